"""This package's own kernels: the backends ``triton`` and ``cuda``, and that of batch invariance.

Those in Triton take every page size, window and KV dtype; those in CUDA C++ only decode.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionSetting,
    AttentionShape,
    Chunks,
    DecodeRows,
    LayerAttention,
    PagedKV,
)
from minisgl_backend.kernels.decode_attention import DecodeWorkspace, decode_attention
from minisgl_backend.kernels.invariant_attention import (
    invariant_decode_attention,
    invariant_prefill_attention,
    split_size,
)
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
            sinks=kv.sinks,
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
            sinks=kv.sinks,
            out=out,
            pdl=rows.pdl,
        )


class CudaDecode:
    """``DecodeAttention`` by ``kernels.cuda.decode_attention``, planned on the GPU once a step.

    It streams keys and values at memory bandwidth, however ragged the rows are, fp8 pages included.
    """

    def __init__(self, setting: AttentionSetting):
        # imports the CUDA driver's bindings, which only installations for GPUs have
        from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel

        shape = setting.shape
        self._shape = shape
        self._windows = setting.windows
        self._kernel = DecodeAttentionKernel(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=setting.page_size,
            dtype=setting.dtype,
            kv_dtype=setting.kv_dtype,
            max_batch_size=setting.max_batch_size,
            device=setting.device,
        )

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        runs = {
            window: self._kernel.plan(
                rows.page_table, rows.lengths, rows=rows.rows, window=window, pdl=rows.pdl
            )
            for window in self._windows
        }
        return partial(self._attend, rows, runs)

    def _attend(
        self,
        rows: DecodeRows,
        runs: dict[int | None, Tensor],
        out: Tensor,
        q: Tensor,
        kv: PagedKV,
        layer: int,
    ) -> None:
        """``runs`` are what was planned for each window."""
        window = self._shape.windows[layer]
        self._kernel(
            q,
            kv.keys,
            kv.values,
            rows.page_table,
            rows.lengths,
            runs[window],
            rows=rows.rows,
            scale=self._shape.scale,
            window=window,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            sinks=kv.sinks,
            out=out,
            pdl=rows.pdl,
        )


class InvariantAttention:
    """``PrefillAttention`` and ``DecodeAttention`` by ``kernels.invariant_attention``."""

    def __init__(self, setting: AttentionSetting):
        shape = setting.shape
        self._shape = shape
        self._split = split_size(setting.max_sequence_length)
        self._workspace = DecodeWorkspace(
            setting.max_batch_size, shape.num_heads, shape.head_dim, setting.device
        )

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        return partial(self._attend_chunks, chunks)

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        return partial(self._attend_rows, rows)

    def _attend_chunks(
        self, chunks: Chunks, out: Tensor, q: Tensor, kv: PagedKV, layer: int
    ) -> None:
        invariant_prefill_attention(
            q,
            kv.keys,
            kv.values,
            chunks.page_table,
            rows=chunks.rows,
            offsets=chunks.offsets,
            ends=chunks.ends,
            split=self._split,
            scale=self._shape.scale,
            window=self._shape.windows[layer],
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            out=out,
        )

    def _attend_rows(
        self, rows: DecodeRows, out: Tensor, q: Tensor, kv: PagedKV, layer: int
    ) -> None:
        invariant_decode_attention(
            q,
            kv.keys,
            kv.values,
            rows.page_table,
            rows.lengths,
            self._workspace,
            rows=rows.rows,
            split=self._split,
            scale=self._shape.scale,
            window=self._shape.windows[layer],
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            out=out,
            pdl=rows.pdl,
        )
