"""The backend ``trtllm``: decoding by TensorRT-LLM's kernels, which FlashInfer ships.

On Hopper those are XQA. Page table and lengths are read on the GPU and nothing is planned. For
decoding only; kernels are compiled at first use, for one page size and ratio of heads. Over float8
pages the queries and the softmax weights are rounded to float8 as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionSetting, DecodeRows, LayerAttention, PagedKV

PAGE_SIZES: Final = (16, 32, 64)

_WORKSPACE_BYTES: Final = 64 * 2**20
"""Counters of the splits (8 MiB) and their partial results."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments that all layers of a step share; ``page_table`` [batch_size, max_pages]."""

    page_table: Tensor
    lengths: Tensor
    pdl: bool


class TrtllmDecode:
    """``DecodeAttention`` by ``trtllm_batch_decode_with_kv_cache``."""

    def __init__(self, library: ModuleType, setting: AttentionSetting):
        """``library`` is the module flashinfer."""
        self._library = library
        self._setting = setting
        # the kernels count in it and leave the counters at zero
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=setting.device)

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        table = rows.page_table.index_select(0, rows.rows)
        return partial(self._attend, _Call(table, rows.lengths, rows.pdl))

    def _attend(self, call: _Call, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        window = self._setting.shape.windows[layer]
        self._library.decode.trtllm_batch_decode_with_kv_cache(
            q.contiguous(),
            (kv.keys, kv.values),
            self._workspace,
            call.page_table,
            call.lengths,
            call.page_table.shape[1] * self._setting.page_size,
            bmm1_scale=self._setting.shape.scale * kv.scale.k,
            bmm2_scale=kv.scale.v,
            window_left=-1 if window is None else window - 1,
            out=out,
            kv_layout="NHD",
            enable_pdl=call.pdl,
        )
