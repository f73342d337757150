"""Tokens in float8: rounding alone, or after RMSNorm or the gate of a feed-forward block.

A unit is 16 neighbours of a row. Its first 8 and its last 8 values alternate in memory, as in
packed weights (``_place_of_8_bits`` of ``quantized_kernels``). So a thread reads both halves, and
no values move between threads. A group shares a scale, and is made of whole units. All units of a
program are in one dimension: with two, a warp would take units that are far apart.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.quantized import FP8_MAX
from minisgl_backend.kernels.triton_kernels.layer_kernels import opened
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_BLOCK = 1024
"""Values per program, for rounding alone or after a gate."""


@triton.jit
def _first_8(unit):
    """Where the first 8 values of units are in their row, [units, 8]."""
    return unit[:, None] * 16 + tl.arange(0, 8)[None, :]


@triton.jit
def _load_both(ptr, mask):
    """The first and the last 8 values of units, in float32."""
    first = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(ptr + 8, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rounded(
    row_ptr,  # of each unit, or of all
    scale_ptr,  # of the row of each group, or of all
    scales_stride,  # of a column
    unit,
    column,
    first,
    last,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Store units in 8 bits, and the scales of their groups at ``column`` [GROUPS]. ``first`` and
    ``last`` are their values in float32, [units, 8]."""
    PER_GROUP: tl.constexpr = GROUP // 16
    UNITS: tl.constexpr = GROUPS * PER_GROUP
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(last)), axis=1)
    largest = tl.max(tl.reshape(largest, [GROUPS, PER_GROUP]), axis=1)
    largest = tl.maximum(largest, 1e-12)
    factor = tl.broadcast_to((MOST / largest)[:, None], [GROUPS, PER_GROUP])
    numbers = tl.join(last, first) * tl.reshape(factor, [UNITS])[:, None, None]
    numbers = tl.reshape(numbers, [UNITS, 16]).to(tl.float8e4nv)
    place = unit[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(row_ptr + place, numbers, mask=place < SIZE)
    tl.store(scale_ptr + column * scales_stride, largest / MOST, mask=column * GROUP < SIZE)


@triton.jit
def _row_and_column(group, num_groups, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """The rows and columns of groups, which are counted row by row. After the last group, columns
    are outside the row."""
    COLUMNS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    column = tl.where(group < num_groups, group % COLUMNS, COLUMNS)
    return (group // COLUMNS).to(tl.int64), column


@triton.jit
def _units_of_program(num_groups, SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The units of the program's groups, counted in their rows, and these rows."""
    PER_GROUP: tl.constexpr = GROUP // 16
    unit = tl.program_id(0) * (GROUPS * PER_GROUP) + tl.arange(0, GROUPS * PER_GROUP)
    row, column = _row_and_column(unit // PER_GROUP, num_groups, SIZE, GROUP)
    return row[:, None], column * PER_GROUP + unit % PER_GROUP


@triton.jit
def _groups_of_program(num_groups, SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The rows and columns of the program's groups."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    return _row_and_column(group, num_groups, SIZE, GROUP)


@triton.jit(do_not_specialize=["scales_stride", "num_groups"])
def _float8_rows(
    numbers_ptr,
    scales_ptr,
    x_ptr,
    x_stride,
    scales_stride,
    num_groups,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # values that share a scale
    GROUPS: tl.constexpr,  # of a program
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    row, unit = _units_of_program(num_groups, SIZE, GROUP, GROUPS)
    k = _first_8(unit)
    if PDL:
        allow_next()
        wait_previous()
    first, last = _load_both(x_ptr + row * x_stride + k, k < SIZE)
    group_row, column = _groups_of_program(num_groups, SIZE, GROUP, GROUPS)
    to, of_scale = numbers_ptr + row * SIZE, scales_ptr + group_row
    _store_rounded(
        to, of_scale, scales_stride, unit, column, first, last, SIZE, GROUP, GROUPS, MOST
    )


@triton.jit(do_not_specialize=["scales_stride"])
def _rms_norm_float8(
    numbers_ptr,
    scales_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_stride,
    scales_stride,
    eps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_rms_norm`` of ``layer_kernels``, then ``_float8_rows`` of its result."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, GROUPS * GROUP // 16)
    k = _first_8(unit)
    mask = k < SIZE
    first_weight, last_weight = _load_both(weight_ptr + k, mask)
    if PDL:
        allow_next()
        wait_previous()
    element = x_ptr.dtype.element_ty
    first, last = _load_both(x_ptr + row * x_stride + k, mask)
    if ADD:
        at = residual_ptr + row * SIZE + k
        first_added, last_added = _load_both(at, mask)
        first, last = (first + first_added).to(element), (last + last_added).to(element)
        tl.store(at, first, mask=mask)
        tl.store(at + 8, last, mask=mask)
        first, last = first.to(tl.float32), last.to(tl.float32)
    squares = tl.sum(tl.sum(first * first + last * last, axis=1), axis=0)
    scale = tl.rsqrt(squares / SIZE + eps)
    first = (first * scale * first_weight).to(element)
    last = (last * scale * last_weight).to(element)
    first, last = first.to(tl.float32), last.to(tl.float32)
    to, of_scale, column = numbers_ptr + row * SIZE, scales_ptr + row, tl.arange(0, GROUPS)
    _store_rounded(
        to, of_scale, scales_stride, unit, column, first, last, SIZE, GROUP, GROUPS, MOST
    )


@triton.jit(do_not_specialize=["scales_stride", "num_groups"])
def _gated_float8(
    numbers_ptr,
    scales_ptr,
    gate_up_ptr,
    stride,
    scales_stride,
    num_groups,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_gated_mul`` of ``layer_kernels``, then ``_float8_rows`` of its result."""
    row, unit = _units_of_program(num_groups, SIZE, GROUP, GROUPS)
    k = _first_8(unit)
    mask = k < SIZE
    if PDL:
        allow_next()
        wait_previous()
    at = gate_up_ptr + row * stride + k
    first_gate, last_gate = _load_both(at, mask)
    first_up, last_up = _load_both(at + SIZE, mask)
    element = gate_up_ptr.dtype.element_ty
    first = opened(first_gate, first_up, GELU).to(element).to(tl.float32)
    last = opened(last_gate, last_up, GELU).to(element).to(tl.float32)
    group_row, column = _groups_of_program(num_groups, SIZE, GROUP, GROUPS)
    to, of_scale = numbers_ptr + row * SIZE, scales_ptr + group_row
    _store_rounded(
        to, of_scale, scales_stride, unit, column, first, last, SIZE, GROUP, GROUPS, MOST
    )


def launch_float8_rows(
    numbers: Tensor, scales: Tensor, x: Tensor, group: int, *, pdl: bool
) -> None:
    """See ``minisgl_backend.kernels.float8_rows.float8_rows``."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    num_groups = num_rows * (size // group)
    group, groups = _groups(size, group, _BLOCK)
    _float8_rows[(triton.cdiv(num_groups, groups),)](
        numbers,
        scales,
        x,
        x.stride(0),
        scales.stride(1),
        num_groups,
        SIZE=size,
        GROUP=group,
        GROUPS=groups,
        MOST=FP8_MAX,
        PDL=pdl,
        num_warps=_num_warps(group * groups),
        **launch_options(pdl),
    )


def launch_rms_norm_float8(
    numbers: Tensor,
    scales: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int,
    *,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.float8_rows.rms_norm_float8``."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    assert residual is None or residual.is_contiguous()
    block = triton.next_power_of_2(size)
    group, groups = _groups(size, group, block)
    _rms_norm_float8[(num_rows,)](
        numbers,
        scales,
        x,
        residual,
        weight,
        x.stride(0),
        scales.stride(1),
        eps,
        SIZE=size,
        GROUP=group,
        GROUPS=groups,
        MOST=FP8_MAX,
        ADD=residual is not None,
        PDL=pdl,
        num_warps=_num_warps(block),
        **launch_options(pdl),
    )


def launch_gated_float8(
    numbers: Tensor, scales: Tensor, gate_up: Tensor, group: int, *, gelu: bool, pdl: bool
) -> None:
    """See ``minisgl_backend.kernels.float8_rows.gated_float8``."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    if num_rows == 0:
        return
    num_groups = num_rows * (size // group)
    group, groups = _groups(size, group, _BLOCK)
    _gated_float8[(triton.cdiv(num_groups, groups),)](
        numbers,
        scales,
        gate_up,
        gate_up.stride(0),
        scales.stride(1),
        num_groups,
        SIZE=size,
        GROUP=group,
        GROUPS=groups,
        MOST=FP8_MAX,
        GELU=gelu,
        PDL=pdl,
        num_warps=_num_warps(group * groups),
        **launch_options(pdl),
    )


def _groups(size: int, group: int, block: int) -> tuple[int, int]:
    """``GROUP``, a power of two, and ``GROUPS`` of a program that takes ``block`` values, or at
    least one group."""
    assert size % 16 == 0 and size % group == 0
    group = triton.next_power_of_2(size) if group == size else group
    return group, max(block // group, 1)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
