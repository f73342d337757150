"""Weight streaming for small batches: one program per block of output features.

There are two forms. ``_vector`` multiplies and adds without tensor cores, which has the least
overhead for one row. ``_matrix`` uses tensor cores with the weight as the left operand, so that
only the batch is padded (to 8 columns). It cuts in_features among the warps, since a block of 16
output features is the tile of only one warp.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.layer_kernels import opened
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


@triton.jit
def _vector(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    squares_ptr,
    out_features,
    eps,
    SIZE: tl.constexpr,  # in_features
    ROWS: tl.constexpr,  # output features of a program
    BLOCK: tl.constexpr,  # in_features of an iteration; the first one is loaded before the wait
    NORM: tl.constexpr,
    SQUARES: tl.constexpr,  # tiles of them, 0 if there are none
    SQUARES_PADDED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    in_rows = r[:, None] < out_features
    at = weight_ptr + r[:, None].to(tl.int64) * SIZE + k[None, :]
    up_offset = out_features.to(tl.int64) * SIZE
    w = tl.load(at, mask=in_rows & (k[None, :] < SIZE), other=0.0, eviction_policy="evict_first")
    if GATED:
        u = tl.load(
            at + up_offset,
            mask=in_rows & (k[None, :] < SIZE),
            other=0.0,
            eviction_policy="evict_first",
        )
    if NORM:
        norm = tl.load(norm_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
    if PDL:
        allow_next()
        wait_previous()
    if SQUARES > 0:
        tile = tl.arange(0, SQUARES_PADDED)
        of_tiles = tl.load(squares_ptr + tile, mask=tile < SQUARES, other=0.0)
    square = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        inside = start + k < SIZE
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        if start > 0:
            mask = in_rows & inside[None, :]
            w = tl.load(at + start, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                u = tl.load(
                    at + up_offset + start, mask=mask, other=0.0, eviction_policy="evict_first"
                )
            if NORM:
                norm = tl.load(norm_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            square += x * x
            x = x * norm
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += u.to(tl.float32) * x[None, :]
    y = tl.sum(acc, axis=1)  # [ROWS]
    up = tl.sum(acc_up, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(square, axis=0) / SIZE + eps)
        y = y * scale
        up = up * scale
    if SQUARES > 0:
        scale = tl.rsqrt(tl.sum(of_tiles, axis=0) / SIZE + eps)
        y = y * scale
        up = up * scale
    inside_rows = r < out_features
    if BIAS:
        y += tl.load(bias_ptr + r, mask=inside_rows, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            up_bias = tl.load(bias_ptr + out_features + r, mask=inside_rows, other=0.0)
            up += up_bias.to(tl.float32)
        y = opened(y, up, GELU)
    if ADD:
        y += tl.load(out_ptr + r, mask=inside_rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + r, y.to(out_ptr.dtype.element_ty), mask=inside_rows)


@triton.jit(do_not_specialize=["batch_size"])
def _matrix(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    x_stride,
    batch_size,
    out_features,
    eps,
    BATCH: tl.constexpr,  # columns to which the batch is padded
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # in_features of a warp's slice in an iteration
    SLICES: tl.constexpr,  # warps
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.arange(0, SLICES)
    k = tl.arange(0, BLOCK)
    b = tl.arange(0, BATCH)
    in_rows = (r < out_features)[None, :, None]
    in_batch = (b < batch_size)[None, None, :]
    # an iteration covers SLICES * BLOCK in_features in a row, slice after slice
    w_at = (
        weight_ptr
        + r[None, :, None].to(tl.int64) * SIZE
        + (s[:, None, None] * BLOCK + k[None, None, :])
    )  # [SLICES, ROWS, BLOCK]
    within = s[:, None] * BLOCK + k[None, :]  # [SLICES, BLOCK]
    x_at = x_ptr + within[:, :, None] + b[None, None, :] * x_stride  # [SLICES, BLOCK, BATCH]
    up_offset = out_features.to(tl.int64) * SIZE
    acc = tl.zeros([SLICES, ROWS, BATCH], tl.float32)
    acc_up = tl.zeros([SLICES, ROWS, BATCH], tl.float32)
    square = tl.zeros([BATCH], tl.float32)
    if PDL:
        allow_next()
        wait_previous()
    for start in tl.range(0, SIZE, SLICES * BLOCK, num_stages=STAGES):
        inside = start + within < SIZE
        mask = in_rows & inside[:, None, :]
        w = tl.load(w_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + start, mask=in_batch & inside[:, :, None], other=0.0)
        if NORM:
            norm = tl.load(norm_ptr + start + within, mask=inside, other=0.0).to(tl.float32)
            wide = x.to(tl.float32)
            square += tl.sum(tl.sum(wide * wide, axis=1), axis=0)
            x = (wide * norm[:, :, None]).to(x_ptr.dtype.element_ty)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            u = tl.load(
                w_at + up_offset + start, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            acc_up = tl.dot(u, x, acc_up, input_precision="ieee")
    y = tl.sum(acc, axis=0)  # [ROWS, BATCH]
    if NORM:
        scale = tl.rsqrt(square / SIZE + eps)
        y = y * scale[None, :]
    r_mask = r < out_features
    if BIAS:
        y += tl.load(bias_ptr + r, mask=r_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up = tl.sum(acc_up, axis=0)
        if NORM:
            up = up * scale[None, :]
        if BIAS:
            up += tl.load(bias_ptr + out_features + r, mask=r_mask, other=0.0).to(tl.float32)[
                :, None
            ]
        y = opened(y, up, GELU)
    to = out_ptr + b[None, :] * out_features + r[:, None]
    mask = r_mask[:, None] & (b < batch_size)[None, :]
    if ADD:
        y += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=mask)


_MOST_OF_VECTOR: Final = 8192
_FEW_OUT_FEATURES: Final = 3072
"""One row takes ``_vector`` if the weight has at most the first number of in_features or the second
one of out_features, as ``_matrix`` would have too few programs. On an H200 the 2,560 x 10,240
numbers of a layer of Gemma 4 E4B take 18 us with it and 31 us with ``_matrix``."""


def _cut_of_vector(size: int, *, gated: bool, normalizes: bool) -> tuple[int, int]:
    """Output features and warps of a program of ``_vector``."""
    if size <= 2048:
        return 2 if normalizes else 4, 4
    return (4, 2 if normalizes else 4) if gated else (2, 2)


def launch_small_batch_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    squares: Tensor | None = None,
    eps: float,
    gated: bool,
    gelu: bool,
    add: bool,
    pdl: bool,
) -> None:
    """``out`` [batch_size, out_features].

    The kernel, and its rows, block, warps and stages, were the fastest, or within 3 % of it, on an
    H200 for the shapes of Qwen3-0.6B and Qwen3-14B.
    """
    batch_size, size = x.shape
    out_features = out.shape[1]
    assert weight.is_contiguous() and out.is_contiguous() and x.stride(1) == 1
    num_squares = 0 if squares is None else len(squares)
    assert not num_squares or (batch_size == 1 and size <= _MOST_OF_VECTOR and norm_weight is None)
    if batch_size == 1 and (size <= _MOST_OF_VECTOR or out_features <= _FEW_OUT_FEATURES):
        rows, num_warps = _cut_of_vector(size, gated=gated, normalizes=norm_weight is not None)
        _vector[(triton.cdiv(out_features, rows),)](
            out,
            x,
            weight,
            bias,
            norm_weight,
            squares,
            out_features,
            eps,
            SIZE=size,
            ROWS=rows,
            BLOCK=min(triton.next_power_of_2(size), 1024),
            NORM=norm_weight is not None,
            SQUARES=num_squares,
            SQUARES_PADDED=triton.next_power_of_2(max(num_squares, 1)),
            GATED=gated,
            GELU=gelu,
            ADD=add,
            BIAS=bias is not None,
            PDL=pdl,
            num_warps=num_warps,
            **launch_options(pdl),
        )
        return
    # each program normalizes x itself, which pays only with more rows per program; if there are few
    # programs, each should have more of a row in flight
    rows = 32 if norm_weight is not None and not (gated and size > 2048) else 16
    num_warps = 4
    _matrix[(triton.cdiv(out_features, rows),)](
        out,
        x,
        weight,
        bias,
        norm_weight,
        x.stride(0),
        batch_size,
        out_features,
        eps,
        BATCH=8,
        SIZE=size,
        ROWS=rows,
        BLOCK=128 if out_features <= 2048 else 64,
        SLICES=num_warps,
        NORM=norm_weight is not None,
        GATED=gated,
        GELU=gelu,
        ADD=add,
        BIAS=bias is not None,
        STAGES=4,
        PDL=pdl,
        num_warps=num_warps,
        **launch_options(pdl),
    )
