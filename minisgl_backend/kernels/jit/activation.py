"""silu(gate) * up: a program per token and block of columns."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.jit.pdl import allow_next, launch_options, wait_previous


@triton.jit
def _silu_mul(
    out_ptr, gate_up_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    if PDL:
        allow_next()
        wait_previous()
    row = gate_up_ptr + token * stride
    gate = tl.load(row + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_silu_mul(out: Tensor, gate_up: Tensor, *, pdl: bool) -> None:
    """``out`` [num_tokens, size] from ``gate_up`` [num_tokens, 2 * size]."""
    num_tokens, size = out.shape
    if num_tokens == 0:
        return
    block = 1024
    _silu_mul[(num_tokens, triton.cdiv(size, block))](
        out,
        gate_up,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
