"""Attention to chosen positions: a backend for models with an indexer (``kernels.indexer``).

Each token of a step, decoding or in a chunk, is attended by itself, as a decoding row whose pages
have one position: those that its layer, or one before it, has chosen. A step whose tokens see no
more positions than are chosen, as far as the host knows, is one of the backend for all positions;
so are chunks of this kind beside rows that choose, if they are expanded.

    token             0 ..               | offsets[0] .. | offsets[-1] .. num_tokens
    row and length    of a decoding row  | of its chunk  | of a decoding row, or padding

Knows which tokens see how many positions of which row. Must not know how scores are made of the
index keys, or how attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import (
    Attend,
    AttendExpanded,
    Chunks,
    DecodeAttention,
    DecodeRows,
    LayerAttention,
    PagedAttention,
)
from minisgl_backend.kernels.indexer import ChooseSlots, index_scores
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.request import IntArray

_SCORE_BYTES: Final = 128 * 2**20
"""The most bytes of scores at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class _SeenPositions:
    """How many positions tokens see, ``lengths`` int32 [num_tokens], of which ``rows`` int32
    [num_tokens] of ``page_table``; ``longest`` bounds the lengths. ``pdl``: see ``DecodeRows``."""

    rows: Tensor
    lengths: Tensor
    page_table: Tensor
    longest: int
    pdl: bool = False

    def pieces(self) -> Iterator[slice]:
        """All tokens, in pieces whose scores take a bounded number of bytes."""
        most = max(_SCORE_BYTES // (4 * self.longest), 1)
        for begin in range(0, len(self.rows), most):
            yield slice(begin, min(begin + most, len(self.rows)))


@dataclass(slots=True, eq=False)
class AttendChosen:
    """``Attend`` of a step whose layers choose positions first, or take those chosen before.

    ``slots`` int32 [num_tokens, top_k] are those of the chosen positions.
    """

    seen: _SeenPositions
    page_size: int
    choose_slots: ChooseSlots
    decode: DecodeAttention
    slots: Tensor
    of_slots: DecodeRows
    attend: LayerAttention | None = None

    def choose(self, q: Tensor, weights: Tensor, index_keys: Tensor) -> None:
        """Choose the positions for this layer and those behind it. ``q`` [num_tokens, num_heads,
        key_dim] and ``weights`` [num_tokens, num_heads] as for ``index_scores``; they may have more
        tokens than choose, behind these."""
        seen = self.seen
        for part in seen.pieces():
            rows, lengths = seen.rows[part], seen.lengths[part]
            scores = index_scores(
                q[part],
                weights[part],
                index_keys,
                seen.page_table,
                rows,
                lengths,
                width=seen.longest,
                top_k=self.slots.shape[1],
                pdl=seen.pdl,
            )
            self.choose_slots(
                self.slots[part],
                scores,
                seen.page_table,
                rows,
                lengths,
                page_size=self.page_size,
                pdl=seen.pdl,
            )
        self.attend = self.decode.plan_rows(self.of_slots)

    def __call__(self, q: Tensor, kv: PagedKV, layer: int) -> Tensor:
        assert self.attend is not None  # the first layer chooses
        latent_dim = kv.values.shape[-1]
        keys = kv.keys.view(-1, 1, *kv.keys.shape[2:])
        out = q.new_empty(*q.shape[:-1], latent_dim)
        self.attend(out, q, replace(kv, keys=keys, values=keys[..., :latent_dim]), layer)
        return out


@dataclass(frozen=True, slots=True)
class SparseAttention(PagedAttention):
    """A backend of a model with an indexer that chooses ``top_k`` positions. ``prefill`` and
    ``decode`` attend to all positions; ``chosen`` decodes over pages of one position."""

    choose_slots: ChooseSlots = field(kw_only=True)
    chosen: DecodeAttention = field(kw_only=True)
    top_k: int = field(kw_only=True)
    page_size: int = field(kw_only=True)

    def plan(self, decodes: DecodeRows | None, chunks: Chunks | None) -> Attend:
        longest = _longest(decodes, chunks, self.page_size)
        if longest <= self.top_k:
            return PagedAttention.plan(self, decodes, chunks)
        if decodes is not None and chunks is not None and chunks.max_end <= self.top_k:
            # rows that choose do not keep short prompts from being expanded
            expanded = None if self.expansion is None else self.expansion.plan_chunks(chunks)
            if expanded is not None:
                rows = self._chosen(decodes, None, longest)
                return AttendExpanded(rows, len(decodes.rows), expanded)
        return self._chosen(decodes, chunks, longest)

    def _chosen(
        self, decodes: DecodeRows | None, chunks: Chunks | None, longest: int
    ) -> AttendChosen:
        """All these tokens attend to chosen positions; they see ``longest`` at most."""
        seen = _seen(decodes, chunks, longest)
        device = seen.rows.device
        slots = torch.zeros((len(seen.rows), self.top_k), dtype=torch.int32, device=device)
        host_lengths = _host_lengths(decodes, chunks)
        of_slots = DecodeRows(
            rows=torch.arange(len(slots), dtype=torch.int32, device=device),
            lengths=seen.lengths.clamp(max=self.top_k),
            page_table=slots,
            host_lengths=None if host_lengths is None else host_lengths.clip(max=self.top_k),
            pdl=seen.pdl,
        )
        return AttendChosen(seen, self.page_size, self.choose_slots, self.chosen, slots, of_slots)


def _longest(decodes: DecodeRows | None, chunks: Chunks | None, page_size: int) -> int:
    """The most positions that a token of the step may see."""
    longest = 0
    if chunks is not None:
        longest = chunks.max_end
    if decodes is not None and decodes.host_lengths is None:
        return decodes.page_table.shape[1] * page_size
    if decodes is not None and decodes.host_lengths is not None:
        longest = max(longest, int(decodes.host_lengths.max()))
    return longest


def _host_lengths(decodes: DecodeRows | None, chunks: Chunks | None) -> IntArray | None:
    """How many positions the tokens see, on the host; None in a step to be captured."""
    lengths = [] if decodes is None else [decodes.host_lengths]
    if chunks is not None:
        offsets, ends = chunks.host_offsets, chunks.host_ends
        if offsets is None or ends is None:
            return None
        tokens = np.arange(offsets[0], offsets[-1], dtype=np.int32)
        lengths.append(np.repeat(ends - offsets[1:], np.diff(offsets)) + tokens + 1)
    known = [part for part in lengths if part is not None]
    return np.concatenate(known) if len(known) == len(lengths) else None


def _seen(decodes: DecodeRows | None, chunks: Chunks | None, longest: int) -> _SeenPositions:
    """What the tokens of a step see. In a step to be captured, tokens of chunks may have a decoding
    row, too, and there may be tokens that have neither: these see one position of the dummy row,
    the last of the page table."""
    if chunks is None:
        assert decodes is not None  # a step has tokens
        return _SeenPositions(
            decodes.rows, decodes.lengths, decodes.page_table, longest, decodes.pdl
        )
    num_decodes = 0 if decodes is None else len(decodes.rows)
    # in a step to be captured, ``max_length`` is that of the flat batch
    num_tokens = (
        max(num_decodes, chunks.max_length)
        if chunks.host_offsets is None
        else int(chunks.host_offsets[-1])
    )
    table, offsets = chunks.page_table, chunks.offsets
    rows = table.new_full((num_tokens,), len(table) - 1)
    lengths = torch.ones_like(rows)
    if decodes is not None:
        rows[:num_decodes], lengths[:num_decodes] = decodes.rows, decodes.lengths
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=table.device)
    chunk = torch.searchsorted(offsets, tokens, right=True).sub_(1).clamp_(0, len(chunks.rows) - 1)
    in_chunk = (tokens >= offsets[0]) & (tokens < offsets[-1])
    rows = torch.where(in_chunk, chunks.rows[chunk], rows)
    ends = chunks.ends[chunk] - offsets[chunk + 1] + tokens + 1
    return _SeenPositions(rows, torch.where(in_chunk, ends, lengths), table, longest)
