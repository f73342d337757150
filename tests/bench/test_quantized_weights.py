"""Logits with quantized weights compared with those with plain ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from minisgl_backend.errors import ConfigError
from minisgl_bench.quantized_weights import kl, quantized_weights
from tests.conformance.quantized_checkpoints import write_quantized


def test_divergence() -> None:
    even, uneven = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl(even, uneven)["mean_kl"] == pytest.approx(expected)
    assert kl(uneven, uneven + 5.0)["largest_kl"] == pytest.approx(0.0, abs=1e-7)


def test_the_demo_model(tmp_path: Path) -> None:
    """8 bits change less than 4, and 4 bits change less in smaller groups than in larger ones."""
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(quantized_weights, f"--prompts 2 --length 20 --json {file}")
    assert result.exit_code == 0, result.output
    rows = {row["format"]: row for row in json.loads(file.read_text())["rows"]}
    for figure in ("mean_difference", "mean_kl"):
        eight = rows["fp8, blocks of 128 x 128"][figure]
        large = rows["int4, groups of 128, zero points"][figure]
        small = rows["int4, groups of 32, zero points"][figure]
        assert 0 < rows["int8, per channel"][figure] < eight < small < large


def test_quantized_checkpoints_are_no_reference(tmp_path: Path) -> None:
    write_quantized("awq-128", tmp_path)
    result = CliRunner().invoke(quantized_weights, f"--model {tmp_path}")
    assert isinstance(result.exception, ConfigError)
    assert "quantized already: int4 in groups of 128" in str(result.exception)
