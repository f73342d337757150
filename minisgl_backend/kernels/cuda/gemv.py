"""Launches ``gemv.cu``: one row times a weight, for linear layers (``linear``)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minisgl_backend.kernels.adapters import Adaptation, AdaptersShape
from minisgl_backend.kernels.cuda.heads import Heads
from minisgl_backend.kernels.cuda.module import CudaModule, address
from minisgl_backend.kernels.gemv_cut import MOST_SQUARES, ROWS, GemvCut, parts_of_a
from minisgl_backend.kernels.packed_weight import CodesKind, code_macros


class _Adapters(ctypes.Structure):
    """``Adapters`` of the source."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("slot", ctypes.c_void_p),
        ("rank", ctypes.c_void_p),
        ("a_stride", ctypes.c_uint64),
        ("b_stride", ctypes.c_uint64),
        ("columns", ctypes.c_int),
        ("max_rank", ctypes.c_int),
        ("second", ctypes.c_int),
        ("third", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("sums", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
    )


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
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
        ("adapters", _Adapters),
    )


class Gemv:
    """The kernel for one row times weights of one ``shape``, [height, in_features], in ``codes`` or
    plain.

    ``macros`` of ``gemv.cu`` say what is done with the results; ``HEADS`` is the size of a head.
    ``tiles`` is the number of tiles whose sums of squares it leaves. ``adapters``: launches may
    have an adaptation of this shape, for which there is a separate kernel.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        codes: CodesKind | None,
        cut: GemvCut,
        macros: Mapping[str, int],
        adapters: AdaptersShape | None = None,
    ) -> None:
        height, in_features = shape
        self.tiles = height // ROWS
        self._cluster = macros["HEADS"] // ROWS or 1
        self._threads = 32 * cut.warps
        constants = {
            **code_macros(codes),
            **macros,
            "SIZE": in_features,
            "WARPS": cut.warps,
            "COLUMNS": cut.columns,
            "PER_PROCESSOR": cut.per_processor,
        }
        self._kernels = {
            adapted: CudaModule("gemv.cu", {**constants, "ADAPTED": adapted}, device).kernel(
                "gemv", shared_bytes=0
            )
            for adapted in ((False,) if adapters is None else (False, True))
        }
        self._adapters = adapters
        self._blocks_of_a = 0
        if adapters is not None:
            columns, parts = adapters[1], parts_of_a(in_features, cut)
            clusters = -(-columns // ROWS * parts // self._cluster)
            self._blocks_of_a = clusters * self._cluster
            # zeros from the start, so not in the memory of a graph
            blocks = self._blocks_of_a + self.tiles
            self._sums = torch.zeros((parts, columns, 2), dtype=torch.int32, device=device)
            self._launches = torch.zeros(blocks, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        row_scales: Tensor | None,
        *,
        squares: Tensor | None,
        bias: Tensor | None,
        adaptation: Adaptation | None = None,
        x_of_a: Tensor | None = None,
        pdl: bool,
        **values: Any,
    ) -> None:
        """``x`` [1, in_features] is in the order of the weight's columns, ``x_of_a`` in that of the
        adapters' A. ``values`` are the other arguments, as in ``linear``."""
        assert x.shape[0] == 1 and x.stride(1) == 1 and codes.is_contiguous()
        assert squares is None or len(squares) <= MOST_SQUARES
        arguments = _Arguments(
            weight=address(codes),
            scales=address(scales),
            row_scales=address(row_scales),
            x=address(x),
            squares=address(squares),
            square_tiles=0 if squares is None else len(squares),
            bias=address(bias),
            **values,
        )
        grid, cluster = (self.tiles, 1, 1), (self._cluster, 1, 1)
        if adaptation is not None:
            assert x_of_a is not None and adaptation.memory.shape == self._adapters
            arguments.adapters = self._of(adaptation, x_of_a)
            grid = self._blocks_of_a + self.tiles, 1, 1
        kernel = self._kernels[adaptation is not None]
        kernel.launch(grid, self._threads, arguments, cluster=cluster, pdl=pdl)

    def _of(self, adaptation: Adaptation, x: Tensor) -> _Adapters:
        memory, tokens = adaptation.memory, adaptation.tokens
        assert memory.a.is_contiguous() and memory.b.is_contiguous() and x.stride(1) == 1
        second, third = memory.later_projections
        return _Adapters(
            a=address(memory.a),
            b=address(memory.b),
            x=address(x),
            slot=address(tokens.slots),
            rank=address(tokens.ranks),
            a_stride=memory.a.stride(0),
            b_stride=memory.b.stride(0),
            columns=memory.a.shape[1],
            max_rank=memory.b.shape[2],
            second=second,
            third=third,
            blocks=self._blocks_of_a,
            sums=address(self._sums),
            launches=address(self._launches),
        )
