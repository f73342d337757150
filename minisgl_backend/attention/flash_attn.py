"""The backend ``fa``: FlashAttention-3 (arXiv 2407.08608) from the package sgl_kernel.

Needs a Hopper GPU, and bf16 or fp16 (bf16 with sinks). Page table and lengths are read on the GPU.
For decode the kernels' schedule is computed once per step, inside the graph, not once per layer.
Of keys over latents it takes the rotated part as keys, and the latents as values that queries have
a part for, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Final

from torch import Tensor

from minisgl_backend.attention.base import AttentionSetting, Chunks, DecodeRows, LayerAttention
from minisgl_backend.kernels.paged_kv import PagedKV

_MOST_SPLIT: Final = 512
"""With more decoding rows than this, as chosen positions make of a prompt's tokens, no row is split
over multiprocessors. The library has memory for the results of all splits that any row may have."""
_BY_LENGTHS: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments that all layers of a step share. ``page_table`` [num_runs, max_pages] and
    ``lengths`` [num_runs] have a line for each chunk or decoding row. ``splits``: the parts in
    which each is read, by default as many as suit its length."""

    page_table: Tensor
    lengths: Tensor
    offsets: Tensor | None
    max_queries: int
    schedule: Tensor | None
    splits: int = _BY_LENGTHS


class FlashAttention:
    """``PrefillAttention`` and ``DecodeAttention`` by ``flash_attn_with_kvcache``."""

    def __init__(self, library: ModuleType, setting: AttentionSetting):
        """``library`` is the module sgl_kernel.flash_attn."""
        self._library = library
        self._shape = setting.shape
        self._page_size = setting.page_size

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        num_pages = -(-chunks.max_end // self._page_size)
        table = chunks.page_table[:, :num_pages].index_select(0, chunks.rows)
        call = _Call(table, chunks.ends, chunks.offsets, chunks.max_length, None)
        return partial(self._attend, call)

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        table = rows.page_table.index_select(0, rows.rows)
        splits = _BY_LENGTHS if len(rows.rows) <= _MOST_SPLIT else 1
        schedule = None
        if all(window is None for window in self._shape.windows):
            schedule = self._library.get_scheduler_metadata(
                len(rows.rows),
                1,
                table.shape[1] * self._page_size,
                self._shape.num_heads,
                self._shape.num_kv_heads,
                self._shape.head_dim - (self._shape.latent_dim or 0),
                rows.lengths,
                headdim_v=self._shape.latent_dim,
                page_size=self._page_size,
                causal=True,
                num_splits=splits,
            )
        return partial(self._decode, _Call(table, rows.lengths, None, 1, schedule, splits))

    def _decode(self, call: _Call, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        self._attend(call, out.unsqueeze(1), q.unsqueeze(1), kv, layer)

    def _attend(self, call: _Call, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        window, of_latents, keys = self._shape.windows[layer], None, kv.keys
        if (latent_dim := self._shape.latent_dim) is not None:
            of_latents, q, keys = q[..., :latent_dim], q[..., latent_dim:], keys[..., latent_dim:]
        self._library.flash_attn_with_kvcache(
            q,
            keys,
            kv.values,
            qv=of_latents,
            cache_seqlens=call.lengths,
            page_table=call.page_table,
            cu_seqlens_q=call.offsets,
            max_seqlen_q=call.max_queries,
            softmax_scale=self._shape.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            scheduler_metadata=call.schedule,
            num_splits=call.splits,
            sinks=kv.sinks,
            out=out,
        )
