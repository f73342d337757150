"""Gated DeltaNet: linear attention whose state is a matrix that each token corrects.

A head keeps S [key_dim, value_dim], float32. A token with key k, value v, query q, decay g <= 0 (in
log space) and rate beta changes it, and reads it, by the gated delta rule (arXiv 2412.06464):

    S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  o = S^T q

Several tokens of one sequence are computed in blocks: within a block the corrections solve a
triangular system (the UT transform, arXiv 2406.06484), so that all else is GEMMs; blocks follow
each other by the state alone. Before the rule, a causal convolution over the last few tokens runs
through queries, keys and values; its own state is the inputs of those tokens.

Knows tensors and slots of states only. States and sums are float32, whatever the inputs are; the
kernels' GEMMs over blocks take operands of the inputs' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32, use_triton
from minisgl_backend.request import IntArray

BLOCK: Final = 64
"""Tokens that are computed at once."""

_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one row that follow each other, by their indices ``begin`` <= t < ``end``.

    ``slot`` has the row's states, those behind the tokens before, unless the run ``is_fresh``: then
    it begins a sequence. It gets those behind the last token. ``kept``, ascending: an index and the
    slot that gets a copy of the states behind the tokens before that index.
    """

    begin: int
    end: int
    slot: int
    is_fresh: bool
    kept: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The prompt chunks of a step, as kernels read them; ``runs`` are for their twins.

    Tokens are numbered from the first run's first. No slot occurs twice. int32 on the device:
    ``blocks`` [num_blocks, 4], up to 64 tokens each: begin, end, the slot that keeps the states
    behind it or -1, and its run. ``lines`` [num_runs, 4]: the run's first block, the one after its
    last, slot, and whether it is fresh.
    """

    runs: tuple[Run, ...]
    blocks: Tensor
    lines: Tensor

    @classmethod
    def of(cls, runs: Sequence[Run], upload: Callable[[IntArray], Tensor]) -> Runs:
        """``upload`` copies an array to the device."""
        blocks: list[tuple[int, int, int, int]] = []
        lines = []
        for index, run in enumerate(runs):
            first, begin = len(blocks), run.begin
            for border, slot in (*run.kept, (run.end, -1)):
                for start in range(begin, border, BLOCK):
                    end = min(start + BLOCK, border)
                    blocks.append((start, end, slot if end == border else -1, index))
                begin = border
            lines.append((first, len(blocks), run.slot, int(run.is_fresh)))
        table = upload(np.array([*blocks, *lines], np.int32))
        return cls(tuple(runs), table[: len(blocks)], table[len(blocks) :])


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """What a layer's rule has beside its inputs.

    [num_heads]: ``log_rates``, of the decay, and ``biases``; ``norm`` [value_dim] is the weight of
    the output's norm, with its ``eps``.
    """

    num_key_heads: int
    log_rates: Tensor
    biases: Tensor
    norm: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """The projections of tokens; a token's numbers lie together, those of the next may be apart.

    ``channels`` [num_tokens, num_channels], behind the convolution: queries and keys of all key
    heads, values of all heads. ``z`` [num_tokens, num_heads, value_dim], the gate of the output.
    [num_tokens, num_heads]: ``a``, which the decay follows from, and ``b``, the rate's.
    """

    channels: Tensor
    z: Tensor
    a: Tensor
    b: Tensor


def causal_conv_step(x: Tensor, states: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """The convolution over one token each of several rows, and SiLU of it; ``states`` are updated
    in place.

    ``x`` [num_rows, channels]; ``states`` [num_slots, channels, width - 1], the inputs of the
    tokens before; ``slots`` int64 [num_rows]; ``weight`` [channels, width], of which the last
    column is the token's own. Returns [num_rows, channels].
    """
    if not use_triton(x):
        return causal_conv_step_reference(x, states, slots, weight)
    from minisgl_backend.kernels.triton_kernels.gated_delta_kernels import launch_conv_step

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_conv_step(out, x, states, slots, weight)
    return out


def causal_conv_runs(x: Tensor, states: Tensor, runs: Runs, weight: Tensor) -> Tensor:
    """The same over the tokens of ``runs``; ``x`` [num_tokens, channels]."""
    if not use_triton(x):
        return causal_conv_runs_reference(x, states, runs, weight)
    from minisgl_backend.kernels.triton_kernels.gated_delta_kernels import launch_conv_blocks

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_conv_blocks(out, x, states, runs.blocks, runs.lines, weight)
    return out


def delta_step(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, states: Tensor, slots: Tensor
) -> None:
    """The rule over one token each of several rows, whose ``states`` are updated in place; then the
    norm of what each head reads, and its gate.

    ``out`` [num_rows, num_heads, value_dim] gets the result; ``states`` float32 [num_slots,
    num_heads, key_dim, value_dim]; ``slots`` int64 [num_rows].
    """
    if not use_triton(out):
        delta_step_reference(out, inputs, weights, states, slots)
        return
    from minisgl_backend.kernels.triton_kernels.gated_delta_kernels import launch_rule_step

    launch_rule_step(
        out,
        inputs.channels,
        inputs.z,
        inputs.a,
        inputs.b,
        (weights.log_rates, weights.biases, weights.norm),
        states,
        slots,
        num_key_heads=weights.num_key_heads,
        eps=weights.eps,
    )


def delta_runs(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, states: Tensor, runs: Runs
) -> None:
    """The same over the tokens of ``runs``; ``out`` [num_tokens, num_heads, value_dim]."""
    if not use_triton(out):
        delta_runs_reference(out, inputs, weights, states, runs)
        return
    from minisgl_backend.kernels.triton_kernels.gated_delta_kernels import launch_rule_blocks

    launch_rule_blocks(
        out,
        inputs.channels,
        inputs.z,
        inputs.a,
        inputs.b,
        (weights.log_rates, weights.biases, weights.norm),
        states,
        runs.blocks,
        runs.lines,
        num_key_heads=weights.num_key_heads,
        eps=weights.eps,
    )


def causal_conv_step_reference(x: Tensor, states: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """The twin of ``causal_conv_step``."""
    inputs = torch.cat([states[slots], x[..., None].to(states.dtype)], dim=-1)
    states[slots] = inputs[..., 1:]
    return F.silu((at_least_float32(inputs) * weight).sum(-1)).to(x.dtype)


def causal_conv_runs_reference(x: Tensor, states: Tensor, runs: Runs, weight: Tensor) -> Tensor:
    """The twin of ``causal_conv_runs``."""
    out = torch.empty_like(x)
    for run in runs.runs:
        state = torch.zeros_like(states[0]) if run.is_fresh else states[run.slot]
        begin = run.begin
        for end, slot in (*run.kept, (run.end, run.slot)):
            if begin < end:
                out[begin:end], state = causal_conv(x[begin:end], state, weight)
            states[slot] = state
            begin = end
    return out


def delta_step_reference(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, states: Tensor, slots: Tensor
) -> None:
    """The twin of ``delta_step``."""
    heads, rates = _heads(inputs, weights, states), _rates(inputs, weights)
    out.copy_(_gated(delta_rule_step(*heads, *rates, states, slots), inputs.z, weights))


def delta_runs_reference(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, states: Tensor, runs: Runs
) -> None:
    """The twin of ``delta_runs``."""
    each = *_heads(inputs, weights, states), *_rates(inputs, weights)
    for run in runs.runs:
        state = torch.zeros_like(states[0]) if run.is_fresh else states[run.slot]
        begin = run.begin
        for end, slot in (*run.kept, (run.end, run.slot)):
            if begin < end:
                q, k, v, g, beta = (of_all[begin:end] for of_all in each)
                found, state = delta_rule(q, k, v, g, beta, state)
                out[begin:end] = _gated(found, inputs.z[begin:end], weights)
            states[slot] = state
            begin = end


def _heads(
    inputs: DeltaInputs, weights: DeltaWeights, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [num_tokens, their heads, their size]."""
    key_heads, (num_heads, key_dim, value_dim) = weights.num_key_heads, states.shape[1:]
    size = key_heads * key_dim
    q, k, v = inputs.channels.tensor_split([size, 2 * size], dim=1)
    keys = len(q), key_heads, key_dim
    return q.reshape(keys), k.reshape(keys), v.reshape(len(v), num_heads, value_dim)


def _rates(inputs: DeltaInputs, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """The log of each head's decay and the rate at which it learns, float32
    [num_tokens, num_heads]."""
    a, b = inputs.a.float() + weights.biases.float(), inputs.b.float()
    return -weights.log_rates.float().exp() * F.softplus(a), b.sigmoid()


def _gated(found: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """What the heads read, normalized and gated: float32 [num_tokens, num_heads, value_dim]."""
    wide = F.rms_norm(found, found.shape[-1:], None, weights.eps)
    return wide * weights.norm * F.silu(z.float())


def causal_conv(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution over one sequence's tokens, and SiLU of it; the state behind them.

    ``x`` [num_tokens, channels]; ``state`` [channels, width - 1], the inputs of the tokens before;
    ``weight`` [channels, width], of which the last column is the token's own. Returns
    [num_tokens, channels] and a new state.
    """
    inputs = torch.cat([state, x.T.to(state.dtype)], dim=1)  # [channels, width - 1 + num_tokens]
    wide = at_least_float32(inputs)
    mixed = F.conv1d(wide[None], weight[:, None].to(wide.dtype), groups=len(weight))[0]
    return F.silu(mixed).T.to(x.dtype), inputs[:, len(x) :]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule over one sequence's tokens: what they read, and the state behind them.

    ``q``, ``k`` [num_tokens, num_key_heads, key_dim], not normalized; ``v`` [num_tokens, num_heads,
    value_dim], where consecutive heads share a key head; ``g``, ``beta`` [num_tokens, num_heads];
    ``state`` float32 [num_heads, key_dim, value_dim]. Returns float32 [num_tokens, num_heads,
    value_dim] and a new state.
    """
    num_tokens, num_heads, value_dim = v.shape
    queries, keys = _unit_queries(q, num_heads), _unit(k, num_heads)
    padding = -num_tokens % BLOCK

    def blocks(x: Tensor) -> Tensor:
        """[num_tokens, num_heads, ...] -> float32 [num_blocks, num_heads, BLOCK, ...]."""
        padded = F.pad(x.float(), (0, 0) * (x.dim() - 1) + (0, padding))
        return padded.view(-1, BLOCK, *x.shape[1:]).transpose(1, 2)

    queries, keys, values = blocks(queries), blocks(keys), blocks(v)
    rates = blocks(beta)[..., None]  # [num_blocks, num_heads, BLOCK, 1]; padding has the rate 0
    decay = blocks(g).cumsum(-1)  # since the block began
    between = decay[..., :, None] - decay[..., None, :]  # from the column's token to the row's
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=v.device).tril()
    between = between.masked_fill(~causal, -torch.inf).exp()
    # what each token would write if the tokens of its block before it were not there, and what of
    # it is owed to the state at the block's beginning; the system takes those tokens into account
    system = (rates * keys) @ keys.mT * between
    since = decay.exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([rates * values, rates * keys * since], dim=-1),
        upper=False,
        unitriangular=True,
    )
    written, owed = solved[..., :value_dim], solved[..., value_dim:]
    within = queries @ keys.mT * between
    queries = queries * since
    keys = keys * (decay[..., -1:] - decay).exp()[..., None]
    kept = since[..., -1:, :]  # of the state, over the whole block
    outputs = torch.empty_like(values)
    for block, new in enumerate(written):
        new = new - owed[block] @ state  # [num_heads, BLOCK, value_dim]
        outputs[block] = queries[block] @ state + within[block] @ new
        state = state * kept[block] + keys[block].mT @ new
    flat = outputs.transpose(1, 2).flatten(0, 1)
    return flat[:num_tokens], state


def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """The same for one token each of several rows, whose ``states`` are updated in place.

    Arguments are as of ``delta_rule``, with rows in place of tokens; ``states`` float32 [num_slots,
    num_heads, key_dim, value_dim]; ``slots`` int64 [num_rows].
    """
    num_heads = v.shape[1]
    queries, keys = _unit_queries(q, num_heads), _unit(k, num_heads)  # [num_rows, num_heads, ...]
    state = states[slots] * g.float().exp()[..., None, None]
    read = (keys[..., None, :] @ state).squeeze(-2)
    written = (v.float() - read) * beta.float()[..., None]  # [num_rows, num_heads, value_dim]
    state += keys[..., None] * written[..., None, :]
    states[slots] = state
    found: Tensor = queries[..., None, :] @ state  # [num_rows, num_heads, 1, value_dim]
    return found.squeeze(-2)


def _unit(x: Tensor, num_heads: int) -> Tensor:
    """Vectors of length 1, repeated for the heads that share them: float32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
    shared: Tensor = torch.repeat_interleave(x, num_heads // x.shape[1], dim=1)
    return shared


def _unit_queries(q: Tensor, num_heads: int) -> Tensor:
    return _unit(q, num_heads) / math.sqrt(q.shape[-1])
