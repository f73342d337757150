"""LoRA: what the adapters of a step's tokens add to a matrix's outputs, (x A^T) B^T.

Each token has at most one adapter, and the tokens of a step may have different ones. So the host
groups them by adapter (``arrange_tokens``): a block is up to ``block`` tokens with the same
adapter. The first kernel (shrink) computes x A^T of each block, in parts of the inputs. The second
(expand) sums the parts and multiplies by B^T. Groups are data, so a captured graph holds for any
mix of adapters. Hopper has a shrink kernel of its own (``kernels.cuda.adapters``); the GEMMs of
``kernels.cuda.linear`` expand by themselves.

An adapter sits in a *slot* of the memory that all adapters of a matrix share; slot 0 means no
adapter. The matrix may merge several projections (``widths`` are the numbers of their outputs),
each with its own A:

    a    [num_slots, num_projections * max_rank, in_features]
    b    [num_slots, sum of widths, max_rank]

Beyond the rank of the adapter in the slot, both are 0 up to a multiple of ``RANK_STEP``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.request import IntArray

RANK_STEP: Final = 16
"""Kernels compute ranks in steps of this size; ``max_rank`` is a multiple of it."""
IN_STEP: Final = 128
"""in_features that Hopper's kernel for x A^T multiplies at a time; it takes only whole steps."""
_OF_TOKEN: Final = 3
"""Numbers for each token in the buffer of ``AdaptedTokens``."""
_FIELDS: Final = 4
"""Numbers for each block there."""
_SMALL_BLOCK: Final = 16
_LARGE_BLOCK: Final = 64
_NEVER: Final = 2**31 - 1
_MANY_TOKENS: Final = 1024
"""With more tokens than this, blocks are large."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedTokens:
    """The tokens of a step by adapter, in one buffer, int32.

        buffer: order | slots | ranks | blocks

    ``order`` [num_tokens] lists all tokens, those with the same adapter together. ``slots`` and
    ``ranks`` [num_tokens] are those of each token's adapter, or 0 if it has none. ``blocks``
    [num_blocks, 4]: the slot and rank of a block's adapter, and where its part of ``order`` begins
    and ends. Tokens without an adapter are in blocks of slot 0 and rank 0. Blocks at the end may be
    empty.
    """

    buffer: Tensor
    num_tokens: int
    block: int

    @property
    def order(self) -> Tensor:
        return self.buffer[: self.num_tokens]

    @property
    def slots(self) -> Tensor:
        return self.buffer[self.num_tokens : 2 * self.num_tokens]

    @property
    def ranks(self) -> Tensor:
        return self.buffer[2 * self.num_tokens : _OF_TOKEN * self.num_tokens]

    @property
    def blocks(self) -> Tensor:
        return self.buffer[_OF_TOKEN * self.num_tokens :].view(-1, _FIELDS)


AdaptersShape = tuple[int, int]
"""The number of slots, and of A's rows in each: num_projections * max_rank."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMemory:
    """This rank's part of the adapters of one matrix, in slots: ``a``, ``b`` and ``widths`` as
    above, in the order of the matrix's parts."""

    a: Tensor
    b: Tensor
    widths: tuple[int, ...]

    @property
    def shape(self) -> AdaptersShape:
        return self.a.shape[0], self.a.shape[1]

    @property
    def later_projections(self) -> tuple[int, int]:
        """The first output of the second projection and of the third; if there is none, a number
        beyond all outputs."""
        assert len(self.widths) <= 3
        second, third = (*accumulate(self.widths[:-1]), _NEVER, _NEVER)[:2]
        return second, third


@dataclass(frozen=True, slots=True, eq=False)
class Adaptation:
    """The adapters of one matrix, and which tokens of a step have which."""

    memory: AdapterMemory
    tokens: AdaptedTokens


class Shrink(Protocol):
    """A kernel that computes x A^T for steps with small blocks."""

    def __call__(self, x: Tensor, adaptation: Adaptation, *, pdl: bool) -> Tensor:
        """[num_tokens, num_projections * max_rank], for each token's own A."""


def block_tokens(num_tokens: int) -> int:
    """How many tokens a block of a step of ``num_tokens`` has on a GPU."""
    return _LARGE_BLOCK if num_tokens > _MANY_TOKENS else _SMALL_BLOCK


def arranged_size(num_tokens: int, num_slots: int, block: int) -> int:
    """The length of the buffer of ``AdaptedTokens`` that holds any mix of adapters."""
    num_blocks = min(num_tokens, -(-num_tokens // block) + num_slots)
    return _OF_TOKEN * num_tokens + _FIELDS * num_blocks


def arrange_tokens(slots: IntArray, ranks: IntArray, *, block: int, size: int) -> IntArray:
    """The content of ``AdaptedTokens``, int32 [size], for tokens of these ``slots`` [num_tokens].

    ``ranks`` [num_slots + 1] are the ranks of the adapters in the slots.
    """
    content = np.zeros(size, np.int32)
    num_tokens = len(slots)
    order = np.argsort(slots, kind="stable")
    content[: _OF_TOKEN * num_tokens].reshape(_OF_TOKEN, num_tokens)[:] = order, slots, ranks[slots]
    present, begins = np.unique(slots[order], return_index=True)
    blocks = content[_OF_TOKEN * num_tokens :].reshape(-1, _FIELDS)
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
    adaptation: Adaptation,
    *,
    bias: Tensor | None = None,
    shrink: Shrink | None = None,
    pdl: bool = False,
) -> Tensor:
    """What the adapters add, plus ``bias``: [num_tokens, sum of widths]. ``x`` is [num_tokens,
    in_features]. ``shrink`` may replace Triton's kernel."""
    shape = len(x), sum(adaptation.memory.widths)
    if use_triton(x):
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        _launch(out, x, adaptation, bias=bias, shrink=shrink, add=False, pdl=pdl)
        return out
    out = torch.zeros(shape, dtype=x.dtype, device=x.device)
    if bias is not None:
        out += bias
    add_adapter_delta_reference(out, x, adaptation)
    return out


def add_adapter_delta(
    out: Tensor,
    x: Tensor,
    adaptation: Adaptation,
    *,
    shrink: Shrink | None = None,
    pdl: bool = False,
) -> None:
    """Add to ``out`` [num_tokens, sum of widths] what the adapters add for ``x``; ``shrink`` as
    above."""
    if use_triton(x):
        _launch(out, x, adaptation, shrink=shrink, add=True, pdl=pdl)
    else:
        add_adapter_delta_reference(out, x, adaptation)


def open_adapted_gates(
    gate_up: Tensor,
    x: Tensor,
    adaptation: Adaptation,
    gate: Gate,
    *,
    shrink: Shrink | None = None,
    pdl: bool = False,
) -> Tensor:
    """``open_gates`` after the adapters have added to ``gate_up`` [num_tokens, 2 * width], which
    may be overwritten. Returns [num_tokens, width]."""
    if not use_triton(x):
        add_adapter_delta_reference(gate_up, x, adaptation)
        return open_gates_reference(gate_up, gate)
    from minisgl_backend.kernels.triton_kernels.adapter_kernels import launch_gated_expand

    memory, tokens = adaptation.memory, adaptation.tokens
    out = gate_up.new_empty((len(x), gate_up.shape[1] // 2))
    if len(x):
        launch_gated_expand(
            out,
            gate_up,
            _inner(x, adaptation, shrink, pdl),
            memory.b,
            tokens.order,
            tokens.blocks,
            block=tokens.block,
            gelu=gate == "gelu",
            pdl=pdl,
        )
    return out


def _inner(x: Tensor, adaptation: Adaptation, shrink: Shrink | None, pdl: bool) -> Tensor:
    """x A^T in parts to be added, [parts, num_tokens, num_projections * max_rank]."""
    from minisgl_backend.kernels.triton_kernels.adapter_kernels import launch_shrink

    memory, tokens = adaptation.memory, adaptation.tokens
    if shrink is not None and tokens.block <= _SMALL_BLOCK:
        return shrink(x, adaptation, pdl=pdl)[None]
    return launch_shrink(
        x,
        memory.a,
        tokens.order,
        tokens.blocks,
        block=tokens.block,
        max_rank=memory.b.shape[2],
        pdl=pdl,
    )


def _launch(
    out: Tensor,
    x: Tensor,
    adaptation: Adaptation,
    *,
    bias: Tensor | None = None,
    shrink: Shrink | None,
    add: bool,
    pdl: bool,
) -> None:
    from minisgl_backend.kernels.triton_kernels.adapter_kernels import launch_expand

    memory, tokens = adaptation.memory, adaptation.tokens
    if len(x) == 0:
        return
    launch_expand(
        out,
        _inner(x, adaptation, shrink, pdl),
        memory.b,
        tokens.order,
        tokens.blocks,
        block=tokens.block,
        widths=memory.widths,
        bias=bias,
        add=add,
        pdl=pdl,
    )


def add_adapter_delta_reference(out: Tensor, x: Tensor, adaptation: Adaptation) -> None:
    """The twin of ``add_adapter_delta``: one adapter after another."""
    memory, adapted = adaptation.memory, adaptation.tokens
    a, b, max_rank = memory.a, memory.b, memory.b.shape[2]
    for slot, rank, begin, end in adapted.blocks.tolist():
        if not rank or begin == end:
            continue
        tokens = adapted.order[begin:end].long()
        rows = x.index_select(0, tokens)  # [num_tokens of the block, in_features]
        at = 0
        deltas = []
        for part, width in enumerate(memory.widths):
            first = part * max_rank
            inner = F.linear(rows, a[slot - 1, first : first + rank])  # [.., rank]
            deltas.append(F.linear(inner, b[slot - 1, at : at + width, :rank]))
            at += width
        out.index_add_(0, tokens, torch.cat(deltas, dim=1))
