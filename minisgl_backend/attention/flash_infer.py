"""The backends ``fi`` and ``trtllm``: kernels of the library FlashInfer (arXiv 2501.01005), which
are compiled at first use.

The kernels of ``fi``, for prompts and for decoding, follow a schedule: which part of which sequence
each thread block takes. The host makes it from the lengths, in pinned memory, and copies it to the
GPU in the order of the stream. That memory is not written again before the copy has run, so the
host is never more than one step ahead.

A captured decode step has a wrapper for each batch size and window. Pages and lengths are read on
the GPU: the graph gathers the rows of the page table into a buffer that the kernels read. So before
a replay the host writes only the schedule.

``trtllm`` only decodes, and follows no schedule.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl_backend import packages
from minisgl_backend.attention.base import AttentionSetting, Chunks, DecodeRows, LayerAttention
from minisgl_backend.device.base import HostArray
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.request import IntArray

HEAD_DIMS: Final = (64, 128, 256)

TRTLLM_PAGE_SIZES: Final = (16, 32, 64)

TENSOR_CORE_GROUP: Final = 4
"""With at least this many query heads per KV head, a row's GEMMs fill a tensor core well enough."""

_SCHEDULE_BYTES: Final = 2**20
"""For a captured step, which takes less than 32 bytes for each row and each thread block."""

_TRTLLM_BYTES: Final = 64 * 2**20
"""Counters of the splits (8 MiB) and their partial results."""

_LAYOUT: Final = "NHD"  # [num_pages, page_size, num_kv_heads, head_dim]


class Wrapper(Protocol):
    """A FlashInfer wrapper, for prompts or for decoding, as far as it is used here."""

    def plan(self, *arguments: object, **options: object) -> None:
        """Write the schedule of a step."""

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], **options: object) -> object:
        """Attention of one layer, which fills ``out`` and, if asked for, ``lse``."""

    def reset_workspace_buffer(self, partial_results: Tensor, schedule: Tensor) -> None:
        """Use this memory from now on."""


def why_no_kernels() -> str | None:
    """Why FlashInfer cannot get its kernels; None if it has them or a compiler."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    compilers = [Path(home) / "bin" / "nvcc" for home in homes if home]
    if shutil.which("nvcc") or any(compiler.exists() for compiler in compilers):
        return None
    return f"needs nvcc to compile its kernels, or {packages.FLASH_INFER_KERNELS}"


class FlashInferPrefill:
    """``PrefillAttention`` by ``BatchPrefillWithPagedKVCacheWrapper``: FlashAttention-3 kernels on
    Hopper with 16-bit pages, otherwise FlashAttention-2 kernels."""

    def __init__(self, library: ModuleType, setting: AttentionSetting):
        """``library`` is the module flashinfer."""
        self._setting = setting
        workspace = _workspace(setting)
        self._wrappers: dict[int | None, Wrapper] = {
            window: library.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT)
            for window in setting.windows
        }
        self._copied = torch.cuda.Event()

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        assert chunks.host_offsets is not None  # such steps are not captured
        assert chunks.host_ends is not None
        setting, first_token = self._setting, int(chunks.host_offsets[0])
        table = chunks.page_table.index_select(0, chunks.rows)
        offsets = _pinned(chunks.host_offsets - chunks.host_offsets[0], setting)
        pages = _PageLists.of(chunks.host_ends, table, setting)
        self._copied.synchronize()
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                offsets,
                pages.offsets,
                pages.indices,
                pages.last_lengths,
                *_heads(setting),
                causal=True,
                **_options(setting, window),
            )
        self._copied.record()
        return partial(self._attend, first_token)

    def _attend(self, first_token: int, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        wrapper = self._wrappers[self._setting.shape.windows[layer]]
        _run(wrapper, out[first_token:], q[first_token:], kv, enable_pdl=False)


class FlashInferDecode:
    """``ScheduledDecode`` by ``BatchDecodeWithPagedKVCacheWrapper``, on tensor cores if enough
    query heads share a KV head."""

    def __init__(self, library: ModuleType, setting: AttentionSetting):
        """``library`` is the module flashinfer."""
        self._library = library
        self._setting = setting
        self._workspace = _workspace(setting)
        most, max_pages = setting.max_captured_batch_size, setting.max_pages

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=setting.device)

        # Inputs of captured kernels, which take a row's length as (pages - 1) * page_size + (length
        # of the last page). Every row gets max_pages in its own place, and the excess is subtracted
        # from the length of the last page, which may become negative.
        self._host_offsets = torch.arange(most + 1, dtype=torch.int32) * max_pages
        self._offsets = self._host_offsets.to(setting.device)
        self._pages = zeros(most * max_pages, torch.int32)
        self._last_lengths = zeros(most, torch.int32)
        self._positions_before_last = (max_pages - 1) * setting.page_size
        self._schedules = {w: zeros(_SCHEDULE_BYTES, torch.uint8) for w in setting.windows}

        self._captured: dict[int, dict[int | None, Wrapper]] = {}  # by batch size
        self._eager = {window: self._wrapper() for window in setting.windows}
        self._copied = torch.cuda.Event()

    def schedule_rows(self, lengths: IntArray) -> None:
        setting, size = self._setting, len(lengths)
        if size not in self._captured:
            self._captured[size] = self._wrappers_to_capture(size)
        counts = _num_pages(lengths, setting.page_size)
        offsets = _offsets(counts)
        last_lengths = torch.from_numpy(lengths - (counts - 1) * setting.page_size)
        self._copied.synchronize()
        for window, wrapper in self._captured[size].items():
            # unlike ``plan``, it writes only the schedule, not the kernels' other inputs
            self._library.decode.fast_decode_plan(
                wrapper,
                offsets,
                self._pages,
                last_lengths,
                *_heads(setting),
                **_options(setting, window),
            )
        self._copied.record()

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        if rows.host_lengths is not None:
            return self._plan_eagerly(rows, rows.host_lengths)
        size, max_pages = rows.rows.shape[0], self._setting.max_pages
        table = self._pages[: size * max_pages].view(size, max_pages)
        torch.index_select(rows.page_table, 0, rows.rows, out=table)
        last_lengths = self._last_lengths[:size]
        torch.sub(rows.lengths, self._positions_before_last, out=last_lengths)
        return partial(self._attend, self._captured[size], rows.pdl)

    def _attend(
        self,
        wrappers: dict[int | None, Wrapper],
        pdl: bool,
        out: Tensor,
        q: Tensor,
        kv: PagedKV,
        layer: int,
    ) -> None:
        wrapper = wrappers[self._setting.shape.windows[layer]]
        _run(wrapper, out, q, kv, enable_pdl=pdl)

    def _plan_eagerly(self, rows: DecodeRows, lengths: IntArray) -> LayerAttention:
        setting = self._setting
        pages = _PageLists.of(lengths, rows.page_table.index_select(0, rows.rows), setting)
        self._copied.synchronize()
        for window, wrapper in self._eager.items():
            wrapper.plan(
                pages.offsets,
                pages.indices,
                pages.last_lengths,
                *_heads(setting),
                **_options(setting, window),
            )
        self._copied.record()
        return partial(self._attend, self._eager, rows.pdl)

    def _wrappers_to_capture(self, size: int) -> dict[int | None, Wrapper]:
        setting = self._setting
        wrappers = {}
        for window, schedule in self._schedules.items():
            wrapper = self._wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._offsets[: size + 1],
                paged_kv_indices_buffer=self._pages,
                paged_kv_last_page_len_buffer=self._last_lengths[:size],
            )
            wrapper.reset_workspace_buffer(self._workspace, schedule)
            # chooses the kernels, and leaves the offsets as they are
            wrapper.plan(
                self._host_offsets[: size + 1],
                self._pages[:0],
                torch.full((size,), 1 - self._positions_before_last, dtype=torch.int32),
                *_heads(setting),
                **_options(setting, window),
            )
            wrappers[window] = wrapper
        return wrappers

    def _wrapper(self, **options: Tensor | bool) -> Wrapper:
        shape = self._setting.shape
        wrapper: Wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_tensor_cores=shape.num_heads // shape.num_kv_heads >= TENSOR_CORE_GROUP,
            backend="fa2",
            **options,
        )
        return wrapper


class TrtllmDecode:
    """``DecodeAttention`` by ``trtllm_batch_decode_with_kv_cache``: kernels of TensorRT-LLM, which
    are named XQA on Hopper.

    Page table and lengths are read on the GPU, and nothing is planned. With float8 pages, queries
    and softmax weights are also rounded to float8.
    """

    def __init__(self, library: ModuleType, setting: AttentionSetting):
        """``library`` is the module flashinfer."""
        self._library = library
        self._setting = setting
        # the kernels count in it, and leave the counters at zero
        self._workspace = torch.zeros(_TRTLLM_BYTES, dtype=torch.uint8, device=setting.device)

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        table = rows.page_table.index_select(0, rows.rows)  # [batch_size, max_pages]
        return partial(self._attend, rows, table)

    def _attend(
        self, rows: DecodeRows, table: Tensor, out: Tensor, q: Tensor, kv: PagedKV, layer: int
    ) -> None:
        window = self._setting.shape.windows[layer]
        self._library.decode.trtllm_batch_decode_with_kv_cache(
            q.contiguous(),
            (kv.keys, kv.values),
            self._workspace,
            table,
            rows.lengths,
            table.shape[1] * self._setting.page_size,
            bmm1_scale=self._setting.shape.scale * kv.scale.k,
            bmm2_scale=kv.scale.v,
            window_left=-1 if window is None else window - 1,
            sinks=None if kv.sinks is None else kv.sinks.float(),
            out=out,
            kv_layout=_LAYOUT,
            enable_pdl=rows.pdl,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _PageLists:
    """The pages of sequences, one list after another, as wrappers take them; int32.

    ``indices`` are on the device. The host has ``offsets`` [num_sequences + 1] into them, and
    ``last_lengths`` [num_sequences]: how many positions of each last page are used.
    """

    offsets: Tensor
    indices: Tensor
    last_lengths: Tensor

    @classmethod
    def of(cls, ends: IntArray, page_table: Tensor, setting: AttentionSetting) -> _PageLists:
        """The pages of sequences of ``ends`` positions, each with a row of ``page_table``."""
        counts = _num_pages(ends, setting.page_size)
        offsets = _offsets(counts)
        starts: HostArray = np.arange(len(ends)) * page_table.shape[1] - offsets[:-1].numpy()
        taken = np.repeat(starts, counts) + np.arange(counts.sum())
        index = _pinned(taken, setting).to(setting.device, non_blocking=True)
        return cls(
            _pinned(offsets.numpy(), setting),
            page_table.flatten().index_select(0, index),
            _pinned(ends - (counts - 1) * setting.page_size, setting),
        )


def _num_pages(lengths: IntArray, page_size: int) -> IntArray:
    return -(-lengths // page_size)


def _offsets(counts: IntArray) -> Tensor:
    """0 and the running sums, int32 [len(counts) + 1]."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def _pinned(array: IntArray | HostArray, setting: AttentionSetting) -> Tensor:
    """A copy in pinned memory, so that copying it to the GPU does not wait for the GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if setting.device.type == "cuda" else tensor


def _heads(setting: AttentionSetting) -> tuple[int, int, int, int]:
    shape = setting.shape
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, setting.page_size


def _options(setting: AttentionSetting, window: int | None) -> dict[str, object]:
    return {
        "window_left": -1 if window is None else window - 1,
        "sm_scale": setting.shape.scale,
        "q_data_type": setting.dtype,
        "kv_data_type": setting.kv_dtype,
    }


def _run(wrapper: Wrapper, out: Tensor, q: Tensor, kv: PagedKV, *, enable_pdl: bool) -> None:
    pages, scale = (kv.keys, kv.values), kv.scale
    options = {"k_scale": scale.k, "v_scale": scale.v, "enable_pdl": enable_pdl}
    if kv.sinks is None:
        wrapper.run(q, pages, out=out, **options)
        return
    logarithms = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)  # to base 2
    wrapper.run(q, pages, out=out, lse=logarithms, return_lse=True, **options)
    out.mul_((logarithms * math.log(2) - kv.sinks).sigmoid_()[..., None])


def _workspace(setting: AttentionSetting) -> Tensor:
    """Room for the partial results of sequences that several thread blocks share, zeroed.

    On each multiprocessor two thread blocks take a tile of up to 128 query heads each. In a
    captured step every row of the batch has its own tile, split or not.
    """
    shape = setting.shape
    group = shape.num_heads // shape.num_kv_heads
    tile = 16 if group <= 16 else 128
    blocks = 2 * num_processors(setting.device) // shape.num_kv_heads
    rows = max(128 * blocks, (tile + group) * setting.max_captured_batch_size + tile)
    num_bytes = 4 * rows * shape.num_heads * (shape.head_dim + 1)
    return torch.zeros(num_bytes + 2**20, dtype=torch.uint8, device=setting.device)
