"""The backend ``triton``: this package's own kernels, for every page size, window and KV dtype."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionShape,
    Chunks,
    DecodeRows,
    LayerAttention,
    PagedKV,
)
from minisgl_backend.kernels.decode_attention import DecodeWorkspace, decode_attention
from minisgl_backend.kernels.prefill_attention import prefill_attention


class TritonPrefill:
    """``PrefillAttention`` by ``kernels.prefill_attention``."""

    def __init__(self, shape: AttentionShape):
        self._shape = shape

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        return partial(self._attend, chunks)

    def _attend(self, chunks: Chunks, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        prefill_attention(
            q,
            kv.keys,
            kv.values,
            chunks.page_table,
            rows=chunks.rows,
            offsets=chunks.offsets,
            ends=chunks.ends,
            max_length=chunks.max_length,
            scale=self._shape.scale,
            window=self._shape.windows[layer],
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            out=out,
        )


class TritonDecode:
    """``DecodeAttention`` by ``kernels.decode_attention``, whose grid needs no plan."""

    def __init__(self, shape: AttentionShape, *, max_batch_size: int, device: torch.device):
        self._shape = shape
        self._workspace = DecodeWorkspace(max_batch_size, shape.num_heads, shape.head_dim, device)

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        return partial(self._attend, rows)

    def _attend(self, rows: DecodeRows, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        decode_attention(
            q,
            kv.keys,
            kv.values,
            rows.page_table,
            rows.lengths,
            self._workspace,
            rows=rows.rows,
            scale=self._shape.scale,
            window=self._shape.windows[layer],
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            out=out,
            pdl=rows.pdl,
        )
