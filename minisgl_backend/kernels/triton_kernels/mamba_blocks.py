"""Mamba 2 for prompts: blocks of tokens, in three launches after the convolution:

    _score_blocks     for each block and group, the products C B^T
    _chain_blocks     the states, from block to block, and what the tokens read
    _gated_norm       the gate and the norm of the output; and where updates of rows that may be
                      pending begin, which all programs of a run have read by then

Blocks and runs may be padding (``kernels.chunk_runs``, which has their columns), whose programs end
at once. So one CUDA graph serves steps with different numbers of rows.

Names of dimensions: P of a head, N of a state, padded to a power of two (NP).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.chunk_runs import BLOCK
from minisgl_backend.kernels.dispatch import shared_bytes
from minisgl_backend.kernels.shared_memory import most_bytes
from minisgl_backend.kernels.triton_kernels.pending_updates import RUN, places_after, with_pending
from minisgl_backend.kernels.triton_kernels.recurrent_math import between, silu, stored
from minisgl_backend.plan import WHOLE_EVERY


@triton.jit
def step_of(raw, bias, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """The step of a token: softplus, within limits; ``HIGHEST`` None means that there is none."""
    raw = raw.to(tl.float32) + bias.to(tl.float32)
    e = tl.exp(-tl.abs(raw))
    # the sum would lose the last bits of a small e
    step = tl.maximum(raw, 0.0) + tl.where(e < 1e-3, e - 0.5 * e * e, tl.log(1.0 + e))
    step = tl.maximum(step, LOWEST)
    if HIGHEST is not None:
        step = tl.minimum(step, HIGHEST)
    return step


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr"])
def _score_blocks(
    scores_ptr,
    channels_ptr,
    blocks_ptr,
    channels_stride,
    GROUPS: tl.constexpr,
    INNER: tl.constexpr,  # values of all heads
    N: tl.constexpr,
    NP: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """scores [TOKENS, TOKENS]: the row's C times the column's B."""
    block, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    if begin >= end:
        return
    i, n = tl.arange(0, TOKENS), tl.arange(0, NP)
    t = (begin + i).to(tl.int64)
    mask = (t < end)[:, None] & (n < N)[None, :]
    at = channels_ptr + t[:, None] * channels_stride + (INNER + group * N) + n[None, :]
    b = tl.load(at, mask=mask, other=0.0)
    c = tl.load(at + GROUPS * N, mask=mask, other=0.0)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    to = ((block * GROUPS + group) * TOKENS + i[:, None]) * TOKENS + i[None, :]
    tl.store(scores_ptr + to, scores.to(scores_ptr.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr", "steps_ptr"])
def _chain_blocks(
    out_ptr,
    states_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    begins_ptr,
    scores_ptr,
    channels_ptr,
    steps_ptr,
    log_rates_ptr,
    bias_ptr,
    skips_ptr,
    blocks_ptr,
    runs_ptr,
    channels_stride,
    steps_stride,
    slot_stride,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    PART: tl.constexpr,  # values of a program
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EVERY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For a run, a head and some of its values. The state is transposed here, [NP, PART]."""
    run_ptr = runs_ptr + tl.program_id(0) * RUN
    head = tl.program_id(1)
    first, last = tl.load(run_ptr), tl.load(run_ptr + 1)
    slot = tl.load(run_ptr + 2).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(run_ptr + 3)  # of the first token; if it is 0, there is no state yet
    i, n = tl.arange(0, TOKENS), tl.arange(0, NP)
    p = tl.program_id(2) * PART + tl.arange(0, PART)
    in_p = p < P
    kind = channels_ptr.dtype.element_ty
    state_kind = states_ptr.dtype.element_ty
    in_state = (n < N)[:, None] & in_p[None, :]
    head_ptr = states_ptr + head * (P * N) + p[None, :] * N + n[:, None]
    state = tl.load(head_ptr + slot * slot_stride, mask=in_state & (position > 0), other=0.0)
    state = state.to(tl.float32)
    group = head // (HEADS // GROUPS)
    of_head = slot * HEADS + head
    pending, place = tl.load(begins_ptr + of_head), position % EVERY
    if pending < place:
        state = with_pending(
            state,
            keys_ptr + (slot * GROUPS + group) * (EVERY * N),
            values_ptr + of_head * (EVERY * P),
            decays_ptr + of_head * EVERY,
            pending,
            place,
            n,
            p,
            N,
            P,
        )
    rate = -tl.exp(tl.load(log_rates_ptr + head).to(tl.float32))
    bias, skip = tl.load(bias_ptr + head), tl.load(skips_ptr + head).to(tl.float32)
    causal = i[:, None] >= i[None, :]
    of_b = HEADS * P + group * N + n
    for block in tl.range(first, last, num_stages=STAGES):
        begin, end = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
        copy = tl.load(blocks_ptr + block * 4 + 2).to(tl.int64)
        t = (begin + i).to(tl.int64)
        inside = t < end
        base = group.to(tl.int64) + block * GROUPS
        scores = tl.load(scores_ptr + (base * TOKENS + i[:, None]) * TOKENS + i[None, :])
        token = channels_ptr + t[:, None] * channels_stride
        in_states = inside[:, None] & (n < N)[None, :]
        b = tl.load(token + of_b[None, :], mask=in_states, other=0.0)
        c = tl.load(token + (of_b + GROUPS * N)[None, :], mask=in_states, other=0.0)
        in_values = inside[:, None] & in_p[None, :]
        x = tl.load(token + (head * P + p)[None, :], mask=in_values, other=0.0)
        raw = tl.load(steps_ptr + t * steps_stride + head, mask=inside, other=0.0)
        step = tl.where(inside, step_of(raw, bias, LOWEST, HIGHEST), 0.0)
        decay = rate * step  # logs, of a token, since the block began, and until it ends
        since = tl.cumsum(decay, axis=0)
        until = tl.cumsum(decay, axis=0, reverse=True) - decay
        within = scores.to(tl.float32) * between(since, causal) * step[None, :]
        found = tl.dot(c, state.to(kind), input_precision=PRECISION) * tl.exp(since)[:, None]
        found = tl.dot(within.to(kind), x, found, input_precision=PRECISION)
        left = x.to(tl.float32) * (step * tl.exp(until))[:, None]
        state *= tl.exp(tl.sum(decay, axis=0))
        state = tl.dot(tl.trans(b), left.to(kind), state, input_precision=PRECISION)
        found += skip * x.to(tl.float32)
        to = out_ptr + (t[:, None] * HEADS + head) * P + p[None, :]
        tl.store(to, found.to(out_ptr.dtype.element_ty), mask=in_values)
        if copy >= 0:
            tl.store(head_ptr + copy * slot_stride, stored(state, state_kind), mask=in_state)
    tl.store(head_ptr + slot * slot_stride, stored(state, state_kind), mask=in_state)


@triton.jit
def gated(x, z, norm_ptr, i, inside, eps, SIZE: tl.constexpr, NORMS: tl.constexpr):
    """``x``, the ``SIZE`` values of a group that are ``inside``, gated by ``z`` and, if ``NORMS``,
    normalized; the norm's weights are at ``i``."""
    x *= silu(z)
    if NORMS:
        weight = tl.load(norm_ptr + i, mask=inside, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x) / SIZE + eps) * weight
    return x


@triton.jit
def gate_group(
    out_ptr,
    z_ptr,
    norm_ptr,
    t,
    group,
    is_token,
    z_stride,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Gate, and if ``NORMS`` normalize, what a group's heads read for token ``t``; zeros unless it
    ``is_token``."""
    i = group * SIZE + tl.arange(0, PADDED)
    inside = tl.arange(0, PADDED) < SIZE
    at = out_ptr + t * (GROUPS * SIZE) + i
    x = tl.load(at, mask=inside & is_token, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + t * z_stride + i, mask=inside & is_token, other=0.0).to(tl.float32)
    x = gated(x, z, norm_ptr, i, inside, eps, SIZE, NORMS)
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["num_runs", "last_block"],
    do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr"],
)
def _gated_norm(
    out_ptr,
    begins_ptr,
    z_ptr,
    norm_ptr,
    blocks_ptr,
    runs_ptr,
    z_stride,
    num_runs,
    last_block,
    eps,
    GROUPS: tl.constexpr,
    SHARING: tl.constexpr,  # heads of a group
    SIZE: tl.constexpr,  # values of a group
    NORMS: tl.constexpr,
    PADDED: tl.constexpr,
    EVERY: tl.constexpr,
):
    # tokens:  decoding rows, done | [begin, end) runs | padding, which gets zeros
    t, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, place = places_after(blocks_ptr, runs_ptr, t, num_runs, EVERY)
    if slot >= 0:
        h = tl.arange(0, PADDED)  # a head has at least one value
        tl.store(begins_ptr + (slot * GROUPS + group) * SHARING + h, place, mask=h < SHARING)
    if t < tl.load(blocks_ptr):
        return
    is_token = t < tl.load(blocks_ptr + last_block * 4 + 1)
    gate_group(
        out_ptr, z_ptr, norm_ptr, t, group, is_token, z_stride, eps, GROUPS, SIZE, NORMS, PADDED
    )


def launch_mamba_blocks(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor, Tensor | None],
    states: Tensor,
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    blocks: Tensor,
    runs: Tensor,
    *,
    num_groups: int,
    eps: float,
    time_steps: tuple[float, float],
) -> None:
    """See ``minisgl_backend.kernels.mamba.mamba_runs``. ``inputs``: the fields of ``MambaInputs``,
    whose channels have gone through the convolution; ``weights``: the decay's log rates, the biases
    of steps, d, and the norm's weight; ``states`` are ``LayerStates.matrices``, and ``pending`` the
    fields of a ``PendingUpdates``."""
    z, channels, steps = inputs
    log_rates, bias, skips, norm = weights
    num_tokens, (num_heads, head_dim, state_size) = len(out), states.shape[1:]
    num_blocks = len(blocks)
    assert states[0].is_contiguous() and out.is_contiguous() and len(runs) <= num_tokens
    assert all(of.is_contiguous() for of in pending)
    assert z.stride(1) == channels.stride(1) == steps.stride(1) == 1
    # at least 64: with narrower operands, four warps multiply what lies beyond shared memory
    padded = max(64, triton.next_power_of_2(state_size))
    precision = "tf32x3" if channels.dtype == torch.float32 else "tf32"
    shape = num_blocks, num_groups, BLOCK, BLOCK
    scores = torch.empty(shape, dtype=channels.dtype, device=channels.device)
    _score_blocks[(num_blocks, num_groups)](
        scores,
        channels,
        blocks,
        channels.stride(0),
        GROUPS=num_groups,
        INNER=num_heads * head_dim,
        N=state_size,
        NP=padded,
        TOKENS=BLOCK,
        PRECISION=precision,
        num_warps=4,
    )
    part = 32
    # what is loaded for a block; besides, operands that are computed take some 16 KiB
    stage_bytes = BLOCK * (2 * padded + BLOCK + part) * channels.element_size()
    stages = (most_bytes(shared_bytes(out.device)) - 16 * 1024) // stage_bytes
    _chain_blocks[(len(runs), num_heads, triton.cdiv(head_dim, part))](
        out,
        states,
        *pending,
        scores,
        channels,
        steps,
        log_rates,
        bias,
        skips,
        blocks,
        runs,
        channels.stride(0),
        steps.stride(0),
        states.stride(0),
        LOWEST=time_steps[0],
        HIGHEST=None if math.isinf(time_steps[1]) else time_steps[1],
        GROUPS=num_groups,
        HEADS=num_heads,
        P=head_dim,
        N=state_size,
        NP=padded,
        PART=part,
        TOKENS=BLOCK,
        STAGES=min(max(stages, 1), 3),
        EVERY=WHOLE_EVERY,
        PRECISION=precision,
        num_warps=4,
    )
    size = num_heads * head_dim // num_groups
    padded = triton.next_power_of_2(size)
    _gated_norm[(num_tokens, num_groups)](
        out,
        pending[3],
        z,
        norm,
        blocks,
        runs,
        z.stride(0),
        len(runs),
        num_blocks - 1,
        eps,
        GROUPS=num_groups,
        SHARING=num_heads // num_groups,
        SIZE=size,
        NORMS=norm is not None,
        PADDED=padded,
        EVERY=WHOLE_EVERY,
        num_warps=4 if padded < 4096 else 8,
    )
