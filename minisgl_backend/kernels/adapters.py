"""LoRA: what the adapters of a step's tokens add to a matrix's outputs, (x A^T) B^T.

Each token has at most one adapter, and the tokens of a step may have different ones. So they are
brought into an order by adapter, on the host, and computed one adapter after the other in plain
PyTorch, on every device. Nothing here waits for a GPU, but the operations depend on how many tokens
each adapter has: such a step cannot be captured in a CUDA graph.

An adapter sits in a *slot* of the memory that all adapters of a matrix share; 0 is none. The
matrix may merge several projections (``widths`` are their outputs); each has an A of its own:

    a    [num_slots, num_projections * max_rank, in_features]
    b    [num_slots, sum of widths, max_rank]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """The tokens that have the adapter in ``slot``, of this ``rank``: those from ``begin`` up to
    ``end`` in the order of the ``AdaptedTokens``."""

    slot: int
    rank: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedTokens:
    """The tokens of a step by adapter: ``order`` holds the flat indices of all, those without an
    adapter first, int64 [num_tokens]; ``runs`` are those that have one."""

    order: Tensor
    runs: tuple[AdapterRun, ...]


def add_adapter_delta(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    adapted: AdaptedTokens,
    *,
    widths: Sequence[int],
) -> None:
    """Add to ``out`` [num_tokens, sum of widths] what the adapters make of ``x`` [num_tokens,
    in_features]."""
    max_rank = a.shape[1] // len(widths)
    for run in adapted.runs:
        tokens = adapted.order[run.begin : run.end]
        rows = x.index_select(0, tokens)  # [tokens of the run, in_features]
        deltas, at = [], 0
        for part, width in enumerate(widths):
            of_a = a[run.slot - 1, part * max_rank : part * max_rank + run.rank]
            of_b = b[run.slot - 1, at : at + width, : run.rank]
            deltas.append(F.linear(F.linear(rows, of_a), of_b))
            at += width
        out.index_add_(0, tokens, torch.cat(deltas, dim=1))
