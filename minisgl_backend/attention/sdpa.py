"""Attention on a CPU: gather the pages of each run, then PyTorch's scaled dot product.

On a GPU the backend of this name is ``paged_sdpa``. Takes every dtype. Runs are padded into a few
*segments*, each one gather and one SDPA call a layer: all decoding rows are normally one segment;
prefill chunks are cut into blocks of queries, so that masks stay small, and blocks of like size
share a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape, Batch, ForwardContext, HostArray

_MAX_MASK_ELEMENTS: Final = 2**21
_MAX_GATHERED_POSITIONS: Final = 2**18
_FREE_PADDING: Final = 2**16  # products of a query and a key: cheaper than one more SDPA call


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """B blocks of at most L queries over at most T positions, padded.

    ``tokens`` [B * L] are the flat indices of the queries (padding repeats a block's last), or a
    slice where they are consecutive. ``pages`` [B * P], P * page_size == T. ``masks`` hold, for
    each window, what is added to the products: [B, 1, G * L, T], G query heads a KV head.
    """

    tokens: Tensor | slice
    pages: Tensor
    num_blocks: int
    masks: dict[int | None, Tensor]


class SdpaAttention:
    """Attention in plain PyTorch over paged keys and values (``AttentionBackend``)."""

    def __init__(
        self, shape: AttentionShape, *, page_size: int, dtype: torch.dtype, device: torch.device
    ):
        self._shape = shape
        self._page_size = page_size
        self._dtype = dtype
        self._device = device
        self._heads_per_kv = shape.num_heads // shape.num_kv_heads
        self._windows = sorted(set(shape.windows), key=lambda window: window or 0)

    def prepare(self, batch: Batch) -> list[_Segment]:
        blocks = _Blocks.of(batch, self._heads_per_kv)
        return [self._segment(batch, group) for group in blocks.groups(self._heads_per_kv)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, ctx: ForwardContext) -> Tensor:
        shape = self._shape
        key_pages, value_pages = ctx.kv.layer(layer)
        key_pages.view(-1, *k.shape[1:]).index_copy_(0, ctx.batch.slots, k)
        value_pages.view(-1, *v.shape[1:]).index_copy_(0, ctx.batch.slots, v)

        segments: list[_Segment] = ctx.metadata
        window = shape.windows[layer]
        out: Tensor | None = None
        for segment in segments:
            keys = self._gather(key_pages, segment)  # [B, num_kv_heads, T, head_dim]
            values = self._gather(value_pages, segment)
            mask = segment.masks[window]
            queries = self._fold(q[segment.tokens], segment.num_blocks)
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=shape.scale
            )
            attended = self._unfold(attended)  # [B * L, num_heads, head_dim]
            if isinstance(segment.tokens, slice) and len(attended) == len(q):
                return attended
            if out is None:
                out = torch.empty_like(q)
            # Padding repeats a real query, so it writes that query's own result once more.
            out[segment.tokens] = attended
        assert out is not None  # a batch has at least one token
        return out

    def _gather(self, pages: Tensor, segment: _Segment) -> Tensor:
        """[num_pages + 1, page_size, kv_heads, head_dim] -> [B, kv_heads, T, head_dim]."""
        rows = pages.view(pages.shape[0], -1).index_select(0, segment.pages)
        return rows.view(segment.num_blocks, -1, *pages.shape[2:]).transpose(1, 2)

    def _fold(self, q: Tensor, num_blocks: int) -> Tensor:
        """[B * L, num_heads, head_dim] -> [B, num_kv_heads, G * L, head_dim].

        The heads that share a KV head become queries of it, so that nothing is copied for each.
        """
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        q = q.reshape(num_blocks, -1, kv_heads, self._heads_per_kv, head_dim)
        return q.permute(0, 2, 3, 1, 4).reshape(num_blocks, kv_heads, -1, head_dim)

    def _unfold(self, x: Tensor) -> Tensor:
        """The reverse of ``_fold``."""
        num_blocks, kv_heads, _, head_dim = x.shape
        x = x.reshape(num_blocks, kv_heads, self._heads_per_kv, -1, head_dim)
        return x.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads * self._heads_per_kv, head_dim)

    def _segment(self, batch: Batch, blocks: _Blocks) -> _Segment:
        num_blocks, longest = len(blocks.runs), int(blocks.lengths.max())
        num_pages = -(-int(blocks.ends.max()) // self._page_size)
        # Padding repeats a block's last query.
        steps = np.minimum(np.arange(longest), blocks.lengths[:, None] - 1)  # [B, L]
        tokens = (blocks.tokens[:, None] + steps).reshape(-1)
        positions = (blocks.ends - blocks.lengths)[:, None] + steps
        first = int(tokens[0])
        are_consecutive = bool((tokens == np.arange(first, first + len(tokens))).all())
        pages = batch.page_table[blocks.runs, :num_pages].reshape(-1)
        device_positions = torch.from_numpy(positions).to(self._device)
        return _Segment(
            tokens=slice(first, first + len(tokens))
            if are_consecutive
            else torch.from_numpy(tokens).to(self._device),
            pages=torch.from_numpy(pages).to(self._device),
            num_blocks=num_blocks,
            masks={
                window: self._mask(device_positions, num_pages * self._page_size, window)
                for window in self._windows
            },
        )

    def _mask(self, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        """int64[B, L] query positions -> [B, 1, G * L, num_keys]: 0 where seen, else -inf."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """int64[num_blocks] each: run, first flat token, number of queries, end of context."""

    runs: HostArray
    tokens: HostArray
    lengths: HostArray
    ends: HostArray

    @classmethod
    def of(cls, batch: Batch, heads_per_kv: int) -> _Blocks:
        """Each run as one block, or as several where its mask would be too large."""
        ends = batch.starts + batch.lengths
        most = np.maximum(_MAX_MASK_ELEMENTS // (heads_per_kv * ends), 1)
        whole = cls(np.arange(len(ends)), batch.offsets, batch.lengths, ends)
        if (batch.lengths <= most).all():
            return whole
        counts = -(-batch.lengths // most)
        runs = np.repeat(np.arange(len(ends)), counts)
        index = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = index * most[runs]
        lengths = np.minimum(most[runs], batch.lengths[runs] - begins)
        ends = batch.starts[runs] + begins + lengths
        return cls(runs, batch.offsets[runs] + begins, lengths, ends)

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
    products = positions * longest
    # The mask of single queries is broadcast over the heads of a KV head, others are repeated.
    mask_elements = products * heads_per_kv if longest > 1 else products
    return (
        positions <= _MAX_GATHERED_POSITIONS
        and mask_elements <= _MAX_MASK_ELEMENTS
        and products <= 2 * int((lengths * ends).sum()) + _FREE_PADDING
    )
