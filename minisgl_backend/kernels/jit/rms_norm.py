"""RMSNorm: a program per token."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.jit.pdl import allow_next, launch_options, wait_previous


@triton.jit
def _rms_norm(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)  # [SIZE]
    if PDL:
        allow_next()
        wait_previous()
    x = tl.load(x_ptr + token * x_stride + i, mask=mask, other=0.0).to(tl.float32)  # [SIZE]
    if ADD:
        residual = tl.load(residual_ptr + token * SIZE + i, mask=mask, other=0.0).to(tl.float32)
        total = (x + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + token * SIZE + i, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    y = x * scale * weight
    tl.store(out_ptr + token * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm(
    out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, pdl: bool
) -> None:
    """``out`` = norm of ``x``, or of ``residual`` after ``residual += x`` where there is one."""
    num_tokens, size = x.shape
    if num_tokens == 0:
        return
    assert residual is None or residual.is_contiguous()
    block = triton.next_power_of_2(size)
    _rms_norm[(num_tokens,)](
        out,
        x,
        residual,
        weight,
        x.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 8),
        **launch_options(pdl),
    )
