"""Logits over fp8 pages beside those over pages of 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from minisgl_bench.fp8_pages import differences, fp8_pages


def test_differences() -> None:
    expected = torch.tensor([[1.0, 4.0, 2.0], [0.0, 1.0, 5.0]])
    found = torch.tensor([[1.5, 2.0, 2.25], [0.0, 1.0, 5.0]])
    figures = differences(expected, found)
    assert figures["largest_difference"] == 2.0
    assert figures["mean_difference"] == pytest.approx(2.75 / 6)
    assert figures["best_token_changed"] == 0.5
    assert figures["largest_margin_changed"] == 2.0
    assert differences(expected, expected)["largest_margin_changed"] == 0.0


def test_the_demo_model(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(fp8_pages, f"--prompts 2 --length 20 --json {file}")
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    assert figures["positions"] == 40
    assert 0 < figures["mean_difference"] < figures["largest_difference"]
    assert figures["largest_difference"] < figures["spread_of_logits"]
