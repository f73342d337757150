"""What a decode step must read, counted by hand from the checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from minisgl_backend.cli.main import main
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.recurrent_spec import ConvSpec, KimiDeltaSpec
from minisgl_backend.plan import WHOLE_EVERY
from minisgl_bench.step_bytes import bytes_of_decode
from tests.conformance.checkpoints import (
    CONTEXT,
    write_broad_hybrid_checkpoint,
    write_checkpoint,
)
from tests.conformance.engines import TinyEngine, load_model

FLOAT = 4


@contextmanager
def bound(case: str, folder: Path) -> Iterator[tuple[Decoder, dict[str, int]]]:
    """A model with pages, and the bytes of its checkpoint's tensors. ``broad`` is a Qwen3.5 whose
    recurrent layers have heads of 128 elements."""
    if case == "broad":
        write_broad_hybrid_checkpoint(folder)
    else:
        write_checkpoint(case, folder)
    sizes = {name: each.nbytes for name, each in load_file(folder / "model.safetensors").items()}
    model = load_model(folder, context=CONTEXT)
    with TinyEngine(model, page_size=8, context=CONTEXT):
        yield model, sizes


def of_position(model: Decoder, layer: int = 0) -> int:
    heads = model.spec.heads_of(layer)
    return 2 * heads.num_kv_heads * heads.head_dim * FLOAT


def test_an_embedding_counts_only_as_the_output_head(tmp_path: Path) -> None:
    with bound("qwen2", tmp_path) as (model, sizes):
        weights = sum(sizes.values()) - sizes["model.embed_tokens.weight"]
        pages = model.spec.num_layers * 3 * 50 * of_position(model)
        assert bytes_of_decode(model, 3, 50) == weights + pages
    with bound("qwen2-yarn", tmp_path) as (model, sizes):
        pages = model.spec.num_layers * 3 * 50 * of_position(model)
        assert bytes_of_decode(model, 3, 50) == sum(sizes.values()) + pages


def test_windows_bound_what_is_read(tmp_path: Path) -> None:
    with bound("mistral-window", tmp_path) as (model, _):
        (window,) = set(model.spec.windows)
        assert window is not None
        grown = bytes_of_decode(model, 2, window) - bytes_of_decode(model, 2, window - 1)
        assert grown == model.spec.num_layers * 2 * of_position(model)
        assert bytes_of_decode(model, 2, window + 9) == bytes_of_decode(model, 2, window)


def test_latents_are_read_once(tmp_path: Path) -> None:
    with bound("youtu", tmp_path) as (model, _):
        latent = model.spec.latent
        assert latent is not None
        grown = bytes_of_decode(model, 2, 50) - bytes_of_decode(model, 2, 49)
        assert grown == model.spec.num_layers * 2 * latent.key_dim * FLOAT


def test_experts_count_as_often_as_they_are_chosen(tmp_path: Path) -> None:
    with bound("mixtral", tmp_path) as (model, sizes):
        assert model.spec.moe is not None
        rule = model.spec.moe.experts.routing
        of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
        others = sum(sizes.values()) - of_experts - sizes["model.embed_tokens.weight"]
        pages = model.spec.num_layers * of_position(model)
        one = others + pages + of_experts * rule.top_k / rule.num_experts
        assert bytes_of_decode(model, 1, 1) == pytest.approx(one, abs=8)
        assert bytes_of_decode(model, 1000, 1) == pytest.approx(
            others + 1000 * pages + of_experts, abs=8
        )


@pytest.mark.parametrize(
    ("case", "every"), [("qwen3.5", 1), ("broad", WHOLE_EVERY), ("nemotron-h", WHOLE_EVERY)]
)
def test_recurrent_states_are_read_and_perhaps_now_and_then_written(
    case: str, every: int, tmp_path: Path
) -> None:
    with bound(case, tmp_path) as (model, _):
        shape = model.spec.recurrent
        assert shape is not None
        matrices = math.prod(shape.matrices) * FLOAT
        inputs = shape.num_channels * (shape.conv_width - 1) * FLOAT
        row = bytes_of_decode(model, 2, 7) - bytes_of_decode(model, 1, 7)
        pages = 7 * sum(of_position(model, layer) for layer in model.spec.attention_layers)
        assert row == len(shape.layers) * (2 * inputs + matrices + matrices // every) + pages


def test_states_of_kimi_delta_are_read_and_written(tmp_path: Path) -> None:
    with bound("kimi-linear", tmp_path) as (model, _):
        shape, latent = model.spec.recurrent, model.spec.latent
        assert isinstance(shape, KimiDeltaSpec) and latent is not None
        state = math.prod(shape.matrices) + shape.num_channels * (shape.conv_width - 1)
        # so many rows that all experts are read in either case
        grown = bytes_of_decode(model, 3000, 7) - bytes_of_decode(model, 2000, 7)
        assert grown == 1000 * (len(shape.layers) * 2 * state + 7 * latent.key_dim) * FLOAT


def test_inputs_of_short_convolutions_are_read_and_written(tmp_path: Path) -> None:
    with bound("lfm2", tmp_path) as (model, _):
        shape = model.spec.recurrent
        assert isinstance(shape, ConvSpec)
        state = shape.num_channels * (shape.conv_width - 1)
        row = bytes_of_decode(model, 2, 7) - bytes_of_decode(model, 1, 7)
        pages = 7 * of_position(model, model.spec.attention_layers[0])
        assert row == len(shape.layers) * 2 * state * FLOAT + pages


def test_the_benchmark_shows_the_time_at_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = ["bench", "decode", "--batch-size", "1", "--context", "4", "--steps", "2"]
    options = ["--device", "cpu", "--memory-tb-per-s", "0.001", "--json", str(path)]
    result = CliRunner().invoke(main, [*command, *options])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["memory_ms"] > 1  # the demo model has more than a megabyte
