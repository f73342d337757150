"""Logits with fp8 pages compared with those with 16-bit pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from minisgl_backend.errors import ConfigError
from minisgl_bench.dummy_model import SHAPES
from minisgl_bench.fp8_pages import fp8_pages
from minisgl_bench.logits import comparable_spec, differences
from minisgl_bench.quantized_weights import quantized_weights
from tests.unit.models.config_jsons import LLAMA_4_SCOUT


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


def test_models_whose_logits_are_not_computed_here(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SHAPES["qwen3.6-27b"]))
    with pytest.raises(ConfigError, match="Qwen3_5ForCausalLM has recurrent layers"):
        comparable_spec(tmp_path, 256)
    config.write_text(json.dumps(LLAMA_4_SCOUT))
    assert comparable_spec(tmp_path, 8192).sections
    with pytest.raises(ConfigError, match="--length must be <= 8192"):
        comparable_spec(tmp_path, 8193)


def test_prompts_beyond_the_context() -> None:
    for command in (fp8_pages, quantized_weights):
        result = CliRunner().invoke(command, "--length 8193")
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception) == "--length must be <= 8192, the model's context"
