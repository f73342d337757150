"""The backend ``sdpa``: gather the pages of each run, then PyTorch's scaled dot product.

The only backend on a CPU, and on a GPU the reference for the others: it takes every dtype, page
size, window and head count. Needs lengths on the host, so its steps are never captured.

A *run* is a row's part of the step: a chunk, or one decoded token. Runs are cut into *blocks* of
queries, so that masks stay small. Blocks of similar size are padded into a *segment*, which takes
one gather and one SDPA call a layer; all decoding rows are normally one segment.

Pages that a group of decoding rows shares are gathered once for all of them, and their queries are
one matrix (Hydragen, arXiv 2402.05099). What each row reads beyond is in segments as before. Either
leaves a *partial* result, and they are merged by the maxima and the sums of their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionSetting,
    Chunks,
    DecodeRows,
    LayerAttention,
    PagedKV,
)
from minisgl_backend.device.base import HostArray
from minisgl_backend.kernels.dispatch import at_least_float32
from minisgl_backend.plan import Groups
from minisgl_backend.request import IntArray

_MAX_MASK_ELEMENTS: Final = 2**21
_MAX_GATHERED_POSITIONS: Final = 2**18
_FREE_PADDING: Final = 2**16  # scores: computing them is cheaper than one more SDPA call
_MAX_SHARED_SCORES: Final = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """B blocks of at most L queries over at most T positions, padded.

    ``tokens`` [B * L] are the flat indices of the queries (padding repeats a block's last), or a
    slice if they are consecutive. ``pages`` [B * P], P * page_size == T; a block with fewer than P
    pages repeats its last. ``masks`` hold, for each window, what is added to the scores:
    [B, 1, G * L, T], G query heads a KV head.
    """

    tokens: Tensor | slice
    pages: Tensor
    num_blocks: int
    masks: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """T positions that n decoding rows share.

    ``tokens`` [n] are the rows' flat indices, ``pages`` [P], P * page_size == T. ``masks`` hold,
    for each window, what is added to the scores, [n, 1, T]; None for no window.
    """

    tokens: Tensor
    pages: Tensor
    masks: dict[int | None, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class _Partial:
    """Attention of queries over a part of what they see, [.., M, head_dim]: ``values`` weighted
    and summed up, and [.., M, 1] the maximum of the scores and the sum of the weights. A query that
    sees nothing has a maximum of -inf and sums of 0. In float32 or float64."""

    values: Tensor
    best: Tensor
    total: Tensor

    @classmethod
    def of(
        cls, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> _Partial:
        """``q`` [.., M, head_dim]; ``keys``, ``values`` [.., T, head_dim]; ``mask`` [.., M, T]."""
        q, keys, values = (at_least_float32(x) for x in (q, keys, values))
        scores = torch.matmul(q * scale, keys.transpose(-1, -2))
        if mask is not None:
            scores += mask
        best = scores.amax(-1, keepdim=True)
        scores -= best.clamp_min(torch.finfo(scores.dtype).min)  # not -inf from -inf
        weights = scores.exp_()
        return cls(torch.matmul(weights, values), best, weights.sum(-1, keepdim=True))

    def put(self, at: Tensor | slice, part: _Partial) -> None:
        """Set the results of some queries."""
        self.values[at], self.best[at], self.total[at] = part.values, part.best, part.total

    def merge(self, at: Tensor, part: _Partial) -> None:
        """Add what the queries ``at`` attend to elsewhere; one of the two has seen something."""
        before = self.best[at]
        best = torch.maximum(before, part.best)
        kept, added = (before - best).exp_(), (part.best - best).exp_()
        values = self.values[at] * kept + part.values * added
        self.put(at, _Partial(values, best, self.total[at] * kept + part.total * added))

    def by_row(self, num_rows: int) -> _Partial:
        """[kv_heads, n * G, ..] -> [n, kv_heads, G, ..]."""
        parts = (self.values, self.best, self.total)
        return _Partial(*(x.unflatten(1, (num_rows, -1)).transpose(0, 1) for x in parts))

    def normalized(self) -> Tensor:
        return self.values / self.total


class SdpaAttention:
    """``PrefillAttention`` and ``DecodeAttention`` by ``scaled_dot_product_attention``."""

    def __init__(self, setting: AttentionSetting):
        shape = setting.shape
        self._shape = shape
        self._page_size = setting.page_size
        self._dtype = setting.dtype
        self._device = setting.device
        self._heads_per_kv = shape.num_heads // shape.num_kv_heads
        self._windows = setting.windows

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        assert chunks.host_offsets is not None  # such steps are not captured
        assert chunks.host_ends is not None
        offsets = chunks.host_offsets.astype(np.int64)
        blocks = _Blocks.of_runs(
            offsets[:-1], np.diff(offsets), chunks.host_ends.astype(np.int64), self._heads_per_kv
        )
        begins = np.zeros(len(chunks.host_ends), np.int64)
        segments = self._segments(blocks, begins, chunks.rows, chunks.page_table)
        return partial(self._attend, segments)

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        assert rows.host_lengths is not None
        ends = rows.host_lengths.astype(np.int64)
        begins = np.zeros(len(ends), np.int64)  # the pages of each row that it reads with others
        for members, _, end in _each_group(rows.groups):
            begins[members] = end

        def segments(index: HostArray) -> list[_Segment]:
            own = ends[index] - begins[index] * self._page_size
            blocks = _Blocks(index, index, np.ones(len(index), np.int64), own)
            return self._segments(blocks, begins, rows.rows, rows.page_table)

        alone = segments(np.flatnonzero(begins == 0))
        attend_alone = partial(self._attend, alone)
        if not begins.any():
            return attend_alone
        shared = [part for group in _each_group(rows.groups) for part in self._shared(rows, *group)]
        grouped = np.flatnonzero(begins)
        attend_grouped = partial(self._attend_grouped, segments(grouped), shared, grouped)

        def attend(out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
            attend_alone(out, q, kv, layer)
            attend_grouped(out, q, kv, layer)

        return attend

    def _segments(
        self, blocks: _Blocks, begins: HostArray, rows: Tensor, page_table: Tensor
    ) -> list[_Segment]:
        """``begins``: the first page of each run, from which its positions are counted."""
        return [
            self._segment(group, begins, rows, page_table)
            for group in blocks.groups(self._heads_per_kv)
        ]

    def _shared(
        self, rows: DecodeRows, members: IntArray, begin: int, end: int
    ) -> Iterator[_Shared]:
        """The pages of a group, in parts of which the scores take little memory."""
        assert rows.host_lengths is not None
        most = _MAX_SHARED_SCORES // (len(members) * self._shape.num_heads * self._page_size)
        tokens = self._upload(members.astype(np.int64))
        lengths = self._upload(rows.host_lengths[members].astype(np.int64))  # [n]
        table = rows.page_table[rows.rows[int(members[0])]]
        for first in range(begin, end, max(most, 1)):
            last = min(first + max(most, 1), end)
            positions = torch.arange(
                first * self._page_size, last * self._page_size, device=self._device
            )
            masks: dict[int | None, Tensor | None] = {}
            for window in self._windows:
                masks[window] = None
                if window is not None:
                    hidden = positions < (lengths - window)[:, None, None]  # [n, 1, T]
                    mask = torch.zeros(hidden.shape, device=self._device)
                    masks[window] = mask.masked_fill_(hidden, float("-inf"))
            yield _Shared(tokens, table[first:last], masks)

    def _attend(
        self, segments: Sequence[_Segment], out: Tensor, q: Tensor, kv: PagedKV, layer: int
    ) -> None:
        window, scale = self._shape.windows[layer], self._shape.scale
        for segment in segments:
            # [B, num_kv_heads, T, head_dim]
            keys = _gather(kv.keys, segment.pages, segment.num_blocks, q.dtype, kv.k_scale)
            values = _gather(kv.values, segment.pages, segment.num_blocks, q.dtype, kv.v_scale)
            queries = self._fold(q[segment.tokens], segment.num_blocks)
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=segment.masks[window], scale=scale
            )
            # Padding repeats a real query, so it writes that query's own result once more.
            out[segment.tokens] = self._unfold(attended)  # [B * L, num_heads, head_dim]

    def _attend_grouped(
        self,
        segments: Sequence[_Segment],
        shared: Sequence[_Shared],
        grouped: HostArray,
        out: Tensor,
        q: Tensor,
        kv: PagedKV,
        layer: int,
    ) -> None:
        """Rows that share pages: ``segments`` have what each reads alone, all of them something."""
        shape = self._shape
        window, scale = shape.windows[layer], shape.scale
        kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
        queries = q.reshape(len(q), kv_heads, -1, head_dim)  # [num_rows, kv_heads, G, head_dim]
        exact = torch.promote_types(q.dtype, torch.float32)
        sums = queries.new_empty((2, *queries.shape[:3], 1), dtype=exact)
        found = _Partial(torch.empty_like(queries, dtype=exact), *sums)
        for segment in segments:
            keys = _gather(kv.keys, segment.pages, segment.num_blocks, q.dtype, kv.k_scale)
            values = _gather(kv.values, segment.pages, segment.num_blocks, q.dtype, kv.v_scale)
            own = queries[segment.tokens]
            found.put(segment.tokens, _Partial.of(own, keys, values, segment.masks[window], scale))
        for part in shared:
            count, mask = len(part.tokens), part.masks[window]
            (keys,) = _gather(kv.keys, part.pages, 1, q.dtype, kv.k_scale)  # [kv_heads, T, dim]
            (values,) = _gather(kv.values, part.pages, 1, q.dtype, kv.v_scale)
            # all rows as one matrix a KV head: [kv_heads, n * G, head_dim]
            together = queries[part.tokens].transpose(0, 1).flatten(1, 2)
            if mask is not None:
                mask = mask.expand(-1, self._heads_per_kv, -1).flatten(0, 1)  # [n * G, T]
            both = _Partial.of(together, keys, values, mask, scale)
            found.merge(part.tokens, both.by_row(count))
        index = self._upload(grouped)
        out[index] = found.normalized()[index].flatten(1, 2).to(out.dtype)

    def _fold(self, q: Tensor, num_blocks: int) -> Tensor:
        """[B * L, num_heads, head_dim] -> [B, num_kv_heads, G * L, head_dim].

        The heads that share a KV head become queries of it, so that nothing is copied for each.
        """
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        if q.shape[0] == num_blocks:  # single queries
            return q.view(num_blocks, kv_heads, -1, head_dim)
        q = q.reshape(num_blocks, -1, kv_heads, self._heads_per_kv, head_dim)
        return q.permute(0, 2, 3, 1, 4).reshape(num_blocks, kv_heads, -1, head_dim)

    def _unfold(self, x: Tensor) -> Tensor:
        """The reverse of ``_fold``."""
        num_blocks, kv_heads, num_queries, head_dim = x.shape
        if num_queries == self._heads_per_kv:
            return x.flatten(1, 2)
        x = x.reshape(num_blocks, kv_heads, self._heads_per_kv, -1, head_dim)
        return x.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads * self._heads_per_kv, head_dim)

    def _segment(
        self, blocks: _Blocks, begins: HostArray, rows: Tensor, page_table: Tensor
    ) -> _Segment:
        num_blocks, longest = len(blocks.runs), int(blocks.lengths.max())
        counts = -(-blocks.ends // self._page_size)  # pages of each block
        num_pages = int(counts.max())
        # Padding repeats a block's last query, and its last page.
        steps = np.minimum(np.arange(longest), blocks.lengths[:, None] - 1)  # [B, L]
        columns = np.minimum(np.arange(num_pages), counts[:, None] - 1)  # [B, P]
        columns += begins[blocks.runs, None]
        tokens = (blocks.tokens[:, None] + steps).reshape(-1)
        positions = self._upload((blocks.ends - blocks.lengths)[:, None] + steps)
        first = int(tokens[0])
        are_consecutive = bool((tokens == np.arange(first, first + len(tokens))).all())
        block_rows = rows.index_select(0, self._upload(blocks.runs))  # [B]
        return _Segment(
            tokens=slice(first, first + len(tokens)) if are_consecutive else self._upload(tokens),
            pages=page_table[block_rows.long()[:, None], self._upload(columns)].flatten(),
            num_blocks=num_blocks,
            masks={
                window: self._mask(positions, num_pages * self._page_size, window)
                for window in self._windows
            },
        )

    def _mask(self, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        """int64[B, L] query positions -> [B, 1, G * L, num_keys]: 0 if seen, else -inf."""
        keys = torch.arange(num_keys, device=self._device)
        queries = positions[:, None, :, None]  # [B, 1, L, 1]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, float("-inf"))
        num_queries = positions.shape[1]
        if num_queries == 1:
            return mask  # broadcast over the G heads
        return mask.repeat(1, 1, self._heads_per_kv, 1)

    def _upload(self, array: HostArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _gather(
    pages: Tensor, wanted: Tensor, num_blocks: int, dtype: torch.dtype, scale: Tensor | None
) -> Tensor:
    """[num_pages + 1, page_size, kv_heads, head_dim] -> [B, kv_heads, T, head_dim] of ``dtype``."""
    flat = pages.view(pages.shape[0], -1)
    if scale is None:
        found = flat.index_select(0, wanted)
    else:  # float8 cannot be indexed
        bits = flat.view(torch.uint8).index_select(0, wanted)
        found = (bits.view(pages.dtype).float() * scale).to(dtype)
    return found.view(num_blocks, -1, *pages.shape[2:]).transpose(1, 2)


def _each_group(groups: Groups) -> Iterator[tuple[IntArray, int, int]]:
    """Members, first page and end of each group."""
    members = np.split(groups.members, np.cumsum(groups.sizes))[: len(groups.sizes)]
    yield from zip(members, groups.begins.tolist(), groups.ends.tolist(), strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Blocks of queries; int64[num_blocks] each.

    ``runs``: the index of the block's run; ``tokens``: the flat index of its first token;
    ``lengths``: its number of queries; ``ends``: the end of their context.
    """

    runs: HostArray
    tokens: HostArray
    lengths: HostArray
    ends: HostArray

    @classmethod
    def of_runs(
        cls, offsets: HostArray, lengths: HostArray, ends: HostArray, heads_per_kv: int
    ) -> _Blocks:
        """Each run as one block, or as several if its mask would be too large.

        Per run: its first flat token, its number of queries, and the end of its context.
        """
        most = np.maximum(_MAX_MASK_ELEMENTS // (heads_per_kv * ends), 1)
        whole = cls(np.arange(len(ends)), offsets, lengths, ends)
        if (lengths <= most).all():
            return whole
        counts = -(-lengths // most)
        runs = np.repeat(np.arange(len(ends)), counts)
        index = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)  # in its run
        begins = index * most[runs]  # [num_blocks], the queries of the run before the block
        of_blocks = np.minimum(most[runs], lengths[runs] - begins)
        block_ends = (ends - lengths)[runs] + begins + of_blocks
        return cls(runs, offsets[runs] + begins, of_blocks, block_ends)

    def groups(self, heads_per_kv: int) -> list[_Blocks]:
        """Blocks to be padded together: single queries apart from longer runs, little padding."""
        single = self.lengths == 1
        found = []
        for kind in (~single, single):
            members = np.flatnonzero(kind)
            if len(members):
                found += self._split(members, heads_per_kv)
        return found

    def _split(self, members: HostArray, heads_per_kv: int) -> list[_Blocks]:
        if _fits(self.lengths[members], self.ends[members], heads_per_kv):
            return [self._take(members)]
        order = members[np.lexsort((self.ends[members], self.lengths[members]))]
        borders = [0]
        for i in range(1, len(order)):
            group = order[borders[-1] : i + 1]
            if not _fits(self.lengths[group], self.ends[group], heads_per_kv):
                borders.append(i)
        borders.append(len(order))
        return [self._take(order[begin:end]) for begin, end in pairwise(borders)]

    def _take(self, index: HostArray) -> _Blocks:
        return _Blocks(self.runs[index], self.tokens[index], self.lengths[index], self.ends[index])


def _fits(lengths: HostArray, ends: HostArray, heads_per_kv: int) -> bool:
    """Whether padding these blocks into one segment wastes little and keeps its tensors small."""
    if len(lengths) == 1:
        return True
    longest, end = int(lengths.max()), int(ends.max())
    positions = len(lengths) * end
    scores = positions * longest
    # The mask of single queries is broadcast over the heads of a KV head, others are repeated.
    mask_elements = scores * heads_per_kv if longest > 1 else scores
    return (
        positions <= _MAX_GATHERED_POSITIONS
        and mask_elements <= _MAX_MASK_ELEMENTS
        and scores <= 2 * int((lengths * ends).sum()) + _FREE_PADDING
    )
