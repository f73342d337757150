"""Launches ``experts_many.cu``: grouped GEMMs of experts that have many rows each, on Hopper.

A kernel is for one shape of weights: plain ones, or packed ones in float8, which multiply rows that
are rounded to float8 as well (``float8_rows``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.module import (
    CudaModule,
    TensorMap,
    address,
    tensor_map,
)
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.expert_cut import MANY, ManyCut
from minisgl_backend.kernels.linear_cut import CODES_BLOCK
from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight
from minisgl_backend.kernels.quantized_linear import float8_rows
from minisgl_backend.weight_format import Encoding

_THREADS: Final = 384
"""Two warpgroups that multiply, and one that fills the ring."""

_LEAST_IN_FEATURES: Final = 3 * CODES_BLOCK
"""A tile has at least as many steps that its ring does not hold two tiles."""

_ROWS_OF_SCALE: Final = 8
"""As many rows of a weight, or a multiple, share the scale of 128 in_features."""


class _Arguments(ctypes.Structure):
    """``Arguments`` of ``experts_many.cu``."""

    _fields_ = (
        ("weight", TensorMap),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("padding", ctypes.c_uint8 * 4),  # to the alignment of the map
    )


def takes_many(shape: Sequence[int], codes: CodesKind | None) -> bool:
    """Whether there is a kernel for weights [num_experts, height, in_features], plain ones or with
    these ``codes``."""
    _, height, in_features = shape
    if codes is not None:
        in_blocks = codes.group == CODES_BLOCK and codes.shared_by == _ROWS_OF_SCALE
        if codes.encoding is not Encoding.E4M3 or not (in_blocks or codes.group == 0):
            return False
    fits = height % MANY.features == 0 and in_features % CODES_BLOCK == 0
    return fits and in_features >= _LEAST_IN_FEATURES


class ManyRowsKernel:
    """x W^T of blocks of rows, each with the W of its expert; or silu(x G^T) * (x U^T) for a
    ``gated`` weight, which holds G and then U."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        codes: CodesKind | None,
        gated: bool,
        cut: ManyCut = MANY,
    ) -> None:
        """``shape``: [num_experts, height, in_features]; ``codes``: of packed weights; such as
        ``takes_many`` says."""
        _, self._height, self._in_features = shape
        self._gated, self._codes, self.cut = gated, codes, cut
        self.out_features = self._height // 2 if gated else self._height
        constants = {
            "HEIGHT": self._height,
            "SIZE": self._in_features,
            "GATED": gated,
            "FLOAT8": codes is not None,
            "GROUPED": codes is not None and codes.group > 0,
            "CLUSTER": cut.cluster,
            "STAGES": cut.stages,
            "GRAIN": cut.grain,
            "SKEW": cut.skew,
            "SHARED_BYTES": cut.shared_bytes,
        }
        module = CudaModule("experts_many.cu", constants, device)
        self._kernel = module.kernel("experts_many", shared_bytes=cut.shared_bytes)
        self._num_clusters = num_processors(device) // cut.cluster
        self._maps: dict[int, TensorMap] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        pairs: Tensor,
        experts: Tensor,
        num_pairs: int,
        *,
        top_k: int,
        factors: Tensor | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """bfloat16 [num_pairs, out_features]: row p is x[p // top_k] through the expert of pair p,
        which ``pairs`` and ``experts`` tell in blocks of ``cut.block`` (``kernels.moe.Alignment``).

        ``factors`` [num_pairs / top_k] multiply the rows of x.
        """
        out = torch.empty((num_pairs, self.out_features), dtype=x.dtype, device=x.device)
        assert x.is_contiguous()
        scales, numbers = None, weight
        if isinstance(weight, PackedWeight):
            assert weight.kind == self._codes
            scales, numbers = weight.scales, weight.weight.codes
            x, of_rows = float8_rows(x, self._in_features, pdl=pdl)
            of_rows = of_rows[:, 0]
            factors = of_rows if factors is None else of_rows * factors
        assert isinstance(numbers, Tensor)
        arguments = _Arguments(
            weight=self._weight_map(numbers),
            x=address(x),
            out=address(out),
            pairs=address(pairs),
            experts=address(experts),
            factors=address(factors),
            scales=address(scales),
            num_pairs=num_pairs,
            num_blocks=len(experts),
            top_k=top_k,
        )
        tiles, cluster = len(experts) * (self._height // self.cut.features), self.cut.cluster
        grid = cluster * min(tiles, self._num_clusters), 1, 1
        self._kernel.launch(grid, _THREADS, arguments, cluster=(cluster, 1, 1), pdl=pdl)
        return out

    def _weight_map(self, weight: Tensor) -> TensorMap:
        """The tensor map of a weight; cached, since weights do not move while the model lives."""
        key = weight.data_ptr()
        if key not in self._maps:
            assert weight.is_contiguous()
            codes = weight if self._codes is None else weight.view(torch.uint8)
            num_experts, height, size = codes.shape
            box, rows = 128 // codes.itemsize, self.cut.features // self.cut.cluster
            if self._gated:
                outs = height // 2
                shape = [size, 8, 2, outs // 8, num_experts]
                strides = [size, outs * size, 8 * size, height * size]
                boxes = [box, 8, 2, rows // 16, 1]
            else:
                shape, strides = [size, height, num_experts], [size, height * size]
                boxes = [box, rows, 1]
            self._maps[key] = tensor_map(codes, shape, strides, boxes)
        return self._maps[key]
