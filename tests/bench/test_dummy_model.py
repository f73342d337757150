"""Folders without weights, which load like real ones."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minisgl_backend.cli.main import main
from minisgl_backend.models.catalog import load_spec, parse_spec
from minisgl_backend.models.eagle_checkpoint import load_eagle
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.text.tokenizer_files import load_vocabulary
from minisgl_backend.wire.generation import TextPrompt
from minisgl_bench.dummy_model import FORMATS, LAYERS, SHAPES, write_dummy_model


@pytest.fixture(scope="module")
def sizes() -> dict[bytes, int]:
    """Sizes of vocabularies by the digest of their files."""
    return {}


def num_tokens(folder: Path, sizes: dict[bytes, int]) -> int:
    """The size of a vocabulary. It takes seconds to load, and models of a family have the same, so
    each is loaded once."""
    content = hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()
    if content not in sizes:
        sizes[content] = len(load_vocabulary(folder))
    return sizes[content]


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_id_of_the_model_is_one_of_the_tokenizer(
    shape: str, sizes: dict[bytes, int], tmp_path: Path
) -> None:
    result = CliRunner().invoke(main, ["bench", "dummy-model", shape, str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    spec = load_spec(tmp_path / "model")
    vocab_sizes = {
        "gpt-oss": 201_088,
        "qwen3": 151_936,
        "qwen3.6": 248_320,
        "gemma-3": 262_208,
        "gemma-4": 262_144,
        "granite-4": 100_352,
        "nemotron-nano": 131_072,
        "nemotron-3": 131_072,
        "glm-4.7": 154_880,
        "glm-5": 154_880,
        "deepseek-v2": 102_400,
        "deepseek-v3.2": 129_280,
        "hy4": 120_832,
        "olmo-hybrid": 100_352,
        "kimi-linear": 163_840,
        "ling-3.0": 157_184,
    }
    family = "-".join(shape.split("-")[: 1 if shape.startswith("qwen") else 2])
    assert spec.vocab_size == vocab_sizes[family]
    mixtures = ("gpt-oss", "glm-4.7", "glm-5", "deepseek-v2", "deepseek-v3.2", "hy4", "ling-3.0")
    has_experts = family in mixtures
    assert (spec.moe is not None) == (bool(re.search(r"-a\d+b$", shape)) or has_experts)
    recurrent = (
        "qwen3.6",
        "granite-4",
        "nemotron-nano",
        "nemotron-3",
        "olmo-hybrid",
        "kimi-linear",
        "ling-3.0",
    )
    assert (spec.recurrent is not None) == (family in recurrent)
    assert num_tokens(tmp_path / "model", sizes) == spec.vocab_size


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("fp8-blocks", "fp8 in blocks of 128 x 128 (fp8)"),
        ("fp8-channel", "fp8 per channel (compressed-tensors)"),
        ("int8-gptq", "int8 in groups of 128 (gptq)"),
        ("int4-gptq", "int4 in groups of 128 (gptq)"),
        ("int4-awq", "int4 in groups of 128 (zero points) (awq)"),
        ("nvfp4", "fp4 in groups of 16 (modelopt)"),
    ],
)
def test_weights_are_quantized_but_for_the_output_head(
    weights: str, expected: str, tmp_path: Path
) -> None:
    assert weights in FORMATS
    folder = str(tmp_path / "model")
    options = ["--weights", weights]
    result = CliRunner().invoke(main, ["bench", "dummy-model", "qwen3-14b", folder, *options])
    assert result.exit_code == 0, result.output
    spec = load_spec(tmp_path / "model")
    assert spec.weights is not None and str(spec.weights) == expected
    assert spec.weights.of("lm_head") is None
    assert spec.weights.of("model.layers.0.mlp.down_proj") is not None


def test_text_becomes_tokens_that_become_it_again(tmp_path: Path) -> None:
    write_dummy_model("qwen3-0.6b", tmp_path)
    encoder = PromptEncoder.load(tmp_path)
    text = "What is the capital of France?"
    ids = encoder.encode(TextPrompt(text))
    assert len(ids) < len(text)
    assert TextStream(encoder.vocabulary).push(ids.tolist(), final=True).text == text


def make(shape: object, folder: Path) -> Result:
    return CliRunner().invoke(main, ["bench", "dummy-model", str(shape), str(folder)])


def test_the_shape_of_a_config_json(tmp_path: Path) -> None:
    """Its own, with the tokens that the demo model's tokenizer lacks."""
    text = {**SHAPES["gemma-4-e4b"], "vocab_size": 5001, "num_kv_shared_layers": 0}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**outer, "text_config": text}))
    result = make(path, tmp_path / "model")
    assert result.exit_code == 0, result.output
    spec = load_spec(tmp_path / "model")
    assert (spec.num_layers, spec.hidden_size) == (42, 2560)
    assert len(load_vocabulary(tmp_path / "model")) == spec.vocab_size == 5001


@pytest.mark.parametrize("name", LAYERS)
def test_layers_fit_their_models(name: str, tmp_path: Path) -> None:
    result = make(name, tmp_path)
    assert result.exit_code == 0 and "--speculative-mtp-model" in result.output, result.output
    spec = parse_spec(SHAPES[name.removeprefix("eagle3-")])
    found = spec.with_eagle(load_eagle(tmp_path, spec, tmp_path, has_weights=False))
    assert not found.attention_shape().by_layer
    options = ["bench", "dummy-model", name, str(tmp_path), "--weights", "fp8-blocks"]
    assert "for whole models, not EAGLE-3 layers" in CliRunner().invoke(main, options).output


def test_shapes_that_are_refused(tmp_path: Path) -> None:
    result = make("qwen9", tmp_path)
    assert (
        result.exit_code == 2
        and "'qwen9' is no file, and none of deepseek-v2-lite," in result.output
    )
    path = tmp_path / "config.json"
    for changed, said in (
        ({"vocab_size": 100}, "vocab_size is 100, and the tokenizer has"),
        ({"architectures": ["BertModel"]}, "BertModel"),
    ):
        path.write_text(json.dumps({**SHAPES["qwen3-0.6b"], **changed}))
        result = make(path, tmp_path / "model")
        assert result.exit_code == 1 and said in result.output
        assert not (tmp_path / "model" / "tokenizer.json").exists()
    path.write_text("[")
    assert make(path, tmp_path / "model").output.startswith("Error: ")


def test_the_first_layers_of_a_large_model(tmp_path: Path) -> None:
    command = ["bench", "dummy-model", "glm-5", str(tmp_path), "--layers", "5"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    spec = load_spec(tmp_path)
    assert spec.num_layers == 5 and spec.moe is not None and spec.moe.layers == {3, 4}


def test_a_folder_that_cannot_be_made() -> None:
    result = CliRunner().invoke(main, ["bench", "dummy-model", "qwen3-0.6b", "/proc/x"])
    assert result.exit_code == 1
    assert result.output == "Error: cannot write /proc/x: No such file or directory\n"
