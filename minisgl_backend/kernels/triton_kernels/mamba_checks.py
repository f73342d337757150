"""Mamba 2 for steps that check guesses, in three launches:

    _conv_checks    the convolution (``conv_checks``)
    _read_checks    what the tokens read, and what they would add to the state, which a program
                    reads once for some of a head's values and all tokens of a check
    _gate_checks    the gate and the norm of the output

A program of ``_read_checks`` has one warp, which needs no barriers. It loads what the next token
needs before it computes a token, since a check is a chain, and few programs run at once.

Tokens may be padding (``kernels.checks``, which has the columns of their lines).

Names of dimensions: P of a head, N of a state, each padded to a power of two (NP).
"""

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.conv_checks import CHECK, launch_conv_checks
from minisgl_backend.kernels.triton_kernels.mamba_blocks import gate_group, step_of
from minisgl_backend.kernels.triton_kernels.mamba_step import part_of_state
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.triton_kernels.pending_updates import with_pending
from minisgl_backend.plan import WHOLE_EVERY

_PART: Final = 8
"""Values of a program of ``_read_checks``."""


@triton.jit
def _inputs_of(token_ptr, raw_ptr, of_x, of_b, in_p, in_n, GROUP_NUMBERS: tl.constexpr):
    """A token's x, B and C, and its step before the bias."""
    x = tl.load(token_ptr + of_x, mask=in_p, other=0.0)
    b = tl.load(token_ptr + of_b, mask=in_n, other=0.0)
    c = tl.load(token_ptr + of_b + GROUP_NUMBERS, mask=in_n, other=0.0)
    return x, b, c, tl.load(raw_ptr)


@triton.jit(
    do_not_specialize=["most_tokens"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "checks_ptr", "steps_ptr"],
)
def _read_checks(
    out_ptr,
    convolved_ptr,
    steps_ptr,
    log_rates_ptr,
    bias_ptr,
    skips_ptr,
    states_ptr,
    pending_keys_ptr,
    pending_values_ptr,
    pending_decays_ptr,
    begins_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    slots_ptr,
    positions_ptr,
    checks_ptr,
    steps_stride,
    states_stride,
    most_tokens,
    LOWEST: tl.constexpr,  # step
    HIGHEST: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    PARTS: tl.constexpr,  # programs of a head
    PART: tl.constexpr,  # values of a program
    EVERY: tl.constexpr,
    PDL: tl.constexpr,
):
    """For a check, a head and some of its values."""
    # Lines, slots and states were written before the step or at its beginning. So they are read
    # before the wait; and states past the first-level cache, since other kernels have written them.
    first = tl.program_id(1).to(tl.int64)
    if PDL:
        allow_next()
    place = tl.load(checks_ptr + first * CHECK).to(tl.int64)
    index = tl.load(checks_ptr + first * CHECK + 1)
    length = tl.load(checks_ptr + first * CHECK + 2)
    slot = tl.load(slots_ptr + first)
    end = (tl.load(positions_ptr + first) % EVERY).to(tl.int32)  # of what is pending
    if (place < 0) | (index != 0):
        if PDL:
            wait_previous()  # the next kernel may assume that all before it have ended
        return
    SHARING: tl.constexpr = HEADS // GROUPS
    CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    group = head // SHARING
    p, n = part * PART + tl.arange(0, PART), tl.arange(0, NP)
    in_p, in_n = p < P, n < N
    _, _, state = part_of_state(states_ptr + slot * states_stride + head * (P * N), p, n, P, N)
    of_head = slot * HEADS + head
    begin = tl.load(begins_ptr + of_head, cache_modifier=".cg")
    of_x, of_b = head * P + p, HEADS * P + group * N + n
    token_ptr, raw_ptr = convolved_ptr + first * CHANNELS, steps_ptr + first * steps_stride + head
    rate = -tl.exp(tl.load(log_rates_ptr + head).to(tl.float32))
    bias, skip = tl.load(bias_ptr + head), tl.load(skips_ptr + head).to(tl.float32)
    if begin < end:
        state = with_pending(
            state,
            pending_values_ptr + of_head * (EVERY * P),
            pending_keys_ptr + (slot * GROUPS + group) * (EVERY * N),
            pending_decays_ptr + of_head * EVERY,
            begin,
            end,
            p,
            n,
            P,
            N,
        )
    if PDL:
        wait_previous()
    x, b, c, raw = _inputs_of(token_ptr, raw_ptr, of_x, of_b, in_p, in_n, GROUPS * N)
    out_ptr += (first * HEADS + head) * P + p
    kept = place * most_tokens
    keys_ptr += (kept * GROUPS + group) * N + n
    values_ptr += (kept * HEADS + head) * P + p
    decays_ptr += kept * HEADS + head
    keeps_decays = part == 0  # of a head
    keeps_keys = keeps_decays & (head % SHARING == 0)  # of a group
    since = 0.0  # the log of the decay, from the state before the check
    for i in tl.range(length):
        # the last token is loaded twice
        has_next = (i + 1 < length).to(tl.int32)
        token_ptr += has_next * CHANNELS
        raw_ptr += has_next * steps_stride
        after = _inputs_of(token_ptr, raw_ptr, of_x, of_b, in_p, in_n, GROUPS * N)
        step = step_of(raw, bias, LOWEST, HIGHEST)
        decay = rate * step
        since += decay
        wide, key = x.to(tl.float32), b.to(tl.float32)
        value = wide * step
        state = state * tl.exp(decay) + value[:, None] * key[None, :]
        found = tl.sum(state * c.to(tl.float32)[None, :], axis=1) + skip * wide
        tl.store(out_ptr + i * (HEADS * P), found.to(out_ptr.dtype.element_ty), mask=in_p)
        tl.store(values_ptr + i * (HEADS * P), value, mask=in_p)
        tl.store(keys_ptr + i * (GROUPS * N), key, mask=in_n & keeps_keys)
        tl.store(decays_ptr + i * HEADS, since, mask=keeps_decays)
        x, b, c, raw = after


@triton.jit(do_not_specialize_on_alignment=["checks_ptr"])
def _gate_checks(
    out_ptr,
    z_ptr,
    norm_ptr,
    checks_ptr,
    z_stride,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,  # values of a group
    NORMS: tl.constexpr,
    PADDED: tl.constexpr,  # SIZE, as a power of two
    PDL: tl.constexpr,
):
    """For a token and a group. Padding gets zeros."""
    if PDL:
        allow_next()
        wait_previous()
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_token = tl.load(checks_ptr + token * CHECK) >= 0
    gate_group(
        out_ptr, z_ptr, norm_ptr, token, group, is_token, z_stride, eps, GROUPS, SIZE, NORMS, PADDED
    )


def launch_mamba_checks(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    conv: tuple[Tensor, Tensor | None],
    weights: tuple[Tensor, Tensor, Tensor, Tensor | None],
    states: tuple[Tensor, Tensor],
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    unsettled: tuple[Tensor, Tensor, Tensor, Tensor],
    slots: Tensor,
    checks: Tensor,
    positions: Tensor,
    *,
    num_groups: int,
    eps: float,
    time_steps: tuple[float, float],
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.mamba.mamba_checks``. ``inputs``: the fields of
    ``MambaInputs``; ``conv``: the convolution's weight and bias; ``weights``: the decay's log
    rates, the biases of steps, d, and the norm's weight; ``states``: the first fields of a
    ``LayerStates``; ``pending`` and ``unsettled``: the fields of its ``PendingUpdates`` and
    ``UnsettledTokens``; ``checks``: the lines of ``CheckedTokens``."""
    (z, channels, steps), (inputs_before, matrices) = inputs, states
    (*of_heads, norm), (kept_inputs, *kept) = weights, unsettled
    num_tokens, (num_heads, head_dim, state_size) = len(slots), matrices.shape[1:]
    assert all(of.is_contiguous() for of in (out, matrices[0], *pending, *kept, checks, positions))
    assert z.stride(1) == steps.stride(1) == 1
    convolved = torch.empty(num_tokens, channels.shape[1], dtype=channels.dtype, device=out.device)
    launch_conv_checks(
        convolved, channels, inputs_before, kept_inputs, slots, checks, *conv, silu=True, pdl=pdl
    )
    parts = triton.cdiv(head_dim, _PART)
    _read_checks[(num_heads * parts, num_tokens)](
        out,
        convolved,
        steps,
        *of_heads,
        matrices,
        *pending,
        *kept,
        slots,
        positions,
        checks,
        steps.stride(0),
        matrices.stride(0),
        kept[0].shape[1],
        LOWEST=time_steps[0],
        HIGHEST=None if math.isinf(time_steps[1]) else time_steps[1],
        GROUPS=num_groups,
        HEADS=num_heads,
        P=head_dim,
        N=state_size,
        NP=triton.next_power_of_2(state_size),
        PARTS=parts,
        PART=_PART,
        EVERY=WHOLE_EVERY,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
    size = num_heads * head_dim // num_groups
    padded = triton.next_power_of_2(size)
    _gate_checks[(num_tokens, num_groups)](
        out,
        z,
        norm,
        checks,
        z.stride(0),
        eps,
        GROUPS=num_groups,
        SIZE=size,
        NORMS=norm is not None,
        PADDED=padded,
        PDL=pdl,
        num_warps=4 if padded < 4096 else 8,
        **launch_options(pdl),
    )
