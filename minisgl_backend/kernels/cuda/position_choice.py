"""Launches ``position_choice.cu``: the slots of the positions with the highest scores, on Hopper.

Must not know how scores are computed, or what is done with slots.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.module import CudaModule, address
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.shared_memory import OF_HOPPER, most_bytes

_THREADS: Final = 1024
MOST_CHOSEN: Final = 4096
"""Chosen positions of a token, which are collected in shared memory."""
_MOST_BLOCKS: Final = 8
"""Thread blocks of a cluster."""
_BLOCKS: Final = 4
"""More take longer to meet than they gain: only keys that do not fit otherwise need them."""
_LEAST_SHARE: Final = 8192
"""Fewer positions are not divided among thread blocks."""
_OWN_BYTES: Final = 17 * 1024
"""Of ``Block`` in the source, rounded up."""


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("scores_stride", ctypes.c_longlong),
        ("table_stride", ctypes.c_longlong),
        ("top_k", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("held", ctypes.c_int),
    )


class PositionChoice:
    """``kernels.indexer.choose_slots`` for any number of tokens."""

    def __init__(self, device: torch.device) -> None:
        module = CudaModule("position_choice.cu", {}, device)
        # by how many thread blocks fit on a multiprocessor; the larger one comes last
        self._kernels = {
            count: (module.kernel("choose_slots", shared_bytes=size), (size - _OWN_BYTES) // 4)
            for count in (2, 1)
            for size in (most_bytes(OF_HOPPER, count),)
        }
        self._processors = num_processors(device)

    def __call__(
        self,
        out: Tensor,
        scores: Tensor,
        page_table: Tensor,
        rows: Tensor,
        lengths: Tensor,
        *,
        page_size: int,
        pdl: bool = False,
    ) -> None:
        """See ``kernels.indexer.choose_slots``."""
        num_tokens, width = scores.shape
        if num_tokens == 0:
            return
        assert out.is_contiguous() and scores.stride(1) == 1 and page_table.stride(1) == 1
        assert scores.dtype == torch.float32 and out.shape[1] <= MOST_CHOSEN
        blocks = blocks_of(num_tokens, width, self._processors, self._kernels[1][1])
        of_half = self._kernels[2][1]
        fills_twice = num_tokens * blocks > self._processors and -(-width // blocks) <= of_half
        kernel, held = self._kernels[2 if fills_twice else 1]
        arguments = _Arguments(
            out=address(out),
            scores=address(scores),
            table=address(page_table),
            rows=address(rows),
            lengths=address(lengths),
            scores_stride=scores.stride(0),
            table_stride=page_table.stride(0),
            top_k=out.shape[1],
            page_size=page_size,
            blocks=blocks,
            held=held,
        )
        grid = num_tokens * blocks, 1, 1
        kernel.launch(grid, _THREADS, arguments, cluster=(blocks, 1, 1), pdl=pdl)


def blocks_of(num_tokens: int, width: int, processors: int, held: int) -> int:
    """How many thread blocks take a token: as many as its keys need if each holds up to ``held`` of
    them, and more if multiprocessors would have none; a power of two."""
    blocks = 1
    while blocks < _BLOCKS and 2 * blocks * num_tokens <= processors:
        if 2 * blocks * _LEAST_SHARE > width:
            break
        blocks *= 2
    while blocks < _MOST_BLOCKS and blocks * held < width:
        blocks *= 2
    return blocks
