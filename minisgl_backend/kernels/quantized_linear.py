"""Linear layers with quantized weights of any sizes, on any GPU, and with tokens in float8.

For few rows, ``quantized_linear`` decodes the codes inside the GEMM: it reads few bytes, but
multiplies slowly. For many rows the library multiplies: tokens rounded to float8 if the weight is
float8, too (``float8_linear``), which is what its scales are for; otherwise the weight that
``dequantize_weight`` makes. On Hopper, for a ``PackedWeight``, ``cuda/linear.cu`` is faster than
either up to a certain number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.packed_weight import PLACES_OF_BYTES, PackedWeight
from minisgl_backend.kernels.quantized import FP8_MAX, QuantizedWeight, dequantized
from minisgl_backend.kernels.rms_norm import fused_add_rms_norm_reference
from minisgl_backend.weight_format import Encoding

MAX_ROWS: Final = 64
"""Up to here ``quantized_linear`` beats dequantizing the weight first."""

FLOAT8_BLOCK: Final = 128
"""Of rows and of columns that share a scale, if not all columns do."""

_ROWS_OF_SCALES: Final = 8
"""Of tokens with scales of blocks the library takes a multiple of this."""


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


def float8_rows(
    x: Tensor, group: int, *, unit: int = 1, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Numbers of 8 bits of ``x`` [num_rows, in_features], permuted as packed weights are, and their
    scales, float32 [num_rows, in_features / group] in column-major order: ``group`` neighbours
    share one; with ``group`` = in_features a row does. Up to the next multiple of ``unit`` there
    are more rows, whose contents are undefined."""
    num_rows, in_features = -(-len(x) // unit) * unit, x.shape[1]
    if not use_triton(x):
        return float8_rows_reference(F.pad(x, (0, 0, 0, num_rows - len(x))), group)
    from minisgl_backend.kernels.triton_kernels.quantized_kernels import launch_float8_rows

    scales = torch.empty((in_features // group, num_rows), dtype=torch.float32, device=x.device)
    out = torch.empty((num_rows, in_features), dtype=torch.float8_e4m3fn, device=x.device)
    launch_float8_rows(out, scales, x, group, pdl=pdl)
    return out, scales.t()


def float8_rows_reference(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The twin of ``float8_rows``."""
    groups = x.float().reshape(len(x), -1, group)  # [num_rows, columns, group]
    scales = groups.abs().amax(-1).clamp_min(1e-12) / FP8_MAX
    numbers = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    permuted = numbers.view(torch.uint8).reshape(len(x), -1, 16)[..., PLACES_OF_BYTES]
    in_columns = torch.empty_like(scales.t(), memory_format=torch.contiguous_format).t()
    return permuted.flatten(1).view(torch.float8_e4m3fn), in_columns.copy_(scales)


def add_rms_norm_float8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_add_rms_norm``, and ``float8_rows`` of its result with a scale a row: the result, its
    numbers of 8 bits, and their scales [num_rows, 1].

    ``x``, ``residual`` [num_rows, hidden_size] of one dtype, a multiple of 16 numbers a row.
    """
    if not use_triton(x):
        normed = fused_add_rms_norm_reference(x, residual, weight, eps)
        return normed, *float8_rows_reference(normed, x.shape[1])
    from minisgl_backend.kernels.triton_kernels.quantized_kernels import launch_add_rms_norm_float8

    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    launch_add_rms_norm_float8(normed, out, scales, x, residual, weight, eps, pdl=pdl)
    return normed, out, scales


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """A packed weight in float8 as the library's GEMMs take it.

    ``codes`` float8_e4m3fn [out_features, in_features], permuted. ``scales`` float32: of blocks of
    128 x 128, [ceil(in_features / 512) * 4, out_features / 128] in column-major order; or of rows,
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
        if packed.kind.group == 0:
            return cls(weight.codes, packed.scales[None], False)
        if weight.block != (FLOAT8_BLOCK, FLOAT8_BLOCK) or out_features % FLOAT8_BLOCK:
            return None
        lines, columns = weight.scales.shape
        scales = weight.scales.new_ones((lines, -(-columns // 4) * 4))
        scales[:, :columns] = weight.scales
        return cls(weight.codes, scales.t(), True)


def float8_linear(
    x: Tensor, weight: Float8Weight, bias: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """x W^T + bias with ``x`` [num_rows, in_features] rounded to 8 bits (``float8_rows``): a scale
    for 128 inputs if the weight has such blocks, else one for a row."""
    if not use_triton(x):
        return float8_linear_reference(x, weight, bias)
    unit = _ROWS_OF_SCALES if weight.in_blocks else 1
    rows, scales = float8_rows(x, weight.group, unit=unit, pdl=pdl)
    a, b = (
        (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        if weight.in_blocks
        else (ScalingType.RowWise, ScalingType.RowWise)
    )
    y = scaled_mm(rows, weight.codes.t(), scales, a, weight.scales, b, output_dtype=x.dtype)
    y = y[: len(x)]
    return y if bias is None else y.add_(bias)


def float8_linear_reference(x: Tensor, weight: Float8Weight, bias: Tensor | None = None) -> Tensor:
    """The twin of ``float8_linear``."""
    codes, scales = float8_rows_reference(x, weight.group)
    rows = codes.float() * scales.repeat_interleave(weight.group, dim=1)
    factors = weight.scales.t()  # [lines, columns]
    if weight.in_blocks:
        factors = factors.repeat_interleave(FLOAT8_BLOCK, dim=0)
        factors = factors.repeat_interleave(FLOAT8_BLOCK, dim=1)[:, : x.shape[1]]
    y = F.linear(rows, weight.codes.float() * factors, None if bias is None else bias.float())
    return y.to(x.dtype)
