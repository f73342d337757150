"""Gated DeltaNet for prompts: the delta rule for blocks of tokens, in three launches:

    _solve_blocks     for each block, everything that does not depend on earlier states
    _chain_blocks     the states, from block to block, and what the tokens read of them
    _gated_norm       the norm and the gate of the output; and where updates of rows that may be
                      pending begin, which all programs of a run have read by then

If each dimension of a key decays by itself, the first is another kernel (``kimi_delta_blocks``).
Blocks and runs may be padding (``kernels.chunk_runs``, which has their columns), whose programs end
at once. So one CUDA graph serves steps with different numbers of rows.

Names of dimensions: K of a key, V of a value, each padded to a power of two (KP, VP).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.chunk_runs import BLOCK
from minisgl_backend.kernels.dispatch import shared_bytes
from minisgl_backend.kernels.shared_memory import most_bytes
from minisgl_backend.kernels.triton_kernels.pending_updates import RUN, places_after, with_pending
from minisgl_backend.kernels.triton_kernels.recurrent_math import between, stored
from minisgl_backend.plan import WHOLE_EVERY

EPS = tl.constexpr(1e-6)  # added to the squared length of queries and keys


class SolvedBlocks(NamedTuple):
    """What does not depend on earlier states, by block and head: see ``_solve_blocks``. ``queries``
    and ``keys`` are those of key heads. If each dimension of a key decays by itself, they contain
    its decays: queries have decayed since the block began, and keys until it ends; and ``decays``
    are [num_blocks, num_heads, BLOCK, KP]."""

    queries: Tensor
    keys: Tensor
    owed: Tensor
    within: Tensor
    written: Tensor
    decays: Tensor


@triton.jit
def open_gate(z, SIGMOID: tl.constexpr):
    """What an output is multiplied by."""
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate *= z
    return gate


@triton.jit
def log_decay(a, log_rate, bias, LEAST: tl.constexpr):
    """The log of a head's decay for a token, from ``LEAST``, if that is given, to 0."""
    a = a.to(tl.float32) + bias.to(tl.float32)
    rate = tl.exp(log_rate.to(tl.float32))
    if LEAST is None:
        softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
        decay = -rate * softplus
    else:
        decay = LEAST * tl.sigmoid(rate * a)
    return decay


@triton.jit
def _product(a, b, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """a b in float32, for operands that are rounded to ``KIND``."""
    return tl.dot(a.to(KIND), b.to(KIND), input_precision=PRECISION)


@triton.jit
def inverse(a, exchanged_ptr, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 for a strictly lower triangular [64, 64].

    The 16 x 16 blocks on the diagonal are inverted row by row, which is stable. With D their
    inverses and n = D times the rest of a, (1 + a)^-1 = (1 + n)^-1 D. Since n^4 = 0, the series
    ends: it is (1 - n) (1 + n^2) D.

    Threads exchange the blocks on the diagonal through ``exchanged_ptr``, float32 [64, 16]. So a
    thread has whole columns of an inverse, and their rows need no sums over threads.
    """
    i = tl.arange(0, 64)
    own = (i // 16)[:, None] == (i // 16)[None, :]
    on_diagonal = exchanged_ptr + i[:, None] * 16 + (i % 16)[None, :]
    tl.store(on_diagonal, a, mask=own)
    part_ptr, column = exchanged_ptr + tl.arange(0, 4) * 256, tl.arange(0, 16)
    rows = ()
    for row in tl.static_range(16):
        if row % 4 == 0:
            tl.debug_barrier()
        solved = tl.where(column == row, 1.0, 0.0)[None, :] + tl.zeros([4, 16], tl.float32)
        for before in tl.static_range(row):
            factor = tl.load(part_ptr + (row * 16 + before))  # [4]
            solved -= factor[:, None] * rows[before]
        rows += (solved,)  # type: ignore[assignment]  # Triton takes no annotation of a tuple
    tl.debug_barrier()
    for row in tl.static_range(16):
        tl.store(part_ptr[:, None] + row * 16 + column[None, :], rows[row])
    tl.debug_barrier()
    d = tl.load(on_diagonal, mask=own, other=0.0)
    n = _product(d, tl.where(own, 0.0, a), KIND, PRECISION)
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    series = _product(one - n, one + _product(n, n, KIND, PRECISION), KIND, PRECISION)
    return _product(series, d, KIND, PRECISION)


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "a_ptr", "b_ptr"])
def _solve_blocks(
    queries_ptr,
    keys_ptr,
    owed_ptr,
    within_ptr,
    written_ptr,
    decays_ptr,
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
    KEY_HEADS: tl.constexpr,
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
    """For a block and the heads that share a key, with S the state before the block:

    queries, keys   [TOKENS, KP], of unit length; queries times the scale
    decays          [TOKENS], logs, since the block began
    within          [TOKENS, TOKENS], how much a token reads of each token's correction
    written         [TOKENS, VP], the corrections if S were zero
    owed            [TOKENS, KP], which times S is to be subtracted from these
    """
    block, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    if begin >= end:
        return
    n, i, j = tl.arange(0, TOKENS), tl.arange(0, KP), tl.arange(0, VP)
    t = (begin + n).to(tl.int64)
    inside = t < end
    kind = channels_ptr.dtype.element_ty
    from_ptr = channels_ptr + t[:, None] * channels_stride + key_head * K + i[None, :]
    in_keys = inside[:, None] & (i < K)[None, :]
    q = tl.load(from_ptr, mask=in_keys, other=0.0).to(tl.float32)
    k = tl.load(from_ptr + KEY_HEADS * K, mask=in_keys, other=0.0).to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + EPS) * scale)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + EPS)[:, None]
    q, k = q.to(kind), k.to(kind)
    to = ((block * KEY_HEADS + key_head) * TOKENS + n[:, None]) * KP + i[None, :]
    tl.store(queries_ptr + to, q)
    tl.store(keys_ptr + to, k)
    causal = n[:, None] >= n[None, :]
    first = key_head * (HEADS // KEY_HEADS)
    # a loop for each product, as both do not fit in registers
    read = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    for head in tl.range(first, first + HEADS // KEY_HEADS, num_stages=1):
        a = tl.load(a_ptr + t * a_stride + head, mask=inside, other=0.0)
        g = log_decay(a, tl.load(log_rates_ptr + head), tl.load(bias_ptr + head), LEAST)
        g = tl.cumsum(tl.where(inside, g, 0.0), axis=0)  # since the block began
        base = block * HEADS + head
        tl.store(decays_ptr + base * TOKENS + n, g)
        to_within = (base * TOKENS + n[:, None]) * TOKENS + n[None, :]
        tl.store(within_ptr + to_within, (read * between(g, causal)).to(kind))
    tl.debug_barrier()  # decays are there
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    alike = tl.where(n[:, None] > n[None, :], alike, 0.0)
    for head in tl.range(first, first + HEADS // KEY_HEADS, num_stages=1):
        base = block * HEADS + head
        g = tl.load(decays_ptr + base * TOKENS + n)
        b = tl.load(b_ptr + t * b_stride + head, mask=inside, other=0.0)
        rate = tl.where(inside, tl.sigmoid(b.to(tl.float32)) * RATE_SCALE, 0.0)
        system = alike * between(g, causal) * rate[:, None]
        to_exchanged = exchanged_ptr + base * (TOKENS * 16)
        inverted = inverse(system, to_exchanged, SYSTEM_KIND, PRECISION)
        of_keys = (inverted * (rate * tl.exp(g))[None, :]).to(kind)
        owed = tl.dot(of_keys, k, input_precision=PRECISION)
        tl.store(owed_ptr + (base * TOKENS + n[:, None]) * KP + i[None, :], owed.to(kind))
        v_at = 2 * KEY_HEADS * K + head * V + j[None, :]
        in_values = inside[:, None] & (j < V)[None, :]
        v = tl.load(channels_ptr + t[:, None] * channels_stride + v_at, mask=in_values, other=0.0)
        of_values = (inverted * rate[None, :]).to(kind)
        written = tl.dot(of_values, v, input_precision=PRECISION)
        tl.store(written_ptr + (base * TOKENS + n[:, None]) * VP + j[None, :], written.to(kind))


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr"])
def _chain_blocks(
    out_ptr,
    states_ptr,
    pending_keys_ptr,
    pending_values_ptr,
    pending_decays_ptr,
    begins_ptr,
    queries_ptr,
    keys_ptr,
    owed_ptr,
    within_ptr,
    written_ptr,
    decays_ptr,
    blocks_ptr,
    runs_ptr,
    slot_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    PART: tl.constexpr,  # dimensions of values of a program
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EVERY: tl.constexpr,
    BY_DIMENSION: tl.constexpr,  # see SolvedBlocks
    PRECISION: tl.constexpr,
):
    """For a run, a head and a part of its values, from what was solved for each block."""
    run_ptr = runs_ptr + tl.program_id(0) * RUN
    head = tl.program_id(1)
    first, last = tl.load(run_ptr), tl.load(run_ptr + 1)
    slot = tl.load(run_ptr + 2).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(run_ptr + 3)  # of the first token; if it is 0, there is no state yet
    n, i = tl.arange(0, TOKENS), tl.arange(0, KP)
    j = tl.program_id(2) * PART + tl.arange(0, PART)
    in_v = j < V
    kind = owed_ptr.dtype.element_ty
    at = i[:, None] * V + j[None, :]
    in_state = (i < K)[:, None] & in_v[None, :]
    head_ptr = states_ptr + head * (K * V) + at
    state_kind = states_ptr.dtype.element_ty
    state = tl.load(head_ptr + slot * slot_stride, mask=in_state & (position > 0), other=0.0)
    state = state.to(tl.float32)
    key_head = head // (HEADS // KEY_HEADS)
    if not BY_DIMENSION:  # otherwise no kernel leaves updates pending
        of_head = slot * HEADS + head
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
    of_keys = n[:, None] * KP + i[None, :]
    of_within = n[:, None] * TOKENS + n[None, :]
    of_values = n[:, None] * VP + j[None, :]
    for block in tl.range(first, last, num_stages=STAGES):
        base = head.to(tl.int64) + block * HEADS
        key_base = key_head.to(tl.int64) + block * KEY_HEADS
        queries = tl.load(queries_ptr + key_base * (TOKENS * KP) + of_keys)
        keys = tl.load(keys_ptr + key_base * (TOKENS * KP) + of_keys)
        owed = tl.load(owed_ptr + base * (TOKENS * KP) + of_keys)
        within = tl.load(within_ptr + base * (TOKENS * TOKENS) + of_within)
        written = tl.load(written_ptr + base * (TOKENS * VP) + of_values)
        if BY_DIMENSION:
            decay = tl.load(decays_ptr + (base * TOKENS + TOKENS - 1) * KP + i)  # over the block
        else:
            decays = tl.load(decays_ptr + base * TOKENS + n)  # since the block began
            decay = tl.load(decays_ptr + base * TOKENS + TOKENS - 1)  # over the block
        begin, end = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
        t = (begin + n).to(tl.int64)
        inside = t < end
        copy = tl.load(blocks_ptr + block * 4 + 2).to(tl.int64)
        rounded = state.to(kind)
        new = written.to(tl.float32) - tl.dot(owed, rounded, input_precision=PRECISION)
        found = tl.dot(queries, rounded, input_precision=PRECISION)
        if BY_DIMENSION:
            left = tl.exp(decay)[:, None]
            found = tl.dot(within, new.to(kind), found, input_precision=PRECISION)
        else:
            left = tl.exp(decay)
            found *= tl.exp(decays)[:, None]
            found = tl.dot(within, new.to(kind), found, input_precision=PRECISION)
            new *= tl.exp(decay - decays)[:, None]
        state = tl.dot(tl.trans(keys), new.to(kind), state * left, input_precision=PRECISION)
        to = out_ptr + (t[:, None] * HEADS + head) * V + j[None, :]
        tl.store(to, found.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_v[None, :])
        if copy >= 0:
            tl.store(head_ptr + copy * slot_stride, stored(state, state_kind), mask=in_state)
    tl.store(head_ptr + slot * slot_stride, stored(state, state_kind), mask=in_state)


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
    num_lines,
    num_runs,
    last_block,
    eps,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    LINES: tl.constexpr,
    EVERY: tl.constexpr,
    BY_DIMENSION: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    # lines of tokens:  decoding rows, done | [begin, end) runs | padding, which gets zeros
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    if not BY_DIMENSION:  # as many lines are also those of the heads of runs
        slot, place = places_after(blocks_ptr, runs_ptr, line // HEADS, num_runs, EVERY)
        tl.store(begins_ptr + slot * HEADS + line % HEADS, place, mask=slot >= 0)
    begin = tl.load(blocks_ptr) * HEADS
    end = tl.load(blocks_ptr + last_block * 4 + 1) * HEADS
    j = tl.arange(0, VP)
    mask = ((line >= begin) & (line < num_lines))[:, None] & (j < V)[None, :]
    at = out_ptr + line[:, None] * V + j[None, :]
    x = tl.load(at, mask=mask & (line < end)[:, None], other=0.0).to(tl.float32)
    z_at = z_ptr + (line // HEADS)[:, None] * z_stride + (line % HEADS)[:, None] * V + j[None, :]
    z = tl.load(z_at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + j, mask=j < V, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)[:, None] * weight[None, :]
    x *= open_gate(z, SIGMOID)
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=mask)


def solve_blocks(
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
    """What of the rule does not depend on earlier states. ``channels`` have gone through the
    convolution. ``rates`` are the decay's log rates and biases; ``shape``: numbers of key heads and
    heads, key_dim and value_dim."""
    num_key_heads, num_heads, key_dim, value_dim = shape
    assert a.stride(1) == b.stride(1) == channels.stride(1) == 1
    solved = empty_blocks(channels, len(blocks), shape, by_dimension=False)
    kp, vp = solved.keys.shape[3], solved.written.shape[3]
    of_inverses = (len(blocks), num_heads, BLOCK, 16)
    exchanged = torch.empty(of_inverses, dtype=torch.float32, device=channels.device)
    precision, system_kind = precision_of(channels.dtype)
    _solve_blocks[(len(blocks), num_key_heads)](
        *solved,
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
        KEY_HEADS=num_key_heads,
        HEADS=num_heads,
        K=key_dim,
        V=value_dim,
        KP=kp,
        VP=vp,
        TOKENS=BLOCK,
        RATE_SCALE=rate_scale,
        LEAST=least_decay,
        SYSTEM_KIND=system_kind,
        PRECISION=precision,
        num_warps=4,
    )
    return solved


def empty_blocks(
    channels: Tensor, num_blocks: int, shape: tuple[int, int, int, int], *, by_dimension: bool
) -> SolvedBlocks:
    """Memory for what is solved."""
    num_key_heads, num_heads, key_dim, value_dim = shape
    # at least 64: with narrower operands, four warps multiply what lies beyond shared memory
    kp, vp = (max(64, triton.next_power_of_2(size)) for size in (key_dim, value_dim))

    def scratch(heads: int, width: int, dtype: torch.dtype = channels.dtype) -> Tensor:
        size = (num_blocks, heads, BLOCK, width)
        return torch.empty(size, dtype=dtype, device=channels.device)

    return SolvedBlocks(
        queries=scratch(num_key_heads, kp),
        keys=scratch(num_key_heads, kp),
        owed=scratch(num_heads, kp),
        within=scratch(num_heads, BLOCK),
        written=scratch(num_heads, vp),
        decays=scratch(num_heads, kp if by_dimension else 1, torch.float32),
    )


def precision_of(dtype: torch.dtype) -> tuple[str, tl.dtype]:
    """How GEMMs over blocks multiply inputs of this type, and the type of the operands that invert
    the systems.

    With 16-bit inputs, an inverse is rounded to 16 bits in any case. Its operands are not large:
    corrections with rates of at most 2 enlarge nothing. So float16 suffices, which has as many bits
    as tf32, and whose operands the tensor cores take in any order.
    """
    return ("tf32x3", tl.float32) if dtype == torch.float32 else ("tf32", tl.float16)


def launch_chain(
    out: Tensor,
    solved: SolvedBlocks,
    z: Tensor,
    norm: Tensor,
    states: Tensor,
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    blocks: Tensor,
    runs: Tensor,
    *,
    eps: float,
    sigmoid_gates: bool,
) -> None:
    """The rest of ``minisgl_backend.kernels.gated_delta.delta_runs``. ``norm`` is the weight of the
    output's norm, ``pending`` are the fields of a ``PendingUpdates``."""
    num_tokens, num_heads, value_dim = out.shape
    key_dim, num_blocks = states.shape[2], len(blocks)
    assert states[0].is_contiguous() and out.is_contiguous()
    assert all(of.is_contiguous() for of in pending)
    assert z.stride(2) == 1 and z.stride(1) == value_dim and len(runs) <= num_tokens
    by_dimension = solved.decays.shape[3] > 1
    num_key_heads, kp, vp = solved.keys.shape[1], solved.keys.shape[3], solved.written.shape[3]
    precision, _ = precision_of(solved.keys.dtype)
    part = 32
    # what is loaded for a block; besides, operands that are computed take some 13 KiB
    stage_bytes = BLOCK * (3 * kp + BLOCK + part) * solved.keys.element_size()
    stages = (most_bytes(shared_bytes(out.device)) - 16 * 1024) // stage_bytes
    _chain_blocks[(len(runs), num_heads, vp // part)](
        out,
        states,
        *pending,
        *solved,
        blocks,
        runs,
        states.stride(0),
        KEY_HEADS=num_key_heads,
        HEADS=num_heads,
        K=key_dim,
        V=value_dim,
        KP=kp,
        VP=vp,
        PART=part,
        TOKENS=BLOCK,
        STAGES=min(max(stages, 1), 3),
        EVERY=WHOLE_EVERY,
        BY_DIMENSION=by_dimension,
        PRECISION=precision,
        num_warps=4,
    )
    lines = 16
    _gated_norm[(triton.cdiv(num_tokens * num_heads, lines),)](
        out,
        pending[3],
        z,
        norm,
        blocks,
        runs,
        z.stride(0),
        num_tokens * num_heads,
        len(runs),
        num_blocks - 1,
        eps,
        HEADS=num_heads,
        V=value_dim,
        VP=vp,
        LINES=lines,
        EVERY=WHOLE_EVERY,
        BY_DIMENSION=by_dimension,
        SIGMOID=sigmoid_gates,
        num_warps=4,
    )
