"""Launches ``experts_many.cu``: grouped GEMMs of experts that have many rows each, on Hopper.

A kernel is for one shape of weights, either plain or packed in float8. The latter are multiplied by
rows that are rounded to float8 as well (``float8_rows``). Must not know how rows are routed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.gates import Gate, LimitedGate
from minisgl_backend.kernels.cuda.gates import gate_arguments, gate_macros
from minisgl_backend.kernels.cuda.module import CudaModule, TensorMap, address
from minisgl_backend.kernels.cuda.weight_maps import WeightMaps
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.expert_cut import MANY
from minisgl_backend.kernels.float8_rows import float8_rows
from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight, numbers_and_scales

_THREADS: Final = 384
"""Two warpgroups multiply, and one fills the ring."""


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
        ("row_scales", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("limit", ctypes.c_float),
    )


class ManyRowsKernel:
    """x W^T for blocks of rows, each with the W of its expert. With a ``gate`` it holds G and then
    U, and the result is gate(x G^T) * (x U^T). If it ``squares_relu``, it is relu(x W^T)^2."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        codes: CodesKind | None,
        gate: Gate | LimitedGate | None,
        squares_relu: bool = False,
    ) -> None:
        """``shape``: [num_experts, height, in_features], one that ``expert_cut.fits_many`` accepts;
        ``codes``: the kind of packed weights, one that ``CodesKind.rounds_many_rows`` accepts."""
        _, self._height, self._in_features = shape
        self._gate, self._codes = gate, codes
        self._out_features = self._height if gate is None else self._height // 2
        constants = {
            "HEIGHT": self._height,
            "SIZE": self._in_features,
            **gate_macros(gate, squares_relu=squares_relu),
            "FLOAT8": codes is not None,
            "GROUPED": codes is not None and codes.group > 0,
            "STAGES": MANY.stages,
            "SHARED_BYTES": MANY.shared_bytes,
        }
        module = CudaModule("experts_many.cu", constants, device)
        self._kernel = module.kernel("experts_many", shared_bytes=MANY.shared_bytes)
        self._num_clusters = num_processors(device) // MANY.cluster
        self._maps = WeightMaps(gated=gate is not None)

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
        """bfloat16 [num_pairs, out_features]: row p is x[p // top_k] through the expert of pair p.
        ``pairs`` and ``experts`` list the pairs in blocks of ``MANY.block``
        (``kernels.routing.Alignment``).

        The rows of x are multiplied by ``factors`` [num_pairs / top_k].
        """
        out = torch.empty((num_pairs, self._out_features), dtype=x.dtype, device=x.device)
        assert x.is_contiguous()
        numbers, scales, row_scales = numbers_and_scales(weight, self._codes)
        if self._codes is not None:
            x, factors = rounded_rows(x, factors, pdl=pdl)
        arguments = _Arguments(
            weight=self._maps(numbers, 128 // numbers.itemsize, MANY.features // MANY.cluster),
            x=address(x),
            out=address(out),
            pairs=address(pairs),
            experts=address(experts),
            factors=address(factors),
            scales=address(scales),
            row_scales=address(row_scales),
            num_pairs=num_pairs,
            num_blocks=len(experts),
            top_k=top_k,
            **gate_arguments(self._gate),
        )
        tiles = len(experts) * (self._height // MANY.features)
        grid = MANY.cluster * min(tiles, self._num_clusters), 1, 1
        self._kernel.launch(grid, _THREADS, arguments, cluster=(MANY.cluster, 1, 1), pdl=pdl)
        return out


def rounded_rows(x: Tensor, factors: Tensor | None, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """The rows of x in float8, and their factors: their scales times ``factors`` [num_rows]."""
    rows = float8_rows(x, x.shape[1], pdl=pdl)
    scales = rows.scales[: rows.num_rows, 0]
    return rows.numbers, scales if factors is None else scales * factors
