"""The benchmarks of an engine on a GPU, run small on the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend.kernels.dispatch import is_interpreted
from tests.figures import figures_of

_OF_INDEXER = ("rope_store_index", "index_scores")

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")


def test_kernels_are_timed_beside_their_twins(tmp_path: Path) -> None:
    command = ["kernels", "--model", "qwen3-0.6b", "--batch-size", "2", "--only", "norm"]
    rows = figures_of(command, tmp_path)["rows"]
    assert [row["kernel"] for row in rows] == [
        "norm + qkv",
        "norm + gate/up + silu",
        "norm",
        "add + norm",
        "qk-norm + rope + store",
    ]
    for row in rows:
        assert row["us"] > 0
        assert (row["twin"] is None) == (row["kernel"] == "qk-norm + rope + store")


@pytest.mark.parametrize("num_tokens", ["2", "300"])
def test_an_indexer_is_timed(num_tokens: str, tmp_path: Path) -> None:
    """A few tokens that decode, and many of one prompt."""
    command = ["kernels", "--model", "deepseek-v3.2", "--batch-size", num_tokens]
    rows = figures_of([*command, "--context", "3000"], tmp_path)["rows"]
    names = [f"{kernel}, {pages}" for pages in ("bf16", "fp8") for kernel in _OF_INDEXER]
    assert [row["kernel"] for row in rows] == [
        f"{name}, context 3000" for name in (*names, "choose_slots, Triton", "choose_slots")
    ]
    assert all(row["us"] > 0 for row in rows)
    assert rows[-1]["twin"] > 0
    assert rows[-1]["library"] > 0


def test_experts_are_timed_in_all_formats(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("quantized experts have kernels for Hopper alone")
    command = ["kernels", "--model", "qwen3-30b-a3b", "--model", "gpt-oss-20b"]
    command += ["--model", "gemma-4-26b-a4b", "--batch-size", "1"]
    rows = figures_of(command, tmp_path)["rows"]
    names = ["bf16 experts, Triton", "bf16 experts", "fp8 experts", "int4 experts"]
    names += ["nvfp4 experts", "mxfp4 experts"]
    names += ["gelu experts, Triton", "gelu experts", "gelu-fp8 experts"]
    assert [row["kernel"] for row in rows] == names
    assert all(row["us"] > 0 for row in rows)
    bounds = {row["kernel"]: row["bound"] for row in rows}
    assert bounds["bf16 experts"] > 1.9 * bounds["fp8 experts"] > 3.5 * bounds["int4 experts"]


@pytest.mark.parametrize("most", ["4", "0"])
def test_a_captured_step_is_timed_beside_its_replay(most: str, tmp_path: Path) -> None:
    """Also beside the same step without graphs; the cost of capturing is reported."""
    command = ["decode", "--batch-size", "2", "--context", "20", "--steps", "5", "--eager"]
    command += ["--num-pages", "256", "--max-running-requests", "4"]
    figures = figures_of([*command, "--cuda-graph-max-batch-size", most], tmp_path)
    (row,), info = figures["rows"], figures["info"]
    assert row["step_ms"] > 0
    assert row["eager_ms"] > 0
    assert (row["replay_ms"] == "-") == (most == "0")
    if most == "0":
        assert "decode_graphs" not in info
    else:
        assert info["decode_graphs"] == 9  # for 1, 2 and 4 rows: whole, and two parts for masks
        assert info["decode_capture_s"] > 0
        assert info["decode_graphs_gib"] > 0
