"""The backend ``cuda``: this package's kernel in CUDA C++.

It streams keys and values at memory bandwidth, however ragged the rows are, fp8 pages included.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from minisgl_backend.attention.base import AttentionSetting, DecodeRows, LayerAttention, PagedKV
from minisgl_backend.kernels.cuda.decode_attention import DecodeAttentionKernel


class CudaDecode:
    """``DecodeAttention`` by ``kernels.cuda.decode_attention``, planned on the GPU once a step."""

    def __init__(self, setting: AttentionSetting):
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
            out=out,
            pdl=rows.pdl,
        )
