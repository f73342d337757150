"""Linear layers with quantized weights of any size, on any GPU, and with tokens in float8.

For few rows, ``quantized_linear`` decodes the codes inside the GEMM: it reads few bytes, but
multiplies slowly. For many rows the library multiplies. If the weight is float8 and its scales
allow it, tokens are rounded to float8, too (``float8_linear``); otherwise the library takes the
weight that ``dequantize_weight`` makes. On Hopper, for a ``PackedWeight``, ``cuda/linear.cu`` is
faster than either up to a certain number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.float8_rows import Float8Rows
from minisgl_backend.kernels.packed_weight import PackedWeight
from minisgl_backend.kernels.quantized import QuantizedWeight, dequantized
from minisgl_backend.weight_format import Encoding

MAX_ROWS: Final = 64
"""Up to this many rows, ``quantized_linear`` beats dequantizing the weight first."""

FLOAT8_BLOCK: Final = 128
"""The number of rows, and of columns, that share a scale, unless all columns share it."""


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, [num_rows, out_features]; rows of ``x`` [num_rows, in_features] may be
    strided."""
    if not use_triton(x):
        return quantized_linear_reference(x, weight, bias)
    from minisgl_backend.kernels.triton_kernels.quantized_kernels import launch_quantized_linear

    out = torch.empty((len(x), len(weight.codes)), dtype=x.dtype, device=x.device)
    launch_quantized_linear(out, x, weight, bias)
    return out


def quantized_linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """The twin of ``quantized_linear``."""
    y = F.linear(x.float(), dequantized(weight, torch.float32))
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """A packed weight in float8, as the library's GEMMs take it.

    ``codes`` float8_e4m3fn [out_features, in_features], permuted. ``scales`` float32: for blocks of
    128 x 128, [ceil(in_features / 512) * 4, out_features / 128] in column-major order; for rows,
    [1, out_features].
    """

    codes: Tensor
    scales: Tensor
    in_blocks: bool

    @property
    def group(self) -> int:
        """Inputs that share a scale of the tokens."""
        return FLOAT8_BLOCK if self.in_blocks else self.codes.shape[1]

    @classmethod
    def of(cls, packed: PackedWeight) -> Float8Weight | None:
        """None if the library has no GEMM for this weight."""
        weight = packed.weight
        out_features = packed.shape[0]
        if weight.encoding is not Encoding.E4M3 or packed.order is not None:
            return None
        if packed.row_scales is not None:
            return cls(weight.codes, packed.row_scales[None], False)
        if weight.block != (FLOAT8_BLOCK, FLOAT8_BLOCK) or out_features % FLOAT8_BLOCK:
            return None
        lines, columns = weight.scales.shape
        scales = weight.scales.new_ones((lines, -(-columns // 4) * 4))
        scales[:, :columns] = weight.scales
        return cls(weight.codes, scales.t(), True)


def float8_linear(
    x: Float8Rows, weight: Float8Weight, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """x W^T + bias in ``dtype``; ``x`` has scales of the weight's ``group``."""
    assert x.group == weight.group
    if not use_triton(x.numbers):
        return float8_linear_reference(x, weight, dtype, bias)
    a, b = (
        (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        if weight.in_blocks
        else (ScalingType.RowWise, ScalingType.RowWise)
    )
    y = scaled_mm(x.numbers, weight.codes.t(), x.scales, a, weight.scales, b, output_dtype=dtype)
    y = y[: x.num_rows]
    return y if bias is None else y.add_(bias)


def float8_linear_reference(
    x: Float8Rows, weight: Float8Weight, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The twin of ``float8_linear``."""
    rows = (x.numbers.float() * x.scales.repeat_interleave(x.group, dim=1))[: x.num_rows]
    factors = weight.scales.t()  # [lines, columns]
    if weight.in_blocks:
        factors = factors.repeat_interleave(FLOAT8_BLOCK, dim=0)
        factors = factors.repeat_interleave(FLOAT8_BLOCK, dim=1)[:, : rows.shape[1]]
    y = F.linear(rows, weight.codes.float() * factors, None if bias is None else bias.float())
    return y.to(dtype)
