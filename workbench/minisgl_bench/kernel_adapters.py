"""The cases of `minisgl bench kernels` for LoRA adapters: the GEMMs of a layer with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.kernels.adapters import (
    Adaptation,
    AdaptedTokens,
    AdapterMemory,
    arrange_tokens,
    arranged_size,
    block_tokens,
)
from minisgl_backend.kernels.linear_cut import MAX_TOKENS
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import TokenPlaces
from minisgl_backend.request import IntArray
from minisgl_bench.kernel_cases import (
    PAGE_SIZE,
    Call,
    Case,
    Shape,
    copies,
    has_hopper_kernels,
    normal,
)

_NUM_SLOTS: Final = 16
_RANK: Final = 16
_EPS: Final = 1e-6


def adapter_cases(shape: Shape, batch_size: int) -> Iterator[Case]:
    """The four GEMMs of a layer, one right after the other: without adapters, all rows with one,
    and with one of 16."""
    if batch_size > MAX_TOKENS or not has_hopper_kernels():
        return
    rows = np.arange(batch_size)
    mixes: dict[str, IntArray | None] = {
        "no adapter": None,
        "one adapter": 0 * rows + 1,
        f"{_NUM_SLOTS} adapters": np.sort(rows % _NUM_SLOTS) + 1,
        f"{_NUM_SLOTS} adapters, rows in turn": rows % _NUM_SLOTS + 1,
    }
    make = _layers(shape, batch_size)
    for name, slots in mixes.items():
        if slots is not None and batch_size == 1 and name != "one adapter":
            continue
        tokens = None if slots is None else _tokens(slots)
        yield Case(f"GEMMs of a layer, {name}", _num_bytes(shape), make(tokens))


def _num_bytes(shape: Shape) -> int:
    """The size of a layer's weights."""
    o = shape.hidden * shape.num_heads * shape.head_dim
    return 2 * (shape.hidden * (shape.qkv + 3 * shape.intermediate) + o)


def _tokens(slots: IntArray) -> AdaptedTokens:
    block, ranks = block_tokens(len(slots)), np.array([0] + [_RANK] * _NUM_SLOTS, np.int32)
    size = arranged_size(len(slots), _NUM_SLOTS, block)
    content = arrange_tokens(slots.astype(np.int32), ranks, block=block, size=size)
    return AdaptedTokens(torch.from_numpy(content).cuda(), len(slots), block)


def _memory(size: int, *widths: int) -> AdapterMemory:
    a = normal(_NUM_SLOTS, len(widths) * _RANK, size, scale=size**-0.5)
    return AdapterMemory(a, normal(_NUM_SLOTS, sum(widths), _RANK, scale=0.1), widths)


def _weights(shape: Shape) -> tuple[tuple[Tensor, AdapterMemory], ...]:
    """The weights of a layer's four GEMMs, each with the adapters of it."""
    hidden, inner, heads = shape.hidden, shape.intermediate, shape.num_heads * shape.head_dim
    of_keys = shape.num_kv_heads * shape.head_dim
    return (
        (normal(shape.qkv, hidden, scale=hidden**-0.5), _memory(hidden, heads, of_keys, of_keys)),
        (normal(hidden, heads, scale=heads**-0.5), _memory(heads, hidden)),
        (normal(2 * inner, hidden, scale=hidden**-0.5), _memory(hidden, inner, inner)),
        (normal(hidden, inner, scale=inner**-0.5), _memory(inner, hidden)),
    )


def _layers(shape: Shape, batch_size: int) -> Callable[[AdaptedTokens | None], list[Call]]:
    """A function that makes the calls for tokens by adapter: each call computes one of several
    layers."""
    # needs the CUDA driver's bindings, which only installations for GPUs have
    from minisgl_backend.kernels.cuda.linear import HeadsKernel, LinearKernel, ResidualKernel

    device = torch.device("cuda")
    hidden, inner, heads = shape.hidden, shape.intermediate, shape.num_heads * shape.head_dim
    sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim, hidden
    qkv = HeadsKernel(
        *sizes, device, page_size=PAGE_SIZE, fp8=False, adapters=(_NUM_SLOTS, 3 * _RANK)
    )
    o = ResidualKernel((hidden, heads), device, adapters=(_NUM_SLOTS, _RANK))
    up = LinearKernel((2 * inner, hidden), device, gate="silu", adapters=(_NUM_SLOTS, 2 * _RANK))
    down = ResidualKernel((hidden, inner), device, adapters=(_NUM_SLOTS, _RANK))
    positions = torch.arange(batch_size, device=device, dtype=torch.int32)
    cos_sin = torch.rand(4096, shape.head_dim, device=device)
    places = TokenPlaces(positions, positions * PAGE_SIZE, cos_sin)
    keys, values = normal(2, batch_size, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    kv = PagedKV(keys=keys, values=values)
    norm, head_norm = normal(hidden), normal(shape.head_dim)
    residual, first = normal(batch_size, hidden), normal(batch_size, hidden)
    layers = [_weights(shape) for _ in copies(_num_bytes(shape))]
    last: list[tuple[Tensor, Tensor | None]] = []

    def compute(layer: int, tokens: AdaptedTokens | None) -> None:
        """A layer: the first of ``first``, others of what the one before has left."""

        def of(memory: AdapterMemory) -> Adaptation | None:
            return None if tokens is None else Adaptation(memory, tokens)

        (w_qkv, of_qkv), (w_o, of_o), (w_up, of_up), (w_down, of_down) = layers[layer]
        x, squares = last.pop() if layer else (first, None)
        q = qkv(
            x,
            w_qkv,
            places,
            kv,
            squares=squares,
            eps=_EPS,
            q_weight=head_norm,
            k_weight=head_norm,
            adaptation=of(of_qkv),
            pdl=True,
        )
        x, squares = o(q.flatten(1), w_o, residual, norm, adaptation=of(of_o), pdl=True)
        y = up(x, w_up, squares=squares, eps=_EPS, adaptation=of(of_up), pdl=True)
        last[:] = [down(y, w_down, residual, norm, adaptation=of(of_down), pdl=True)]

    return lambda tokens: [partial(compute, layer, tokens) for layer in range(len(layers))]
