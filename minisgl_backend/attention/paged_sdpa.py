"""The backend ``sdpa`` of a GPU: PyTorch's scaled dot product, one run after another.

The reference of the others: every page size, window, head count and dtype, slow and plain. It needs
lengths on the host, so its decode steps are never captured. Runs on a CPU too, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.attention.paged import Chunks, DecodeRows, PagedKV

_BLOCK: Final = 512
"""Queries of one call: the products of a long prompt are not all held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Runs of queries ``offsets[i] .. offsets[i + 1]`` at the end of ``ends[i]`` positions, whose
    pages are row i of ``page_table`` [num_runs, max_pages]."""

    page_table: Tensor
    offsets: list[int]
    ends: list[int]


class PagedSdpa:
    """``PrefillAttention`` and ``DecodeAttention`` by ``scaled_dot_product_attention``."""

    def __init__(self, shape: AttentionShape):
        self._shape = shape

    def plan_chunks(self, chunks: Chunks) -> _Runs:
        assert chunks.host_offsets is not None  # its steps are not captured
        assert chunks.host_ends is not None
        table = chunks.page_table.index_select(0, chunks.rows)
        return _Runs(table, chunks.host_offsets.tolist(), chunks.host_ends.tolist())

    def plan_rows(self, rows: DecodeRows) -> _Runs:
        assert rows.host_lengths is not None
        table = rows.page_table.index_select(0, rows.rows)
        return _Runs(table, list(range(len(table) + 1)), rows.host_lengths.tolist())

    def prefill(self, out: Tensor, q: Tensor, kv: PagedKV, layer: int, metadata: _Runs) -> None:
        self._attend(out, q, kv, layer, metadata)

    def decode(self, out: Tensor, q: Tensor, kv: PagedKV, layer: int, metadata: _Runs) -> None:
        self._attend(out, q, kv, layer, metadata)

    def _attend(self, out: Tensor, q: Tensor, kv: PagedKV, layer: int, runs: _Runs) -> None:
        each = zip(runs.page_table, pairwise(runs.offsets), runs.ends, strict=True)
        for pages, (first, last), end in each:
            keys = _gather(kv.keys, pages, end, q.dtype, kv.k_scale)
            values = _gather(kv.values, pages, end, q.dtype, kv.v_scale)
            for begin in range(first, last, _BLOCK):
                stop = min(begin + _BLOCK, last)
                seen = self._seen(end - last + begin, end - last + stop, end, layer, q.device)
                out[begin:stop] = F.scaled_dot_product_attention(
                    q[begin:stop].transpose(0, 1),  # [num_heads, num_queries, head_dim]
                    keys,
                    values,
                    attn_mask=seen,
                    scale=self._shape.scale,
                    enable_gqa=True,
                ).transpose(0, 1)

    def _seen(self, begin: int, stop: int, end: int, layer: int, device: torch.device) -> Tensor:
        """Which of ``end`` positions the queries from ``begin`` to ``stop`` see.

        bool[queries, end].
        """
        query = torch.arange(begin, stop, device=device)[:, None]
        key = torch.arange(end, device=device)
        seen = key <= query
        window = self._shape.windows[layer]
        return seen if window is None else seen & (key > query - window)


def _gather(
    cache: Tensor, pages: Tensor, end: int, dtype: torch.dtype, scale: Tensor | None
) -> Tensor:
    """The first ``end`` positions of a run's row, [num_kv_heads, end, head_dim]."""
    count = -(-end // cache.shape[1])
    raw = cache.view(torch.uint8) if scale is not None else cache  # float8 cannot be indexed
    found = raw.index_select(0, pages[:count]).view(cache.dtype).flatten(0, 1)[:end]
    if scale is not None:
        found = found.float() * scale
    return found.to(dtype).transpose(0, 1)
