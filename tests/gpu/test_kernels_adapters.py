"""The kernels of LoRA adapters against their twin, and what tensor-core kernels take from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.adapters import (
    TokenGroups,
    adapter_delta,
    add_adapter_delta,
    add_adapter_delta_reference,
    block_tokens,
    group_tokens,
    groups_size,
)
from minisgl_backend.kernels.dispatch import is_interpreted
from tests.gpu.compare import assert_close

NUM_SLOTS = 5
MAX_RANK = 64
RANKS = np.array([0, 16, 64, 32, 16, 48])


def groups_of(slots: np.ndarray, device: torch.device) -> TokenGroups:
    num_tokens = len(slots)
    block = block_tokens(num_tokens)
    size = groups_size(num_tokens, NUM_SLOTS, block)
    content = group_tokens(slots, RANKS, block=block, size=size)
    return TokenGroups(torch.from_numpy(content).to(device), num_tokens, block)


def memory(
    widths: tuple[int, ...], size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Adapters of ``RANKS`` in all slots; numbers behind a rank are garbage in a, 0 in b."""
    a = torch.randn(NUM_SLOTS, len(widths) * MAX_RANK, size, device=device) * size**-0.5
    b = torch.randn(NUM_SLOTS, sum(widths), MAX_RANK, device=device) * MAX_RANK**-0.5
    for slot, rank in enumerate(RANKS[1:].tolist()):
        b[slot, :, rank:] = 0
    return a.to(dtype), b.to(dtype)


def mixes(num_tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(num_tokens)
    return [
        rng.integers(0, NUM_SLOTS + 1, num_tokens),
        np.full(num_tokens, 3),
        np.where(rng.random(num_tokens) < 0.5, 0, 2),
    ]


@pytest.mark.parametrize("widths", [(96,), (160, 96), (256, 64, 64)])
@pytest.mark.parametrize("num_tokens", [1, 7, 40, 257, 1100])
def test_deltas_are_those_of_the_twin(
    widths: tuple[int, ...], num_tokens: int, device: torch.device, dtype: torch.dtype
) -> None:
    if is_interpreted() and num_tokens > 40:
        pytest.skip("slow in the interpreter")
    size = 192 if is_interpreted() else 1088
    a, b = memory(widths, size, device, dtype)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype)
    bias = torch.randn(sum(widths), device=device, dtype=dtype)
    for slots in mixes(num_tokens):
        groups = groups_of(slots, device)
        expected = torch.zeros(num_tokens, sum(widths), device=device, dtype=torch.float32)
        exact = TokenGroups(groups.buffer.cpu(), num_tokens, groups.block)
        expected = expected.cpu().double()
        add_adapter_delta_reference(
            expected, x.cpu().double(), a.cpu().double(), b.cpu().double(), exact, widths=widths
        )
        found = adapter_delta(x, a, b, groups, widths=widths, bias=bias)
        assert_close(found.cpu(), (expected + bias.cpu().double()).to(dtype))
        out = torch.randn(num_tokens, sum(widths), device=device, dtype=dtype)
        before = out.cpu().double()
        add_adapter_delta(out, x, a, b, groups, widths=widths)
        assert_close(out.cpu(), (before + expected).to(dtype))
        assert torch.equal(out.cpu()[slots == 0].double(), before[slots == 0])


def test_a_norm_may_lack_its_scale(device: torch.device, dtype: torch.dtype) -> None:
    widths, size, num_tokens = (128, 64), 256, 20
    a, b = memory(widths, size, device, dtype)
    x = torch.randn(num_tokens, size, device=device).to(dtype)
    squares = (x.float() ** 2).view(num_tokens, 4, -1).sum(dim=2).t().contiguous()
    scale = torch.rsqrt((x.float() ** 2).mean(dim=1, keepdim=True) + 1e-3)
    groups = groups_of(mixes(num_tokens)[0], device)
    found = adapter_delta(x, a, b, groups, widths=widths, squares=squares, eps=1e-3)
    plain = adapter_delta(x, a, b, groups, widths=widths)
    assert_close(found, (plain.float() * scale).to(dtype))


@pytest.mark.parametrize("pdl", [False, True])
def test_groups_are_data_to_a_graph(
    pdl: bool, device: torch.device, dtype: torch.dtype
) -> None:
    if is_interpreted():
        pytest.skip("there are no graphs")
    widths, size, num_tokens = (256, 128, 128), 512, 48
    a, b = memory(widths, size, device, dtype)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype)
    groups = groups_of(np.zeros(num_tokens, np.int64), device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        adapter_delta(x, a, b, groups, widths=widths, pdl=pdl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = adapter_delta(x, a, b, groups, widths=widths, pdl=pdl)
        for slots in mixes(num_tokens):
            other = groups_of(slots, device)
            groups.buffer.copy_(other.buffer)
            graph.replay()
            expected = adapter_delta(x, a, b, other, widths=widths)
            stream.synchronize()
            assert torch.equal(out, expected)
