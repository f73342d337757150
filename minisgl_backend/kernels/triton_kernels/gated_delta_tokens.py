"""The delta rule over runs of few tokens, token by token, in one launch; after the convolution.

Blocks of 64 tokens (``gated_delta_blocks``) take several launches, each of which takes about as
long for one token as for 64. Here a program keeps the state of one head of a row in registers, and
updates it for one token after another. Dimensions are named as in ``gated_delta_blocks``.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.gated_delta_blocks import (
    EPS,
    log_decay,
    open_gate,
    stored,
)
from minisgl_backend.kernels.triton_kernels.pending_updates import RUN, with_pending
from minisgl_backend.plan import WHOLE_EVERY


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr", "a_ptr", "b_ptr"])
def _chain_tokens(
    out_ptr,
    channels_ptr,
    z_ptr,
    a_ptr,
    b_ptr,
    log_rates_ptr,
    bias_ptr,
    norm_ptr,
    states_ptr,
    pending_keys_ptr,
    pending_values_ptr,
    pending_decays_ptr,
    begins_ptr,
    blocks_ptr,
    runs_ptr,
    channels_stride,
    z_stride,
    a_stride,
    b_stride,
    slot_stride,
    num_tokens,
    num_runs,
    last_block,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    EVERY: tl.constexpr,
    RATE_SCALE: tl.constexpr,
    BY_DIMENSION: tl.constexpr,  # each dimension of a key decays by itself
    SIGMOID: tl.constexpr,  # the gates
):
    """For a head and a run; or, in the place of one more run, for the padding, which gets zeros."""
    head, run = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, KP), tl.arange(0, VP)
    in_k, in_v = i < K, j < V
    if run == num_runs:
        for t in range(tl.load(blocks_ptr + last_block * 4 + 1), num_tokens):
            to = out_ptr + (t * HEADS + head) * V + j
            tl.store(to, tl.zeros([VP], out_ptr.dtype.element_ty), mask=in_v)
        return
    run_ptr = runs_ptr + run * RUN
    slot = tl.load(run_ptr + 2).to(tl.int64)
    if slot < 0:
        return
    first, last = tl.load(run_ptr), tl.load(run_ptr + 1)
    position = tl.load(run_ptr + 3)  # of the first token; if it is 0, there is no state yet
    known = tl.load(run_ptr + 4)  # the first block of guesses, or the one after the last
    state_kind: tl.constexpr = states_ptr.dtype.element_ty
    head_ptr = states_ptr + head * (K * V) + i[:, None] * V + j[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    state = tl.load(head_ptr + slot * slot_stride, mask=in_state & (position > 0), other=0.0)
    state = state.to(tl.float32)  # [KP, VP]
    key_head = head // (HEADS // KEY_HEADS)
    of_head = slot * HEADS + head
    if not BY_DIMENSION:  # otherwise no kernel leaves updates pending
        pending, place = tl.load(begins_ptr + of_head), position % EVERY
        if pending < place:
            state = with_pending(
                state,
                pending_keys_ptr + (slot * KEY_HEADS + key_head) * (EVERY * K),
                pending_values_ptr + of_head * (EVERY * V),
                pending_decays_ptr + of_head * EVERY,
                pending,
                place,
                i,
                j,
                K,
                V,
            )
    log_rate = tl.load(log_rates_ptr + head)
    if BY_DIMENSION:
        bias = tl.load(bias_ptr + head * K + i, mask=in_k, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    norm = tl.load(norm_ptr + j, mask=in_v, other=0.0).to(tl.float32)
    for block in range(first, last):
        block_ptr = blocks_ptr + block * 4
        for token in range(tl.load(block_ptr), tl.load(block_ptr + 1)):
            t = tl.cast(token, tl.int64)
            channels = channels_ptr + t * channels_stride
            q = tl.load(channels + key_head * K + i, mask=in_k, other=0.0).to(tl.float32)
            k = tl.load(channels + (KEY_HEADS + key_head) * K + i, mask=in_k, other=0.0)
            k = k.to(tl.float32)
            v = tl.load(channels + 2 * KEY_HEADS * K + head * V + j, mask=in_v, other=0.0)
            z = tl.load(z_ptr + t * z_stride + head * V + j, mask=in_v, other=0.0)
            rate = tl.sigmoid(tl.load(b_ptr + t * b_stride + head).to(tl.float32)) * RATE_SCALE
            if BY_DIMENSION:
                a = tl.load(a_ptr + t * a_stride + head * K + i, mask=in_k, other=0.0)
                state *= tl.exp(log_decay(a, log_rate, bias))[:, None]
            else:
                state *= tl.exp(log_decay(tl.load(a_ptr + t * a_stride + head), log_rate, bias))
            q_square, k_square = tl.reduce((q * q, k * k), 0, _both)
            q *= tl.rsqrt(q_square + EPS) * scale
            k *= tl.rsqrt(k_square + EPS)
            # what the key and the query read of the old state
            old, found = tl.reduce((state * k[:, None], state * q[:, None]), 0, _both)  # [VP]
            new = (v.to(tl.float32) - old) * rate
            state += k[:, None] * new[None, :]
            found += tl.sum(q * k) * new
            found *= tl.rsqrt(tl.sum(found * found) / V + eps) * norm
            found *= open_gate(z.to(tl.float32), SIGMOID)
            to = out_ptr + (t * HEADS + head) * V + j
            tl.store(to, found.to(out_ptr.dtype.element_ty), mask=in_v)
        copy = tl.load(block_ptr + 2).to(tl.int64)
        row_takes = block + 1 == known
        if (copy >= 0) | row_takes:
            kept = stored(state, state_kind)
            tl.store(head_ptr + copy * slot_stride, kept, mask=in_state & (copy >= 0))
            tl.store(head_ptr + slot * slot_stride, kept, mask=in_state & row_takes)
            if not BY_DIMENSION and row_takes:
                num_known = tl.load(block_ptr + 1) - tl.load(blocks_ptr + first * 4)
                tl.store(begins_ptr + of_head, (position + num_known) % EVERY)


def launch_chain_tokens(
    out: Tensor,
    channels: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    blocks: Tensor,
    runs: Tensor,
    *,
    num_key_heads: int,
    eps: float,
    rate_scale: float,
    by_dimension: bool,
    sigmoid_gates: bool,
) -> None:
    """The part of ``minisgl_backend.kernels.gated_delta.delta_runs`` after the convolution, whose
    result is ``channels``. ``weights``: the decay's log rates and biases, and the norm's weight.
    ``states`` are the matrices, ``pending`` the fields of a ``PendingUpdates``."""
    num_heads, key_dim, value_dim = states.shape[1:]
    assert states[0].is_contiguous() and out.is_contiguous()
    assert all(of.is_contiguous() for of in pending)
    a = a.flatten(1)  # if each dimension has its own, a head's follow one another
    assert a.stride(1) == b.stride(1) == channels.stride(1) == z.stride(2) == 1
    assert z.stride(1) == value_dim
    _chain_tokens[(num_heads, len(runs) + 1)](
        out,
        channels,
        z,
        a,
        b,
        *weights,
        states,
        *pending,
        blocks,
        runs,
        channels.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        states.stride(0),
        len(out),
        len(runs),
        len(blocks) - 1,
        key_dim**-0.5,
        eps,
        KEY_HEADS=num_key_heads,
        HEADS=num_heads,
        K=key_dim,
        V=value_dim,
        KP=triton.next_power_of_2(key_dim),
        VP=triton.next_power_of_2(value_dim),
        EVERY=WHOLE_EVERY,
        RATE_SCALE=rate_scale,
        BY_DIMENSION=by_dimension,
        SIGMOID=sigmoid_gates,
        num_warps=8,
    )
