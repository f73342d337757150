"""Mamba 2 for decode steps: one token per row. For few rows, in two launches:

    _step           the convolution and the state, which a program reads and writes once for some
                    of a head's values; it adds updates that are pending, and leaves none
    _gated_norm     the gate and the norm of the output; and what other programs of the row have
                    read by then: the convolution's inputs of B and C, and where updates begin

For many rows, whose states take most of the time, ``_step`` is two kernels:

    _prepare        the convolution, the token's update, which it leaves pending, and what the token
                    reads of pending updates
    _read           what it reads of the state, which is written only if the next position is a
                    multiple of ``WHOLE_EVERY``; it reads states while ``_prepare`` runs

Slots may be padding (``minisgl_backend.kernels.mamba``), whose programs end at once.

Names of dimensions: P of a head, N of a state, each padded to a power of two (PP, NP).
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.conv_step import (
    conv_begun,
    conv_ended,
    keep_inputs_of_token,
)
from minisgl_backend.kernels.triton_kernels.mamba_blocks import gated, step_of
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.triton_kernels.pending_updates import with_pending
from minisgl_backend.kernels.triton_kernels.recurrent_math import stored
from minisgl_backend.plan import WHOLE_EVERY

_FEW_ROWS: Final = 8
"""Up to this many rows, a program of ``_step`` takes fewer values of a head."""
_PREPARED: Final = 256
"""Values of a program of ``_prepare``."""
_READ: Final = 4096
"""Numbers of the state that a program of ``_read`` reads."""


@triton.jit
def _begun(inputs_ptr, weight_ptr, bias_ptr, c, mask, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """``conv_begun`` for channels ``c``, with their bias in the sum."""
    begun, own, stay = conv_begun(inputs_ptr, weight_ptr, c, mask, WIDTH)
    if BIAS:
        begun += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    return begun, own, stay


@triton.jit
def part_of_state(head_ptr, p, n, P: tl.constexpr, N: tl.constexpr):
    """The values ``p`` of a head's state: where they are, which of them there are, and what is
    there, [PART, NP]. They were written before the step, so the first-level cache is bypassed."""
    at = head_ptr + p[:, None] * N + n[None, :]
    inside = (p < P)[:, None] & (n < N)[None, :]
    state = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return at, inside, state


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "steps_ptr"])
def _step(
    out_ptr,
    channels_ptr,
    steps_ptr,
    conv_ptr,
    conv_bias_ptr,
    log_rates_ptr,
    bias_ptr,
    skips_ptr,
    inputs_ptr,
    states_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    begins_ptr,
    slots_ptr,
    positions_ptr,
    channels_stride,
    steps_stride,
    inputs_stride,
    states_stride,
    LOWEST: tl.constexpr,  # step
    HIGHEST: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    PART: tl.constexpr,  # values of a program
    WIDTH: tl.constexpr,  # of the convolution
    BIAS: tl.constexpr,
    EVERY: tl.constexpr,
    PDL: tl.constexpr,
):
    # Rows' slots, positions and states were written before the step or at its beginning. So they
    # are read before the wait, bypassing the first-level cache.
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    if PDL:
        allow_next()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        if PDL:
            wait_previous()  # the next kernel may assume that all before it have ended
        return
    p, n = tl.program_id(0) * PART + tl.arange(0, PART), tl.arange(0, NP)
    in_p, in_n = p < P, n < N
    of_state = states_ptr + slot * states_stride + head * (P * N)
    at, in_state, state = part_of_state(of_state, p, n, P, N)
    place = (tl.load(positions_ptr + row) % EVERY).to(tl.int32)  # of this token's update
    of_head = slot * HEADS + head
    begin = tl.load(begins_ptr + of_head, cache_modifier=".cg")
    group = head // (HEADS // GROUPS)
    of_x = head * P + p
    of_b = HEADS * P + group * N + n
    of_c = of_b + GROUPS * N
    row_inputs = inputs_ptr + slot * inputs_stride
    x_begun, x_own, x_stay = _begun(row_inputs, conv_ptr, conv_bias_ptr, of_x, in_p, WIDTH, BIAS)
    b_begun, b_own, _ = _begun(row_inputs, conv_ptr, conv_bias_ptr, of_b, in_n, WIDTH, BIAS)
    c_begun, c_own, _ = _begun(row_inputs, conv_ptr, conv_bias_ptr, of_c, in_n, WIDTH, BIAS)
    log_rate, bias = tl.load(log_rates_ptr + head), tl.load(bias_ptr + head)
    skip = tl.load(skips_ptr + head).to(tl.float32)
    if begin < place:  # now that all loads are under way
        state = with_pending(
            state,
            values_ptr + of_head * (EVERY * P),
            keys_ptr + (slot * GROUPS + group) * (EVERY * N),
            decays_ptr + of_head * EVERY,
            begin,
            place,
            p,
            n,
            P,
            N,
        )
    if PDL:
        wait_previous()
    token = channels_ptr + row * channels_stride
    x_input = tl.load(token + of_x, mask=in_p, other=0.0)
    b_input = tl.load(token + of_b, mask=in_n, other=0.0)
    c_input = tl.load(token + of_c, mask=in_n, other=0.0)
    step = step_of(tl.load(steps_ptr + row * steps_stride + head), bias, LOWEST, HIGHEST)
    x = conv_ended(x_begun, x_own, x_input)
    b = conv_ended(b_begun, b_own, b_input)
    c = conv_ended(c_begun, c_own, c_input)
    decay = tl.exp(-tl.exp(log_rate.to(tl.float32)) * step)
    state = state * decay + (x * step)[:, None] * b[None, :]
    found = tl.sum(state * c[None, :], axis=1) + skip * x
    tl.store(at, stored(state, states_ptr.dtype.element_ty), mask=in_state)
    to = out_ptr + (row * HEADS + head) * P + p
    tl.store(to, found.to(out_ptr.dtype.element_ty), mask=in_p)
    tl.debug_barrier()  # every warp may have read the inputs that one of them replaces
    keep_inputs_of_token(row_inputs, x_stay, x_input, of_x, in_p, WIDTH, True)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "steps_ptr"])
def _prepare(
    begun_ptr,
    readers_ptr,
    channels_ptr,
    steps_ptr,
    conv_ptr,
    conv_bias_ptr,
    log_rates_ptr,
    bias_ptr,
    skips_ptr,
    inputs_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    begins_ptr,
    slots_ptr,
    positions_ptr,
    channels_stride,
    steps_stride,
    inputs_stride,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    PART_HEADS: tl.constexpr,  # heads of a program, all of one group
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    EVERY: tl.constexpr,
    PDL: tl.constexpr,
):
    # readers [num_rows, GROUPS, N]    C, after the convolution
    # begun [num_rows, HEADS, P]       what the token reads apart from the state: of the updates
    #                                  that are pending, of its own, and of x
    row = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1)
    if PDL:
        allow_next()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        if PDL:
            wait_previous()
        return
    SHARING: tl.constexpr = HEADS // GROUPS
    h = tl.program_id(0) * PART_HEADS + tl.arange(0, PART_HEADS)
    p, n, places = tl.arange(0, PP), tl.arange(0, NP), tl.arange(0, EVERY)
    in_h, in_n = h < SHARING, n < N
    in_x = in_h[:, None] & (p < P)[None, :]
    h += group * SHARING
    place = (tl.load(positions_ptr + row) % EVERY).to(tl.int32)
    # the same for all heads of a row
    begin = tl.load(begins_ptr + slot * HEADS + group * SHARING, cache_modifier=".cg")
    is_pending = (places >= begin) & (places < place)
    of_group, of_heads = slot * GROUPS + group, slot * HEADS + h
    keys = tl.load(  # [EVERY, NP]
        keys_ptr + (of_group * EVERY + places[:, None]) * N + n[None, :],
        mask=is_pending[:, None] & in_n[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    of_values = of_heads[:, None] * (EVERY * P) + p[None, :]
    values = tl.load(  # [EVERY, PART_HEADS, PP]
        values_ptr + of_values[None, :, :] + places[:, None, None] * P,
        mask=is_pending[:, None, None] & in_x[None, :, :],
        other=0.0,
        cache_modifier=".cg",
    )
    decays = tl.load(  # [EVERY, PART_HEADS]
        decays_ptr + of_heads[None, :] * EVERY + places[:, None],
        mask=is_pending[:, None] & in_h[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    before = tl.load(
        decays_ptr + of_heads * EVERY + place - 1,
        mask=in_h & (begin < place),
        other=0.0,
        cache_modifier=".cg",
    )
    of_x = h[:, None] * P + p[None, :]
    of_b = HEADS * P + group * N + n
    of_c = of_b + GROUPS * N
    row_inputs = inputs_ptr + slot * inputs_stride
    x_begun, x_own, x_stay = _begun(row_inputs, conv_ptr, conv_bias_ptr, of_x, in_x, WIDTH, BIAS)
    b_begun, b_own, _ = _begun(row_inputs, conv_ptr, conv_bias_ptr, of_b, in_n, WIDTH, BIAS)
    c_begun, c_own, _ = _begun(row_inputs, conv_ptr, conv_bias_ptr, of_c, in_n, WIDTH, BIAS)
    log_rates = tl.load(log_rates_ptr + h, mask=in_h, other=0.0).to(tl.float32)
    biases = tl.load(bias_ptr + h, mask=in_h, other=0.0)
    skips = tl.load(skips_ptr + h, mask=in_h, other=0.0).to(tl.float32)
    if PDL:
        wait_previous()
    token = channels_ptr + row * channels_stride
    x_input = tl.load(token + of_x, mask=in_x, other=0.0)
    b_input = tl.load(token + of_b, mask=in_n, other=0.0)
    c_input = tl.load(token + of_c, mask=in_n, other=0.0)
    raw = tl.load(steps_ptr + row * steps_stride + h, mask=in_h, other=0.0)
    steps = step_of(raw, biases, LOWEST, HIGHEST)
    x = conv_ended(x_begun, x_own, x_input)
    b = conv_ended(b_begun, b_own, b_input)
    c = conv_ended(c_begun, c_own, c_input)
    decay = before - tl.exp(log_rates) * steps  # of the heads, since the states were written
    value = x * steps[:, None]
    read = tl.sum(keys * c[None, :], axis=1)  # [EVERY]
    weights = read[:, None] * tl.exp(decay[None, :] - decays)
    weights = tl.where(is_pending[:, None], weights, 0.0)
    begun = tl.sum(values * weights[:, :, None], axis=0) + tl.sum(b * c) * value
    begun += skips[:, None] * x
    tl.store(begun_ptr + row * (HEADS * P) + of_x, begun, mask=in_x)
    tl.store(values_ptr + of_values + place * P, value, mask=in_x)
    tl.store(decays_ptr + of_heads * EVERY + place, decay, mask=in_h)
    is_first = tl.program_id(0) == 0
    tl.store(readers_ptr + (row * GROUPS + group) * N + n, c, mask=in_n & is_first)
    tl.store(keys_ptr + (of_group * EVERY + place) * N + n, b, mask=in_n & is_first)
    tl.debug_barrier()  # every warp may have read the inputs that one of them replaces
    keep_inputs_of_token(row_inputs, x_stay, x_input, of_x, in_x, WIDTH, True)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _read(
    out_ptr,
    begun_ptr,
    readers_ptr,
    states_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    begins_ptr,
    slots_ptr,
    positions_ptr,
    states_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    PART: tl.constexpr,  # values of a program
    EVERY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    if PDL:
        allow_next()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        if PDL:
            wait_previous()
        return
    p, n = tl.program_id(0) * PART + tl.arange(0, PART), tl.arange(0, NP)
    in_p, in_n = p < P, n < N
    of_state = states_ptr + slot * states_stride + head * (P * N)
    at, in_state, state = part_of_state(of_state, p, n, P, N)
    place = (tl.load(positions_ptr + row) % EVERY).to(tl.int32)
    of_head, group = slot * HEADS + head, head // (HEADS // GROUPS)
    begin = tl.load(begins_ptr + of_head, cache_modifier=".cg")
    if PDL:
        wait_previous()
    c = tl.load(readers_ptr + (row * GROUPS + group) * N + n, mask=in_n, other=0.0)
    to = (row * HEADS + head) * P + p
    found = tl.load(begun_ptr + to, mask=in_p, other=0.0)
    decay = tl.load(decays_ptr + of_head * EVERY + place)
    found += tl.exp(decay) * tl.sum(state * c[None, :], axis=1)
    tl.store(out_ptr + to, found.to(out_ptr.dtype.element_ty), mask=in_p)
    if place == EVERY - 1:
        state = with_pending(
            state,
            values_ptr + of_head * (EVERY * P),
            keys_ptr + (slot * GROUPS + group) * (EVERY * N),
            decays_ptr + of_head * EVERY,
            begin,
            EVERY,
            p,
            n,
            P,
            N,
            UNROLL=2,
        )
        tl.store(at, stored(state, states_ptr.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _gated_norm(
    out_ptr,
    z_ptr,
    channels_ptr,
    norm_ptr,
    inputs_ptr,
    begins_ptr,
    slots_ptr,
    positions_ptr,
    z_stride,
    channels_stride,
    inputs_stride,
    eps,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BLOCK: tl.constexpr,  # values of a group, padded to a power of two
    HP: tl.constexpr,  # heads of a group, padded to a power of two
    NORMS: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAVES: tl.constexpr,  # whether the update may be pending
    EVERY: tl.constexpr,
    PDL: tl.constexpr,
):
    row, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if PDL:
        allow_next()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    place = (tl.load(positions_ptr + row) % EVERY).to(tl.int32)
    SHARING: tl.constexpr = HEADS // GROUPS  # heads
    SIZE: tl.constexpr = SHARING * P  # values of a group
    i = group * SIZE + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < SIZE
    if PDL:
        wait_previous()
    if slot < 0:
        return
    at = out_ptr + row * (GROUPS * SIZE) + i
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + i, mask=inside, other=0.0).to(tl.float32)
    x = gated(x, z, norm_ptr, i, inside, eps, SIZE, NORMS)
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=inside)
    n = tl.arange(0, NP)
    row_inputs, token = inputs_ptr + slot * inputs_stride, channels_ptr + row * channels_stride
    for part in tl.static_range(2):  # B, C
        c = (GROUPS * SIZE + (part * GROUPS + group) * N) + n
        own = tl.load(token + c, mask=n < N, other=0.0)
        keep_inputs_of_token(row_inputs, (), own, c, n < N, WIDTH, False)
    h = tl.arange(0, HP)
    is_whole = (not LEAVES) | (place == EVERY - 1)
    begins = begins_ptr + slot * HEADS + group * SHARING + h
    tl.store(begins, (place + 1) % EVERY, mask=(h < SHARING) & is_whole)


def launch_mamba_step(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    conv: tuple[Tensor, Tensor | None],
    weights: tuple[Tensor, Tensor, Tensor, Tensor | None],
    states: tuple[Tensor, Tensor],
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
    *,
    num_groups: int,
    eps: float,
    time_steps: tuple[float, float],
    leaves: bool,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.mamba.mamba_step``. ``inputs``: the fields of ``MambaInputs``;
    ``conv``: the convolution's weight and bias; ``weights``: the decay's log rates, the biases of
    steps, d, and the norm's weight; ``states``: the first fields of a ``LayerStates``, and
    ``pending`` those of its ``PendingUpdates``."""
    (z, channels, steps), (kept, matrices) = inputs, states
    (weight, bias), (*of_heads, norm) = conv, weights
    num_rows, (num_heads, head_dim, state_size) = len(slots), matrices.shape[1:]
    if num_rows == 0:
        return
    assert all(of.is_contiguous() for of in (out, weight, kept[0], matrices[0], *pending))
    assert z.stride(1) == channels.stride(1) == steps.stride(1) == 1
    assert kept.shape[2] == weight.shape[1] - 1
    sharing = num_heads // num_groups
    padded = triton.next_power_of_2(state_size)
    shape: dict[str, Any] = {
        "GROUPS": num_groups,
        "HEADS": num_heads,
        "P": head_dim,
        "N": state_size,
        "NP": padded,
        "EVERY": WHOLE_EVERY,
        "PDL": pdl,
        **launch_options(pdl),
    }
    width = weight.shape[1]
    conv_and_step: dict[str, Any] = {
        "WIDTH": width,
        "BIAS": bias is not None,
        "LOWEST": time_steps[0],
        "HIGHEST": None if math.isinf(time_steps[1]) else time_steps[1],
    }
    of_tokens = channels, steps, weight, bias, *of_heads, kept
    of_rows = *pending, slots, positions
    strides = channels.stride(0), steps.stride(0), kept.stride(0)
    if leaves:
        begun = torch.empty(num_rows, num_heads, head_dim, device=out.device)
        readers = torch.empty(num_rows, num_groups, state_size, device=out.device)
        wide = triton.next_power_of_2(head_dim)
        part = min(triton.next_power_of_2(sharing), max(1, _PREPARED // wide))
        _prepare[(triton.cdiv(sharing, part), num_groups, num_rows)](
            begun,
            readers,
            *of_tokens,
            *of_rows,
            *strides,
            PP=wide,
            PART_HEADS=part,
            num_warps=4,
            **conv_and_step,
            **shape,
        )
        part = min(wide, max(1, _READ // padded))
        _read[(triton.cdiv(head_dim, part), num_heads, num_rows)](
            out,
            begun,
            readers,
            matrices,
            *of_rows,
            matrices.stride(0),
            PART=part,
            num_warps=4,
            **shape,
        )
    else:
        # with few rows programs are short of work; with many they read B and C again less often
        part = 16 if num_rows <= _FEW_ROWS else 32
        _step[(triton.cdiv(head_dim, part), num_heads, num_rows)](
            out,
            *of_tokens,
            matrices,
            *of_rows,
            *strides,
            matrices.stride(0),
            PART=part,
            num_warps=4 if part * padded <= 4096 else 8,
            **conv_and_step,
            **shape,
        )
    block = triton.next_power_of_2(sharing * head_dim)
    _gated_norm[(num_groups, num_rows)](
        out,
        z,
        channels,
        norm,
        kept,
        pending[3],
        slots,
        positions,
        z.stride(0),
        channels.stride(0),
        kept.stride(0),
        eps,
        BLOCK=block,
        HP=triton.next_power_of_2(sharing),
        NORMS=norm is not None,
        WIDTH=width,
        LEAVES=leaves,
        num_warps=4 if block < 4096 else 8,
        **shape,
    )
