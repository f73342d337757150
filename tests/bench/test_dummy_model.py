"""Folders without weights, which load as the real ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.tokenizer import PromptEncoder, load_vocabulary
from minisgl_backend.wire.generation import TextPrompt
from minisgl_bench.dummy_model import SHAPES, write_dummy_model


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_id_of_the_model_is_one_of_the_tokenizer(shape: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "dummy-model", shape, str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    spec = load_spec(tmp_path / "model")
    assert spec.vocab_size == (248_320 if spec.delta_net is not None else 151_936)
    assert (spec.moe is not None) == shape.endswith("-a3b")
    assert (spec.delta_net is not None) == shape.startswith("qwen3.6")
    assert len(load_vocabulary(tmp_path / "model")) == spec.vocab_size


def test_text_becomes_tokens_that_become_it_again(tmp_path: Path) -> None:
    write_dummy_model("qwen3-0.6b", tmp_path)
    encoder = PromptEncoder.load(tmp_path)
    text = "What is the capital of France?"
    ids = encoder.encode(TextPrompt(text))
    assert len(ids) < len(text)
    assert TextStream(encoder.vocabulary).push(ids.tolist(), final=True).text == text


def test_a_folder_that_cannot_be_made() -> None:
    result = CliRunner().invoke(main, ["bench", "dummy-model", "qwen3-0.6b", "/proc/x"])
    assert result.exit_code == 1
    assert result.output == "Error: cannot write /proc/x: No such file or directory\n"
