"""Kernels and the engine with ``batch_invariant``: the same bits for a row in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.decode_attention import DecodeWorkspace
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.experts import ExpertWeights, fused_experts, fused_experts_reference
from minisgl_backend.kernels.invariant_attention import (
    invariant_decode_attention,
    invariant_prefill_attention,
)
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.prefill_attention import prefill_attention_reference
from minisgl_backend.kernels.routing import Choices
from minisgl_bench.dummy_model import SHAPES, write_dummy_model
from tests.figures import figures_of
from tests.gpu.compare import assert_close

needs_gpu = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

MOST = 3000
SPANS = [(0, 1), (7, 8), (0, 8), (5, 14), (60, 93), (100, 164), (1, 130), (300, 556), (40, 1500)]
"""Spans of the rows of a batch of ``MOST``; each is also computed as a batch of its own."""
SHAPES_OF_GEMMS = [
    (4096, 1024),
    (1024, 3072),
    (7168, 5120),
    (5120, 17408),
    (128, 2048),
    (192, 512),
]


def normal(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).bfloat16()


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES_OF_GEMMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gemms(device: torch.device, shape: tuple[int, int], has_bias: bool) -> None:
    """All rows in one kernel call, and spans of them in others."""
    from minisgl_backend.kernels.cuda.invariant_linear import InvariantLinear

    x, bias = normal(MOST, shape[1], device=device), normal(shape[0], device=device)
    weight = normal(*shape, device=device, scale=shape[1] ** -0.5)
    kernel = InvariantLinear(shape, device)

    def compute(begin: int, end: int) -> Tensor:
        return kernel(x[begin:end], weight, bias=bias if has_bias else None)

    whole = compute(0, MOST)
    expected = x.float() @ weight.float().t() + (bias.float() if has_bias else 0)
    assert_close(whole, expected.bfloat16())
    for begin, end in SPANS:
        torch.testing.assert_close(compute(begin, end), whole[begin:end], rtol=0, atol=0)


ATTENTION = [
    # query heads, KV heads, head_dim, window, fp8
    (16, 8, 128, None, False),
    (10, 2, 128, None, False),
    (8, 1, 64, None, False),
    (16, 8, 128, 100, False),
    (8, 4, 64, 37, False),
    (16, 8, 128, None, True),
]
LENGTHS = (1, 64, 65, 130, 700)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "window", "fp8"), ATTENTION)
def test_attention(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    fp8: bool,
) -> None:
    """Chunks are cut in several ways, and each position is also computed as a decoding row."""
    if is_interpreted() and (fp8 or num_heads == 16):
        pytest.skip("numpy has no float8, and is slow")
    lengths = (1, 130, 33) if is_interpreted() else LENGTHS
    page_size, width = 16, -(-max(lengths) // 16)
    table = torch.randperm(len(lengths) * width, device=device).int().view(len(lengths), width)
    pages = torch.randn(2, table.numel(), page_size, num_kv_heads, head_dim, device=device)
    keys, values = pages.to(torch.float8_e4m3fn if fp8 else dtype)
    one = torch.ones(1, device=device) if fp8 else None
    kv = PagedKV(keys=keys, values=values, k_scale=one, v_scale=one)
    q = torch.randn(sum(lengths), num_heads, head_dim, device=device).to(dtype)
    fixed: dict[str, Any] = {"scale": head_dim**-0.5, "window": window}

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def chunks(largest: int) -> Tensor:
        """All positions of all rows, in chunks of at most ``largest``."""
        rows, ends, offsets = [], [], [0]
        for row, length in enumerate(lengths):
            for begin in range(0, length, largest):
                end = min(begin + largest, length)
                rows.append(row)
                ends.append(end)
                offsets.append(offsets[-1] + end - begin)
        out = torch.empty_like(q)
        invariant_prefill_attention(
            q,
            kv,
            table,
            rows=ints(rows),
            offsets=ints(offsets),
            ends=ints(ends),
            split=128,
            out=out,
            **fixed,
        )
        return out

    whole = chunks(1000)
    for largest in (97, 60 if is_interpreted() else 1):
        torch.testing.assert_close(chunks(largest), whole, rtol=0, atol=0)
    expected = torch.empty_like(q)
    borders = ints([0, *torch.tensor(lengths).cumsum(0).tolist()])
    prefill_attention_reference(
        expected,
        q,
        kv,
        table,
        rows=ints(list(range(len(lengths)))),
        offsets=borders,
        ends=ints(list(lengths)),
        **fixed,
    )
    assert_close(whole, expected)
    token_rows = ints([row for row, length in enumerate(lengths) for _ in range(length)])
    token_ends = ints([at + 1 for length in lengths for at in range(length)])
    # many rows, and few rows, whose splits are shared among programs
    for batch in (20 if is_interpreted() else len(q), 3):
        workspace = DecodeWorkspace(batch, num_heads, head_dim, device)
        tokens = torch.randperm(len(q), device=device)[:batch]
        found = torch.empty_like(q[tokens])
        invariant_decode_attention(
            q[tokens],
            kv,
            table,
            token_ends[tokens],
            workspace,
            rows=token_rows[tokens],
            split=128,
            out=found,
            **fixed,
        )
        torch.testing.assert_close(found, whole[tokens], rtol=0, atol=0)


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8)])
def test_experts(device: torch.device, dtype: torch.dtype, num_experts: int, top_k: int) -> None:
    if is_interpreted():
        num_experts, top_k = 4, 2
    most = 20 if is_interpreted() else MOST
    x = torch.randn(most, 256, device=device).to(dtype)
    gate_up = (torch.randn(num_experts, 2 * 192, 256, device=device) / 16).to(dtype)
    down = (torch.randn(num_experts, 256, 192, device=device) / 14).to(dtype)
    experts = ExpertWeights(gate_up, down)
    weights, ids = torch.randn(most, num_experts, device=device).softmax(-1).topk(top_k, dim=-1)

    def compute(a: int, b: int) -> Tensor:
        choices = Choices(ids[a:b], weights[a:b])
        return fused_experts(x[a:b], experts, choices, invariant=True)

    whole = compute(0, most)
    for begin, end in SPANS:
        if end <= most:
            torch.testing.assert_close(compute(begin, end), whole[begin:end], rtol=0, atol=0)
    expected = fused_experts_reference(x, experts, Choices(ids, weights))
    assert_close(whole, expected, tolerance=1e-5 if dtype == torch.float32 else 1.5e-2)


@needs_gpu
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("options", [[], ["--overlap", "false", "--kv-cache-dtype", "fp8_e4m3"]])
def test_requests_get_the_same_tokens_in_any_company(
    tmp_path: Path, shape: str, options: list[str]
) -> None:
    """Requests run alone, together, with cached prompts, and after retractions; with few layers."""
    folder = tmp_path / "model"
    write_dummy_model(shape, folder)
    config = {**SHAPES[shape], "num_hidden_layers": 3, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = ["invariance", "--model", str(folder), "--load-format", "dummy"]
    command += ["--requests", "32", "--input-length", "5", "900", "--output-length", "10", "40"]
    command += ["--temperature", "0.8", "--batch-invariant", "true", "--max-prefill-tokens", "700"]
    command += ["--num-pages", "4000", *options]
    figures = figures_of(command, tmp_path)
    assert figures["retractions"] > 0
    assert figures["in_all"] == figures["requests"] == 32
