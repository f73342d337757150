"""The benchmark of the plans' way runs, and writes the figures that it shows."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from minisgl_backend.bench.plan_broadcast import plan_broadcast


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--requests", "5", "--steps", "7", "--json", str(path)]
    result = CliRunner().invoke(plan_broadcast, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["ranks"] for row in rows] == [2, 4, 8]
    for row in rows:
        assert 0 < row["rank_0_us_p50"] <= row["rank_0_us_p99"]
        assert row["rank_0_us_p50"] < row["taken_us_p50"] <= row["taken_us_p99"]
