"""GEMMs that give a row the same bits, however many rows there are.

On Hopper's tensor cores an instruction adds 16 products to an element's float32 sum, and gives the
same bits whatever the shape of its tile. So an element's sum is the same in all kernels that take
in_features in order, 16 at a time and without splitting them: the kernels of ``linear.cu`` without
splits, and ``triton_kernels.invariant_linear_kernel``, which is faster if there are many rows.
Which kernel computes a GEMM, and with which tiles, may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.linear import LinearKernel
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.linear_cut import ANY_BATCH, MAX_TOKENS, invariant_cuts
from minisgl_backend.kernels.triton_kernels.invariant_linear_kernel import launch_invariant_linear

_ROWS: Final = 128
_COLUMNS: Final = 256
"""Columns of the Triton kernel's tiles."""


class InvariantLinear:
    """x W^T in bfloat16, for weights of one ``shape``, [out_features, in_features], that
    ``linear_cut.why_not_invariant`` does not reject."""

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self._out_features = shape[0]
        self._least_tiles = num_processors(device)
        cuts = invariant_cuts(*shape)
        self._kernel = LinearKernel(shape, device, most_tokens=ANY_BATCH, cuts=cuts)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """x W^T + bias, [num_rows, out_features], in ``out`` if that is given; rows of ``x``
        [num_rows, in_features] may be strided."""
        tiles = -(-len(x) // _ROWS) * -(-self._out_features // _COLUMNS)
        if len(x) <= MAX_TOKENS or tiles < self._least_tiles:
            return self._kernel(x, weight, bias=bias, out=out, pdl=pdl)
        if out is None:
            out = torch.empty((len(x), self._out_features), dtype=x.dtype, device=x.device)
        launch_invariant_linear(
            out,
            x,
            weight,
            bias,
            rows=_ROWS,
            columns=_COLUMNS,
            block=64,
            stages=4,
            num_warps=8,
            pdl=pdl,
        )
        return out


class InvariantKernels:
    """Makes the kernels of a model's matrices, one for each shape."""

    def __init__(self, device: torch.device) -> None:
        self.linear = cache(partial(InvariantLinear, device=device))
