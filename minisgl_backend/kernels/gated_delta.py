"""Gated DeltaNet: linear attention whose state is a matrix that each token corrects.

A head keeps S [key_dim, value_dim]. A token with key k, value v, query q, decay g <= 0 (in
log space) and rate beta updates and reads it by the gated delta rule (arXiv 2412.06464):

    S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  o = S^T q

In Kimi Delta Attention (arXiv 2510.26692) each dimension of a key has a decay of its own: exp(g)
is then a diagonal matrix.

Several tokens of one sequence are computed in blocks. Within a block the corrections solve a
triangular system (the UT transform, arXiv 2406.06484), so everything else is GEMMs. Only the state
goes from one block to the next. Before the rule, queries, keys and values go through a causal
convolution over the last few tokens, whose own state is the inputs of those tokens.

The decode steps of many rows have a kernel (``cuda/delta_step``) that leaves updates pending
(``layer_states``). The value of an update is the correction beta (v - k^T S). Its key has unit
length.

Knows only tensors, slots of states and positions. States and sums are computed in float32, whatever
the dtype of the inputs; the kernels' GEMMs over blocks take operands of that dtype, and those that
invert the systems of 16-bit inputs float16. In slots S may have 16 bits: then it is rounded
whenever it is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.causal_conv import (
    causal_conv_checks,
    causal_conv_checks_reference,
    causal_conv_runs,
    causal_conv_runs_reference,
    causal_conv_step_reference,
)
from minisgl_backend.kernels.checks import CheckedTokens
from minisgl_backend.kernels.chunk_runs import BLOCK, Runs
from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.layer_states import LayerStates, rows_of, stored

_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class DeltaStates(LayerStates):
    """The states of a Gated DeltaNet layer, whose ``matrices`` are [num_slots, num_heads, key_dim,
    value_dim].

    ``readers`` int32 [num_slots, num_key_heads] counts within a kernel, and is 0 otherwise; layers
    may share it. None of this holds for the padding's slot, which several rows of a step have.
    """

    readers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """The weights of a layer other than its projections.

    ``conv`` [num_channels, width] is the convolution's; its last column is for the token itself.
    ``log_rates`` of the decay and ``biases`` are [num_heads]. If each dimension of a key decays by
    itself, ``biases`` are [num_heads, key_dim]; then all heads have keys. ``norm`` [value_dim] is
    the weight of the output's norm, and ``eps`` that norm's. Rates are up to ``rate_scale``, at
    most 2. The output's gates are SiLU or, if they are ``sigmoid_gates``, sigmoids. Logs of decays
    are minus a softplus, times the rates; with a ``least_decay``, which is below 0, they are that
    times a sigmoid, whose argument is multiplied by the rates.
    """

    num_key_heads: int
    conv: Tensor
    log_rates: Tensor
    biases: Tensor
    norm: Tensor
    eps: float
    rate_scale: float = 1.0
    sigmoid_gates: bool = False
    least_decay: float | None = None

    @property
    def by_dimension(self) -> bool:
        """Whether each dimension of a key decays by itself."""
        return self.biases.dim() == 2


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """The projections of tokens. A token's numbers are contiguous; tokens may be strided.

    ``channels`` [num_tokens, num_channels], before the convolution: queries and keys of all key
    heads, then values of all heads. ``z`` [num_tokens, num_heads, value_dim] is the output's gate.
    ``a`` and ``b`` [num_tokens, num_heads] give the decay and the rate. If each dimension of a key
    decays by itself, ``a`` is [num_tokens, num_heads, key_dim].
    """

    channels: Tensor
    z: Tensor
    a: Tensor
    b: Tensor


def delta_step(
    out: Tensor,
    inputs: DeltaInputs,
    weights: DeltaWeights,
    states: DeltaStates,
    slots: Tensor,
    positions: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """The convolution with SiLU and the rule for the first tokens, one per row, whose ``states``
    are updated in place; then the norm and the gate of what each head reads.

    ``out`` [num_tokens, num_heads, value_dim] gets the result. ``slots`` int64 [num_rows] is -1 for
    a token that is left to others; ``positions``, of at least these tokens, are integers. With
    ``pdl`` the kernel before this one must not write ``states``, ``slots`` or ``positions``.
    """
    if not use_triton(out):
        delta_step_reference(out, inputs, weights, states, slots)
        return
    from minisgl_backend.kernels.triton_kernels.gated_delta_step import launch_step

    launch_step(
        out,
        inputs.channels,
        inputs.z,
        inputs.a,
        inputs.b,
        (weights.conv, weights.log_rates, weights.biases, weights.norm),
        (states.conv, states.matrices, states.readers),
        states.pending.tensors,
        slots,
        positions,
        num_key_heads=weights.num_key_heads,
        eps=weights.eps,
        rate_scale=weights.rate_scale,
        least_decay=weights.least_decay,
        by_dimension=weights.by_dimension,
        sigmoid_gates=weights.sigmoid_gates,
        pdl=pdl,
    )


def delta_checks(
    out: Tensor,
    inputs: DeltaInputs,
    weights: DeltaWeights,
    states: DeltaStates,
    slots: Tensor,
    checks: CheckedTokens,
    positions: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """The same for the tokens of ``checks``, the first ones, which leave states, and updates that
    are pending, as they are. What they would add is kept in ``states.unsettled``.

    Arguments are as in ``delta_step``. ``slots`` int64 [num_tokens] are those of the tokens' rows,
    which have states; tokens of padding get zeros. With ``pdl`` the kernel before this one must not
    write ``checks``, either.
    """
    if not use_triton(out):
        delta_checks_reference(out, inputs, weights, states, slots, checks)
        return
    from minisgl_backend.kernels.triton_kernels.gated_delta_checks import launch_checks

    channels, unsettled = inputs.channels, states.unsettled
    assert unsettled is not None
    shape = len(slots), channels.shape[1]
    convolved = torch.empty(shape, dtype=channels.dtype, device=channels.device)
    causal_conv_checks(
        convolved, channels, states.conv, unsettled.inputs, slots, checks, weights.conv, pdl=pdl
    )
    launch_checks(
        out,
        convolved,
        inputs.z,
        inputs.a,
        inputs.b,
        (weights.log_rates, weights.biases, weights.norm),
        states.matrices,
        states.pending.tensors,
        unsettled.tensors[1:],
        slots,
        checks.lines,
        positions,
        eps=weights.eps,
        rate_scale=weights.rate_scale,
        least_decay=weights.least_decay,
        sigmoid_gates=weights.sigmoid_gates,
        pdl=pdl,
    )


def delta_runs(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, runs: Runs
) -> None:
    """The same for the tokens of ``runs``, which update the states. All tokens after them are
    padding, and get zeros."""
    if not use_triton(out):
        delta_runs_reference(out, inputs, weights, states, runs)
        return
    from minisgl_backend.kernels.triton_kernels.gated_delta_blocks import launch_chain, solve_blocks
    from minisgl_backend.kernels.triton_kernels.kimi_delta_blocks import solve_kimi_blocks

    channels = inputs.channels
    convolved = torch.empty(channels.shape, dtype=channels.dtype, device=channels.device)
    causal_conv_runs(convolved, channels, states.conv, runs, weights.conv)
    solve = solve_kimi_blocks if weights.by_dimension else solve_blocks
    solved = solve(
        convolved,
        inputs.a,
        inputs.b,
        (weights.log_rates, weights.biases),
        runs.blocks,
        (weights.num_key_heads, *states.matrices.shape[1:]),
        rate_scale=weights.rate_scale,
        least_decay=weights.least_decay,
    )
    launch_chain(
        out,
        solved,
        inputs.z,
        weights.norm,
        states.matrices,
        states.pending.tensors,
        runs.blocks,
        runs.lines,
        eps=weights.eps,
        sigmoid_gates=weights.sigmoid_gates,
    )


def delta_step_reference(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, slots: Tensor
) -> None:
    """The twin of ``delta_step``."""
    convolved = torch.empty_like(inputs.channels)
    causal_conv_step_reference(convolved, inputs.channels, states.conv, slots, weights.conv)
    of_rows, slots = rows_of(slots)
    each = *_heads(convolved, weights, states.matrices), *_rates(inputs, weights)
    q, k, v, g, beta = (of_all[of_rows] for of_all in each)
    found = delta_rule_step(q, k, v, g, beta, states.matrices, slots)
    out[of_rows] = _gated(found, inputs.z[of_rows], weights).to(out.dtype)


def delta_checks_reference(
    out: Tensor,
    inputs: DeltaInputs,
    weights: DeltaWeights,
    states: DeltaStates,
    slots: Tensor,
    checks: CheckedTokens,
) -> None:
    """The twin of ``delta_checks``, where no updates are pending."""
    unsettled = states.unsettled
    assert unsettled is not None
    convolved = torch.empty_like(inputs.channels)
    causal_conv_checks_reference(
        convolved, inputs.channels, states.conv, unsettled.inputs, slots, checks, weights.conv
    )
    decays, rates = _rates(inputs, weights)
    each = *_heads(convolved, weights, states.matrices), decays, rates
    own = out[: len(slots)].zero_()
    sharing = states.matrices.shape[1] // weights.num_key_heads
    for begin, length, place in checks.listed():
        state = states.matrices[slots[begin]].float()[None]
        for index in range(length):
            one = slice(begin + index, begin + index + 1)
            q, k, v, g, beta = (of_all[one] for of_all in each)
            found, state, keys, values = _stepped(q, k, v, g, beta, state)
            own[one] = _gated(found, inputs.z[one], weights).to(out.dtype)
            unsettled.keys[place, index] = keys[0, ::sharing]
            unsettled.values[place, index] = values[0]
        since = decays[begin : begin + length].cumsum(0)
        unsettled.decays[place, :length] = since if weights.by_dimension else since[..., None]


def delta_runs_reference(
    out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, runs: Runs
) -> None:
    """The twin of ``delta_runs``."""
    convolved, matrices = torch.empty_like(inputs.channels), states.matrices
    causal_conv_runs_reference(convolved, inputs.channels, states.conv, runs, weights.conv)
    each = *_heads(convolved, weights, matrices), *_rates(inputs, weights)
    out[int(runs.blocks[-1, 1]) :] = 0
    for run in runs.listed():
        state = torch.zeros_like(matrices[0]) if run.is_fresh else matrices[run.slot]
        state = state.float()
        for begin, end, slots in run.pieces():
            q, k, v, g, beta = (of_all[begin:end] for of_all in each)
            found, state = delta_rule(q, k, v, g, beta, state)
            out[begin:end] = _gated(found, inputs.z[begin:end], weights)
            for slot in slots:
                matrices[slot] = stored(state, matrices.dtype)
        states.pending.clear(run.slot, run.end_position)


def _heads(
    convolved: Tensor, weights: DeltaWeights, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [num_tokens, their heads, their size]."""
    key_heads, (num_heads, key_dim, value_dim) = weights.num_key_heads, states.shape[1:]
    size = key_heads * key_dim
    q, k, v = convolved.tensor_split([size, 2 * size], dim=1)
    keys = len(q), key_heads, key_dim
    return q.reshape(keys), k.reshape(keys), v.reshape(len(v), num_heads, value_dim)


def _rates(inputs: DeltaInputs, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """The log of each head's decay, float32 [num_tokens, num_heads] or [num_tokens, num_heads,
    key_dim], and the rate at which it learns, float32 [num_tokens, num_heads]."""
    a, b = inputs.a.float() + weights.biases.float(), inputs.b.float()
    factors = weights.log_rates.float().exp()
    if weights.by_dimension:
        factors = factors[:, None]
    if weights.least_decay is None:
        decays = -factors * F.softplus(a)
    else:
        decays = weights.least_decay * (factors * a).sigmoid()
    return decays, weights.rate_scale * b.sigmoid()


def _gated(found: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """What the heads read, normalized and gated: float32 [num_tokens, num_heads, value_dim]."""
    wide = F.rms_norm(found, found.shape[-1:], None, weights.eps)
    gates = z.float().sigmoid() if weights.sigmoid_gates else F.silu(z.float())
    return wide * weights.norm * gates


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule over one sequence's tokens: what they read, and the state after them.

    ``q``, ``k`` [num_tokens, num_key_heads, key_dim], not normalized; ``v`` [num_tokens, num_heads,
    value_dim], where consecutive heads share a key head; ``g``, ``beta`` [num_tokens, num_heads],
    or ``g`` [num_tokens, num_heads, key_dim] if each dimension of a key decays by itself; ``state``
    float32 [num_heads, key_dim, value_dim]. Returns float32 [num_tokens, num_heads,
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
    # since the block began, [num_blocks, num_heads, BLOCK, 1 or key_dim]
    decay = blocks(g if g.dim() == 3 else g[..., None]).cumsum(-2)
    # what each token would write without the tokens before it in its block, and how much of that is
    # due to the state at the block's beginning; the system takes those tokens into account
    system = _products(rates * keys, keys, decay)
    since = decay.exp()
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([rates * values, rates * keys * since], dim=-1),
        upper=False,
        unitriangular=True,
    )
    written, owed = solved[..., :value_dim], solved[..., value_dim:]
    within = _products(queries, keys, decay)
    queries = queries * since
    keys = keys * (decay[..., -1:, :] - decay).exp()
    kept = since[..., -1:, :].mT  # of the state, over the whole block
    outputs = torch.empty_like(values)
    for block, new in enumerate(written):
        new = new - owed[block] @ state  # [num_heads, BLOCK, value_dim]
        outputs[block] = queries[block] @ state + within[block] @ new
        state = state * kept[block] + keys[block].mT @ new
    flat = outputs.transpose(1, 2).flatten(0, 1)
    return flat[:num_tokens], state


def _products(x: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
    """What vectors ``x`` of tokens read of the keys of each token up to their own, which have
    decayed since: [..., BLOCK, BLOCK]. ``x`` and ``keys`` are [..., BLOCK, key_dim]; ``decay``
    [..., BLOCK, 1 or key_dim] since the block began, in log space."""
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=x.device).tril()
    if decay.shape[-1] == 1:
        between = decay - decay.mT  # from the column's token to the row's
        return x @ keys.mT * between.masked_fill(~causal, -torch.inf).exp()
    columns = []
    for key, before in zip(keys.unbind(-2), decay.unbind(-2), strict=True):
        left = (decay - before[..., None, :]).clamp(max=0).exp()
        columns.append((x * left) @ key[..., None])
    return torch.cat(columns, dim=-1).masked_fill(~causal, 0.0)


def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """The same for one token each of several rows, whose ``states`` are updated in place.

    Arguments are as in ``delta_rule``, with rows in place of tokens; ``states`` are
    ``DeltaStates.matrices``; ``slots`` int64 [num_rows].
    """
    found, state, _, _ = _stepped(q, k, v, g, beta, states[slots].float())
    states[slots] = stored(state, states.dtype)
    return found


def _stepped(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the tokens of rows read and their rows' new states, given ``state`` float32 [num_rows,
    num_heads, key_dim, value_dim]; then the keys [num_rows, num_heads, key_dim] and the values
    [num_rows, num_heads, value_dim] that these have taken in."""
    num_heads = v.shape[1]
    queries, keys = _unit_queries(q, num_heads), _unit(k, num_heads)  # [num_rows, num_heads, ...]
    decay = (g if g.dim() == 3 else g[..., None]).float().exp()  # [num_rows, num_heads, ...]
    state = state * decay[..., None]
    read = (keys[..., None, :] @ state).squeeze(-2)
    written = (v.float() - read) * beta.float()[..., None]  # [num_rows, num_heads, value_dim]
    state += keys[..., None] * written[..., None, :]
    found = queries[..., None, :] @ state  # [num_rows, num_heads, 1, value_dim]
    return found.squeeze(-2), state, keys, written


def _unit(x: Tensor, num_heads: int) -> Tensor:
    """Vectors of length 1, repeated for the heads that share them: float32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
    shared: Tensor = torch.repeat_interleave(x, num_heads // x.shape[1], dim=1)
    return shared


def _unit_queries(q: Tensor, num_heads: int) -> Tensor:
    return _unit(q, num_heads) / math.sqrt(q.shape[-1])
