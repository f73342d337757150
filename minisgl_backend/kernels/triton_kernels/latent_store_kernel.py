"""Norm and store of latents, and rotation of what is beside them: one program per token for its
latent and key, and one per token and group of heads for the queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_GROUP = 8  # heads of a program


@triton.jit
def _rotated(low, high, cos, sin):
    return low * cos - high * sin, high * cos + low * sin


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr", "scale_ptr"])
def _store_latents(
    queries_ptr,
    q_ptr,
    compressed_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    weight_ptr,
    keys_ptr,
    scale_ptr,
    queries_stride,
    queries_head_stride,
    q_stride,
    q_head_stride,
    compressed_stride,
    page_stride,
    slot_stride,
    eps,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,  # LATENT as a power of two
    TURNED: tl.constexpr,  # half of the dimensions that rotate
    PAIRS: tl.constexpr,  # TURNED as a power of two
    GROUP: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = tl.arange(0, PAIRS)
    turns = i < TURNED
    # the dimensions ``low`` and ``high`` rotate together: neighbours, or those of the two halves
    step: tl.constexpr = 2 if INTERLEAVED else 1
    gap: tl.constexpr = 1 if INTERLEAVED else TURNED
    low_at = step * i  # [PAIRS]
    if PDL:
        # attention may read older positions while this kernel runs, so all kernels before this one
        # must have ended
        wait_previous()
        allow_next()
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * TURNED)
    cos = tl.load(row_ptr + i, mask=turns, other=1.0)
    sin = tl.load(row_ptr + TURNED + i, mask=turns, other=0.0)
    if part > 0:
        head = (part - 1) * GROUP + tl.arange(0, GROUP)
        inside = (head < NUM_HEADS)[:, None] & turns[None, :]  # [GROUP, PAIRS]
        q_at = q_ptr + token * q_stride + head[:, None] * q_head_stride + low_at[None, :]
        low = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(q_at + gap, mask=inside, other=0.0).to(tl.float32)
        low, high = _rotated(low, high, cos[None, :], sin[None, :])
        heads_ptr = queries_ptr + token * queries_stride
        to_q = heads_ptr + head[:, None] * queries_head_stride + low_at[None, :]
        tl.store(to_q, low.to(queries_ptr.dtype.element_ty), mask=inside)
        tl.store(to_q + gap, high.to(queries_ptr.dtype.element_ty), mask=inside)
        return
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    d = tl.arange(0, COLUMNS)
    of_latent = d < LATENT
    latent_ptr = compressed_ptr + token * compressed_stride
    latent = tl.load(latent_ptr + d, mask=of_latent, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=of_latent, other=0.0).to(tl.float32)
    latent = latent * tl.rsqrt(tl.sum(latent * latent) / LATENT + eps) * weight
    key_ptr = latent_ptr + LATENT + low_at
    low = tl.load(key_ptr, mask=turns, other=0.0).to(tl.float32)
    high = tl.load(key_ptr + gap, mask=turns, other=0.0).to(tl.float32)
    low, high = _rotated(low, high, cos, sin)
    if FP8:
        inverse = 1.0 / tl.load(scale_ptr)
        latent = tl.clamp(latent * inverse, -448.0, 448.0)
        low = tl.clamp(low * inverse, -448.0, 448.0)
        high = tl.clamp(high * inverse, -448.0, 448.0)
    to = keys_ptr + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
    tl.store(to + d, latent.to(keys_ptr.dtype.element_ty), mask=of_latent)
    to_key = to + LATENT + low_at
    tl.store(to_key, low.to(keys_ptr.dtype.element_ty), mask=turns)
    tl.store(to_key + gap, high.to(keys_ptr.dtype.element_ty), mask=turns)


def launch_store_latents(
    queries: Tensor,
    q: Tensor,
    compressed: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    kv: PagedKV,
    *,
    norm_weight: Tensor,
    eps: float,
    interleaved: bool,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.rope_store.rope_store_latents``."""
    num_tokens, num_heads, rope_dim = q.shape
    if num_tokens == 0:
        return
    latent_dim = len(norm_weight)
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    assert cos_sin.shape[1] == rope_dim and kv.keys.shape[2:] == (1, latent_dim + rope_dim)
    assert queries.stride(2) == q.stride(2) == compressed.stride(1) == kv.keys.stride(3) == 1
    _store_latents[(num_tokens, 1 + triton.cdiv(num_heads, _GROUP))](
        queries,
        q,
        compressed,
        positions,
        slots,
        cos_sin,
        norm_weight,
        kv.keys,
        kv.k_scale,
        queries.stride(0),
        queries.stride(1),
        q.stride(0),
        q.stride(1),
        compressed.stride(0),
        kv.keys.stride(0),
        kv.keys.stride(1),
        eps,
        PAGE_SIZE=kv.keys.shape[1],
        NUM_HEADS=num_heads,
        LATENT=latent_dim,
        COLUMNS=triton.next_power_of_2(latent_dim),
        TURNED=rope_dim // 2,
        PAIRS=triton.next_power_of_2(rope_dim // 2),
        GROUP=_GROUP,
        INTERLEAVED=interleaved,
        FP8=kv.k_scale is not None,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
