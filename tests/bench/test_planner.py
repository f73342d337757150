"""The planner's benchmark runs, and writes the figures that it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_bench import planner as bench

NAMES = {
    "step_us_p50",
    "step_us_p99",
    "step_us_p50_page_1",
    "step_us_p99_page_1",
    "step_us_p50_page_64",
    "step_us_p99_page_64",
    "encode_us_p50",
    "grouped_step_us_p50",
    "grouped_step_us_p50_without",
    "regrouped_step_us_p50",
    "regrouped_step_us_p50_without",
    "admit_us_300",
    "evict_us_p50",
    "evict_us_max",
    "match_us_page_1",
    "match_us_page_16",
    "match_us_page_64",
}


def test_the_command_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = bench.run(num_steps=43, num_leaves=1024, queue_lengths=(300,))
    assert set(figures) == NAMES
    assert all(value > 0 for value in figures.values())
    monkeypatch.setattr(bench, "run", lambda: figures)
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(bench.planner, ["--json", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text(encoding="utf-8")) == figures
    assert all(name in result.output for name in NAMES)
    assert CliRunner().invoke(bench.planner, []).exit_code == 0
