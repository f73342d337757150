"""The router benchmark: its replicas are real caches, and its rules differ as they should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from minisgl_backend.request import IntArray
from minisgl_backend.routing.router import Balance, Router
from minisgl_bench import router as bench


def tokens(first: int, number: int) -> IntArray:
    return np.arange(first, first + number, dtype=np.int32)


def test_a_session_finds_its_past_only_where_it_was() -> None:
    """Three sessions of three turns over two replicas: round robin alternates between them."""
    sessions = [
        bench.Session(
            start_s=float(index),
            turns=[
                bench.Turn(tokens(10_000 * index + 1000 * turn, 160), tokens(turn, 80), 0.5)
                for turn in range(3)
            ],
        )
        for index in range(3)
    ]
    hits = {
        name: bench.Simulation(rule, 2, Balance()).run(sessions)["hit_rate"]
        for name, rule in bench.RULES.items()
    }
    alone = bench.Simulation(Router, 1, Balance(), scale=2).run(sessions)
    # whole pages: 240 of 400 tokens, 480 of 640; nothing of the first 160
    assert alone["hit_rate"] == 720 / 1200
    assert hits["prefix"] == alone["hit_rate"]
    assert hits["round robin"] < hits["prefix"]


@pytest.mark.parametrize("trace", bench.TRACES)
def test_hits_and_balance_of_the_rule(trace: str) -> None:
    """Nothing here depends on time."""
    sessions = bench.TRACES[trace](bench.Trace(8, seconds=40.0, seed=0))
    alone = bench.Simulation(Router, 1, Balance(), scale=8).run(sessions)
    figures = bench.Simulation(Router, 8, Balance()).run(sessions)
    assert figures["hit_rate"] >= 0.95 * alone["hit_rate"]
    assert figures["busiest_rows"] <= 1.25


def test_the_least_time_of_each_decision_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock gives decisions of the first run 9 us, and those of the second 1 or 20 us."""
    num_calls = [0]

    def clock() -> float:
        num_calls[0] += 1
        decision, is_end = (num_calls[0] - 1) // 2, num_calls[0] % 2 == 0
        run, place = divmod(decision, num_requests)
        took_us = 9 if run == 0 else (1, 20)[place % 2]
        return 1e-3 * decision + (1e-6 * took_us if is_end else 0)

    session = bench.Session(0.0, [bench.Turn(tokens(0, 160), tokens(0, 20), 0.0)])
    num_requests = 4
    monkeypatch.setattr(bench, "TRACES", {"one": lambda trace: [session] * num_requests})
    monkeypatch.setattr(bench, "RULES", {"prefix": Router})
    simulated = bench.Simulation.run

    def run(self: bench.Simulation, sessions: list[bench.Session]) -> dict[str, float]:
        is_alone = len(self._engines) == 1
        monkeypatch.setattr("time.thread_time", (lambda: 0.0) if is_alone else clock)
        return simulated(self, sessions)

    monkeypatch.setattr(bench.Simulation, "run", run)
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(
        bench.router, ["--engines", "2", "--runs", "2", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert figures["decision_p50_us"] == pytest.approx(5)
    assert figures["decision_p99_us"] == pytest.approx(9)


def test_the_command_compares_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--engines", "2", "--seconds", "1", "--json", str(path)]
    result = CliRunner().invoke(bench.router, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(row["trace"], row["rule"]) for row in rows] == [
        (trace, rule) for trace in bench.TRACES for rule in bench.RULES
    ]
    for row in rows:
        assert 0 < row["hit_rate"] < 1
        assert row["busiest_rows"] >= 1
