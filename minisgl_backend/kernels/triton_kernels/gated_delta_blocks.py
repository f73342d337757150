"""Gated DeltaNet for prompts: its convolution, and the delta rule for blocks of tokens, in five
launches:

    _conv_blocks      the convolution, and the inputs that snapshots keep
    _keep_inputs      the inputs that rows keep; only now have all blocks read the old ones
    _solve_blocks     for each block and head, everything that does not depend on earlier states
    _chain_blocks     the states, from block to block, and what the tokens read of them
    _gated_norm       the norm and the gate of the output

Blocks and runs may be padding (``kernels.delta_runs``), whose programs end at
once. So one CUDA graph serves steps with different numbers of rows.

Names of dimensions: K of a key, V of a value, each padded to a power of two (KP, VP).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = tl.constexpr(1e-6)  # added to the squared length of queries and keys


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def log_decay(a, log_rate, bias):
    """The log of a head's decay for a token, at most 0."""
    a = a.to(tl.float32) + bias.to(tl.float32)
    positive = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))  # softplus
    return -tl.exp(log_rate.to(tl.float32)) * positive


@triton.jit
def stored(state, kind: tl.constexpr):
    """See ``minisgl_backend.kernels.gated_delta.stored``."""
    if kind == tl.float16:
        state = tl.clamp(state, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return state.to(kind)


@triton.jit
def _input_before(x_ptr, state_ptr, s, first, is_known, x_stride, c, mask, WIDTH: tl.constexpr):
    """The inputs of token ``s`` of a run that begins at token ``first``. Before that token they
    come from the row's state, if there is any."""
    x = tl.load(x_ptr + s.to(tl.int64) * x_stride + c, mask=mask & (s >= first), other=0.0)
    at = state_ptr + c * (WIDTH - 1) + (s - first + WIDTH - 1)
    old = tl.load(at, mask=mask & (s < first) & is_known, other=0.0)
    return tl.where(s >= first, x, old.to(x.dtype))


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr"])
def _conv_blocks(
    out_ptr,
    x_ptr,
    states_ptr,
    blocks_ptr,
    runs_ptr,
    weight_ptr,
    x_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block_ptr = blocks_ptr + tl.program_id(0) * 4
    begin, end = tl.load(block_ptr), tl.load(block_ptr + 1)
    if begin >= end:
        return
    kept = tl.load(block_ptr + 2).to(tl.int64)
    run_ptr = runs_ptr + tl.load(block_ptr + 3) * 4
    first = tl.load(blocks_ptr + tl.load(run_ptr) * 4)
    slot = tl.load(run_ptr + 2).to(tl.int64)
    is_known = tl.load(run_ptr + 3) == 0
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < CHANNELS
    t = begin + tl.arange(0, TOKENS)
    state_ptr = states_ptr + slot * slot_stride
    inside = (t < end)[:, None] & mask[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + c * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
        s = (t - (WIDTH - 1) + tap)[:, None]
        from_ptr = x_ptr + s.to(tl.int64) * x_stride + c[None, :]
        x = tl.load(from_ptr, mask=inside & (s >= first), other=0.0)
        if begin < first + WIDTH - 1 and is_known:
            old_ptr = state_ptr + c[None, :] * (WIDTH - 1) + (s - first + WIDTH - 1)
            old = tl.load(old_ptr, mask=inside & (s < first), other=0.0)
            x = tl.where(s >= first, x, old.to(x.dtype))
        total += x.to(tl.float32) * weight[None, :]
    to = out_ptr + t.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(to, silu(total).to(out_ptr.dtype.element_ty), mask=inside)
    if kept >= 0:
        kept_ptr = states_ptr + kept * slot_stride + c * (WIDTH - 1)
        for tap in tl.static_range(WIDTH - 1):
            of = end - (WIDTH - 1) + tap + tl.zeros_like(c)
            last = _input_before(x_ptr, state_ptr, of, first, is_known, x_stride, c, mask, WIDTH)
            tl.store(kept_ptr + tap, last.to(states_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr"])
def _keep_inputs(
    x_ptr,
    states_ptr,
    blocks_ptr,
    runs_ptr,
    x_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run_ptr = runs_ptr + tl.program_id(0) * 4
    slot = tl.load(run_ptr + 2).to(tl.int64)
    if slot < 0:
        return
    first = tl.load(blocks_ptr + tl.load(run_ptr) * 4)
    end = tl.load(blocks_ptr + (tl.load(run_ptr + 1) - 1) * 4 + 1)
    is_known = tl.load(run_ptr + 3) == 0
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < CHANNELS
    state_ptr = states_ptr + slot * slot_stride
    for tap in tl.static_range(WIDTH - 1):
        # a short run keeps some old inputs: here a later one, which the same thread has not
        # overwritten yet
        s = end - (WIDTH - 1) + tap + tl.zeros_like(c)
        x = _input_before(x_ptr, state_ptr, s, first, is_known, x_stride, c, mask, WIDTH)
        at = state_ptr + c * (WIDTH - 1) + tap
        tl.store(at, x.to(states_ptr.dtype.element_ty), mask=mask)


def launch_conv_blocks(
    out: Tensor, x: Tensor, states: Tensor, blocks: Tensor, runs: Tensor, weight: Tensor
) -> None:
    """See ``minisgl_backend.kernels.gated_delta.causal_conv_runs``."""
    channels, width = weight.shape
    assert states[0].is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    block = 64
    _conv_blocks[(len(blocks), triton.cdiv(channels, block))](
        out,
        x,
        states,
        blocks,
        runs,
        weight,
        x.stride(0),
        states.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        TOKENS=64,
        BLOCK=block,
        num_warps=8,
    )
    block = 256
    _keep_inputs[(len(runs), triton.cdiv(channels, block))](
        x,
        states,
        blocks,
        runs,
        x.stride(0),
        states.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _diagonal_blocks(x, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """[PARTS * SIZE, PARTS * SIZE] -> the blocks on its diagonal, [PARTS, SIZE, SIZE]."""
    split = tl.reshape(x, [PARTS, SIZE, PARTS, SIZE])
    row = tl.arange(0, PARTS)[:, None, None, None]
    column = tl.arange(0, PARTS)[None, None, :, None]
    return tl.sum(tl.where(row == column, split, 0.0), axis=2)


@triton.jit
def _on_diagonal(x, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """The inverse of ``_diagonal_blocks``: everything else is 0."""
    row = tl.arange(0, PARTS)[:, None, None, None]
    column = tl.arange(0, PARTS)[None, None, :, None]
    placed = tl.where(row == column, tl.expand_dims(x, 2), 0.0)
    return tl.reshape(placed, [PARTS * SIZE, PARTS * SIZE])


@triton.jit
def _inverse(a, PRECISION: tl.constexpr):
    """(1 + a)^-1 for a strictly lower triangular [64, 64].

    The 16 x 16 blocks on the diagonal are inverted row by row, which is stable. With D their
    inverses and n = D times the rest of a, (1 + a)^-1 = (1 + n)^-1 D. Since n^4 = 0, the series
    ends: it is (1 - n) (1 + n^2) D.
    """
    own = _diagonal_blocks(a, 4, 16)  # [4, 16, 16]
    r = tl.arange(0, 16)
    is_one = (r[:, None] == r[None, :])[None, :, :]
    solved = tl.where(is_one, 1.0, tl.zeros_like(own))
    for row in tl.range(1, 16):
        at = (r == row)[None, :, None]
        factors = tl.sum(tl.where(at, own, 0.0), axis=1)  # of the rows before [4, 16]
        update = tl.sum(tl.expand_dims(factors, 2) * solved, axis=1)  # [4, 16]
        solved = tl.where(at, solved - tl.expand_dims(update, 1), solved)
    d = _on_diagonal(solved, 4, 16)
    n = tl.dot(d, a - _on_diagonal(own, 4, 16), input_precision=PRECISION)
    i = tl.arange(0, 64)
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    square = tl.dot(n, n, input_precision=PRECISION)
    series = tl.dot(one - n, one + square, input_precision=PRECISION)
    return tl.dot(series, d, input_precision=PRECISION)


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "a_ptr", "b_ptr"])
def _solve_blocks(
    owed_ptr,
    queries_ptr,
    keys_ptr,
    within_ptr,
    written_ptr,
    kept_ptr,
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
    PRECISION: tl.constexpr,
):
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    if begin >= end:
        return
    n, i, j = tl.arange(0, TOKENS), tl.arange(0, KP), tl.arange(0, VP)
    t = (begin + n).to(tl.int64)
    inside = t < end
    kind = channels_ptr.dtype.element_ty
    key_head = head // (HEADS // KEY_HEADS)
    from_ptr = channels_ptr + t[:, None] * channels_stride + key_head * K + i[None, :]
    in_keys = inside[:, None] & (i < K)[None, :]
    k = tl.load(from_ptr + KEY_HEADS * K, mask=in_keys, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + EPS)[:, None]
    rounded = k.to(kind)
    a = tl.load(a_ptr + t * a_stride + head, mask=inside, other=0.0)
    g = log_decay(a, tl.load(log_rates_ptr + head), tl.load(bias_ptr + head))
    g = tl.cumsum(tl.where(inside, g, 0.0), axis=0)  # since the block began
    b = tl.load(b_ptr + t * b_stride + head, mask=inside, other=0.0)
    rate = tl.where(inside, tl.sigmoid(b.to(tl.float32)), 0.0)
    whole = tl.sum(tl.where(n == TOKENS - 1, g, 0.0))  # over the block
    base = block * HEADS + head
    to = (base * TOKENS + n[:, None]) * KP + i[None, :]
    tl.store(keys_ptr + to, (k * tl.exp(whole - g)[:, None]).to(kind))
    tl.store(kept_ptr + base, tl.exp(whole))
    # from the column's token to the row's
    causal = n[:, None] >= n[None, :]
    between = tl.exp(tl.where(causal, g[:, None] - g[None, :], float("-inf")))
    q = tl.load(from_ptr, mask=in_keys, other=0.0).to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + EPS) * scale)[:, None]
    tl.store(queries_ptr + to, (q * tl.exp(g)[:, None]).to(kind))
    within = tl.dot(q.to(kind), tl.trans(rounded), input_precision=PRECISION) * between
    to_within = (base * TOKENS + n[:, None]) * TOKENS + n[None, :]
    tl.store(within_ptr + to_within, within.to(kind))
    alike = tl.dot(rounded, tl.trans(rounded), input_precision=PRECISION) * between
    system = tl.where(n[:, None] > n[None, :], alike * rate[:, None], 0.0)
    inverse = _inverse(system, PRECISION).to(kind)
    # load keys again: they would not fit into registers beside the system
    k = tl.load(from_ptr + KEY_HEADS * K, mask=in_keys, other=0.0).to(tl.float32)
    k *= (tl.rsqrt(tl.sum(k * k, axis=1) + EPS) * rate * tl.exp(g))[:, None]
    owed = tl.dot(inverse, k.to(kind), input_precision=PRECISION)
    tl.store(owed_ptr + to, owed.to(kind))
    v_ptr = channels_ptr + t[:, None] * channels_stride + 2 * KEY_HEADS * K + head * V + j[None, :]
    v = tl.load(v_ptr, mask=inside[:, None] & (j < V)[None, :], other=0.0).to(tl.float32)
    written = tl.dot(inverse, (v * rate[:, None]).to(kind), input_precision=PRECISION)
    tl.store(written_ptr + (base * TOKENS + n[:, None]) * VP + j[None, :], written.to(kind))


@triton.jit(do_not_specialize_on_alignment=["blocks_ptr", "runs_ptr"])
def _chain_blocks(
    out_ptr,
    states_ptr,
    owed_ptr,
    queries_ptr,
    keys_ptr,
    within_ptr,
    written_ptr,
    kept_ptr,
    blocks_ptr,
    runs_ptr,
    slot_stride,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    PART: tl.constexpr,  # dimensions of values of a program
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    run_ptr = runs_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    first, last = tl.load(run_ptr), tl.load(run_ptr + 1)
    slot = tl.load(run_ptr + 2).to(tl.int64)
    if slot < 0:
        return
    is_known = tl.load(run_ptr + 3) == 0
    n, i = tl.arange(0, TOKENS), tl.arange(0, KP)
    j = tl.program_id(2) * PART + tl.arange(0, PART)
    in_v = j < V
    kind = owed_ptr.dtype.element_ty
    at = i[:, None] * V + j[None, :]
    in_state = (i < K)[:, None] & in_v[None, :]
    head_ptr = states_ptr + head * (K * V) + at
    state_kind = states_ptr.dtype.element_ty
    state = tl.load(head_ptr + slot * slot_stride, mask=in_state & is_known, other=0.0)
    state = state.to(tl.float32)
    of_keys = n[:, None] * KP + i[None, :]
    of_within = n[:, None] * TOKENS + n[None, :]
    of_values = n[:, None] * VP + j[None, :]
    for block in tl.range(first, last, num_stages=STAGES):
        base = head.to(tl.int64) + block * HEADS
        owed = tl.load(owed_ptr + base * (TOKENS * KP) + of_keys)
        queries = tl.load(queries_ptr + base * (TOKENS * KP) + of_keys)
        keys = tl.load(keys_ptr + base * (TOKENS * KP) + of_keys)
        within = tl.load(within_ptr + base * (TOKENS * TOKENS) + of_within)
        written = tl.load(written_ptr + base * (TOKENS * VP) + of_values)
        kept = tl.load(kept_ptr + base)
        begin, end = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
        copy = tl.load(blocks_ptr + block * 4 + 2).to(tl.int64)
        rounded = state.to(kind)
        new = written.to(tl.float32) - tl.dot(owed, rounded, input_precision=PRECISION)
        new = new.to(kind)
        found = tl.dot(queries, rounded, input_precision=PRECISION)
        found = tl.dot(within, new, found, input_precision=PRECISION)
        state = tl.dot(tl.trans(keys), new, state * kept, input_precision=PRECISION)
        t = begin + n
        to = out_ptr + (t.to(tl.int64)[:, None] * HEADS + head) * V + j[None, :]
        tl.store(to, found.to(out_ptr.dtype.element_ty), mask=(t < end)[:, None] & in_v[None, :])
        if copy >= 0:
            tl.store(head_ptr + copy * slot_stride, stored(state, state_kind), mask=in_state)
    tl.store(head_ptr + slot * slot_stride, stored(state, state_kind), mask=in_state)


@triton.jit(do_not_specialize=["last_block"], do_not_specialize_on_alignment=["blocks_ptr"])
def _gated_norm(
    out_ptr,
    z_ptr,
    norm_ptr,
    blocks_ptr,
    z_stride,
    num_lines,
    last_block,
    eps,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    LINES: tl.constexpr,
):
    # lines of tokens:  decoding rows, done | [begin, end) runs | padding, which gets zeros
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    begin = tl.load(blocks_ptr) * HEADS
    end = tl.load(blocks_ptr + last_block * 4 + 1) * HEADS
    j = tl.arange(0, VP)
    mask = ((line >= begin) & (line < num_lines))[:, None] & (j < V)[None, :]
    at = out_ptr + line[:, None] * V + j[None, :]
    x = tl.load(at, mask=mask & (line < end)[:, None], other=0.0).to(tl.float32)
    z_at = z_ptr + (line // HEADS)[:, None] * z_stride + (line % HEADS)[:, None] * V + j[None, :]
    z = tl.load(z_at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + j, mask=j < V, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)[:, None] * weight[None, :] * silu(z)
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=mask)


def launch_rule_blocks(
    out: Tensor,
    channels: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    blocks: Tensor,
    runs: Tensor,
    *,
    num_key_heads: int,
    eps: float,
) -> None:
    """The rule of ``minisgl_backend.kernels.gated_delta.delta_runs``. ``channels`` have gone
    through the convolution. ``weights`` are the decay's log rates and biases, and the norm's
    weight."""
    num_tokens, num_heads, value_dim = out.shape
    key_dim, num_blocks = states.shape[2], len(blocks)
    assert states[0].is_contiguous() and out.is_contiguous()
    assert a.stride(1) == b.stride(1) == channels.stride(1) == z.stride(2) == 1
    assert z.stride(1) == value_dim
    log_rates, bias, norm = weights
    kp, vp = (max(16, triton.next_power_of_2(size)) for size in (key_dim, value_dim))
    # of float32 products; with 16-bit inputs, results are rounded to 16 bits afterwards
    precision = "tf32x3" if channels.dtype == torch.float32 else "tf32"
    tokens = 64

    def scratch(width: int) -> Tensor:
        shape = (num_blocks, num_heads, tokens, width)
        return torch.empty(shape, dtype=channels.dtype, device=channels.device)

    owed, queries, keys, within, written = (scratch(width) for width in (kp, kp, kp, tokens, vp))
    kept = torch.empty((num_blocks, num_heads), dtype=torch.float32, device=channels.device)
    _solve_blocks[(num_blocks, num_heads)](
        owed,
        queries,
        keys,
        within,
        written,
        kept,
        channels,
        a,
        b,
        log_rates,
        bias,
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
        TOKENS=tokens,
        PRECISION=precision,
        num_warps=8,
    )
    part = min(vp, 32)
    _chain_blocks[(len(runs), num_heads, vp // part)](
        out,
        states,
        owed,
        queries,
        keys,
        within,
        written,
        kept,
        blocks,
        runs,
        states.stride(0),
        HEADS=num_heads,
        K=key_dim,
        V=value_dim,
        KP=kp,
        VP=vp,
        PART=part,
        TOKENS=tokens,
        STAGES=2,
        PRECISION=precision,
        num_warps=4,
    )
    lines = 16
    _gated_norm[(triton.cdiv(num_tokens * num_heads, lines),)](
        out,
        z,
        norm,
        blocks,
        z.stride(0),
        num_tokens * num_heads,
        num_blocks - 1,
        eps,
        HEADS=num_heads,
        V=value_dim,
        VP=vp,
        LINES=lines,
        num_warps=4,
    )
