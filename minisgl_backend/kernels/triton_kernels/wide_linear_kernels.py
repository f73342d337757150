"""GEMMs of 9 to a few hundred rows: tiles of output features, optionally cut along in_features.

The weight is read once, by as many programs as there are multiprocessors. If the output alone has
too few tiles, programs share a tile and leave float32 parts, which the next kernel adds up.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.layer_kernels import opened
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


@triton.jit(do_not_specialize=["num_rows"])
def _wide_linear(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_stride,
    num_rows,
    out_features,
    SIZE: tl.constexpr,  # in_features
    ROWS: tl.constexpr,  # of x, in a tile
    COLUMNS: tl.constexpr,  # output features of a tile
    BLOCK: tl.constexpr,  # in_features of an iteration
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,  # whether the weight is the left operand
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    PER_SPLIT: tl.constexpr = SIZE // SPLITS
    k = split * PER_SPLIT + tl.arange(0, BLOCK)
    x_at = x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :]  # [ROWS, BLOCK]
    w_at = weight_ptr + n[:, None].to(tl.int64) * SIZE + k[None, :]  # [COLUMNS, BLOCK]
    up_offset = out_features.to(tl.int64) * SIZE
    in_rows = (m < num_rows)[:, None]
    if SWAP:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        acc_up = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PDL:
        allow_next()
        wait_previous()
    for start in tl.range(0, PER_SPLIT, BLOCK, num_stages=STAGES):
        w = tl.load(w_at + start)
        x = tl.load(x_at + start, mask=in_rows, other=0.0)
        if SWAP:  # noqa: SIM108  (known when compiled)
            acc = tl.dot(w, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(w), acc)
        if GATED:
            u = tl.load(w_at + up_offset + start)
            if SWAP:  # noqa: SIM108
                acc_up = tl.dot(u, tl.trans(x), acc_up)
            else:
                acc_up = tl.dot(x, tl.trans(u), acc_up)
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    if BIAS:
        acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias_ptr + out_features + n).to(tl.float32)[None, :]
    if GATED:
        acc = opened(acc, acc_up, GELU)
    to = out_ptr + (split * num_rows + m[:, None]).to(tl.int64) * out_features + n[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=in_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_parts(
    out_ptr,
    parts_ptr,
    bias_ptr,
    residual_ptr,
    weight_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)  # [SIZE]
    if PDL:
        allow_next()
        wait_previous()
    total = tl.load(residual_ptr + row * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    x = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        x += tl.load(parts_ptr + (split * num_rows + row) * SIZE + i, mask=mask, other=0.0)
    if BIAS:
        x += tl.load(bias_ptr + i, mask=mask, other=0.0).to(tl.float32)
    kept = (total + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + row * SIZE + i, kept, mask=mask)
    x = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + i, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def launch_wide_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    gelu: bool,
    splits: int,
    rows: int,
    columns: int,
    block: int,
    swap: bool,
    stages: int,
    num_warps: int,
    pdl: bool,
) -> None:
    """``out`` [num_rows, out_features], or float32 [splits, num_rows, out_features]."""
    num_rows, size = x.shape
    out_features = out.shape[-1]
    assert out_features % columns == 0 and size % (splits * block) == 0
    grid = (out_features // columns, triton.cdiv(num_rows, rows), splits)
    _wide_linear[grid](
        out,
        x,
        weight,
        bias,
        x.stride(0),
        num_rows,
        out_features,
        SIZE=size,
        ROWS=rows,
        COLUMNS=columns,
        BLOCK=block,
        SPLITS=splits,
        SWAP=swap,
        GATED=gated,
        GELU=gelu,
        BIAS=bias is not None,
        STAGES=stages,
        PDL=pdl,
        num_warps=num_warps,
        **launch_options(pdl),
    )


def launch_add_rms_norm_parts(
    out: Tensor,
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.wide_linear.add_rms_norm_parts``."""
    splits, num_rows, size = parts.shape
    block = triton.next_power_of_2(size)
    _add_rms_norm_parts[(num_rows,)](
        out,
        parts,
        bias,
        residual,
        weight,
        num_rows,
        eps,
        SIZE=size,
        BLOCK=block,
        SPLITS=splits,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 8),
        **launch_options(pdl),
    )
