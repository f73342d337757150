"""GEMMs with quantized weights, and the numbers that these weights stand for.

Codes are decoded with integer operations, so any GPU can do it. Weights are as in their checkpoint,
or permuted (``kernels.packed_weight``).
"""

from math import gcd
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.quantized import KINDS, QuantizedWeight

_COLUMNS: Final = 64
"""Outputs of a program of a GEMM."""
_BLOCK: Final = 128
"""Inputs that it takes at a time, at most."""
_LEAST_BLOCK: Final = 32
"""If fewer inputs share their scales, each number loads its own."""
_STAGES: Final = 3
"""Loads are that many steps ahead."""


@triton.jit
def _place_of_8_bits(k):
    """The byte in a permuted row that holds the code of input k."""
    quad = k % 8 // 2
    return k // 16 * 16 + 4 * quad + 2 * (k % 2) + 1 - k % 16 // 8


@triton.jit
def _place_of_4_bits(k):
    """The same for half bytes."""
    quad = k % 8 // 2
    return k // 32 * 32 + 8 * quad + 4 * (k % 2) + k % 32 // 8


@triton.jit
def _spread_code(word_ptr, which, mask):
    """One of the eight codes of E2M1 whose bits are spread over 4 bytes."""
    word = tl.load(word_ptr, mask=mask, other=0).to(tl.int64)
    for i in tl.static_range(1, 4):
        word |= tl.load(word_ptr + i, mask=mask, other=0).to(tl.int64) << 8 * i
    pair = which % 4
    at = tl.where(pair % 2 == 0, word << 3 * pair, word << 3 ^ word << 4)
    at = tl.where(pair == 3, word << 5 ^ word >> 6, at)
    at = at >> which // 4 * 16
    return (at >> 12 & 8) | (at >> 6 & 7)


@triton.jit
def _numbers(codes, KIND: tl.constexpr):
    """Codes, each in a uint8 or in half of one, as float32."""
    codes = codes.to(tl.int32)
    if KIND == 1:
        magnitude = codes & 127
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        small = magnitude.to(tl.float32) * 0.001953125  # 2^-9
        number = tl.where(magnitude < 8, small, normal)
        return tl.where(codes > 127, -number, number)
    elif KIND == 4:
        magnitude = codes & 7
        number = ((2 + magnitude % 2) << (magnitude // 2)).to(tl.float32) * 0.25
        number = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, number)
        return tl.where(codes > 7, -number, number)
    else:
        return codes.to(tl.float32)


@triton.jit
def _load_numbers(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    groups_ptr,
    row_scales_ptr,
    n,
    k,
    mask,
    width,  # bytes of a row of codes
    columns,  # of scales
    ROWS_OF_BLOCK,
    COLUMNS_OF_BLOCK,
    KIND: tl.constexpr,
    PERMUTED: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUPS: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """The numbers for outputs ``n`` and inputs ``k``, which are broadcast together, as float32."""
    row = n.to(tl.int64) * width
    if KIND <= 2:
        place = k
        if PERMUTED:
            place = _place_of_8_bits(k)
        codes = tl.load(codes_ptr + row + place, mask=mask, other=0)
    else:
        place = k
        if PERMUTED:
            place = _place_of_4_bits(k)
        if KIND == 4 and PERMUTED:
            codes = _spread_code(codes_ptr + row + place // 8 * 4, place % 8, mask)
        else:
            both = tl.load(codes_ptr + row + place // 2, mask=mask, other=0).to(tl.int32)
            codes = (both >> (place % 2 * 4)) & 15
    if GROUPS:
        column = tl.load(groups_ptr + k, mask=mask & (k >= 0), other=0)
    else:
        column = k // COLUMNS_OF_BLOCK
    at = n // ROWS_OF_BLOCK * columns + column
    numbers, of_row = _numbers(codes, KIND), n + 0 * k
    return _scaled(
        numbers, at, of_row, mask, scales_ptr, zeros_ptr, row_scales_ptr, KIND, ZEROS, OF_ROWS
    )


@triton.jit
def _scaled(
    numbers,
    at,
    of_row,
    mask,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    """``numbers`` less their zeros, times their scales, which are ``at`` these places; ``of_row``
    are their outputs. All are broadcast together."""
    if OF_ROWS:
        scale = _numbers(tl.load(scales_ptr + at, mask=mask, other=0), 1)
    elif KIND == 4:
        exponents = tl.load(scales_ptr + at, mask=mask, other=127).to(tl.int32)
        scale = tl.exp2((exponents - 127).to(tl.float32))
    else:
        scale = tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ZEROS:
        numbers -= tl.load(zeros_ptr + at, mask=mask, other=0).to(tl.float32)
    elif KIND == 2:
        numbers -= 128
    elif KIND == 3:
        numbers -= 8
    numbers *= scale
    if OF_ROWS:
        numbers *= tl.load(row_scales_ptr + of_row, mask=mask, other=0.0)
    return numbers


@triton.jit
def _load_run(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    n,  # [COLUMNS, 1]
    start,
    has_output,  # [COLUMNS, 1]
    width,
    columns,
    ROWS_OF_BLOCK: tl.constexpr,
    COLUMNS_OF_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for the inputs from ``start`` to ``start`` + BLOCK, which share their scales:
    [COLUMNS, BLOCK]. Not permuted. Undefined beyond the last input."""
    row = codes_ptr + n.to(tl.int64) * width
    if KIND <= 2:
        byte = start + tl.arange(0, BLOCK)[None, :]
        codes = tl.load(row + byte, mask=has_output & (byte < width), other=0)
    else:
        byte = start // 2 + tl.arange(0, BLOCK // 2)[None, :]
        both = tl.load(row + byte, mask=has_output & (byte < width), other=0)
        codes = tl.interleave(both & 15, both >> 4)
    at = n // ROWS_OF_BLOCK * columns + start // COLUMNS_OF_BLOCK
    return _scaled(
        _numbers(codes, KIND),
        at,
        n,
        has_output,
        scales_ptr,
        zeros_ptr,
        row_scales_ptr,
        KIND,
        ZEROS,
        OF_ROWS,
    )


@triton.jit
def _dequantize(
    out_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    groups_ptr,
    row_scales_ptr,
    size,
    width,
    columns,
    ROWS_OF_BLOCK,
    COLUMNS_OF_BLOCK,
    KIND: tl.constexpr,
    PERMUTED: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUPS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < size
    numbers = _load_numbers(
        codes_ptr,
        scales_ptr,
        zeros_ptr,
        groups_ptr,
        row_scales_ptr,
        n,
        k,
        mask,
        width,
        columns,
        ROWS_OF_BLOCK,
        COLUMNS_OF_BLOCK,
        KIND,
        PERMUTED,
        ZEROS,
        GROUPS,
        OF_ROWS,
    )
    to = out_ptr + n.to(tl.int64) * size + k
    tl.store(to, numbers.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_linear(
    out_ptr,
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    groups_ptr,
    row_scales_ptr,
    bias_ptr,
    x_stride,
    num_rows,
    out_features,
    size,
    width,
    columns,
    ROWS_OF_BLOCK: tl.constexpr,
    COLUMNS_OF_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUPS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x_at = x_ptr + m[:, None].to(tl.int64) * x_stride
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    has_output = (n < out_features)[:, None]
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK)
        if not GROUPS and COLUMNS_OF_BLOCK % BLOCK == 0:
            weight = _load_run(
                codes_ptr,
                scales_ptr,
                zeros_ptr,
                row_scales_ptr,
                n[:, None],
                start,
                has_output,
                width,
                columns,
                ROWS_OF_BLOCK,
                COLUMNS_OF_BLOCK,
                KIND,
                ZEROS,
                OF_ROWS,
                BLOCK,
            )  # [COLUMNS, BLOCK]
        else:
            weight = _load_numbers(
                codes_ptr,
                scales_ptr,
                zeros_ptr,
                groups_ptr,
                row_scales_ptr,
                n[:, None],
                k[None, :],
                has_output & (k < size)[None, :],
                width,
                columns,
                ROWS_OF_BLOCK,
                COLUMNS_OF_BLOCK,
                KIND,
                False,
                ZEROS,
                GROUPS,
                OF_ROWS,
            )
        x = tl.load(
            x_at + k[None, :], mask=(m < num_rows)[:, None] & (k < size)[None, :], other=0.0
        )
        acc = tl.dot(weight.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < out_features, other=0.0).to(tl.float32)[:, None]
    to = out_ptr + m[None, :].to(tl.int64) * out_features + n[:, None]
    mask = (m < num_rows)[None, :] & (n < out_features)[:, None]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _as_numbers(scales: Tensor) -> Tensor:
    """``scales``, with 8-bit floats as bytes: only some GPUs have these as a type."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales


def launch_dequantize(out: Tensor, weight: QuantizedWeight, *, packed: bool) -> None:
    """See ``minisgl_backend.kernels.packed_weight.dequantize_weight``."""
    (out_features, size), block = out.shape, 1024
    _dequantize[(out_features, triton.cdiv(size, block))](
        out,
        weight.codes.view(torch.uint8),
        _as_numbers(weight.scales),
        weight.zeros,
        weight.groups,
        weight.row_scales,
        size,
        weight.codes.shape[1],
        weight.scales.shape[1],
        *weight.block,
        KIND=KINDS[weight.encoding],
        PERMUTED=packed,
        ZEROS=weight.zeros is not None,
        GROUPS=weight.groups is not None,
        OF_ROWS=weight.row_scales is not None,
        BLOCK=block,
    )


def launch_quantized_linear(
    out: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None
) -> None:
    """See ``minisgl_backend.kernels.quantized_linear.quantized_linear``."""
    num_rows, out_features = out.shape
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    columns = _COLUMNS
    block = gcd(weight.block[1], _BLOCK)  # inputs that share their scales, if these are enough
    _quantized_linear[(triton.cdiv(out_features, columns), triton.cdiv(num_rows, rows))](
        out,
        x,
        weight.codes.view(torch.uint8),
        _as_numbers(weight.scales),
        weight.zeros,
        weight.groups,
        weight.row_scales,
        bias,
        x.stride(0),
        num_rows,
        out_features,
        x.shape[1],
        weight.codes.shape[1],
        weight.scales.shape[1],
        *weight.block,
        KIND=KINDS[weight.encoding],
        ZEROS=weight.zeros is not None,
        GROUPS=weight.groups is not None,
        OF_ROWS=weight.row_scales is not None,
        BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
        BLOCK=block if block >= _LEAST_BLOCK else _BLOCK,
        STAGES=_STAGES,
        num_warps=4,
    )
