"""The router's benchmark: its replicas are real caches, and its rules differ as they should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
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
    # whole pages: 240 tokens of 400, 480 of 640; nothing of the first 160
    assert alone["hit_rate"] == 720 / 1200
    assert hits["prefix"] == alone["hit_rate"]
    assert hits["round robin"] < hits["prefix"]


def test_the_command_compares_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--engines", "2", "--seconds", "2", "--json", str(path)]
    result = CliRunner().invoke(bench.router, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(row["trace"], row["rule"]) for row in rows] == [
        (trace, rule) for trace in bench.TRACES for rule in bench.RULES
    ]
    for row in rows:
        assert 0 < row["hit_rate"] < 1
        assert row["busiest_rows"] >= 1
