"""Attention of decoding rows over the pages that they share, in parts that are merged later.

Rows that read the same pages are a *group* (``plan.StepPlan``). Its query heads are tiles of one
matrix product, so a shared page is read once for each tile instead of once for each row (Hydragen,
arXiv 2402.05099; ChunkAttention, arXiv 2402.15220). A tile's positions are cut into *pieces*, so
that all multiprocessors have work. A piece leaves a *partial* result for each of its rows: what the
softmax's weights sum up to, not normalized, with their maximum and sum. What else a row reads, and
the merging of all, is up to the kernel of decode attention (``cuda/decode_attention.cu``).

The host describes the pieces in one table, whose address and size never change, so that a captured
graph can read it. Must not know requests, plans or how pages are given out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.request import IntArray

MOST_SLOTS: Final = 32
"""Most partial results of a row."""
MOST_LEVELS: Final = 4
"""Most groups that a row may be in."""
_HEADER: Final = 8
PIECE_WORDS: Final = 8
_MOST_PIECES: Final = 2048


@dataclass(frozen=True, slots=True)
class Cut:
    """How groups are cut: tiles of ``tile`` query heads, iterations of ``block`` positions, and
    about ``per_processor`` pieces and KV heads for each multiprocessor. A piece has at least
    ``least`` positions."""

    tile: int
    block: int
    num_warps: int
    stages: int
    per_processor: int
    least: int = 256


def cut_of(group: int, kv_dtype: torch.dtype) -> Cut:
    """What was fastest on an H200 for ``group`` query heads a KV head."""
    return Cut(tile=64, block=64, num_warps=4, stages=3, per_processor=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedShape:
    """What the table and the kernels depend on; ``max_batch`` is the most rows of a step."""

    max_batch: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    processors: int
    cut: Cut

    @property
    def rows_of_tile(self) -> int:
        return self.cut.tile * self.num_kv_heads // self.num_heads


class SharedTable:
    """Where the parts of a step's table stand, in words, and how they are filled.

        number of pieces, padded to 8 words
        starts   [max_batch, 2]             where a row's own part begins; its number of partials
        slots    [max_batch, MOST_SLOTS]    the indices of its partials
        members  [MOST_LEVELS * max_batch]  the rows of the tiles, one tile after another, numbered
                                            as in the batch
        pieces   [.., 8]                    first member, number of members, row of the page table,
                                            first position, end, index of the first partial, -, -

    Rows of the batch without partials have zeros.
    """

    def __init__(self, shape: SharedShape) -> None:
        self.shape = shape
        self.starts_at = _HEADER
        self.slots_at = self.starts_at + 2 * shape.max_batch
        self.members_at = self.slots_at + MOST_SLOTS * shape.max_batch
        self.pieces_at = self.members_at + MOST_LEVELS * shape.max_batch
        self.size = self.pieces_at + PIECE_WORDS * _MOST_PIECES
        self.max_partials = max(4 * shape.max_batch, 1024)

    def content(
        self, sizes: IntArray, begins: IntArray, ends: IntArray, members: IntArray, rows: IntArray
    ) -> IntArray:
        """The table of a step, int32 [up to size], the end of which may be missing.

        Group i has ``sizes[i]`` of the ``members``, one group after another: indices of ``rows``,
        the rows of the step. They share the pages from index ``begins[i]`` up to ``ends[i]`` of
        the page table. All int32. The groups of a row cover its first pages without gaps, in order.
        """
        shape, cut = self.shape, self.shape.cut
        first_members = np.cumsum(sizes) - sizes
        spans = (ends - begins) * shape.page_size
        num_tiles = -(-sizes // shape.rows_of_tile)
        work = int((spans * num_tiles).sum()) * shape.num_kv_heads
        length = max(work // (cut.per_processor * shape.processors), cut.least)
        while True:
            length = -(-length // cut.block) * cut.block
            num_splits = -(-spans // length)
            num_slots = np.zeros(shape.max_batch, np.int64)
            np.add.at(num_slots, members, np.repeat(num_splits, sizes))
            if (
                int(num_slots.max()) <= MOST_SLOTS
                and int(num_slots.sum()) <= self.max_partials
                and int((num_splits * num_tiles).sum()) <= _MOST_PIECES
            ):
                break
            length *= 2
        num_pieces = int((num_splits * num_tiles).sum())
        out = np.zeros(self.pieces_at + PIECE_WORDS * num_pieces, np.int32)
        out[0] = num_pieces
        starts = out[self.starts_at : self.slots_at].reshape(-1, 2)
        slots = out[self.slots_at : self.members_at].reshape(-1, MOST_SLOTS)
        out[self.members_at : self.members_at + len(members)] = members
        pieces = out[self.pieces_at :].reshape(-1, PIECE_WORDS)
        partial = piece = 0
        for group in range(len(sizes)):
            first, size, tiles = int(first_members[group]), int(sizes[group]), int(num_tiles[group])
            borders = np.arange(tiles + 1) * size // tiles  # tiles of about the same size
            of_group = members[first : first + size]
            begin, end = int(begins[group]) * shape.page_size, int(ends[group]) * shape.page_size
            starts[of_group, 0] = end
            for start in range(begin, end, length):
                slots[of_group, starts[of_group, 1]] = partial + np.arange(size)
                starts[of_group, 1] += 1
                of_split = pieces[piece : piece + tiles]
                of_split[:, 0] = first + borders[:-1]
                of_split[:, 1] = np.diff(borders)
                of_split[:, 2] = rows[of_group[0]]
                of_split[:, 3] = start
                of_split[:, 4] = min(start + length, end)
                of_split[:, 5] = partial + borders[:-1]
                partial += size
                piece += tiles
        return out


class SharedAttention:
    """Attention over shared pages for one shape and one stream. Calls share the partial results:
    what reads them must come before the next call.

    ``values`` float32 [max_partials, num_heads, head_dim] and ``sums`` float32 [max_partials,
    num_heads, 2], maximum and sum: the scores' exponents have the base 2, and ``v_scale`` is left
    out.
    """

    def __init__(self, shape: SharedShape, device: torch.device) -> None:
        self.table = SharedTable(shape)
        self.words = torch.zeros(self.table.size, dtype=torch.int32, device=device)
        self.starts = self.words[self.table.starts_at : self.table.slots_at]
        self.slots = self.words[self.table.slots_at : self.table.members_at]
        partials = (self.table.max_partials, shape.num_heads)
        self.values = torch.empty((*partials, shape.head_dim), dtype=torch.float32, device=device)
        self.sums = torch.empty((*partials, 2), dtype=torch.float32, device=device)

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        window: int | None,
        k_scale: Tensor | None,
        pdl: bool,
    ) -> None:
        """Fill the partial results that ``words`` name; see ``decode_attention`` for arguments."""
        table, cut = self.table, self.table.shape.cut
        from minisgl_backend.kernels.triton_kernels.shared_attention_kernel import (
            launch_shared_attention,
        )

        launch_shared_attention(
            self.values,
            self.sums,
            q,
            keys,
            values,
            page_table,
            lengths,
            self.words,
            members_at=table.members_at,
            pieces_at=table.pieces_at,
            piece_words=PIECE_WORDS,
            tile=cut.tile,
            block=cut.block,
            num_warps=cut.num_warps,
            stages=cut.stages,
            num_programs=cut.per_processor * table.shape.processors,
            scale=scale,
            window=window,
            k_scale=k_scale,
            pdl=pdl,
        )
