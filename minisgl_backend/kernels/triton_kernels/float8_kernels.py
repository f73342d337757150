"""Tokens in float8: rounding alone, and behind RMSNorm or the gate of a feed-forward block.

Of each 16 values of a row the first and the last 8 take turns in memory, as in packed weights
(``_place_of_8_bits`` of ``quantized_kernels``). So a thread reads both, and no values change
threads.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.quantized import FP8_MAX
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_BLOCK = 2048
"""Values of a program that rounds alone or behind a gate."""


@triton.jit
def _groups_of_program(num_groups, SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Rows and columns of the groups of a program, counted row by row: [GROUPS]. Behind the last
    one columns are outside."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    COLUMNS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    column = tl.where(group < num_groups, group % COLUMNS, COLUMNS)
    return (group // COLUMNS).to(tl.int64), column


@triton.jit
def _first_8(column, GROUP: tl.constexpr):
    """Where in a row the first 8 of each 16 values of groups are, [GROUPS, GROUP / 16, 8]."""
    unit = column[:, None] * (GROUP // 16) + tl.arange(0, GROUP // 16)[None, :]
    return unit[:, :, None] * 16 + tl.arange(0, 8)[None, None, :]


@triton.jit
def _load_both(ptr, mask):
    """The first and the last 8 of each 16 values, in float32."""
    first = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(ptr + 8, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rounded(
    numbers_ptr,
    scales_ptr,
    scales_stride,  # of a column
    row,
    column,
    first,
    last,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Store the values of groups, at ``row`` and ``column`` [GROUPS], in 8 bits, and their scales:
    of each 16 the ``first`` and the ``last`` 8, float32 [GROUPS, GROUP / 16, 8]."""
    largest = tl.max(tl.max(tl.maximum(tl.abs(first), tl.abs(last)), axis=2), axis=1)
    largest = tl.maximum(largest, 1e-12)
    numbers = tl.join(last, first) * (MOST / largest)[:, None, None, None]
    numbers = tl.reshape(numbers, [GROUPS, GROUP // 16, 16])
    unit = column[:, None] * (GROUP // 16) + tl.arange(0, GROUP // 16)[None, :]
    place = unit[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    to = numbers_ptr + (row * SIZE)[:, None, None] + place
    tl.store(to, numbers.to(numbers_ptr.dtype.element_ty), mask=place < SIZE)
    to = scales_ptr + column * scales_stride + row
    tl.store(to, largest / MOST, mask=column * GROUP < SIZE)


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
    row, column = _groups_of_program(num_groups, SIZE, GROUP, GROUPS)
    k = _first_8(column, GROUP)
    if PDL:
        allow_next()
        wait_previous()
    first, last = _load_both(x_ptr + (row * x_stride)[:, None, None] + k, k < SIZE)
    store_rounded(
        numbers_ptr, scales_ptr, scales_stride, row, column, first, last, SIZE, GROUP, GROUPS, MOST
    )


@triton.jit(do_not_specialize=["scales_stride"])
def _rms_norm_float8(
    numbers_ptr,
    scales_ptr,
    normed_ptr,
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
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_rms_norm`` of ``layer_kernels``, and ``_float8_rows`` of its result."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)
    k = _first_8(column, GROUP)
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
    squares = tl.sum(tl.sum(tl.sum(first * first + last * last, axis=2), axis=1), axis=0)
    scale = tl.rsqrt(squares / SIZE + eps)
    first = (first * scale * first_weight).to(element)
    last = (last * scale * last_weight).to(element)
    if PLAIN:
        to = normed_ptr + row * SIZE + k
        tl.store(to, first, mask=mask)
        tl.store(to + 8, last, mask=mask)
    first, last = first.to(tl.float32), last.to(tl.float32)
    row += tl.zeros([GROUPS], tl.int64)
    store_rounded(
        numbers_ptr, scales_ptr, scales_stride, row, column, first, last, SIZE, GROUP, GROUPS, MOST
    )


@triton.jit
def _gated(gate, up, GELU: tl.constexpr):
    at = gate
    if GELU:  # (1 + tanh(x)) / 2 = sigmoid(2 x)
        at = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate * tl.sigmoid(at) * up


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
    """``_gated_mul`` of ``layer_kernels``, and ``_float8_rows`` of its result."""
    row, column = _groups_of_program(num_groups, SIZE, GROUP, GROUPS)
    k = _first_8(column, GROUP)
    mask = k < SIZE
    if PDL:
        allow_next()
        wait_previous()
    at = gate_up_ptr + (row * stride)[:, None, None] + k
    first_gate, last_gate = _load_both(at, mask)
    first_up, last_up = _load_both(at + SIZE, mask)
    element = gate_up_ptr.dtype.element_ty
    first = _gated(first_gate, first_up, GELU).to(element).to(tl.float32)
    last = _gated(last_gate, last_up, GELU).to(element).to(tl.float32)
    store_rounded(
        numbers_ptr, scales_ptr, scales_stride, row, column, first, last, SIZE, GROUP, GROUPS, MOST
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
    normed: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int,
    *,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.float8_rows.rms_norm_float8``; ``normed`` is there if that
    shall be ``plain``."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    assert residual is None or residual.is_contiguous()
    block = triton.next_power_of_2(size)
    group, groups = _groups(size, group, block)
    _rms_norm_float8[(num_rows,)](
        numbers,
        scales,
        normed,
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
        PLAIN=normed is not None,
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


def padded_group(size: int, group: int) -> int:
    """``GROUP`` of a kernel over rows of ``size`` values: a power of two."""
    assert size % 16 == 0 and size % group == 0
    return triton.next_power_of_2(size) if group == size else group


def _groups(size: int, group: int, block: int) -> tuple[int, int]:
    """``GROUP`` and ``GROUPS`` of a program that takes ``block`` values, or at least a group."""
    group = padded_group(size, group)
    return group, max(block // group, 1)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
