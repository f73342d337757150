"""Prompt chunks over latents that are expanded to a key and a value for each head.

Attention in the space of latents reads few bytes, but multiplies long vectors: with 512 + 64
numbers a key and 512 a value, it takes two to four times the work of attention to the heads' own
keys and values. For a long chunk it takes less to make these first, as in training (DeepSeek-V2,
arXiv 2405.04434). So the positions that a chunk sees are read from their pages, in pieces that
bound the memory:

    0 ............. begin .. end        of each chunk
    | prefix pieces | own piece |
      no mask         causal

Each piece, the own one first, is a call of one kernel for all chunks, and results are merged by
their log-sum-exps, by which sinks are also taken into account.

Knows positions, pages and sizes. Must not know weights: the layer expands latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionSetting,
    AttentionShape,
    Chunks,
    Expand,
    ExpandedChunks,
)
from minisgl_backend.attention.gathered import gathered
from minisgl_backend.device.base import HostArray
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.ragged_attention import Ragged

HEADS_OF_FLASH_ATTN: Final = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Sizes of keys and values for which sgl_kernel has kernels."""

_PREFIX_BYTES: Final = 256 * 2**20
"""The most bytes of a prefix piece's keys and values; an own piece may have more."""


class RaggedAttention(Protocol):
    """``kernels.ragged_attention.ragged_attention_reference``, or another with its results."""

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        of_q: Ragged,
        of_keys: Ragged,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class FlashRagged:
    """``RaggedAttention`` by FlashAttention-3. ``library`` is the module sgl_kernel.flash_attn."""

    library: ModuleType

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        of_q: Ragged,
        of_keys: Ragged,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lses, *_ = self.library.flash_attn_varlen_func(
            q,
            keys,
            values,
            of_q.offsets,
            of_keys.offsets,
            of_q.longest,
            of_keys.longest,
            softmax_scale=scale,
            causal=causal,
            return_softmax_lse=True,
        )
        return out, lses


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Some positions of each chunk: their ``slots`` int64 [num_positions] in the pages."""

    slots: Tensor
    runs: Ragged


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedChunks:
    """``ExpandedChunks`` of the ``tokens`` of all chunks, which are ``runs``; ``pieces`` begin with
    the own one."""

    attention: RaggedAttention
    scale: float
    tokens: slice
    runs: Ragged
    pieces: list[_Piece]

    def __call__(self, out: Tensor, q: Tensor, kv: PagedKV, expand: Expand) -> None:
        q, (own, *others) = q[self.tokens], self.pieces
        found, lses = self._attend(q, kv, expand, own, causal=True)
        for piece in others:
            part, of_part = self._attend(q, kv, expand, piece, causal=False)
            share = (of_part - lses).sigmoid_()  # [num_heads, num_tokens]
            found = torch.lerp(found, part, share.mT[:, :, None].to(part.dtype))
            lses = torch.logaddexp(lses, of_part)
        if kv.sinks is not None:
            share = (lses - kv.sinks[:, None]).sigmoid_()
            found = found * share.mT[:, :, None].to(found.dtype)
        out[self.tokens] = found

    def _attend(
        self, q: Tensor, kv: PagedKV, expand: Expand, piece: _Piece, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        flat = kv.keys.view(-1, kv.keys.shape[-1])
        keys, values = expand(gathered(flat, piece.slots, kv.k_scale, q.dtype))
        return self.attention(
            q, keys, values, self.runs, piece.runs, scale=self.scale, causal=causal
        )


class ExpandedPrefill:
    """``ChunkExpansion`` by a kernel for ragged runs."""

    def __init__(self, setting: AttentionSetting, attention: RaggedAttention):
        """``setting`` has a shape with ``expanded`` heads."""
        self._shape = setting.shape
        self._page_size = setting.page_size
        self._attention = attention
        self.most_positions = most_positions(setting.shape, setting.dtype.itemsize)

    def plan_chunks(self, chunks: Chunks) -> ExpandedChunks | None:
        if chunks.host_offsets is None or chunks.host_ends is None:
            return None
        offsets, ends = chunks.host_offsets.astype(np.int64), chunks.host_ends.astype(np.int64)
        lengths = np.diff(offsets)
        if not pays(self._shape, lengths, ends):
            return None
        begins = ends - lengths
        pieces = [(begins, ends), *cut_prefixes(begins, self.most_positions)]
        return _PlannedChunks(
            self._attention,
            self._shape.scale,
            slice(int(offsets[0]), int(offsets[-1])),
            Ragged(chunks.offsets - chunks.offsets[0], chunks.max_length),
            [self._piece(chunks, *piece) for piece in pieces],
        )

    def _piece(self, chunks: Chunks, begins: HostArray, ends: HostArray) -> _Piece:
        """The positions ``begins`` to ``ends`` of the chunks' rows."""
        counts = ends - begins
        offsets = np.concatenate([[0], np.cumsum(counts)])
        index = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(offsets[-1]) + (begins - offsets[:-1])[index]
        table = chunks.page_table
        chunk, page, offset = (
            torch.from_numpy(part).to(table.device)
            for part in (index, *np.divmod(positions, self._page_size))
        )
        slots = table[chunks.rows[chunk].long(), page].long() * self._page_size + offset
        on_device = torch.from_numpy(offsets.astype(np.int32)).to(table.device)
        return _Piece(slots, Ragged(on_device, int(counts.max())))


def pays(shape: AttentionShape, lengths: HostArray, ends: HostArray) -> bool:
    """Whether attention of chunks takes fewer multiplications with expanded keys and values.
    ``lengths`` and ``ends``, int64 [num_chunks], are those of the chunks."""
    heads, latent = shape.expanded, shape.latent_dim
    assert heads is not None and latent is not None
    tokens, pairs = int(lengths.sum()), int((lengths * (2 * ends - lengths + 1)).sum()) // 2
    rope_dim = shape.head_dim - latent
    of_projections = (heads.key_dim - rope_dim + heads.value_dim) * latent  # of a token and head
    absorbed = pairs * (shape.head_dim + latent) + tokens * of_projections
    expanded = pairs * (heads.key_dim + heads.value_dim) + int(ends.sum()) * of_projections
    return expanded < absorbed


def most_positions(shape: AttentionShape, itemsize: int) -> int:
    """How many positions of prefixes are expanded at a time."""
    heads, latent = shape.expanded, shape.latent_dim
    assert heads is not None and latent is not None
    # the projections of latents, and the keys with their rotated part
    of_head = 2 * heads.key_dim + heads.value_dim - (shape.head_dim - latent)
    return max(_PREFIX_BYTES // (itemsize * shape.num_heads * of_head), 1)


def cut_prefixes(begins: HostArray, most: int) -> Iterator[tuple[HostArray, HostArray]]:
    """Cut the positions before chunks, which begin at ``begins`` int64 [num_chunks], into pieces
    of at most ``most`` positions in total: (first positions, ends) of each chunk's part."""
    last = np.cumsum(begins)
    first = last - begins  # of each prefix in all of them
    total = int(last[-1])
    for begin in range(0, total, most):
        end = min(begin + most, total)
        yield np.clip(begin - first, 0, begins), np.clip(end - first, 0, begins)
