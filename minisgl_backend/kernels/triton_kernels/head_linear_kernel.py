"""One matrix for each head, for few tokens: a program has some outputs of a head for all of them,
and reads each weight once."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_TILE = 16 * 1024  # weights of a program


@triton.jit(do_not_specialize=["num_tokens"])
def _head_linear(
    out_ptr,
    x_ptr,
    weight_ptr,
    num_tokens,
    out_stride,
    out_head_stride,
    x_stride,
    x_head_stride,
    weight_head_stride,
    weight_out_stride,
    weight_in_stride,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    IN_COLUMNS: tl.constexpr,  # INS as a power of two
    TOKENS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,  # outputs of a program
    PDL: tl.constexpr,
):
    head = tl.program_id(1)
    t = tl.arange(0, TOKENS)
    k = tl.arange(0, IN_COLUMNS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if PDL:
        allow_next()
    of_head = weight_ptr + head * weight_head_stride
    weight = tl.load(  # [IN_COLUMNS, COLUMNS]
        of_head + k[:, None] * weight_in_stride + c[None, :] * weight_out_stride,
        mask=(k < INS)[:, None] & (c < OUTS)[None, :],
        other=0.0,
    )
    if PDL:
        wait_previous()
    there = (t < num_tokens)[:, None]
    x = tl.load(  # [TOKENS, IN_COLUMNS]
        x_ptr + t[:, None] * x_stride + head * x_head_stride + k[None, :],
        mask=there & (k < INS)[None, :],
        other=0.0,
    )
    out = tl.dot(x, weight, input_precision="ieee")
    to = out_ptr + t[:, None] * out_stride + head * out_head_stride + c[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=there & (c < OUTS)[None, :])


def launch_head_linear(out: Tensor, x: Tensor, weight: Tensor, *, pdl: bool) -> None:
    """See ``minisgl_backend.kernels.head_linear.head_linear``."""
    (num_tokens, num_heads, in_features), out_features = x.shape, out.shape[2]
    if num_tokens == 0:
        return
    assert out.stride(2) == x.stride(2) == 1
    in_columns = max(16, triton.next_power_of_2(in_features))
    columns = max(16, min(_TILE // in_columns, triton.next_power_of_2(out_features)))
    _head_linear[(triton.cdiv(out_features, columns), num_heads)](
        out,
        x,
        weight,
        num_tokens,
        out.stride(0),
        out.stride(1),
        x.stride(0),
        x.stride(1),
        *(weight.stride(dim) for dim in (0, 1, 2)),
        OUTS=out_features,
        INS=in_features,
        IN_COLUMNS=in_columns,
        TOKENS=max(16, triton.next_power_of_2(num_tokens)),
        COLUMNS=columns,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
