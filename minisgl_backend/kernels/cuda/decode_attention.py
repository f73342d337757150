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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """What kernels are compiled for. ``dtype`` is that of queries, ``kv_dtype`` that of pages. A
    step writes keys and values at up to ``most_written`` positions of a row, the newest ones."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    most_written: int = 1

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype == torch.float8_e4m3fn

    @property
    def columns(self) -> int:
        """Pairs of columns of an MMA's fragment that hold query heads."""
        return 1 if self.group <= 2 else 2 if self.group <= 4 else 4

    @property
    def quads(self) -> int:
        """float4 of each lane in a partial result that thread blocks exchange."""
        return self.head_dim // 16 + 1


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

    def ring_bytes(self, shape: DecodeShape) -> int:
        """Bytes of the ring of a warp: keys and values."""
        position = 2 * shape.head_dim * shape.kv_dtype.itemsize
        return self.stages * self.parts * _PART * position


def tuning(shape: DecodeShape) -> Tuning:
    """What was fastest on an H200. The rings of wide heads leave room for one thread block."""
    is_wide = shape.head_dim > 128
    return Tuning(
        parts=2 if shape.is_fp8 else 1,
        stages=2 if is_wide or shape.is_fp8 else 3,
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


def why_not(shape: DecodeShape, device: torch.device) -> str | None:
    """Why the kernel cannot take this shape on this GPU; None if it can."""
    if shape.group > _HEADS:
        return f"needs at most {_HEADS} query heads a KV head"
    if shape.head_dim not in (64, 128, 256):
        return f"needs heads of 64, 128 or 256 elements, not {shape.head_dim}"
    if shape.page_size % _PART:
        return f"needs a page_size that is a multiple of {_PART}, not {shape.page_size}"
    if shape.kv_dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        name = str(shape.kv_dtype).removeprefix("torch.")
        return f"needs KV pages of two bytes or fp8, not {name}"
    if _WARPS * tuning(shape).ring_bytes(shape) > most_bytes(shared_bytes(device)):
        return f"needs a GPU with more shared memory for heads of {shape.head_dim} elements"
    return None


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
        shape: DecodeShape,
        *,
        max_batch_size: int,
        device: torch.device,
        cut: Tuning | None = None,
        shared: SharedAttention | None = None,
    ) -> None:
        self._shape, self._cut = shape, cut or tuning(shape)
        self._max_batch_size, self._device, self._shared = max_batch_size, device, shared
        per_processor, memory = self._cut.per_processor, shared_bytes(device)
        # GPUs of compute capability 12 have too little for warps that share 16-bit positions
        of_split = self._needed_bytes(_WARPS, split=True)
        few_a_processor = [n for n in _FEW_A_PROCESSOR if of_split <= most_bytes(memory, n)]
        with ThreadPoolExecutor() as pool:
            single = pool.submit(self._compile, per_processor)
            few = [pool.submit(self._compile, n, split=True) for n in few_a_processor]
            self._grouped = None if shared is None else self._compile(per_processor, grouped=True)
        self._single, self._few = single.result(), [made.result() for made in few]
        num_pieces = self._single.num_blocks * self._single.num_warps
        self._pieces = empty_words((num_pieces, shape.quads, shape.columns, 8, 4), device)

    def _needed_bytes(self, num_warps: int, *, split: bool) -> int:
        """Shared memory of a thread block: rings, and what warps merge if they share positions."""
        of_merging = (num_warps - 1) * self._shape.quads * 32 * 16 if split else 0
        return num_warps * self._cut.ring_bytes(self._shape) + of_merging

    def _compile(
        self, per_processor: int, *, split: bool = False, grouped: bool = False
    ) -> _Kernels:
        """The kernels with ``per_processor`` times ``_WARPS`` warps per multiprocessor. If
        ``split``, the warps of a thread block share positions."""
        shape, cut = self._shape, self._cut
        num_warps = _WARPS if split else math.gcd(shape.num_kv_heads, _WARPS)
        per_processor = per_processor * _WARPS // num_warps
        constants = {
            "HEAD_DIM": shape.head_dim,
            "GROUP": shape.group,
            "KV_HEADS": shape.num_kv_heads,
            "PAGE_SIZE": shape.page_size,
            "FP8": shape.is_fp8,
            "BFLOAT16": shape.dtype == torch.bfloat16,
            "WARPS": num_warps,
            "STAGES": cut.stages,
            "PER_PROCESSOR": per_processor,
            "LEAVING": cut.leaving,
            "LEAST": num_warps * cut.stages if split else cut.least,
            "PARTS": cut.parts,
            "COLUMNS": shape.columns,
            "WRITTEN": shape.most_written,
            "MOST_SLOTS": MOST_SLOTS,
            "SHARED": grouped,
            "SPLIT": split,
        }
        module = CudaModule("decode_attention.cu", constants, self._device)
        # leave no room for one more block: early launches would crowd some multiprocessors
        leaving_none = shared_bytes(self._device) // (per_processor + 1)
        of_block = max(self._needed_bytes(num_warps, split=split), leaving_none)
        return _Kernels(
            module.kernel("plan_decode_attention", shared_bytes=8 * self._max_batch_size),
            module.kernel("decode_attention", shared_bytes=of_block),
            per_processor * num_processors(self._device),
            num_warps,
        )

    def plan(
        self,
        page_table: Tensor,
        lengths: Tensor,
        *,
        rows: Tensor,
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
            rows=rows.data_ptr(),
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
        rows: Tensor,
        scale: float,
        window: int | None,
        out: Tensor,
        grouped: bool = False,
        pdl: bool,
    ) -> None:
        """See ``minisgl_backend.kernels.decode_attention.decode_attention``; int32 tensors only.

        ``runs`` is what ``plan`` returned for the same arguments. With ``pdl`` the launch right
        before this one may write only ``q`` and each row's newest positions, at most
        ``DecodeShape.most_written``, and must let this one start only after all launches before it
        have ended.
        """
        keys, values = kv.keys, kv.values
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        assert q.stride(1) == q.shape[2] and q.stride(2) == 1
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
            rows=rows.data_ptr(),
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
            scale_log2=scale * math.log2(math.e),  # exp2 instead of exp
        )
        grid = kernels.num_blocks, 1, 1
        kernels.attend.launch(grid, 32 * kernels.num_warps, arguments, pdl=pdl)

    def _of_step(self, num_rows: int, grouped: bool) -> tuple[_Kernels, SharedAttention | None]:
        if grouped:
            assert self._grouped is not None
            return self._grouped, self._shared
        for few in self._few:
            if num_rows * self._shape.num_kv_heads <= few.num_blocks:
                return few, None
        return self._single, None
