"""Hyper-connections: the weighted sum of a token's streams, and the sum with a part's output. A
program has one token, or some columns of one."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_BLOCK = 512  # columns of an iteration that multiplies by the matrix
_COLUMNS = 1024  # of an iteration that sums


@triton.jit
def _read_streams(
    out_ptr,
    for_writing_ptr,
    streams_ptr,
    matrix_ptr,
    base_ptr,
    scale_ptr,
    eps,
    norm_eps,
    magnitude,
    STREAMS: tl.constexpr,
    MIXES: tl.constexpr,
    ROWS: tl.constexpr,  # MIXES as a power of two
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    is_row = row < MIXES
    is_read = row < STREAMS
    width: tl.constexpr = STREAMS * SIZE
    base = tl.load(base_ptr + row, mask=is_row, other=0.0)
    scale = tl.load(scale_ptr + tl.where(is_read, 0, 1), mask=is_row, other=0.0)
    if PDL:
        allow_next()
        wait_previous()
    own_ptr = streams_ptr + token * width
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(own_ptr + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(
            matrix_ptr + row[:, None] * width + column[None, :],
            mask=is_row[:, None] & inside[None, :],
            other=0.0,
        )
        products += weight * x[None, :]
        squares += x * x
    mixes = tl.sum(products, axis=1) * tl.rsqrt(tl.sum(squares, axis=0) / width + norm_eps)
    weights = tl.sigmoid(mixes * scale + base) * tl.where(is_read, 1.0, magnitude) + eps  # [ROWS]
    tl.store(
        for_writing_ptr + token * (MIXES - STREAMS) + row - STREAMS, weights, mask=is_row & ~is_read
    )
    for start in range(0, SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < SIZE
        total = tl.zeros([COLUMNS], tl.float32)
        for stream in tl.static_range(STREAMS):
            weight = tl.sum(tl.where(row == stream, weights, 0.0), axis=0)
            x = tl.load(own_ptr + stream * SIZE + column, mask=inside, other=0.0)
            total += weight * x.to(tl.float32)
        tl.store(out_ptr + token * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_to_streams(
    streams_ptr,
    part_ptr,
    for_writing_ptr,
    STREAMS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    if PDL:
        allow_next()
        wait_previous()
    part = tl.load(part_ptr + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    for stream in tl.static_range(STREAMS):
        weight = tl.load(for_writing_ptr + token * STREAMS + stream)
        at = streams_ptr + (token * STREAMS + stream) * SIZE + column
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32) + weight * part
        tl.store(at, x.to(streams_ptr.dtype.element_ty), mask=inside)


def launch_read_streams(
    out: Tensor,
    for_writing: Tensor,
    streams: Tensor,
    *,
    matrix: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: float,
    norm_eps: float,
    magnitude: float,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.hyper_connections.read_streams`` and ``StreamWeights``."""
    num_tokens, num_streams, hidden_size = streams.shape
    if num_tokens == 0:
        return
    num_mixes, width = matrix.shape
    assert streams.is_contiguous() and matrix.is_contiguous()
    assert width == num_streams * hidden_size
    _read_streams[(num_tokens,)](
        out,
        for_writing,
        streams,
        matrix,
        base,
        scale,
        eps,
        norm_eps,
        magnitude,
        STREAMS=num_streams,
        MIXES=num_mixes,
        ROWS=triton.next_power_of_2(num_mixes),
        SIZE=hidden_size,
        BLOCK=_BLOCK,
        COLUMNS=_COLUMNS,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )


def launch_add_to_streams(streams: Tensor, part: Tensor, for_writing: Tensor, *, pdl: bool) -> None:
    """See ``minisgl_backend.kernels.hyper_connections.add_to_streams``."""
    num_tokens, num_streams, hidden_size = streams.shape
    if num_tokens == 0:
        return
    assert streams.is_contiguous() and part.is_contiguous() and for_writing.is_contiguous()
    _add_to_streams[(num_tokens, triton.cdiv(hidden_size, _COLUMNS))](
        streams,
        part,
        for_writing,
        STREAMS=num_streams,
        SIZE=hidden_size,
        COLUMNS=_COLUMNS,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
