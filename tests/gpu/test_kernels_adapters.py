"""The Triton kernels of LoRA adapters against their twin."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.adapters import (
    Adaptation,
    AdaptedTokens,
    AdapterMemory,
    adapter_delta,
    add_adapter_delta,
    add_adapter_delta_reference,
    open_adapted_gates,
)
from minisgl_backend.kernels.dispatch import is_interpreted
from tests.gpu.adaptations import RANKS, adapted_tokens, adapter_memory, mixes
from tests.gpu.compare import assert_close


@pytest.mark.parametrize("widths", [(96,), (160, 96), (256, 64, 64)])
@pytest.mark.parametrize("num_tokens", [1, 7, 40, 257, 1100])
@pytest.mark.parametrize("size", [1088, 4160])
def test_deltas_are_those_of_the_twin(
    widths: tuple[int, ...], num_tokens: int, size: int, device: torch.device, dtype: torch.dtype
) -> None:
    if is_interpreted() and (num_tokens > 40 or (size > 4096 and num_tokens != 7)):
        pytest.skip("slow in the interpreter")
    memory = adapter_memory(widths, size, RANKS, device, dtype)
    exact_memory = AdapterMemory(memory.a.cpu().double(), memory.b.cpu().double(), widths)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype)
    bias = torch.randn(sum(widths), device=device, dtype=dtype)
    for slots in mixes(num_tokens)[:3]:
        tokens = adapted_tokens(slots, RANKS, device)
        adaptation = Adaptation(memory, tokens)
        expected = torch.zeros(num_tokens, sum(widths), dtype=torch.float64)
        on_host = AdaptedTokens(tokens.buffer.cpu(), num_tokens, tokens.block)
        add_adapter_delta_reference(expected, x.cpu().double(), Adaptation(exact_memory, on_host))
        found = adapter_delta(x, adaptation, bias=bias)
        assert_close(found.cpu(), (expected + bias.cpu().double()).to(dtype))
        out = torch.randn(num_tokens, sum(widths), device=device, dtype=dtype)
        before = out.cpu().double()
        add_adapter_delta(out, x, adaptation)
        assert_close(out.cpu(), (before + expected).to(dtype))
        assert torch.equal(out.cpu()[slots == 0].double(), before[slots == 0])


@pytest.mark.parametrize("width", [96, 200])
@pytest.mark.parametrize("num_tokens", [1, 40, 257, 1100])
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gates_are_applied_to_what_adapters_have_added(
    width: int, num_tokens: int, gate: Gate, device: torch.device, dtype: torch.dtype
) -> None:
    if is_interpreted() and num_tokens > 40:
        pytest.skip("slow in the interpreter")
    widths, size = (width, width), 640
    memory = adapter_memory(widths, size, RANKS, device, dtype)
    exact = AdapterMemory(memory.a.cpu().double(), memory.b.cpu().double(), widths)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype)
    gate_up = torch.randn(num_tokens, 2 * width, device=device, dtype=dtype)
    for slots in mixes(num_tokens):
        tokens = adapted_tokens(slots, RANKS, device)
        on_host = AdaptedTokens(tokens.buffer.cpu(), num_tokens, tokens.block)
        expected = gate_up.cpu().double()
        add_adapter_delta_reference(expected, x.cpu().double(), Adaptation(exact, on_host))
        found = open_adapted_gates(gate_up.clone(), x, Adaptation(memory, tokens), gate)
        assert_close(found.cpu(), open_gates_reference(expected, gate).to(dtype))


@pytest.mark.parametrize("pdl", [False, True])
def test_adapters_are_data_to_a_graph(pdl: bool, device: torch.device, dtype: torch.dtype) -> None:
    if is_interpreted():
        pytest.skip("there are no graphs")
    widths, size, num_tokens = (256, 128, 128), 512, 48
    memory = adapter_memory(widths, size, RANKS, device, dtype)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype)
    tokens = adapted_tokens(mixes(num_tokens)[0] * 0, RANKS, device)
    adaptation = Adaptation(memory, tokens)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        adapter_delta(x, adaptation, pdl=pdl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = adapter_delta(x, adaptation, pdl=pdl)
        for slots in mixes(num_tokens):
            other = adapted_tokens(slots, RANKS, device)
            tokens.buffer.copy_(other.buffer)
            graph.replay()
            expected = adapter_delta(x, Adaptation(memory, other), pdl=False)
            stream.synchronize()
            assert torch.equal(out, expected)
