"""The backend ``triton`` over latents: this package's kernels for multi-head latent attention.

Passes on the inputs of ``attention.base`` as kernels take them; must not know how these compute.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionShape,
    Chunks,
    DecodeRows,
    LayerAttention,
)
from minisgl_backend.kernels.latent_attention import (
    LatentWorkspace,
    latent_decode_attention,
    latent_prefill_attention,
)
from minisgl_backend.kernels.paged_kv import PagedKV


class LatentPrefill:
    """``PrefillAttention`` by ``kernels.latent_attention``."""

    def __init__(self, shape: AttentionShape):
        self._shape = shape

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        return partial(self._attend, chunks)

    def _attend(self, chunks: Chunks, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        latent_prefill_attention(
            q,
            kv,
            chunks.page_table,
            rows=chunks.rows,
            offsets=chunks.offsets,
            ends=chunks.ends,
            scale=self._shape.scale,
            out=out,
        )


class LatentDecode:
    """``DecodeAttention`` by ``kernels.latent_attention``, whose grid needs no plan."""

    def __init__(self, shape: AttentionShape, *, max_batch_size: int, device: torch.device):
        assert shape.latent_dim is not None
        self._shape = shape
        self._workspace = LatentWorkspace(max_batch_size, shape.num_heads, shape.latent_dim, device)

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        return partial(self._attend, rows)

    def _attend(self, rows: DecodeRows, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        latent_decode_attention(
            q,
            kv,
            rows.page_table,
            rows.lengths,
            self._workspace,
            rows=rows.rows,
            scale=self._shape.scale,
            out=out,
            pdl=rows.pdl,
        )
