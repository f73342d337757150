"""The small kernels of a layer: RMSNorm, alone and around residual adds, the gates of feed-forward
blocks and of attention, and the gather of embeddings. They have one program per token, or per token
and block of columns."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.gates import LimitedGate, PlainActivation
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


@triton.jit
def _under_norm(x, weight, eps, SIZE: tl.constexpr):
    """``x`` [SIZE] in float32 under a norm of this weight; both are 0 beyond their end."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight.to(tl.float32)


@triton.jit
def _rms_norm(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_stride,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0)  # [SIZE]
    if PDL:
        allow_next()
        wait_previous()
    x = tl.load(x_ptr + token * x_stride + i, mask=mask, other=0.0).to(tl.float32)  # [SIZE]
    if ADD:
        residual = tl.load(residual_ptr + token * SIZE + i, mask=mask, other=0.0).to(tl.float32)
        total = (x + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + token * SIZE + i, total, mask=mask)
        x = total.to(tl.float32)
    if CENTERED:
        x = tl.where(mask, x - tl.sum(x, axis=0) / SIZE, 0.0)
    y = _under_norm(x, weight, eps, SIZE)
    if BIASED:
        y += tl.load(bias_ptr + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_stride + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    centered: bool,
    bias: Tensor | None,
    pdl: bool,
) -> None:
    """``out`` = norm of ``x``, or of ``residual`` after ``residual += x`` if there is one;
    ``centered`` and ``bias`` as in ``minisgl_backend.kernels.rms_norm``."""
    num_tokens, size = x.shape
    if num_tokens == 0:
        return
    assert x.stride(1) == 1 and out.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    block = triton.next_power_of_2(size)
    _rms_norm[(num_tokens,)](
        out,
        x,
        residual,
        weight,
        bias,
        out.stride(0),
        x.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        CENTERED=centered,
        BIASED=bias is not None,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 8),
        **launch_options(pdl),
    )


@triton.jit
def _rms_norm_add(
    out_ptr,  # [NORMS, num_tokens, SIZE]
    x_ptr,
    beside_ptr,
    residual_ptr,
    x_weight_ptr,
    beside_weight_ptr,
    after_ptr,
    factor_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    eps,
    norms_eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BESIDE: tl.constexpr,
    FACTOR: tl.constexpr,
    NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    token, num_tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    at = token * SIZE + i
    after = tl.load(after_ptr + i, mask=mask, other=0.0)  # [SIZE]
    if BESIDE:
        x_weight = tl.load(x_weight_ptr + i, mask=mask, other=0.0)
        beside_weight = tl.load(beside_weight_ptr + i, mask=mask, other=0.0)
    if NORMS > 0:
        first = tl.load(first_ptr + i, mask=mask, other=0.0)
    if NORMS > 1:
        second = tl.load(second_ptr + i, mask=mask, other=0.0)
    if NORMS > 2:
        third = tl.load(third_ptr + i, mask=mask, other=0.0)
    if PDL:
        allow_next()
        wait_previous()
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if BESIDE:
        beside = tl.load(beside_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = _under_norm(x, x_weight, eps, SIZE) + _under_norm(beside, beside_weight, eps, SIZE)
    total = residual + _under_norm(x, after, eps, SIZE)
    if FACTOR:
        total *= tl.load(factor_ptr).to(tl.float32)
    kept = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + at, kept, mask=mask)
    x = kept.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + norms_eps)
    to, apart = out_ptr + at, num_tokens * SIZE
    if NORMS > 0:
        tl.store(to, (x * first.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=mask)
    if NORMS > 1:
        y = x * second.to(tl.float32)
        tl.store(to + apart, y.to(out_ptr.dtype.element_ty), mask=mask)
    if NORMS > 2:
        y = x * third.to(tl.float32)
        tl.store(to + 2 * apart, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm_add(
    out: Tensor,
    x: Tensor,
    residual: Tensor,
    after: Tensor,
    eps: float,
    *,
    norms: Sequence[Tensor],
    norms_eps: float,
    beside: tuple[Tensor, Tensor, Tensor] | None,
    factor: Tensor | None,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.rms_norm.fused_rms_norm_add``; ``out`` [len(norms), num_tokens,
    hidden_size]."""
    num_tokens, size = x.shape
    if num_tokens == 0:
        return
    other, x_weight, other_weight = beside or (None, None, None)
    assert x.is_contiguous() and residual.is_contiguous() and len(norms) <= 3
    assert other is None or other.is_contiguous()
    block = triton.next_power_of_2(size)
    _rms_norm_add[(num_tokens,)](
        out,
        x,
        other,
        residual,
        x_weight,
        other_weight,
        after,
        factor,
        *norms,
        *[None] * (3 - len(norms)),
        eps,
        norms_eps,
        SIZE=size,
        BLOCK=block,
        BESIDE=beside is not None,
        FACTOR=factor is not None,
        NORMS=len(norms),
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(pdl),
    )


@triton.jit
def opened(gate, up, GELU: tl.constexpr):
    """SiLU, or GELU by tanh, of ``gate`` times ``up``, both in float32."""
    at = gate
    if GELU:  # (1 + tanh(x)) / 2 = sigmoid(2 x)
        at = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate * tl.sigmoid(at) * up


@triton.jit
def limited(gate, up, LIMIT: tl.constexpr, ON_INPUT: tl.constexpr):
    """SiLU of ``gate``, at most ``LIMIT``, or of the gate that is, times ``up`` within ``LIMIT`` of
    0, both in float32."""
    if ON_INPUT:
        gate = tl.minimum(gate, LIMIT)
    at_most = gate * tl.sigmoid(gate)
    if not ON_INPUT:
        at_most = tl.minimum(at_most, LIMIT)
    return at_most * tl.minimum(tl.maximum(up, -LIMIT), LIMIT)


@triton.jit
def _gated_mul(
    out_ptr,
    gate_ptr,
    up_ptr,
    gate_stride,
    up_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,  # of a limited gate, or None
    ON_INPUT: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    if PDL:
        allow_next()
        wait_previous()
    gate = tl.load(gate_ptr + token * gate_stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * up_stride + i, mask=mask, other=0.0).to(tl.float32)
    y = opened(gate, up, GELU) if LIMIT is None else limited(gate, up, LIMIT, ON_INPUT)
    tl.store(out_ptr + token * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_gated_mul(
    out: Tensor, gate: Tensor, up: Tensor, *, gelu: bool, limited: LimitedGate | None, pdl: bool
) -> None:
    """See ``minisgl_backend.kernels.activation.gate_mul``; silu unless ``gelu``, perhaps
    ``limited``."""
    num_tokens, size = out.shape
    if num_tokens == 0:
        return
    assert gate.stride(1) == 1 and up.stride(1) == 1
    block = 1024
    _gated_mul[(num_tokens, triton.cdiv(size, block))](
        out,
        gate,
        up,
        gate.stride(0),
        up.stride(0),
        SIZE=size,
        BLOCK=block,
        GELU=gelu,
        LIMIT=None if limited is None else limited.limit,
        ON_INPUT=limited is not None and limited.on_input,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit(do_not_specialize=["size"])
def _activate(out_ptr, x_ptr, size, FUNCTION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        allow_next()
        wait_previous()
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    if FUNCTION == "gelu":
        y = opened(x, 1.0, True)
    elif FUNCTION == "exact gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = tl.maximum(x, 0.0)
        if FUNCTION == "relu2":
            y = y * y
    tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=i < size)


def launch_activate(out: Tensor, x: Tensor, function: PlainActivation, *, pdl: bool) -> None:
    """See ``minisgl_backend.kernels.activation.activate``."""
    size = x.numel()
    if size == 0:
        return
    assert x.is_contiguous() and out.is_contiguous()
    block = 1024
    grid = (triton.cdiv(size, block),)
    _activate[grid](
        out, x, size, FUNCTION=function, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl)
    )


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _expm1_below_0(x):
    """exp(x) - 1 for x up to 0, near 0 by its series, which loses no digits there."""
    near = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    return tl.where(x > -0.5, near, tl.exp(x) - 1.0)


@triton.jit(do_not_specialize=["size"])
def _xielu(out_ptr, x_ptr, numbers_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    above = _softplus(tl.load(numbers_ptr).to(tl.float32))
    below = _softplus(tl.load(numbers_ptr + 1).to(tl.float32))
    beta = tl.load(numbers_ptr + 2).to(tl.float32)
    eps = tl.load(numbers_ptr + 3).to(tl.float32)
    if PDL:
        allow_next()
        wait_previous()
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    curve = (_expm1_below_0(tl.minimum(x, eps)) - x) * (beta + below)
    y = tl.where(x > 0, above * x * x, curve) + beta * x
    tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=i < size)


def launch_xielu(out: Tensor, x: Tensor, numbers: Tensor, *, pdl: bool) -> None:
    """See ``minisgl_backend.kernels.activation.xielu``."""
    size = x.numel()
    if size == 0:
        return
    assert x.is_contiguous() and out.is_contiguous() and numbers.is_contiguous()
    block = 1024
    grid = (triton.cdiv(size, block),)
    _xielu[grid](out, x, numbers, size, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl))


@triton.jit
def _soft_cap(x_ptr, x_stride, size, cap, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * x_stride + i
    x = tl.load(at, mask=i < size, other=0.0).to(tl.float32)
    y = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh(x) = 2 sigmoid(2 x) - 1
    tl.store(at, y.to(x_ptr.dtype.element_ty), mask=i < size)


def launch_soft_cap(x: Tensor, cap: float) -> None:
    """See ``minisgl_backend.kernels.activation.soft_cap``."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    assert x.stride(1) == 1
    block = 4096
    grid = num_rows, triton.cdiv(size, block)
    _soft_cap[grid](x, x.stride(0), size, cap, BLOCK=block, num_warps=8)


@triton.jit
def _gate_output(
    out_ptr,
    x_ptr,
    gate_ptr,
    token_stride,
    head_stride,
    GATE_STRIDE: tl.constexpr,  # 0: one gate for a head
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFTPLUS: tl.constexpr,
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
    at = gate_ptr + token * token_stride + i // HEAD_DIM * head_stride
    gate = tl.load(at + i % HEAD_DIM * GATE_STRIDE, mask=mask, other=0.0).to(tl.float32)
    y = x * (_softplus(gate) if SOFTPLUS else tl.sigmoid(gate))
    tl.store(out_ptr + token * SIZE + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_gate_output(out: Tensor, x: Tensor, gate: Tensor, *, softplus: bool, pdl: bool) -> None:
    """See ``minisgl_backend.kernels.activation.gate_output``; a sigmoid unless ``softplus``."""
    num_tokens, size = out.shape
    if num_tokens == 0:
        return
    assert x.is_contiguous() and gate.stride(2) in (0, 1)
    block = 1024
    _gate_output[(num_tokens, triton.cdiv(size, block))](
        out,
        x,
        gate,
        gate.stride(0),
        gate.stride(1),
        GATE_STRIDE=gate.stride(2),
        SIZE=size,
        HEAD_DIM=x.shape[2],
        SOFTPLUS=softplus,
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
