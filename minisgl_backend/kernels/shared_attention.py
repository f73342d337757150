"""Attention of decoding rows over the pages that they share, in parts that are merged later.

Rows that read the same pages form a *group* (``plan.Groups``). The query heads of a group are the
rows of one matrix, which is cut into tiles. So a shared page is read once per tile instead of once
per row (Hydragen, arXiv 2402.05099; ChunkAttention, arXiv 2402.15220). A tile's positions are cut
into *pieces*, so that all multiprocessors have work. A piece leaves a *partial* result for each of
its rows: the weighted sum of values before normalization, and the maximum and the sum of the
weights. The kernel of decode attention (``cuda/decode_attention.cu``) reads each row's other pages,
and merges all results.

The host describes the pieces in one table, whose address and size never change, so that a captured
graph can read it. It also estimates whether groups pay off. Must not know requests, plans or how
pages are allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.request import IntArray

_Counts: TypeAlias = npt.NDArray[np.int64]

MOST_SLOTS: Final = 32
"""The most partial results of a row."""
MOST_LEVELS: Final = 4
"""The most groups that a row may be in."""
PIECE_WORDS: Final = 8
_HEADER: Final = 8

# What was measured on an H200, in microseconds, bytes and floating-point operations.
_FIXED_US: Final = 12.0
"""One more kernel per layer, and the merging of its results."""
_ONCE_BYTES_A_US: Final = 3.7e6
"""How fast shared pages are read once, from memory."""
_AGAIN_BYTES_A_US: Final = 5.0e6
_CACHED_BYTES_A_US: Final = 9.5e6
"""How fast rows read them separately: some pages come from the L2 cache, or nearly all if they have
no more than ``_CACHED_BYTES``."""
_CACHED_BYTES: Final = 34e6
_FLOPS_A_US: Final = 2.6e8
_FP8_FLOPS_A_US: Final = 2.1e8
_POSITIONS_A_US: Final = 32
"""Positions of a piece, while all multiprocessors are busy."""
_PIECE_US: Final = 3.0
_PARTIAL_BYTES_A_US: Final = 5.0e6

_SPLITS: Final = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32])
"""Into how many pieces the longest tile may be cut."""


@dataclass(frozen=True, slots=True)
class SharedCut:
    """How groups are cut: tiles of ``tile`` query heads, iterations of ``block`` positions, and
    ``per_processor`` programs that a multiprocessor runs at the same time."""

    tile: int
    block: int
    num_warps: int
    stages: int
    per_processor: int


FASTEST: Final = SharedCut(tile=64, block=64, num_warps=4, stages=3, per_processor=2)
"""The fastest on an H200, for all numbers of heads and types of pages that were tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedShape:
    """What the table and the kernels depend on. ``max_batch`` is the most rows of a step.
    ``is_fp8``: pages hold float8, otherwise 16 bits."""

    max_batch: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    processors: int
    is_fp8: bool = False
    cut: SharedCut = FASTEST

    @property
    def rows_of_tile(self) -> int:
        return self.cut.tile * self.num_kv_heads // self.num_heads

    @property
    def position_bytes(self) -> int:
        """Bytes of a position's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * (1 if self.is_fp8 else 2)


class SharedTable:
    """Where the parts of a step's table are, in words, and how they are filled.

        number of pieces, padded to 8 words
        starts   [max_batch, 2]             where a row's own part begins; its number of partials
        slots    [max_batch, MOST_SLOTS]    the indices of its partials
        members  [MOST_LEVELS * max_batch]  the rows of the tiles, one tile after another
        pieces   [.., 8]                    first member, number of members, a row of the group,
                                            first position, end, index of the first partial, -, -

    Rows are numbered as in the batch; those without partials have zeros.

    In all methods group i has ``sizes[i]`` members, listed one group after another, which share
    the pages from index ``begins[i]`` up to ``ends[i]`` of the page table. All are int32. The
    groups of a row cover its first pages in order and without gaps.
    """

    def __init__(self, shape: SharedShape) -> None:
        self.shape = shape
        self.starts_at = _HEADER
        self.slots_at = self.starts_at + 2 * shape.max_batch
        self.members_at = self.slots_at + MOST_SLOTS * shape.max_batch
        self.pieces_at = self.members_at + MOST_LEVELS * shape.max_batch
        # a group has at least two members, and a tile has room for eight
        self.max_pieces = max(3 * shape.max_batch, 2048)
        self.size = self.pieces_at + PIECE_WORDS * self.max_pieces
        self.max_partials = max(4 * shape.max_batch, 1024)

    def saved_us(
        self, sizes: IntArray, begins: IntArray, ends: IntArray, *, window: int | None
    ) -> float:
        """About how much time a layer saves if the groups' pages are read together; negative if it
        takes more time. With a ``window``, for rows that see as much of the pages as they can."""
        shape = self.shape
        spans = (ends - begins) * np.int64(shape.page_size)
        if window is not None:
            spans = np.minimum(spans, window)
        tiles = -(-sizes // shape.rows_of_tile)
        once_bytes = int(spans.sum()) * shape.position_bytes
        all_bytes = int((spans * sizes).sum()) * shape.position_bytes
        flops = (
            4 * int((spans * tiles).sum()) * shape.cut.tile * shape.num_kv_heads * shape.head_dim
        )
        together_us = max(
            once_bytes / _ONCE_BYTES_A_US,
            flops / (_FP8_FLOPS_A_US if shape.is_fp8 else _FLOPS_A_US),
        )
        is_cached = once_bytes <= _CACHED_BYTES
        alone_us = all_bytes / (_CACHED_BYTES_A_US if is_cached else _AGAIN_BYTES_A_US)
        return alone_us - together_us - _FIXED_US

    def content(
        self, sizes: IntArray, begins: IntArray, ends: IntArray, members: IntArray
    ) -> IntArray:
        """The table of a step, int32 [up to size]; its end may be missing."""
        shape = self.shape
        if not len(sizes):
            return np.zeros(self.slots_at, np.int32)  # no pieces, and no row has partials
        size_of = sizes.astype(np.int64)
        num_tiles = -(-size_of // shape.rows_of_tile)
        first = begins.astype(np.int64) * shape.page_size  # position
        end = ends.astype(np.int64) * shape.page_size
        spans = end - first
        has_levels = bool(begins.any())
        length = self._length(size_of, spans, num_tiles, has_levels=has_levels)
        num_splits = -(-spans // length)
        num_pieces = num_splits * num_tiles
        firsts = _before(size_of)  # members, partials
        partials = _before(size_of * num_splits)
        out = np.zeros(self.pieces_at + PIECE_WORDS * int(num_pieces.sum()), np.int32)
        out[0] = num_pieces.sum()
        out[self.members_at : self.members_at + len(members)] = members

        pieces = out[self.pieces_at :].reshape(-1, PIECE_WORDS)
        group = np.repeat(np.arange(len(sizes)), num_pieces)
        size, tiles = size_of[group], num_tiles[group]
        split, tile = np.divmod(np.arange(len(group)) - _before(num_pieces)[group], tiles)
        low, high = tile * size // tiles, (tile + 1) * size // tiles  # of about the same size
        start = first[group] + split * length
        pieces[:, 0] = firsts[group] + low
        pieces[:, 1] = high - low
        pieces[:, 2] = members[firsts][group]
        pieces[:, 3] = start
        pieces[:, 4] = np.minimum(start + length, end[group])
        pieces[:, 5] = partials[group] + split * size + low

        starts = out[self.starts_at : self.slots_at].reshape(-1, 2)
        slots = out[self.slots_at : self.members_at].reshape(-1, MOST_SLOTS)
        group = np.repeat(np.arange(len(sizes)), sizes)  # of each member
        splits = num_splits[group]
        starts[members, 0] = end[group]  # the last group's, if there are several
        starts[:, 1] = np.bincount(members, splits, len(starts))
        member = np.repeat(np.arange(len(members)), splits)  # of each partial
        split = np.arange(len(member)) - _before(splits)[member]
        partial = partials[group] + np.arange(len(members)) - firsts[group]
        slot = split
        if has_levels:
            slot = slot + _before_by(members, splits)[member]
        slots[members[member], slot] = partial[member] + split * size_of[group][member]
        return out

    def _length(
        self, sizes: _Counts, spans: _Counts, num_tiles: _Counts, *, has_levels: bool
    ) -> int:
        """The positions per piece with which all pieces are done soonest."""
        shape, cut = self.shape, self.shape.cut
        longest = int(spans.max())
        lengths = -(-longest // (_SPLITS * cut.block)) * cut.block
        num_splits = -(-spans // lengths[:, None])  # [candidates, groups]
        num_pieces = num_splits @ num_tiles
        num_partials = num_splits @ sizes
        waves = -(-num_pieces * shape.num_kv_heads // (cut.per_processor * shape.processors))
        partial_bytes = 8 * shape.num_heads * shape.head_dim  # written and read
        us = waves * (lengths / _POSITIONS_A_US + _PIECE_US)
        us += num_partials * partial_bytes / _PARTIAL_BYTES_A_US
        fits = num_splits.max(axis=1) <= (MOST_SLOTS // MOST_LEVELS if has_levels else MOST_SLOTS)
        fits &= (num_partials <= self.max_partials) & (num_pieces <= self.max_pieces)
        fits[0] = True
        return int(lengths[np.where(fits, us, np.inf).argmin()])


def _before(counts: _Counts) -> _Counts:
    """The sum of all counts before each one."""
    return np.cumsum(counts) - counts


def _before_by(keys: IntArray, counts: _Counts) -> _Counts:
    """The sum of the counts before each one that have the same key."""
    order = np.argsort(keys, kind="stable")
    ordered, before = keys[order], _before(counts[order])
    is_first = np.append(True, ordered[1:] != ordered[:-1])
    found = np.empty_like(before)
    found[order] = before - np.maximum.accumulate(np.where(is_first, before, 0))
    return found


class SharedAttention:
    """Attention over shared pages for one shape and one stream. Calls share the partial results, so
    these must be read before the next call.

    ``values`` float32 [max_partials, num_heads, head_dim]; ``sums`` float32 [max_partials,
    num_heads, 2], maximum and sum. The scores are exponents to base 2, and ``v_scale`` is not
    applied.
    """

    def __init__(self, shape: SharedShape, device: torch.device) -> None:
        self.table = SharedTable(shape)
        self.words = torch.zeros(self.table.size, dtype=torch.int32, device=device)
        self.starts = self.words[self.table.starts_at : self.table.slots_at]
        self.slots = self.words[self.table.slots_at : self.table.members_at]
        partials = (self.table.max_partials, shape.num_heads)
        self.values = torch.empty((*partials, shape.head_dim), dtype=torch.float32, device=device)
        self.sums = torch.empty((*partials, 2), dtype=torch.float32, device=device)

    def fill(self, content: IntArray) -> None:
        """Make the following calls use this content of the table."""
        host = torch.from_numpy(content)
        if self.words.is_cuda:
            host = host.pin_memory()  # so that this does not wait for the GPU
        self.words[: len(content)].copy_(host, non_blocking=True)

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        page_table: Tensor,
        lengths: Tensor,
        *,
        rows: Tensor,
        scale: float,
        window: int | None,
        pdl: bool,
    ) -> None:
        """Fill the partial results that ``words`` lists; see ``decode_attention`` for arguments."""
        from minisgl_backend.kernels.triton_kernels.shared_attention_kernel import (
            launch_shared_attention,
        )

        table, cut = self.table, self.table.shape.cut
        launch_shared_attention(
            self.values,
            self.sums,
            q,
            kv,
            page_table,
            lengths,
            self.words,
            rows=rows,
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
            pdl=pdl,
        )
