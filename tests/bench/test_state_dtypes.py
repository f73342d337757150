"""Outputs with 16-bit recurrent states compared with those with float32 states."""

from __future__ import annotations

from pathlib import Path

from tests.figures import figures_of


def test_float16_is_nearer_than_bfloat16(tmp_path: Path) -> None:
    steps = [word for count in ("40", "5", "5") for word in ("--steps", count)]
    figures = figures_of(["state-dtypes", *steps], tmp_path)
    assert [(row["steps"], row["state_dtype"]) for row in figures["rows"]] == [
        (5, "bfloat16"),
        (5, "float16"),
        (40, "bfloat16"),
        (40, "float16"),
    ]
    for bfloat16, float16 in (figures["rows"][:2], figures["rows"][2:]):
        error = float16["error_percent"]
        assert 0 < error < float16["error_of_worst_head_percent"]
        assert 4 * error < bfloat16["error_percent"] < 2
