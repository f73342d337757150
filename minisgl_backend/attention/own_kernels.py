"""This package's own kernels: the backends ``triton``, ``cuda`` and the batch-invariant one.

The Triton kernels take every page size, window and KV dtype; the CUDA C++ kernels only decode.
Passes on the inputs of ``attention.base`` as kernels take them; must not know how these compute.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionSetting,
    AttentionShape,
    Chunks,
    DecodeRows,
    LayerAttention,
)
from minisgl_backend.kernels.decode_attention import DecodeWorkspace, decode_attention
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.invariant_attention import (
    invariant_decode_attention,
    invariant_prefill_attention,
    split_size,
)
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.prefill_attention import prefill_attention
from minisgl_backend.kernels.shared_attention import SharedAttention, SharedShape
from minisgl_backend.plan import NO_GROUPS, Groups

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.decode_attention import DecodeShape


class TritonPrefill:
    """``PrefillAttention`` by ``kernels.prefill_attention``."""

    def __init__(self, shape: AttentionShape):
        self._shape = shape

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        return partial(self._attend, chunks)

    def _attend(self, chunks: Chunks, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        prefill_attention(
            q,
            kv,
            chunks.page_table,
            rows=chunks.rows,
            offsets=chunks.offsets,
            ends=chunks.ends,
            max_length=chunks.max_length,
            scale=self._shape.scale,
            cap=self._shape.cap,
            window=self._shape.windows[layer],
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
            kv,
            rows.page_table,
            rows.lengths,
            self._workspace,
            rows=rows.rows,
            scale=self._shape.scale,
            cap=self._shape.cap,
            window=self._shape.windows[layer],
            out=out,
            pdl=rows.pdl,
        )


def decode_shape(setting: AttentionSetting) -> DecodeShape:
    """What the CUDA C++ kernels for this setting are compiled for."""
    # imports the CUDA driver's bindings, which only installations for GPUs have
    from minisgl_backend.kernels.cuda.decode_attention import DecodeShape

    shape = setting.shape
    return DecodeShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=setting.page_size,
        dtype=setting.dtype,
        kv_dtype=setting.kv_dtype,
        most_written=setting.most_written,
    )


class CudaDecode:
    """``GroupedDecode`` by ``kernels.cuda.decode_attention``, planned on the GPU once per step.

    It streams keys and values at memory bandwidth, however ragged the rows are, fp8 pages included.
    """

    def __init__(self, setting: AttentionSetting):
        # imports the CUDA driver's bindings, which only installations for GPUs have
        from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel

        shape = setting.shape
        self._shape = shape
        self._windows = setting.windows
        self._shared: SharedAttention | None = None
        self._asked = NO_GROUPS
        self._pays = False
        if setting.grouped:
            of_groups = SharedShape(
                max_batch=setting.max_batch_size,
                page_size=setting.page_size,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                processors=num_processors(setting.device),
                is_fp8=setting.kv_dtype == torch.float8_e4m3fn,
            )
            self._shared = SharedAttention(of_groups, setting.device)
        self._kernel = DecodeAttentionKernel(
            decode_shape(setting),
            max_batch_size=setting.max_batch_size,
            device=setting.device,
            shared=self._shared,
        )

    def take_groups(self, groups: Groups) -> bool:
        if self._shared is None or not len(groups.sizes):
            return False
        if not _are_same(groups, self._asked):
            table, cut = self._shared.table, (groups.sizes, groups.begins, groups.ends)
            saved_us = {w: table.saved_us(*cut, window=w) for w in self._windows}
            self._pays = sum(saved_us[window] for window in self._shape.windows) > 0
            if self._pays:
                self._shared.fill(table.content(*cut, groups.members))
            self._asked = Groups(*(of.copy() for of in (*cut, groups.members)))
        return self._pays

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        is_captured = rows.host_lengths is None
        grouped = rows.grouped if is_captured else self.take_groups(rows.groups)
        runs = {
            window: self._kernel.plan(
                rows.page_table,
                rows.lengths,
                rows=rows.rows,
                window=window,
                grouped=grouped,
                pdl=rows.pdl,
            )
            for window in self._windows
        }
        return partial(self._attend, rows, runs, grouped)

    def _attend(
        self,
        rows: DecodeRows,
        runs: dict[int | None, Tensor],
        grouped: bool,
        out: Tensor,
        q: Tensor,
        kv: PagedKV,
        layer: int,
    ) -> None:
        """``runs`` are the plans, by window."""
        window = self._shape.windows[layer]
        self._kernel(
            q,
            kv,
            rows.page_table,
            rows.lengths,
            runs[window],
            rows=rows.rows,
            scale=self._shape.scale,
            window=window,
            out=out,
            grouped=grouped,
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
            kv,
            chunks.page_table,
            rows=chunks.rows,
            offsets=chunks.offsets,
            ends=chunks.ends,
            split=self._split,
            scale=self._shape.scale,
            window=self._shape.windows[layer],
            out=out,
        )

    def _attend_rows(
        self, rows: DecodeRows, out: Tensor, q: Tensor, kv: PagedKV, layer: int
    ) -> None:
        invariant_decode_attention(
            q,
            kv,
            rows.page_table,
            rows.lengths,
            self._workspace,
            rows=rows.rows,
            split=self._split,
            scale=self._shape.scale,
            window=self._shape.windows[layer],
            out=out,
            pdl=rows.pdl,
        )


def _are_same(groups: Groups, others: Groups) -> bool:
    return (
        np.array_equal(groups.members, others.members)
        and np.array_equal(groups.sizes, others.sizes)
        and np.array_equal(groups.ends, others.ends)
        and np.array_equal(groups.begins, others.begins)
    )
