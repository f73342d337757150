"""Launches ``decode_attention.cu``: streaming attention of one new token per row."""

from __future__ import annotations

import ctypes
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.empty_words import empty_words
from minisgl_backend.kernels.cuda.module import CudaKernel, CudaModule, address
from minisgl_backend.kernels.dispatch import num_processors, shared_bytes
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.shared_attention import MOST_SLOTS, SharedAttention
from minisgl_backend.kernels.shared_memory import most_bytes

_WARPS: Final = 4
"""The most warps of a thread block. With fewer KV heads there are fewer warps and more thread
blocks, unless warps share positions."""

_FEW_A_PROCESSOR: Final = (1, 2)
"""Thread blocks per multiprocessor if warps share positions. If one is enough, it leaves more
memory to the L1 cache, which the early loads of the next kernels need: shared memory and L1 cache
are the same memory."""

_PART: Final = 16
_HEADS: Final = 8


@dataclass(frozen=True, slots=True)
class Tuning:
    """How rows are cut into runs, and runs into tiles.

    A tile has ``parts`` of 16 positions, a warp's ring ``stages`` of a tile, and a multiprocessor
    ``per_processor`` thread blocks. ``leaving`` is what a row costs besides its tiles, in tiles. A
    run has at least ``least`` tiles or, if warps share them, the number that they load at once.
    """

    parts: int
    stages: int
    per_processor: int
    leaving: int = 1
    least: int = 4


def tuning(kv_dtype: torch.dtype, head_dim: int) -> Tuning:
    """What was fastest on an H200. The rings of wide heads leave room for one thread block."""
    is_wide, is_fp8 = head_dim > 128, kv_dtype == torch.float8_e4m3fn
    return Tuning(
        parts=2 if is_fp8 else 1,
        stages=2 if is_wide or is_fp8 else 3,
        per_processor=1 if is_wide else 2,
    )


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("page_stride", ctypes.c_uint64),
        ("slot_stride", ctypes.c_uint32),
        ("head_stride", ctypes.c_uint32),
        ("q_stride", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
    )


class _PlanArguments(ctypes.Structure):
    """``PlanArguments`` of the source."""

    _fields_ = (
        ("runs", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("table_stride", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("max_runs", ctypes.c_int),
        ("window", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Kernels:
    """The kernels for grouped steps, for steps of few rows, or for all other steps. They have
    ``num_blocks`` thread blocks of ``num_warps`` warps, all of which run at once."""

    plan: CudaKernel
    attend: CudaKernel
    num_blocks: int
    num_warps: int


def why_not(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why the kernel cannot take these shapes on this GPU; None if it can."""
    if num_heads // num_kv_heads > _HEADS:
        return f"needs at most {_HEADS} query heads a KV head"
    if head_dim not in (64, 128, 256):
        return f"needs heads of 64, 128 or 256 elements, not {head_dim}"
    if page_size % _PART:
        return f"needs a page_size that is a multiple of {_PART}, not {page_size}"
    if kv_dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return f"needs KV pages of two bytes or fp8, not {str(kv_dtype).removeprefix('torch.')}"
    ring_bytes = _ring_bytes(tuning(kv_dtype, head_dim), head_dim, kv_dtype)
    if _WARPS * ring_bytes > most_bytes(shared_bytes(device)):
        return f"needs a GPU with more shared memory for heads of {head_dim} elements"
    return None


def _ring_bytes(cut: Tuning, head_dim: int, kv_dtype: torch.dtype) -> int:
    """Of the ring of a warp."""
    return cut.stages * 2 * cut.parts * _PART * head_dim * kv_dtype.itemsize


class DecodeAttentionKernel:
    """softmax(q k^T * scale) v for one query per row, for one shape and one stream.

    Its workspace holds partial results that thread blocks exchange, so calls must not overlap. It
    must not get shapes that ``why_not`` rejects, lengths below 1, or lengths other than those
    planned: thread blocks would deadlock.

    In steps of few rows the warps of a thread block share the positions of one KV head. A step may
    be *grouped*: then ``shared`` has attended the first positions of rows, as its table says, and
    this kernel does the rest. The source is compiled once more for each of these two cases, so that
    all other steps do not pay for them.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        max_batch_size: int,
        device: torch.device,
        cut: Tuning | None = None,
        shared: SharedAttention | None = None,
    ) -> None:
        group = num_heads // num_kv_heads
        cut = cut or tuning(kv_dtype, head_dim)
        columns = 1 if group <= 2 else 2 if group <= 4 else 4
        quads = head_dim // 16 + 1
        ring_bytes = _ring_bytes(cut, head_dim, kv_dtype)
        memory = shared_bytes(device)

        def needed(num_warps: int, *, split: bool) -> int:
            of_merging = (num_warps - 1) * quads * 32 * 16 if split else 0
            return num_warps * ring_bytes + of_merging

        def kernels(per_processor: int, *, split: bool = False, grouped: bool = False) -> _Kernels:
            num_warps = _WARPS if split else math.gcd(num_kv_heads, _WARPS)
            per_processor = per_processor * _WARPS // num_warps
            constants = {
                "HEAD_DIM": head_dim,
                "GROUP": group,
                "KV_HEADS": num_kv_heads,
                "PAGE_SIZE": page_size,
                "FP8": kv_dtype == torch.float8_e4m3fn,
                "BFLOAT16": dtype == torch.bfloat16,
                "WARPS": num_warps,
                "STAGES": cut.stages,
                "PER_PROCESSOR": per_processor,
                "LEAVING": cut.leaving,
                "LEAST": num_warps * cut.stages if split else cut.least,
                "PARTS": cut.parts,
                "COLUMNS": columns,
                "MOST_SLOTS": MOST_SLOTS,
                "SHARED": grouped,
                "SPLIT": split,
            }
            module = CudaModule("decode_attention.cu", constants, device)
            # leave no room for one more block: early launches would crowd some multiprocessors
            most = max(needed(num_warps, split=split), memory // (per_processor + 1))
            return _Kernels(
                module.kernel("plan_decode_attention", shared_bytes=8 * max_batch_size),
                module.kernel("decode_attention", shared_bytes=most),
                per_processor * num_processors(device),
                num_warps,
            )

        self._shared, self._num_kv_heads = shared, num_kv_heads
        # GPUs of compute capability 12 have too little for warps that share 16-bit positions
        few_a_processor = [
            n for n in _FEW_A_PROCESSOR if needed(_WARPS, split=True) <= most_bytes(memory, n)
        ]
        with ThreadPoolExecutor() as pool:
            single = pool.submit(kernels, cut.per_processor)
            few = [pool.submit(kernels, n, split=True) for n in few_a_processor]
            self._grouped = None if shared is None else kernels(cut.per_processor, grouped=True)
        self._single, self._few = single.result(), [made.result() for made in few]
        num_pieces = self._single.num_blocks * self._single.num_warps
        self._pieces = empty_words((num_pieces, quads, columns, 8, 4), device)

    def plan(
        self,
        page_table: Tensor,
        lengths: Tensor,
        *,
        rows: Tensor | None,
        window: int | None,
        grouped: bool = False,
        pdl: bool,
    ) -> Tensor:
        """int32 [1 + 2 * num_blocks, 4]: the runs of the thread blocks, for all calls with these
        arguments."""
        kernels, shared = self._of_step(len(lengths), grouped)
        shape = 1 + 2 * kernels.num_blocks, 4
        runs = torch.empty(shape, dtype=torch.int32, device=lengths.device)
        arguments = _PlanArguments(
            runs=runs.data_ptr(),
            table=page_table.data_ptr(),
            lengths=lengths.data_ptr(),
            rows=address(rows),
            starts=None if shared is None else shared.starts.data_ptr(),
            table_stride=page_table.stride(0),
            batch=len(lengths),
            max_runs=kernels.num_blocks,
            window=window or 0,
        )
        kernels.plan.launch((1, 1, 1), 1024, arguments, pdl=pdl)
        return runs

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        page_table: Tensor,
        lengths: Tensor,
        runs: Tensor,
        *,
        rows: Tensor | None,
        scale: float,
        window: int | None,
        out: Tensor | None = None,
        grouped: bool = False,
        pdl: bool,
    ) -> Tensor:
        """See ``minisgl_backend.kernels.decode_attention.decode_attention``; int32 tensors only.

        ``runs`` is what ``plan`` returned for the same arguments. With ``pdl`` the launch right
        before this one may write only ``q`` and each row's newest position, and must let this one
        start only after all launches before it have ended.
        """
        keys, values = kv.keys, kv.values
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        assert q.stride(1) == q.shape[2] and q.stride(2) == 1
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kernels, shared = self._of_step(len(q), grouped)
        if shared is not None:
            shared(q, kv, page_table, lengths, rows=rows, scale=scale, window=window, pdl=pdl)
        item = keys.element_size()
        arguments = _Arguments(
            out=out.data_ptr(),
            q=q.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            table=page_table.data_ptr(),
            lengths=lengths.data_ptr(),
            rows=address(rows),
            runs=runs.data_ptr(),
            k_scale=address(kv.k_scale),
            v_scale=address(kv.v_scale),
            sinks=address(kv.sinks),
            pieces=self._pieces.data_ptr(),
            starts=None if shared is None else shared.starts.data_ptr(),
            slots=None if shared is None else shared.slots.data_ptr(),
            partials=None if shared is None else shared.values.data_ptr(),
            sums=None if shared is None else shared.sums.data_ptr(),
            page_stride=keys.stride(0) * item,
            slot_stride=keys.stride(1) * item,
            head_stride=keys.stride(2) * item,
            q_stride=q.stride(0),
            table_stride=page_table.stride(0),
            window=window or 0,
            scale_log2=scale * 1.4426950408889634,  # exp2 instead of exp
        )
        grid = kernels.num_blocks, 1, 1
        kernels.attend.launch(grid, 32 * kernels.num_warps, arguments, pdl=pdl)
        return out

    def _of_step(self, num_rows: int, grouped: bool) -> tuple[_Kernels, SharedAttention | None]:
        if grouped:
            assert self._grouped is not None
            return self._grouped, self._shared
        for few in self._few:
            if num_rows * self._num_kv_heads <= few.num_blocks:
                return few, None
        return self._single, None
