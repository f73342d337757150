"""The plan broadcast benchmark runs, and writes the figures that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_bench.planner import decoding_plan
from tests.figures import figures_of


@pytest.mark.parametrize("way", [[], ["--tcp"]])
def test_the_command_writes_what_it_measured(way: list[str], tmp_path: Path) -> None:
    command = ["plan-broadcast", "--requests", "5", "--steps", "7", *way]
    rows = figures_of(command, tmp_path)["rows"]
    assert [row["ranks"] for row in rows] == [2, 4, 8]
    for row in rows:
        assert 0 < row["rank_0_us_p50"] <= row["rank_0_us_p99"]
        assert row["rank_0_us_p50"] < row["taken_us_p50"] <= row["taken_us_p99"]


def test_a_plan_has_as_many_rows_as_were_asked_for() -> None:
    assert len(decoding_plan(300).decodes.rows) == 300  # by default an engine runs at most 256
