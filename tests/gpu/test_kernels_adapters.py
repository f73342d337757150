"""The kernels of LoRA adapters against their twin, and what tensor-core kernels take from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.adapters import (
    AdaptedTokens,
    adapter_delta,
    add_adapter_delta,
    add_adapter_delta_reference,
    arrange_tokens,
    arranged_size,
    block_tokens,
)
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.request import IntArray
from tests.gpu.compare import assert_close

NUM_SLOTS = 5
MAX_RANK = 64
EPS = 1e-6
NUM_LAYERS = 3
RANKS = np.array([0, 16, 64, 32, 16, 48], np.int32)


def adapted_of(slots: IntArray, device: torch.device) -> AdaptedTokens:
    num_tokens = len(slots)
    block = block_tokens(num_tokens)
    size = arranged_size(num_tokens, NUM_SLOTS, block)
    content = arrange_tokens(slots, RANKS, block=block, size=size)
    return AdaptedTokens(torch.from_numpy(content).to(device), num_tokens, block)


def memory(
    widths: tuple[int, ...], size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Adapters of ``RANKS`` in all slots; numbers behind a rank are garbage in a, 0 in b."""
    a = torch.randn(NUM_SLOTS, len(widths) * MAX_RANK, size, device=device) * size**-0.5
    b = torch.randn(NUM_SLOTS, sum(widths), MAX_RANK, device=device) * MAX_RANK**-0.5
    for slot, rank in enumerate(RANKS[1:].tolist()):
        b[slot, :, rank:] = 0
    return a.to(dtype), b.to(dtype)


def mixes(num_tokens: int) -> list[IntArray]:
    rng = np.random.default_rng(num_tokens)
    return [
        rng.integers(0, NUM_SLOTS + 1, num_tokens),
        np.full(num_tokens, 3),
        np.where(rng.random(num_tokens) < 0.5, 0, 2),
    ]


@pytest.mark.parametrize("widths", [(96,), (160, 96), (256, 64, 64)])
@pytest.mark.parametrize("num_tokens", [1, 7, 40, 257, 1100])
@pytest.mark.parametrize("size", [1088, 4160])
def test_deltas_are_those_of_the_twin(
    widths: tuple[int, ...], num_tokens: int, size: int, device: torch.device, dtype: torch.dtype
) -> None:
    if is_interpreted() and (num_tokens > 40 or (size > 4096 and num_tokens != 7)):
        pytest.skip("slow in the interpreter")
    a, b = memory(widths, size, device, dtype)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype)
    bias = torch.randn(sum(widths), device=device, dtype=dtype)
    for slots in mixes(num_tokens):
        adapted = adapted_of(slots, device)
        expected = torch.zeros(num_tokens, sum(widths), device=device, dtype=torch.float32)
        exact = AdaptedTokens(adapted.buffer.cpu(), num_tokens, adapted.block)
        expected = expected.cpu().double()
        add_adapter_delta_reference(
            expected, x.cpu().double(), a.cpu().double(), b.cpu().double(), exact, widths=widths
        )
        found = adapter_delta(x, a, b, adapted, widths=widths, bias=bias)
        assert_close(found.cpu(), (expected + bias.cpu().double()).to(dtype))
        out = torch.randn(num_tokens, sum(widths), device=device, dtype=dtype)
        before = out.cpu().double()
        add_adapter_delta(out, x, a, b, adapted, widths=widths)
        assert_close(out.cpu(), (before + expected).to(dtype))
        assert torch.equal(out.cpu()[slots == 0].double(), before[slots == 0])


def test_a_norm_may_lack_its_scale(device: torch.device, dtype: torch.dtype) -> None:
    widths, size, num_tokens = (128, 64), 256, 20
    a, b = memory(widths, size, device, dtype)
    x = torch.randn(num_tokens, size, device=device).to(dtype)
    squares = (x.float() ** 2).view(num_tokens, 4, -1).sum(dim=2).t().contiguous()
    scale = torch.rsqrt((x.float() ** 2).mean(dim=1, keepdim=True) + 1e-3)
    adapted = adapted_of(mixes(num_tokens)[0], device)
    found = adapter_delta(x, a, b, adapted, widths=widths, squares=squares, eps=1e-3)
    plain = adapter_delta(x, a, b, adapted, widths=widths)
    assert_close(found, (plain.float() * scale).to(dtype))


@pytest.mark.parametrize("pdl", [False, True])
def test_adapters_are_data_to_a_graph(pdl: bool, device: torch.device, dtype: torch.dtype) -> None:
    if is_interpreted():
        pytest.skip("there are no graphs")
    widths, size, num_tokens = (256, 128, 128), 512, 48
    a, b = memory(widths, size, device, dtype)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype)
    adapted = adapted_of(np.zeros(num_tokens, np.int64), device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        adapter_delta(x, a, b, adapted, widths=widths, pdl=pdl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = adapter_delta(x, a, b, adapted, widths=widths, pdl=pdl)
        for slots in mixes(num_tokens):
            other = adapted_of(slots, device)
            adapted.buffer.copy_(other.buffer)
            graph.replay()
            expected = adapter_delta(x, a, b, other, widths=widths)
            stream.synchronize()
            assert torch.equal(out, expected)


@pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")
@pytest.mark.parametrize("num_tokens", [1, 24, 64, 200, 256])
def test_gemms_beside_the_kernels_of_adapters(num_tokens: int, device: torch.device) -> None:
    """Layers in a row: what is added, or the residual stream, comes while a GEMM multiplies."""
    from minisgl_backend.kernels.cuda.linear import LinearKernel, ResidualKernel

    dtype, hidden, inner = torch.bfloat16, 1024, 3072
    up = LinearKernel((2 * inner, hidden), device, gated=True, takes_added=True)
    down = ResidualKernel((hidden, inner), device, takes_added=True)
    up_weight = torch.randn(2 * inner, hidden, device=device).to(dtype) * hidden**-0.5
    down_weight = torch.randn(hidden, inner, device=device).to(dtype) * inner**-0.5
    norm = torch.randn(hidden, device=device).to(dtype)
    of_up = memory((inner, inner), hidden, device, dtype)
    of_down = memory((hidden,), inner, device, dtype)
    adapted = adapted_of(mixes(num_tokens)[0], device)
    first = torch.randn(num_tokens, hidden, device=device).to(dtype)
    stream = torch.cuda.Stream()

    def computed(pdl: bool) -> Tensor:
        """The residual stream after some layers, captured and replayed again and again."""
        residual = torch.empty_like(first)

        def layers() -> None:
            residual.copy_(first)
            x, squares = first, None
            for _ in range(NUM_LAYERS):
                added = adapter_delta(
                    x, *of_up, adapted, widths=(inner, inner), squares=squares, eps=EPS, pdl=pdl
                )
                y = up(x, up_weight, squares=squares, eps=EPS, added=added, pdl=pdl)
                add_adapter_delta(residual, y, *of_down, adapted, widths=(hidden,), pdl=pdl)
                x, squares = down(y, down_weight, residual, norm, changes=True, pdl=pdl)

        with torch.cuda.stream(stream):
            layers()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                layers()
            for _ in range(20):
                graph.replay()
            stream.synchronize()
        return residual

    found = computed(pdl=True)
    assert torch.equal(found, computed(pdl=False))
    on_host = AdaptedTokens(adapted.buffer.cpu(), num_tokens, adapted.block)

    def projected(x: Tensor, weight: Tensor, memory: tuple[Tensor, Tensor], *widths: int) -> Tensor:
        y = F.linear(x, weight.cpu().double())
        a, b = memory[0].cpu().double(), memory[1].cpu().double()
        add_adapter_delta_reference(y, x, a, b, on_host, widths=widths)
        return y

    x = expected = first.cpu().double()
    for _ in range(NUM_LAYERS):
        gate, value = projected(x, up_weight, of_up, inner, inner).chunk(2, dim=1)
        expected = expected + projected(F.silu(gate) * value, down_weight, of_down, hidden)
        scale = (expected.square().mean(dim=1, keepdim=True) + EPS).rsqrt()
        x = expected * scale * norm.cpu().double()
    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert error < 0.02
