"""The delta rule for steps that check guesses, whose states stay as they are, in two launches after
that of the convolution:

    _check            what the tokens of a check read, token by token, and what is kept of them
    _gated_norm       the norm and the gate of the output

In a step of few checks, what counts is how soon a token follows the one before. So a program is one
warp with a few columns of a state, which it reads once and keeps in registers: its sums need no
barriers, and it loads the next token's inputs before it computes the present one's.

Each dimension of a key may decay by itself. Tokens may be padding (``kernels.checks``, which has
the columns of their lines), which gets zeros. Dimensions are named as in ``gated_delta_blocks``.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.conv_checks import CHECK
from minisgl_backend.kernels.triton_kernels.gated_delta_blocks import EPS, log_decay, open_gate
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.triton_kernels.pending_updates import with_pending
from minisgl_backend.plan import WHOLE_EVERY

PART: Final = 32
"""Columns of a state that a program holds."""

_LINES: Final = 4
"""Heads of tokens that a program of ``_gated_norm`` completes, one per warp."""


@triton.jit
def _loaded(
    channels_ptr,
    a_ptr,
    b_ptr,
    head,
    i,
    j,
    is_token,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_DIMENSION: tl.constexpr,
):
    """What the token at these pointers gives to a head: the query, the key, dimensions ``j`` of the
    value, a and b; or zeros unless ``is_token``."""
    of_q, in_k = channels_ptr + head // (HEADS // KEY_HEADS) * K + i, (i < K) & is_token
    q = tl.load(of_q, mask=in_k, other=0.0)
    k = tl.load(of_q + KEY_HEADS * K, mask=in_k, other=0.0)
    of_v = channels_ptr + 2 * KEY_HEADS * K + head * V + j
    v = tl.load(of_v, mask=(j < V) & is_token, other=0.0)
    if BY_DIMENSION:
        a = tl.load(a_ptr + head * K + i, mask=in_k, other=0.0)
    else:
        a = tl.load(a_ptr + head, mask=is_token, other=0.0)
    return q, k, v, a, tl.load(b_ptr + head, mask=is_token, other=0.0)


@triton.jit
def _prepared(q, k, v, a, b, log_rate, bias, scale, RATE_SCALE: tl.constexpr, LEAST: tl.constexpr):
    """The query and the key, of unit length, the value, the log of the decay, and the rate."""
    q, k = q.to(tl.float32), k.to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q) + EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k) + EPS)
    rate = tl.sigmoid(b.to(tl.float32)) * RATE_SCALE
    return q, k, v.to(tl.float32), log_decay(a, log_rate, bias, LEAST), rate


@triton.jit(
    do_not_specialize_on_alignment=["a_ptr", "b_ptr", "slots_ptr", "checks_ptr", "positions_ptr"]
)
def _check(
    found_ptr,
    channels_ptr,
    a_ptr,
    b_ptr,
    log_rates_ptr,
    bias_ptr,
    states_ptr,
    pending_keys_ptr,
    pending_values_ptr,
    pending_decays_ptr,
    begins_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    slots_ptr,
    checks_ptr,
    positions_ptr,
    channels_stride,
    a_stride,
    b_stride,
    states_stride,
    most_tokens,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # of a state
    EVERY: tl.constexpr,
    RATE_SCALE: tl.constexpr,
    LEAST: tl.constexpr,  # log of a decay, or None
    BY_DIMENSION: tl.constexpr,  # each dimension of a key decays by itself
    PDL: tl.constexpr,
):
    # Lines, slots and states were written before the step or at its beginning. So they are read
    # before the wait; and states past the first-level cache, since other kernels have written them.
    token = tl.program_id(1).to(tl.int64)
    if PDL:
        allow_next()
    place = tl.load(checks_ptr + token * CHECK).to(tl.int64)
    if (place < 0) | (tl.load(checks_ptr + token * CHECK + 1) != 0):
        if PDL:
            wait_previous()  # the next kernel may assume that all before it have ended
        return
    length = tl.load(checks_ptr + token * CHECK + 2)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    SHARING: tl.constexpr = HEADS // KEY_HEADS
    key_head = head // SHARING
    i, j = tl.arange(0, KP), part * PART + tl.arange(0, PART)
    in_k, in_v = i < K, j < V
    log_rate = tl.load(log_rates_ptr + head)
    if BY_DIMENSION:
        bias = tl.load(bias_ptr + head * K + i, mask=in_k, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    channels_ptr += token * channels_stride
    a_ptr += token * a_stride
    b_ptr += token * b_stride
    at = states_ptr + slot * states_stride + head * (K * V) + i[:, None] * V + j[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    state = tl.load(at, mask=in_state, other=0.0, cache_modifier=".cg")
    state = state.to(tl.float32)  # [KP, PART]
    if not BY_DIMENSION:  # otherwise no kernel leaves updates pending
        of_head = slot * HEADS + head
        begin = tl.load(begins_ptr + of_head, cache_modifier=".cg")
        end = (tl.load(positions_ptr + token) % EVERY).to(tl.int32)
        if begin < end:
            state = with_pending(
                state,
                pending_keys_ptr + (slot * KEY_HEADS + key_head) * (EVERY * K),
                pending_values_ptr + of_head * (EVERY * V),
                pending_decays_ptr + of_head * EVERY,
                begin,
                end,
                i,
                j,
                K,
                V,
            )
    if PDL:
        wait_previous()
    q, k, v, a, b = _loaded(
        channels_ptr, a_ptr, b_ptr, head, i, j, length > 0, KEY_HEADS, HEADS, K, V, BY_DIMENSION
    )
    keeps_decay = part == 0
    keeps_key = keeps_decay & (head % SHARING == 0)
    q, k, v, g, rate = _prepared(q, k, v, a, b, log_rate, bias, scale, RATE_SCALE, LEAST)
    since = g  # the check began
    for index in tl.range(length, num_stages=1):
        channels_ptr += channels_stride
        a_ptr += a_stride
        b_ptr += b_stride
        is_next = index + 1 < length
        next_q, next_k, next_v, next_a, next_b = _loaded(
            channels_ptr, a_ptr, b_ptr, head, i, j, is_next, KEY_HEADS, HEADS, K, V, BY_DIMENSION
        )
        if BY_DIMENSION:
            state *= tl.exp(g)[:, None]
        else:
            state *= tl.exp(g)
        # what the key and the query read of the old state
        known = tl.sum(state * k[:, None], axis=0)
        found = tl.sum(state * q[:, None], axis=0)
        new = (v - known) * rate
        state += k[:, None] * new[None, :]
        found += tl.sum(q * k) * new
        tl.store(found_ptr + ((token + index) * HEADS + head) * V + j, found, mask=in_v)
        kept = place * most_tokens + index
        tl.store(values_ptr + (kept * HEADS + head) * V + j, new, mask=in_v)
        tl.store(keys_ptr + (kept * KEY_HEADS + key_head) * K + i, k, mask=in_k & keeps_key)
        if BY_DIMENSION:
            to = decays_ptr + (kept * HEADS + head) * K + i
            tl.store(to, since, mask=in_k & keeps_decay)
        else:
            tl.store(decays_ptr + kept * HEADS + head, since, mask=keeps_decay)
        q, k, v, g, rate = _prepared(
            next_q, next_k, next_v, next_a, next_b, log_rate, bias, scale, RATE_SCALE, LEAST
        )
        since += g


@triton.jit(do_not_specialize=["num_lines"], do_not_specialize_on_alignment=["checks_ptr"])
def _gated_norm(
    out_ptr,
    found_ptr,
    z_ptr,
    norm_ptr,
    checks_ptr,
    z_stride,
    num_lines,
    eps,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    LINES: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        allow_next()
    # a line is a head of a token
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    token, head, j = line // HEADS, line % HEADS, tl.arange(0, VP)
    place = tl.load(checks_ptr + token * CHECK, mask=line < num_lines, other=-1)
    mask = (line < num_lines)[:, None] & (j < V)[None, :]
    of_check = mask & (place >= 0)[:, None]
    weight = tl.load(norm_ptr + j, mask=j < V, other=0.0).to(tl.float32)
    if PDL:
        wait_previous()
    at = line[:, None] * V + j[None, :]
    x = tl.load(found_ptr + at, mask=of_check, other=0.0)
    z_at = z_ptr + token[:, None] * z_stride + head[:, None] * V + j[None, :]
    z = tl.load(z_at, mask=of_check, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)[:, None] * weight[None, :]
    x *= open_gate(z, SIGMOID)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)


def launch_checks(
    out: Tensor,
    channels: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    unsettled: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    checks: Tensor,
    positions: Tensor,
    *,
    eps: float,
    rate_scale: float,
    least_decay: float | None,
    sigmoid_gates: bool,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.gated_delta.delta_checks``. ``channels`` have gone through the
    convolution. ``weights``: the decay's log rates and biases, and the norm's weight. ``states``
    are ``LayerStates.matrices``, ``pending`` the fields of a ``PendingUpdates``; ``unsettled``:
    keys, values and decays of an ``UnsettledTokens``; ``checks``: the lines of a
    ``CheckedTokens``."""
    log_rates, biases, norm = weights
    keys, values, decays = unsettled
    num_tokens, (num_heads, key_dim, value_dim) = len(slots), states.shape[1:]
    assert all(of.is_contiguous() for of in (out, biases, states[0], *pending, *unsettled))
    assert all(of.is_contiguous() for of in (slots, checks, positions))
    a = a.flatten(1)  # if each dimension has its own, a head's follow one another
    assert a.stride(1) == b.stride(1) == channels.stride(1) == z.stride(2) == 1
    assert z.stride(1) == value_dim
    vp = triton.next_power_of_2(value_dim)
    parts = triton.cdiv(value_dim, PART)
    shape = num_tokens, num_heads, value_dim
    found = torch.empty(shape, dtype=torch.float32, device=out.device)
    _check[(num_heads * parts, num_tokens)](
        found,
        channels,
        a,
        b,
        log_rates,
        biases,
        states,
        *pending,
        keys,
        values,
        decays,
        slots,
        checks,
        positions,
        channels.stride(0),
        a.stride(0),
        b.stride(0),
        states.stride(0),
        keys.shape[1],
        key_dim**-0.5,
        KEY_HEADS=keys.shape[2],
        HEADS=num_heads,
        K=key_dim,
        V=value_dim,
        KP=triton.next_power_of_2(key_dim),
        PART=PART,
        PARTS=parts,
        EVERY=WHOLE_EVERY,
        RATE_SCALE=rate_scale,
        LEAST=least_decay,
        BY_DIMENSION=biases.dim() == 2,
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )
    num_lines = num_tokens * num_heads
    _gated_norm[(triton.cdiv(num_lines, _LINES),)](
        out,
        found,
        z,
        norm,
        checks,
        z.stride(0),
        num_lines,
        eps,
        HEADS=num_heads,
        V=value_dim,
        VP=vp,
        LINES=_LINES,
        SIGMOID=sigmoid_gates,
        PDL=pdl,
        num_warps=_LINES,
        **launch_options(pdl),
    )
