"""Launches ``fused_sum.cu``: the sum of all ranks' rows, residual add and norm, in one kernel.

Knows where the memory of each rank is. Must not know how the ranks came to share it, or what
happens if a rank is lost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.module import CudaKernel, CudaModule, address
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.sum_cut import slices

UNSENT: Final = 0x8000
"""The bits of -0.0, the 16-bit number that memory must be filled with."""
NUM_BUFFERS: Final = 2

_VECTOR: Final = 8
_VECTOR_BYTES: Final = 16
_MOST_THREADS: Final = 1344
"""Threads per multiprocessor, with 48 registers each, unless a row needs more."""


class _State(ctypes.Structure):
    """``State`` of the source."""

    _fields_ = (("arrived", ctypes.c_uint32), ("turn", ctypes.c_uint32))


class FusedSumKernels:
    """The kernels of one rank. Those for a size of rows are compiled when the size first comes."""

    def __init__(
        self, memory: Sequence[int], rank: int, buffer_bytes: int, device: torch.device
    ) -> None:
        """``memory`` has the address of each rank's ``NUM_BUFFERS`` buffers, which are filled with
        ``UNSENT``."""
        self._memory, self._rank, self._buffer_bytes = list(memory), rank, buffer_bytes
        self._device = device
        self._num_processors = num_processors(device)
        self._state = torch.zeros(ctypes.sizeof(_State), dtype=torch.uint8, device=device)
        num_ranks = len(memory)

        class Arguments(ctypes.Structure):
            """``Arguments`` of the source."""

            _fields_ = (
                ("x", ctypes.c_void_p),
                ("residual", ctypes.c_void_p),
                ("weight", ctypes.c_void_p),
                ("out", ctypes.c_void_p),
                ("memory", ctypes.c_void_p * num_ranks),
                ("state", ctypes.c_void_p),
                ("buffer", ctypes.c_uint64),
                ("rows", ctypes.c_uint32),
                ("eps", ctypes.c_float),
            )

        self._arguments = Arguments
        self._kernels = cache(self._compiled)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool
    ) -> Tensor:
        """``parallel.group.FusedSum.add_rms_norm``, for contiguous rows of at most
        ``LARGEST_SIZE`` elements, a multiple of 8, in bfloat16 or float16."""
        num_rows, size = x.shape
        num_ranks = len(self._memory)
        kernels = self._kernels(size, x.dtype)
        out = torch.empty_like(x)
        for begin, end, two_shot in slices(num_rows, size, num_ranks, self._buffer_bytes):
            arguments = self._arguments(
                x=address(x[begin:]),
                residual=address(residual[begin:]),
                weight=address(weight),
                out=address(out[begin:]),
                memory=(ctypes.c_void_p * num_ranks)(*self._memory),
                state=address(self._state),
                buffer=self._buffer_bytes // _VECTOR_BYTES,
                rows=end - begin,
                eps=eps,
            )
            most = self._num_processors * (_per_processor(size) if two_shot else 1)
            grid = (min(end - begin, most), 1, 1)
            kernels[two_shot].launch(grid, _num_threads(size), arguments, pdl=pdl)
        return out

    def _compiled(self, size: int, dtype: torch.dtype) -> tuple[CudaKernel, CudaKernel]:
        constants = {
            "SIZE": size,
            "RANKS": len(self._memory),
            "RANK": self._rank,
            "HALF": dtype == torch.float16,
            "PER_PROCESSOR": _per_processor(size),
        }
        module = CudaModule("fused_sum.cu", constants, self._device)
        one, two = (module.kernel(name, shared_bytes=0) for name in ("one_shot", "two_shot"))
        return one, two


def _num_threads(size: int) -> int:
    return -(-size // (32 * _VECTOR)) * 32


def _per_processor(size: int) -> int:
    """Thread blocks per multiprocessor, in ``two_shot``."""
    return max(1, _MOST_THREADS // _num_threads(size))
