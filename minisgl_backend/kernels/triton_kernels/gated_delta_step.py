"""Gated DeltaNet for decode steps: the convolution and the delta rule for one token per row.

Both are one launch, in which a program reads and writes the state of one head of a row once. It
adds updates that another kernel has left pending, and leaves none. Slots may be padding
(``minisgl_backend.kernels.gated_delta``), whose programs end at once. Dimensions are named as in
``gated_delta_blocks``.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.conv_step import (
    conv_begun,
    conv_ended,
    keep_inputs_of_token,
)
from minisgl_backend.kernels.triton_kernels.gated_delta_blocks import EPS, log_decay, open_gate
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.triton_kernels.pending_updates import with_pending
from minisgl_backend.kernels.triton_kernels.recurrent_math import stored
from minisgl_backend.plan import WHOLE_EVERY

_FEW_ROWS: Final = 8
"""Up to this many rows, the time of a single program counts: sums are computed in pairs, with the
same bits, and the convolution's inputs stay in registers. With more rows, bytes count, and this is
slower."""


_MOST_OF_FOUR_WARPS: Final = 128 * 128
"""Numbers of a state that four warps hold in registers."""


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "a_ptr", "b_ptr"])
def _step(
    out_ptr,
    x_ptr,
    z_ptr,
    a_ptr,
    b_ptr,
    conv_ptr,
    log_rates_ptr,
    bias_ptr,
    norm_ptr,
    inputs_ptr,
    states_ptr,
    readers_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    begins_ptr,
    slots_ptr,
    positions_ptr,
    x_stride,
    z_stride,
    a_stride,
    b_stride,
    inputs_stride,
    states_stride,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    WIDTH: tl.constexpr,  # of the convolution
    EVERY: tl.constexpr,
    RATE_SCALE: tl.constexpr,
    LEAST: tl.constexpr,  # log of a decay, or None
    BY_DIMENSION: tl.constexpr,  # each dimension of a key decays by itself
    SIGMOID: tl.constexpr,  # the gates
    FEW: tl.constexpr,  # see _FEW_ROWS
    PDL: tl.constexpr,
):
    # Rows' slots, positions and states were written before the step or at its beginning. So they
    # are read before the wait, bypassing the first-level cache.
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)  # programs that run together read neighbouring memory
    if PDL:
        allow_next()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        if PDL:
            wait_previous()  # the next kernel may assume that all before it have ended
        return
    key_head = head // (HEADS // KEY_HEADS)
    i, j = tl.arange(0, KP), tl.arange(0, VP)
    in_k, in_v = i < K, j < V
    at = states_ptr + slot * states_stride + head * (K * V) + i[:, None] * V + j[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    state = tl.load(at, mask=in_state, other=0.0, cache_modifier=".cg").to(tl.float32)  # [KP, VP]
    of_head = slot * HEADS + head
    if not BY_DIMENSION:  # otherwise no kernel leaves updates pending
        place = (tl.load(positions_ptr + row) % EVERY).to(tl.int32)  # of this token's update
        begin = tl.load(begins_ptr + of_head, cache_modifier=".cg")
        if begin < place:
            state = with_pending(
                state,
                keys_ptr + (slot * KEY_HEADS + key_head) * (EVERY * K),
                values_ptr + of_head * (EVERY * V),
                decays_ptr + of_head * EVERY,
                begin,
                place,
                i,
                j,
                K,
                V,
            )
    of_q, of_k = key_head * K + i, (KEY_HEADS + key_head) * K + i
    of_v = 2 * KEY_HEADS * K + head * V + j
    row_inputs = inputs_ptr + slot * inputs_stride
    q_begun, q_own, q_stay = conv_begun(row_inputs, conv_ptr, of_q, in_k, WIDTH)
    k_begun, k_own, k_stay = conv_begun(row_inputs, conv_ptr, of_k, in_k, WIDTH)
    v_begun, v_own, v_stay = conv_begun(row_inputs, conv_ptr, of_v, in_v, WIDTH)
    log_rate = tl.load(log_rates_ptr + head)
    if BY_DIMENSION:
        bias = tl.load(bias_ptr + head * K + i, mask=in_k, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    norm = tl.load(norm_ptr + j, mask=in_v, other=0.0).to(tl.float32)
    if PDL:
        wait_previous()
    token = x_ptr + row * x_stride
    q_input = tl.load(token + of_q, mask=in_k, other=0.0)
    k_input = tl.load(token + of_k, mask=in_k, other=0.0)
    v_input = tl.load(token + of_v, mask=in_v, other=0.0)
    z = tl.load(z_ptr + row * z_stride + head * V + j, mask=in_v, other=0.0).to(tl.float32)
    rate = tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32)) * RATE_SCALE
    if BY_DIMENSION:
        a = tl.load(a_ptr + row * a_stride + head * K + i, mask=in_k, other=0.0)
        state *= tl.exp(log_decay(a, log_rate, bias, LEAST))[:, None]
        decay = 1.0
    else:
        a = tl.load(a_ptr + row * a_stride + head)
        decay = tl.exp(log_decay(a, log_rate, bias, LEAST))
    q = conv_ended(q_begun, q_own, q_input)
    k = conv_ended(k_begun, k_own, k_input)
    v = conv_ended(v_begun, v_own, v_input)
    if FEW:
        q_square, k_square = tl.reduce((q * q, k * k), 0, _both)
        q *= tl.rsqrt(q_square + EPS) * scale
        k *= tl.rsqrt(k_square + EPS)
    else:
        q *= tl.rsqrt(tl.sum(q * q) + EPS) * scale
        k *= tl.rsqrt(tl.sum(k * k) + EPS)
    if HEADS > KEY_HEADS:
        # Other programs read the same inputs of queries and keys, and the last program replaces
        # them. Each has used its own before it counts, so there is nothing to order. One thread
        # counts, and its result is needed only at the end.
        tl.debug_barrier()
        readers = readers_ptr + slot * KEY_HEADS + key_head
        before = tl.atomic_add(readers + 0 * i, 1, mask=i == 0, sem="relaxed")
    # what the key and the query read of the old state
    if FEW:
        known, found = tl.reduce((state * k[:, None], state * q[:, None]), 0, _both)  # [VP]
        known, found = known * decay, found * decay
    else:
        known = tl.sum(state * k[:, None], axis=0) * decay
        found = tl.sum(state * q[:, None], axis=0) * decay
    new = (v - known) * rate
    state = state * decay + k[:, None] * new[None, :]
    tl.store(at, stored(state, states_ptr.dtype.element_ty), mask=in_state)
    if not BY_DIMENSION:
        tl.store(begins_ptr + of_head, (place + 1) % EVERY)
    found += tl.sum(q * k) * new
    found *= tl.rsqrt(tl.sum(found * found) / V + eps) * norm * open_gate(z, SIGMOID)
    to = out_ptr + (row * HEADS + head) * V + j
    tl.store(to, found.to(out_ptr.dtype.element_ty), mask=in_v)
    keep_inputs_of_token(row_inputs, v_stay, v_input, of_v, in_v, WIDTH, FEW)
    replaces = in_k
    if HEADS > KEY_HEADS:
        is_last = tl.sum(tl.where(i == 0, before, 0)) == HEADS // KEY_HEADS - 1
        tl.store(readers, 0, mask=is_last)
        replaces = in_k & is_last
    keep_inputs_of_token(row_inputs, q_stay, q_input, of_q, replaces, WIDTH, FEW)
    keep_inputs_of_token(row_inputs, k_stay, k_input, of_k, replaces, WIDTH, FEW)


def launch_step(
    out: Tensor,
    x: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    states: tuple[Tensor, Tensor, Tensor],
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
    *,
    num_key_heads: int,
    eps: float,
    rate_scale: float,
    least_decay: float | None,
    by_dimension: bool,
    sigmoid_gates: bool,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.gated_delta.delta_step``. ``weights``: the convolution's
    weight, the decay's log rates and biases, and the norm's weight. ``states``: the fields of a
    ``DeltaStates``, and ``pending`` those of its ``PendingUpdates``."""
    (conv, _, biases, _), (inputs, matrices, readers) = weights, states
    num_rows, (num_heads, key_dim, value_dim) = len(slots), matrices.shape[1:]
    if num_rows == 0:
        return
    assert all(of.is_contiguous() for of in (out, conv, biases, inputs[0], matrices[0], readers))
    assert all(of.is_contiguous() for of in pending)
    a = a.flatten(1)  # if each dimension has its own, a head's follow one another
    assert a.stride(1) == b.stride(1) == x.stride(1) == z.stride(2) == 1
    assert z.stride(1) == value_dim and inputs.shape[2] == conv.shape[1] - 1
    kp, vp = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    _step[(num_heads, num_rows)](
        out,
        x,
        z,
        a,
        b,
        *weights,
        *states,
        *pending,
        slots,
        positions,
        x.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        inputs.stride(0),
        matrices.stride(0),
        key_dim**-0.5,
        eps,
        KEY_HEADS=num_key_heads,
        HEADS=num_heads,
        K=key_dim,
        V=value_dim,
        KP=kp,
        VP=vp,
        WIDTH=conv.shape[1],
        EVERY=WHOLE_EVERY,
        RATE_SCALE=rate_scale,
        LEAST=least_decay,
        BY_DIMENSION=by_dimension,
        SIGMOID=sigmoid_gates,
        FEW=num_rows <= _FEW_ROWS,
        PDL=pdl,
        num_warps=4 if kp * vp <= _MOST_OF_FOUR_WARPS else 8,
        **launch_options(pdl),
    )
