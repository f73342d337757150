"""Launches ``gemv.cu``: one row by a large quantized weight, for linear layers (``linear``)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.heads import Heads
from minisgl_backend.kernels.cuda.module import CudaModule, address
from minisgl_backend.kernels.gemv_cut import MOST_SQUARES, ROWS, GemvCut
from minisgl_backend.kernels.packed_weight import CodesKind


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scaled", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("squares_out", ctypes.c_void_p),
        ("square_tiles", ctypes.c_int),
        ("features", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("heads", Heads),
    )


class Gemv:
    """The kernel for one row by weights of a ``shape``, [height, in_features], in ``codes``.

    ``macros`` are those of ``gemv.cu`` that say what becomes of the results; of ``HEADS`` it is the
    size of a head. ``tiles`` are those of the sums of squares that it leaves.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        codes: CodesKind,
        cut: GemvCut,
        macros: Mapping[str, int],
    ) -> None:
        height, in_features = shape
        self.tiles = height // ROWS
        self._cluster = macros["HEADS"] // ROWS or 1
        self._threads = 32 * cut.warps
        constants = {
            **codes.macros,
            **macros,
            "SIZE": in_features,
            "WARPS": cut.warps,
            "COLUMNS": cut.columns,
            "PER_PROCESSOR": cut.per_processor,
        }
        self._kernel = CudaModule("gemv.cu", constants, device).kernel("gemv", shared_bytes=0)

    def __call__(
        self,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        *,
        squares: Tensor | None,
        bias: Tensor | None,
        pdl: bool,
        **values: Any,
    ) -> None:
        """``x`` [1, in_features], in the order of the weight's columns; ``values`` are the rest of
        the arguments, as ``linear`` has them."""
        assert x.shape[0] == 1 and x.stride(1) == 1 and codes.is_contiguous()
        assert squares is None or len(squares) <= MOST_SQUARES
        arguments = _Arguments(
            weight=address(codes),
            scales=address(scales),
            x=address(x),
            squares=address(squares),
            square_tiles=0 if squares is None else len(squares),
            bias=address(bias),
            **values,
        )
        cluster = self._cluster, 1, 1
        self._kernel.launch((self.tiles, 1, 1), self._threads, arguments, cluster=cluster, pdl=pdl)
