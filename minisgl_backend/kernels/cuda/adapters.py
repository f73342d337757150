"""Launches ``adapters.cu``: x A^T of LoRA adapters, for the GEMMs of ``linear.cu``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.adapters import IN_STEP, RANK_STEP, Adaptation
from minisgl_backend.kernels.cuda.module import CudaModule, address

_THREADS: Final = 128
_BLOCK_OF_TOKENS: Final = 16
"""The number of an adapter's tokens that are multiplied by A at a time."""
_PART: Final = 512
_MOST_PARTS: Final = 8
"""A thread block of a cluster takes the first number of in_features, unless the cluster would then
have more thread blocks than the second number."""
_MOST_FETCHED: Final = 16 * 2**20
"""The most bytes of a weight that are fetched; the L2 cache has 50 MiB."""


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("inner", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("slot_stride", ctypes.c_uint64),
        ("x_stride", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("max_rank", ctypes.c_int),
        ("size", ctypes.c_int),
        ("early", ctypes.c_int),
        ("weight", ctypes.c_void_p),
        ("weight_bytes", ctypes.c_int),
    )


class ShrinkKernel:
    """Computes x A^T for each token's own A."""

    def __init__(self, device: torch.device) -> None:
        self._kernel = CudaModule("adapters.cu", {}, device).kernel("shrink", shared_bytes=0)

    def __call__(
        self, x: Tensor, adaptation: Adaptation, *, weight: Tensor | None, pdl: bool
    ) -> Tensor:
        """Bfloat16 [num_tokens, num_projections * max_rank]: 0 beyond the rank of a token's
        adapter, and undefined for a token without one.

        If the next kernel's ``weight`` is given, that kernel starts once ``x`` is there, and finds
        (the first MiB of) the weight in the L2 cache. Otherwise it may start as soon as this one
        has.
        """
        memory, tokens = adaptation.memory, adaptation.tokens
        a, size = memory.a, x.shape[1]
        assert a.is_contiguous() and a.shape[2] == size and size % IN_STEP == 0
        assert x.stride(0) % 8 == 0 and x.stride(1) == 1 and tokens.block <= _BLOCK_OF_TOKENS
        columns = a.shape[1]
        inner = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
        arguments = _Arguments(
            inner=address(inner),
            x=address(x),
            a=address(a),
            order=address(tokens.order),
            blocks=address(tokens.blocks),
            slot_stride=a.stride(0),
            x_stride=x.stride(0),
            columns=columns,
            max_rank=memory.b.shape[2],
            size=size,
            early=weight is None,
            weight=address(weight),
            weight_bytes=0 if weight is None else min(weight.nbytes, _MOST_FETCHED),
        )
        parts = min(-(-size // _PART), _MOST_PARTS)
        grid = len(tokens.blocks), columns // RANK_STEP, parts
        self._kernel.launch(grid, _THREADS, arguments, cluster=(1, 1, parts), pdl=pdl)
        return inner


@cache
def shrink_kernel(device: torch.device) -> ShrinkKernel:
    """The kernel for all shapes."""
    return ShrinkKernel(device)
