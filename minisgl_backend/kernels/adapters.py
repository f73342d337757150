"""LoRA: what the adapters of a step's tokens add to a matrix's outputs, (x A^T) B^T.

Each token has at most one adapter, and the tokens of a step may have different ones. So they are
grouped by adapter on the host (``arrange_tokens``): a block is up to ``block`` tokens of the same
one. The first kernel (shrink) computes x A^T of each block, in parts of the inputs; the second
(expand) sums the parts and multiplies by B^T. Groups are data, so a captured graph holds for any
mix of adapters.

An adapter sits in a *slot* of the memory that all adapters of a matrix share; 0 is none. The
matrix may merge several projections (``widths`` are their outputs); each has an A of its own:

    a    [num_slots, num_projections * max_rank, in_features]
    b    [num_slots, sum of widths, max_rank]

Both are 0 behind the rank of the adapter in the slot, as far as a multiple of ``RANK_STEP``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.request import IntArray

RANK_STEP: Final = 16
"""Kernels compute ranks in steps of this size; ``max_rank`` is a multiple of it."""
_FIELDS: Final = 4
_SMALL_BLOCK: Final = 16
_LARGE_BLOCK: Final = 64
_MANY_TOKENS: Final = 1024
"""With more tokens than this, blocks are large."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedTokens:
    """The tokens of a step by adapter, in one buffer, int32.

        buffer: order | blocks

    ``order`` [num_tokens] lists all tokens, those of the same adapter together. ``blocks``
    [num_blocks, 4]: slot and rank of its adapter, and the part of ``order`` that it covers, from
    its begin up to its end. Tokens without an adapter have blocks of slot 0 and rank 0. Blocks at
    the end may be empty.
    """

    buffer: Tensor
    num_tokens: int
    block: int

    @property
    def order(self) -> Tensor:
        return self.buffer[: self.num_tokens]

    @property
    def blocks(self) -> Tensor:
        return self.buffer[self.num_tokens :].view(-1, _FIELDS)


def block_tokens(num_tokens: int) -> int:
    """How many tokens a block of such a step has on a GPU."""
    return _LARGE_BLOCK if num_tokens > _MANY_TOKENS else _SMALL_BLOCK


def arranged_size(num_tokens: int, num_slots: int, block: int) -> int:
    """The length of the buffer of ``AdaptedTokens`` that holds any mix of adapters."""
    return num_tokens + _FIELDS * min(num_tokens, -(-num_tokens // block) + num_slots)


def arrange_tokens(slots: IntArray, ranks: IntArray, *, block: int, size: int) -> IntArray:
    """The content of ``AdaptedTokens``, int32 [size], for tokens of these ``slots`` [num_tokens].

    ``ranks`` [num_slots + 1] are those of the adapters in the slots.
    """
    content = np.zeros(size, np.int32)
    num_tokens = len(slots)
    order = np.argsort(slots, kind="stable")
    content[:num_tokens] = order
    present, begins = np.unique(slots[order], return_index=True)
    blocks = content[num_tokens:].reshape(-1, _FIELDS)
    used = 0
    for slot, begin, end in zip(present, begins, [*begins[1:], num_tokens], strict=True):
        starts = np.arange(begin, end, block)
        of_slot = blocks[used : used + len(starts)]
        of_slot[:, 0], of_slot[:, 1] = slot, ranks[slot]
        of_slot[:, 2], of_slot[:, 3] = starts, np.minimum(starts + block, end)
        used += len(starts)
    return content


def adapter_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    adapted: AdaptedTokens,
    *,
    widths: Sequence[int],
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> Tensor:
    """What the adapters add, and ``bias``: [num_tokens, sum of widths].

    ``x`` [num_tokens, in_features]. With ``squares``, float32 [tiles, num_tokens], it lacks the
    scale of its RMSNorm (``layers.norm.Normed``), of which ``eps`` is.
    """
    if use_triton(x):
        from minisgl_backend.kernels.triton_kernels.adapter_kernels import launch_adapters

        out = torch.empty((len(x), sum(widths)), dtype=x.dtype, device=x.device)
        launch_adapters(
            out,
            x,
            a,
            b,
            adapted.order,
            adapted.blocks,
            block=adapted.block,
            widths=widths,
            bias=bias,
            squares=squares,
            eps=eps,
            add=False,
            pdl=pdl,
        )
        return out
    if squares is not None:
        x = x * torch.rsqrt(squares.sum(dim=0)[:, None] / x.shape[1] + eps).to(x.dtype)
    out = torch.zeros((len(x), sum(widths)), dtype=x.dtype, device=x.device)
    if bias is not None:
        out += bias
    add_adapter_delta_reference(out, x, a, b, adapted, widths=widths)
    return out


def add_adapter_delta(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    adapted: AdaptedTokens,
    *,
    widths: Sequence[int],
    pdl: bool = False,
) -> None:
    """Add to ``out`` [num_tokens, sum of widths] what the adapters add for ``x``."""
    if use_triton(x):
        from minisgl_backend.kernels.triton_kernels.adapter_kernels import launch_adapters

        order, blocks, block = adapted.order, adapted.blocks, adapted.block
        launch_adapters(out, x, a, b, order, blocks, block=block, widths=widths, add=True, pdl=pdl)
    else:
        add_adapter_delta_reference(out, x, a, b, adapted, widths=widths)


def add_adapter_delta_reference(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, adapted: AdaptedTokens, *, widths: Sequence[int]
) -> None:
    """The twin of ``add_adapter_delta``: one adapter after another."""
    max_rank = b.shape[2]
    for slot, rank, begin, end in adapted.blocks.tolist():
        if not rank or begin == end:
            continue
        tokens = adapted.order[begin:end].long()
        rows = x.index_select(0, tokens)  # [num_tokens of the block, in_features]
        at = 0
        deltas = []
        for part, width in enumerate(widths):
            first = part * max_rank
            inner = F.linear(rows, a[slot - 1, first : first + rank])  # [.., rank]
            deltas.append(F.linear(inner, b[slot - 1, at : at + width, :rank]))
            at += width
        out.index_add_(0, tokens, torch.cat(deltas, dim=1))
