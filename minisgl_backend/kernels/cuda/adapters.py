"""Launches ``adapters.cu``: x A^T of LoRA adapters, for the GEMMs of ``linear.cu``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.adapters import IN_STEP, RANK_STEP, Adaptation
from minisgl_backend.kernels.cuda.module import CudaModule, address

_BLOCK_OF_TOKENS: Final = 16
"""The number of an adapter's tokens that are multiplied by A at a time."""
_LEAST_WARPS: Final = 4
_MOST_WARPS: Final = 8
_MOST_PARTS: Final = 8
"""Warps per thread block, and the most thread blocks of a cluster."""


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
        ("turns", ctypes.c_void_p),
    )


class ShrinkKernel:
    """Computes x A^T for each token's own A."""

    def __init__(self, device: torch.device) -> None:
        self._kernel = CudaModule("adapters.cu", {}, device).kernel("shrink", shared_bytes=0)

    def __call__(
        self, x: Tensor, adaptation: Adaptation, *, turns: Tensor | None = None, pdl: bool
    ) -> Tensor:
        """Bfloat16 [num_tokens, num_projections * max_rank]: 0 beyond the rank of a token's
        adapter, and undefined for a token without one.

        The next kernel may start as soon as this one has. ``turns``, two numbers that are 0 before
        the first launch, tell it when ``x`` is there (``turns.cuh``).
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
            turns=address(turns),
        )
        parts, warps = _shares(size // IN_STEP)
        grid = len(tokens.blocks), columns // RANK_STEP, parts
        self._kernel.launch(grid, 32 * warps, arguments, cluster=(1, 1, parts), pdl=pdl)
        return inner


def _shares(pieces: int) -> tuple[int, int]:
    """Thread blocks of a cluster, and warps of each, that share this number of pieces of the
    in_features about evenly, in as few rounds as possible."""
    rounds = -(-pieces // (_MOST_PARTS * _MOST_WARPS))
    parts = min(-(-pieces // (rounds * _LEAST_WARPS)), _MOST_PARTS)
    return parts, max(-(-pieces // (rounds * parts)), _LEAST_WARPS)


@cache
def shrink_kernel(device: torch.device) -> ShrinkKernel:
    """The kernel for all shapes."""
    return ShrinkKernel(device)
