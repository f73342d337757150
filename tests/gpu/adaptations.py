"""Adapters and mixes of tokens for tests of the kernels that compute them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.kernels.adapters import (
    Adaptation,
    AdaptedTokens,
    AdapterMemory,
    add_adapter_delta_reference,
    arrange_tokens,
    arranged_size,
    block_tokens,
)
from minisgl_backend.request import IntArray

RANKS = np.array([0, 16, 64, 32, 16, 48], np.int32)
"""The rank of no adapter, and those of the adapters in five slots."""
MAX_RANK = 64


def adapted_tokens(slots: IntArray, ranks: IntArray, device: torch.device) -> AdaptedTokens:
    """Tokens with these ``slots`` [num_tokens], which have these ``ranks`` [num_slots + 1]."""
    num_tokens = len(slots)
    block = block_tokens(num_tokens)
    size = arranged_size(num_tokens, len(ranks) - 1, block)
    content = arrange_tokens(slots, ranks, block=block, size=size)
    return AdaptedTokens(torch.from_numpy(content).to(device), num_tokens, block)


def adapter_memory(
    widths: Sequence[int],
    size: int,
    ranks: IntArray,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_rank: int = MAX_RANK,
) -> AdapterMemory:
    """Random adapters of ``ranks`` in all slots; numbers beyond a rank are garbage in a, 0 in b."""
    num_slots = len(ranks) - 1
    a = torch.randn(num_slots, len(widths) * max_rank, size, device=device) * size**-0.5
    b = torch.randn(num_slots, sum(widths), max_rank, device=device) * max_rank**-0.5
    for slot, rank in enumerate(ranks[1:].tolist()):
        b[slot, :, rank:] = 0
    return AdapterMemory(a.to(dtype), b.to(dtype), tuple(widths))


def mixes(num_tokens: int, num_slots: int = len(RANKS) - 1) -> list[IntArray]:
    """Slots of tokens: random; one for all; none or one; all in turn; random but sorted; none."""
    rng = np.random.default_rng(num_tokens)
    some = rng.integers(0, num_slots + 1, num_tokens)
    return [
        some,
        np.full(num_tokens, min(3, num_slots)),
        np.where(rng.random(num_tokens) < 0.5, 0, min(2, num_slots)),
        np.arange(num_tokens) % num_slots + 1,
        np.sort(some),
        np.zeros(num_tokens, some.dtype),
    ]


def with_adapters(y: Tensor, x: Tensor, adaptation: Adaptation) -> Tensor:
    """``y`` plus what the adapters add for ``x``, in float64."""
    memory = adaptation.memory
    exact = AdapterMemory(memory.a.double(), memory.b.double(), memory.widths)
    add_adapter_delta_reference(y, x.double(), Adaptation(exact, adaptation.tokens))
    return y
