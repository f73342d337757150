"""Kimi Delta Attention for prompts: what does not depend on earlier states, for blocks of tokens.

``gated_delta_blocks`` has the other kernels, and names dimensions. Each dimension of a key decays
by itself. So what token n reads of token m's key is a sum over dimensions of

    q[n] k[m] exp(g[n] - g[m])

with g the logs of the decays since the block began. A GEMM of q exp(g) and k exp(-g) would give it,
but exp(-g) may be infinite. So rows are computed in parts of 16. With r the first row of a part,
exp(g[n] - g[r]) and, for m < r, exp(g[r] - g[m]) are at most 1, and all columns before the part are
one GEMM. The columns of the part itself are computed one by one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.chunk_runs import BLOCK
from minisgl_backend.kernels.triton_kernels.gated_delta_blocks import (
    EPS,
    SolvedBlocks,
    empty_blocks,
    inverse,
    log_decay,
    precision_of,
)


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "a_ptr", "b_ptr"])
def _solve_kimi_blocks(
    queries_ptr,
    keys_ptr,
    owed_ptr,
    within_ptr,
    written_ptr,
    decays_ptr,
    systems_ptr,
    exchanged_ptr,
    channels_ptr,
    a_ptr,
    b_ptr,
    log_rates_ptr,
    bias_ptr,
    blocks_ptr,
    channels_stride,
    a_stride,
    b_stride,
    scale,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    TOKENS: tl.constexpr,
    RATE_SCALE: tl.constexpr,
    LEAST: tl.constexpr,  # log of a decay, or None
    SYSTEM_KIND: tl.constexpr,  # of the operands that invert the system
    PRECISION: tl.constexpr,
):
    """For a block and a head, with S the state before the block:

    queries    [TOKENS, KP], of unit length, times the scale, decayed since the block began
    keys       [TOKENS, KP], of unit length, decayed until the block ends
    decays     [TOKENS, KP], logs, since the block began
    within     [TOKENS, TOKENS], how much a token reads of each token's correction
    written    [TOKENS, VP], the corrections if S were zero
    owed       [TOKENS, KP], which times S is to be subtracted from these
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    if begin >= end:
        return
    n, i, j = tl.arange(0, TOKENS), tl.arange(0, KP), tl.arange(0, VP)
    t = (begin + n).to(tl.int64)
    inside = t < end
    in_keys = inside[:, None] & (i < K)[None, :]
    kind = channels_ptr.dtype.element_ty
    base = block * HEADS + head
    queries_ptr += base * (TOKENS * KP)
    keys_ptr += base * (TOKENS * KP)
    decays_ptr += base * (TOKENS * KP)
    within_ptr += base * (TOKENS * TOKENS)
    systems_ptr += base * (TOKENS * TOKENS)
    tile = n[:, None] * KP + i[None, :]
    square = n[:, None] * TOKENS + n[None, :]

    # first queries and keys are kept as they are, so that parts of them can be read
    from_ptr = channels_ptr + t[:, None] * channels_stride + head * K + i[None, :]
    q = tl.load(from_ptr, mask=in_keys, other=0.0).to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + EPS) * scale)[:, None]
    tl.store(queries_ptr + tile, q.to(kind))
    k = tl.load(from_ptr + HEADS * K, mask=in_keys, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + EPS)[:, None]
    tl.store(keys_ptr + tile, k.to(kind))
    of_head = head * K + i
    a = tl.load(a_ptr + t[:, None] * a_stride + of_head[None, :], mask=in_keys, other=0.0)
    bias = tl.load(bias_ptr + of_head, mask=i < K, other=0.0)
    g = log_decay(a, tl.load(log_rates_ptr + head), bias[None, :], LEAST)
    tl.store(decays_ptr + tile, tl.cumsum(tl.where(in_keys, g, 0.0), axis=0))
    tl.debug_barrier()

    for part in tl.range(0, TOKENS, 16, num_stages=1):
        row = part + tl.arange(0, 16)
        rows = row[:, None] * KP + i[None, :]
        q_rows = tl.load(queries_ptr + rows).to(tl.float32)
        k_rows = tl.load(keys_ptr + rows).to(tl.float32)
        g_rows = tl.load(decays_ptr + rows)
        first = tl.load(decays_ptr + part * KP + i)[None, :]
        before = (n < part)[:, None]
        left = first - tl.load(decays_ptr + tile, mask=before, other=0.0)
        old = tl.load(keys_ptr + tile, mask=before, other=0.0).to(tl.float32)
        old *= tl.exp(tl.minimum(left, 0.0))  # only columns before the part count
        since = tl.exp(g_rows - first)
        read = tl.dot(q_rows * since, tl.trans(old), input_precision=PRECISION)  # [16, TOKENS]
        alike = tl.dot(k_rows * since, tl.trans(old), input_precision=PRECISION)
        for column in tl.range(part, part + 16, num_stages=1):
            lost = g_rows - tl.load(decays_ptr + column * KP + i)[None, :]
            key = tl.load(keys_ptr + column * KP + i).to(tl.float32)[None, :]
            key = key * tl.exp(tl.minimum(lost, 0.0))  # [16, KP]
            here = (n == column)[None, :]
            read = tl.where(here, tl.sum(q_rows * key, axis=1)[:, None], read)
            alike = tl.where(here, tl.sum(k_rows * key, axis=1)[:, None], alike)
        to = row[:, None] * TOKENS + n[None, :]
        read = tl.where(row[:, None] >= n[None, :], read, 0.0)
        tl.store(within_ptr + to, read.to(kind))
        tl.store(systems_ptr + to, tl.where(row[:, None] > n[None, :], alike, 0.0))
    tl.debug_barrier()

    b = tl.load(b_ptr + t * b_stride + head, mask=inside, other=0.0)
    rate = tl.where(inside, tl.sigmoid(b.to(tl.float32)) * RATE_SCALE, 0.0)
    system = tl.load(systems_ptr + square) * rate[:, None]
    inverted = inverse(system, exchanged_ptr + base * (TOKENS * 16), SYSTEM_KIND, PRECISION)
    of_tokens = (inverted * rate[None, :]).to(kind)
    v_at = 2 * HEADS * K + head * V + j[None, :]
    in_values = inside[:, None] & (j < V)[None, :]
    v = tl.load(channels_ptr + t[:, None] * channels_stride + v_at, mask=in_values, other=0.0)
    written = tl.dot(of_tokens, v, input_precision=PRECISION)
    tl.store(written_ptr + (base * TOKENS + n[:, None]) * VP + j[None, :], written.to(kind))
    g = tl.load(decays_ptr + tile)
    k = tl.load(keys_ptr + tile).to(tl.float32)
    owed = tl.dot(of_tokens, (k * tl.exp(g)).to(kind), input_precision=PRECISION)
    tl.store(owed_ptr + base * (TOKENS * KP) + tile, owed.to(kind))
    whole = tl.load(decays_ptr + (TOKENS - 1) * KP + i)[None, :]  # over the block
    tl.store(keys_ptr + tile, (k * tl.exp(whole - g)).to(kind))
    q = tl.load(queries_ptr + tile).to(tl.float32)
    tl.store(queries_ptr + tile, (q * tl.exp(g)).to(kind))


def solve_kimi_blocks(
    channels: Tensor,
    a: Tensor,
    b: Tensor,
    rates: tuple[Tensor, Tensor],
    blocks: Tensor,
    shape: tuple[int, int, int, int],
    *,
    rate_scale: float,
    least_decay: float | None,
) -> SolvedBlocks:
    """As ``gated_delta_blocks.solve_blocks``, with ``a`` [num_tokens, num_heads, key_dim] and
    biases [num_heads, key_dim]."""
    num_key_heads, num_heads, key_dim, value_dim = shape
    assert num_key_heads == num_heads and rates[1].is_contiguous()
    assert a.stride(2) == b.stride(1) == channels.stride(1) == 1 and a.stride(1) == key_dim
    solved = empty_blocks(channels, len(blocks), shape, by_dimension=True)
    of_block = len(blocks), num_heads, BLOCK
    systems, exchanged = (
        torch.empty((*of_block, width), dtype=torch.float32, device=channels.device)
        for width in (BLOCK, 16)
    )
    precision, system_kind = precision_of(channels.dtype)
    _solve_kimi_blocks[(len(blocks), num_heads)](
        *solved,
        systems,
        exchanged,
        channels,
        a,
        b,
        *rates,
        blocks,
        channels.stride(0),
        a.stride(0),
        b.stride(0),
        key_dim**-0.5,
        HEADS=num_heads,
        K=key_dim,
        V=value_dim,
        KP=solved.keys.shape[3],
        VP=solved.written.shape[3],
        TOKENS=BLOCK,
        RATE_SCALE=rate_scale,
        LEAST=least_decay,
        SYSTEM_KIND=system_kind,
        PRECISION=precision,
        num_warps=4,
    )
    return solved
