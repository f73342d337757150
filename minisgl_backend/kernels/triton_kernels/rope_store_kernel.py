"""qk-norm, RoPE and KV store: one program per token and group of heads of one kind (q, k or v)."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


@triton.jit
def _partner(d, TURNED: tl.constexpr):
    """The dimension that each dimension ``d`` of a head rotates with, or ``d`` if it does not
    rotate."""
    other = tl.where(d < TURNED, d + TURNED, d - TURNED)
    return tl.where(d < 2 * TURNED, other, d)


@triton.jit
def _angle(row_ptr, d, TURNED: tl.constexpr):
    """The factors of each dimension ``d`` and of its partner, from a row of the table."""
    rotates = d < 2 * TURNED
    angle = tl.where(d < TURNED, d, d - TURNED)
    cos = tl.load(row_ptr + angle, mask=rotates, other=1.0)
    sin = tl.load(row_ptr + TURNED + angle, mask=rotates, other=0.0)
    return cos, tl.where(d < TURNED, -sin, sin)


@triton.jit(
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr", "k_scale_ptr", "v_scale_ptr"]
)
def _qk_norm_rope_store(
    out_ptr,
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    qkv_stride,
    page_stride,
    slot_stride,
    head_stride,
    eps,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    COLUMNS: tl.constexpr,  # HALF as a power of two
    TURNED: tl.constexpr,  # half of the dimensions that rotate
    GROUP: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    GATED: tl.constexpr,  # each query is followed by the gate of what it reads, which stays there
    KEYS_ARE_VALUES: tl.constexpr,  # before they are normalized and rotated
    NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,  # after the rotation
    VALUE_NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    head = first + tl.arange(0, GROUP)
    i = tl.arange(0, COLUMNS)
    inside = i < HALF
    in_tile = inside[None, :]
    # which dimensions are ``low`` and ``high`` here: the halves, or those that rotate together
    step: tl.constexpr = 2 if INTERLEAVED else 1
    gap: tl.constexpr = 1 if INTERLEAVED else HALF
    d = step * i  # [COLUMNS]
    is_q = first < NUM_HEADS
    is_v = first >= NUM_HEADS + NUM_KV_HEADS
    place = head  # of its numbers
    if GATED:
        place += tl.where(is_q, head, NUM_HEADS)
    if KEYS_ARE_VALUES:
        place -= tl.where(is_v, NUM_KV_HEADS, 0)
    heads_ptr = qkv_ptr + token * qkv_stride + place[:, None] * (2 * HALF)
    if PDL:
        # attention may read older positions while this kernel runs, so all kernels before this one
        # must have ended
        wait_previous()
        allow_next()
    low = tl.load(heads_ptr + d[None, :], mask=in_tile, other=0.0).to(
        tl.float32
    )  # [GROUP, COLUMNS]
    high = tl.load(heads_ptr + gap + d[None, :], mask=in_tile, other=0.0).to(tl.float32)
    if not is_v:
        if NORM:
            weight_ptr = q_weight_ptr
            if NUM_KV_HEADS > 0:
                weight_ptr = q_weight_ptr if is_q else k_weight_ptr
            weight_low = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
            weight_high = tl.load(weight_ptr + gap + d, mask=inside, other=0.0).to(tl.float32)
            if not NORM_LAST:
                square = tl.sum(low * low + high * high, axis=1) / (2 * HALF)  # [GROUP]
                scale = tl.rsqrt(square + eps)[:, None]
                low = low * scale * weight_low[None, :]
                high = high * scale * weight_high[None, :]
        position = tl.load(positions_ptr + token).to(tl.int64)
        row_ptr = cos_sin_ptr + position * (2 * TURNED)
        if INTERLEAVED or TURNED == HALF:
            turns = i < TURNED
            cos = tl.load(row_ptr + i, mask=turns, other=1.0)[None, :]
            sin = tl.load(row_ptr + TURNED + i, mask=turns, other=0.0)[None, :]
            rotated = low * cos - high * sin
            high = high * cos + low * sin
            low = rotated
        else:
            # the dimensions that rotate together are not the two halves: load them anew
            last = tl.minimum(i, HALF - 1)  # columns after it are not stored
            low_from, high_from = _partner(last, TURNED), _partner(HALF + last, TURNED)
            low_other = tl.load(heads_ptr + low_from[None, :]).to(tl.float32)
            high_other = tl.load(heads_ptr + high_from[None, :]).to(tl.float32)
            if NORM and not NORM_LAST:
                low_other *= scale * tl.load(weight_ptr + low_from).to(tl.float32)[None, :]
                high_other *= scale * tl.load(weight_ptr + high_from).to(tl.float32)[None, :]
            low_cos, low_sin = _angle(row_ptr, last, TURNED)
            high_cos, high_sin = _angle(row_ptr, HALF + last, TURNED)
            low = low * low_cos[None, :] + low_other * low_sin[None, :]
            high = high * high_cos[None, :] + high_other * high_sin[None, :]
        if NORM and NORM_LAST:
            turned = tl.where(in_tile, low * low + high * high, 0.0)
            scale = tl.rsqrt(tl.sum(turned, axis=1) / (2 * HALF) + eps)[:, None]
            low = low * scale * weight_low[None, :]
            high = high * scale * weight_high[None, :]
    elif VALUE_NORM:
        square = tl.sum(low * low + high * high, axis=1) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        low = low * scale
        high = high * scale
    if is_q:
        to_q = out_ptr + (token * NUM_HEADS + head[:, None]) * (2 * HALF) + d[None, :]
        tl.store(to_q, low.to(out_ptr.dtype.element_ty), mask=in_tile)
        tl.store(to_q + gap, high.to(out_ptr.dtype.element_ty), mask=in_tile)
    elif NUM_KV_HEADS > 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            cache_ptr = v_cache_ptr if is_v else k_cache_ptr
            if FP8:
                inverse = 1.0 / tl.load(v_scale_ptr if is_v else k_scale_ptr)
                low = tl.clamp(low * inverse, -448.0, 448.0)
                high = tl.clamp(high * inverse, -448.0, 448.0)
            kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
            base = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
            to = cache_ptr + base + kv_head[:, None] * head_stride + d[None, :]
            tl.store(to, low.to(k_cache_ptr.dtype.element_ty), mask=in_tile)
            tl.store(to + gap, high.to(k_cache_ptr.dtype.element_ty), mask=in_tile)


def launch_qk_norm_rope_store(
    out: Tensor,
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    kv: PagedKV | None,
    *,
    gated: bool = False,
    value_norm: bool = False,
    keys_are_values: bool = False,
    q_weight: Tensor | None,
    k_weight: Tensor | None = None,
    norm_last: bool = False,
    eps: float,
    interleaved: bool,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.rope_store.qk_norm_rope_store``; ``out`` gets the queries.
    Without ``kv``, ``qkv`` has only queries."""
    num_tokens, num_heads, head_dim = out.shape
    if num_tokens == 0:
        return
    page_size, num_kv_heads = 1, 0
    stored: tuple[Tensor | None, ...] = (None, None, None, None)
    strides: tuple[int, ...] = (0, 0, 0)
    if kv is not None:
        _, page_size, num_kv_heads, _ = kv.keys.shape
        assert kv.keys.stride() == kv.values.stride() and kv.keys.stride(3) == 1
        stored = kv.keys, kv.values, kv.k_scale, kv.v_scale
        strides = kv.keys.stride()[:3]
    assert out.is_contiguous() and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    # a group must not mix kinds, so its size divides the heads of each; wide heads would spill
    group = math.gcd(math.gcd(num_heads, num_kv_heads), 4 if head_dim <= 256 else 2)
    _qk_norm_rope_store[(num_tokens, (num_heads + 2 * num_kv_heads) // group)](
        out,
        qkv,
        positions,
        slots,
        cos_sin,
        q_weight,
        k_weight,
        *stored,
        qkv.stride(0),
        *strides,
        eps,
        PAGE_SIZE=page_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        COLUMNS=triton.next_power_of_2(head_dim // 2),
        TURNED=cos_sin.shape[1] // 2,
        GROUP=group,
        INTERLEAVED=interleaved,
        GATED=gated,
        KEYS_ARE_VALUES=keys_are_values,
        NORM=q_weight is not None,
        NORM_LAST=norm_last,
        VALUE_NORM=value_norm,
        FP8=kv is not None and kv.k_scale is not None,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
