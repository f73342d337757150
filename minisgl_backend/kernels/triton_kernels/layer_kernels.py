"""The small kernels of a layer: RMSNorm, the gates of feed-forward blocks and of attention, and the
gather of embeddings. They have one program per token, or per token and block of columns."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


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
    """``out`` = norm of ``x``, or of ``residual`` after ``residual += x`` if there is one."""
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


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """SiLU, or GELU by tanh, of ``gate`` times ``up``, both in float32."""
    at = gate
    if GELU:  # (1 + tanh(x)) / 2 = sigmoid(2 x)
        at = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate * tl.sigmoid(at) * up


@triton.jit
def _gated_mul(
    out_ptr,
    gate_up_ptr,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
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
    y = gated(gate, up, GELU)
    tl.store(out_ptr + token * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_gated_mul(out: Tensor, gate_up: Tensor, *, gelu: bool = False, pdl: bool) -> None:
    """``out`` [num_tokens, size] from ``gate_up`` [num_tokens, 2 * size]; silu unless ``gelu``."""
    num_tokens, size = out.shape
    if num_tokens == 0:
        return
    block = 1024
    _gated_mul[(num_tokens, triton.cdiv(size, block))](
        out,
        gate_up,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
        GELU=gelu,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit
def _sigmoid_mul(
    out_ptr,
    x_ptr,
    gate_ptr,
    token_stride,
    head_stride,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    if PDL:
        allow_next()
        wait_previous()
    x = tl.load(x_ptr + token * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    at = gate_ptr + token * token_stride + i // HEAD_DIM * head_stride + i % HEAD_DIM
    y = x * tl.sigmoid(tl.load(at, mask=mask, other=0.0).to(tl.float32))
    tl.store(out_ptr + token * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_sigmoid_mul(out: Tensor, x: Tensor, gate: Tensor, *, pdl: bool) -> None:
    """See ``minisgl_backend.kernels.activation.sigmoid_mul``."""
    num_tokens, size = out.shape
    if num_tokens == 0:
        return
    assert x.is_contiguous() and gate.stride(2) == 1
    block = 1024
    _sigmoid_mul[(num_tokens, triton.cdiv(size, block))](
        out,
        x,
        gate,
        gate.stride(0),
        gate.stride(1),
        SIZE=size,
        HEAD_DIM=x.shape[2],
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit
def _embedding(
    out_ptr,
    ids_ptr,
    weight_ptr,
    start,
    num_ids,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(ids_ptr + token).to(tl.int64) - start
    held = (index >= 0) & (index < num_ids)
    i = tl.arange(0, BLOCK)
    row = tl.load(weight_ptr + index * SIZE + i, mask=(i < SIZE) & held, other=0.0)
    tl.store(out_ptr + token * SIZE + i, row, mask=i < SIZE)


def launch_embedding(out: Tensor, token_ids: Tensor, weight: Tensor, start: int) -> None:
    """``out`` [num_tokens, size] from ``weight`` [num_ids, size]."""
    num_ids, size = weight.shape
    if len(token_ids) == 0:
        return
    assert weight.is_contiguous()
    block = triton.next_power_of_2(size)
    _embedding[(len(token_ids),)](
        out,
        token_ids,
        weight,
        start,
        num_ids,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )
