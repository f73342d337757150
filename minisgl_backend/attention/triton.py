"""The backend ``triton``: this package's own kernels, for every page size, window and KV dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.attention.paged import Chunks, DecodeRows, PagedKV
from minisgl_backend.kernels.decode_attention import DecodeWorkspace, decode_attention
from minisgl_backend.kernels.prefill_attention import prefill_attention


class TritonPrefill:
    """``PrefillAttention`` by ``kernels.prefill_attention``."""

    def __init__(self, shape: AttentionShape):
        self._shape = shape

    def plan_chunks(self, chunks: Chunks) -> Chunks:
        return chunks

    def prefill(self, out: Tensor, q: Tensor, kv: PagedKV, layer: int, metadata: Chunks) -> None:
        prefill_attention(
            q,
            kv.keys,
            kv.values,
            metadata.page_table,
            rows=metadata.rows,
            offsets=metadata.offsets,
            ends=metadata.ends,
            max_length=metadata.max_length,
            scale=self._shape.scale,
            window=self._shape.windows[layer],
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            out=out,
        )


class TritonDecode:
    """``DecodeAttention`` by ``kernels.decode_attention``: a fixed grid, nothing to plan."""

    def __init__(self, shape: AttentionShape, *, max_batch_size: int, device: torch.device):
        self._shape = shape
        self._workspace = DecodeWorkspace(max_batch_size, shape.num_heads, shape.head_dim, device)

    def plan_rows(self, rows: DecodeRows) -> DecodeRows:
        return rows

    def decode(self, out: Tensor, q: Tensor, kv: PagedKV, layer: int, metadata: DecodeRows) -> None:
        decode_attention(
            q,
            kv.keys,
            kv.values,
            metadata.page_table,
            metadata.lengths,
            self._workspace,
            rows=metadata.rows,
            scale=self._shape.scale,
            window=self._shape.windows[layer],
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            out=out,
            pdl=metadata.pdl,
        )
