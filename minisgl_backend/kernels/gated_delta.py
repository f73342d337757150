"""Gated DeltaNet: linear attention whose state is a matrix that each token corrects.

A head keeps S [key_dim, value_dim], float32. A token with key k, value v, query q, decay g <= 0 (in
log space) and rate beta changes it, and reads it, by the gated delta rule (arXiv 2412.06464):

    S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  o = S^T q

Several tokens of one sequence are computed in blocks: within a block the corrections solve a
triangular system (the UT transform, arXiv 2406.06484), so that all else is GEMMs; blocks follow
each other by the state alone. Before the rule, a causal convolution over the last few tokens runs
through queries, keys and values; its own state is the inputs of those tokens.

Knows tensors only. Everything here is float32 inside, whatever the inputs are.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK: Final = 64
"""Tokens that are computed at once."""

_EPS: Final = 1e-6


def causal_conv(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution over one sequence's tokens, and SiLU of it; the state behind them.

    ``x`` [num_tokens, channels]; ``state`` [channels, width - 1], the inputs of the tokens before;
    ``weight`` [channels, width], of which the last column is the token's own. Returns
    [num_tokens, channels] and a new state.
    """
    inputs = torch.cat([state, x.T.to(state.dtype)], dim=1)  # [channels, width - 1 + num_tokens]
    mixed = F.conv1d(inputs[None], weight[:, None].to(inputs.dtype), groups=len(weight))[0]
    return F.silu(mixed).T.to(x.dtype), inputs[:, len(x) :]


def causal_conv_step(x: Tensor, states: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """The same for one token each of several rows, whose ``states`` are updated in place.

    ``x`` [num_rows, channels]; ``states`` [num_slots, channels, width - 1]; ``slots`` int64
    [num_rows]. Returns [num_rows, channels].
    """
    inputs = torch.cat([states[slots], x[..., None].to(states.dtype)], dim=-1)
    states[slots] = inputs[..., 1:]
    return F.silu((inputs * weight.to(inputs.dtype)).sum(-1)).to(x.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule over one sequence's tokens: what they read, and the state behind them.

    ``q``, ``k`` [num_tokens, num_key_heads, key_dim], not normalized; ``v`` [num_tokens, num_heads,
    value_dim], where consecutive heads share a key head; ``g``, ``beta`` [num_tokens, num_heads];
    ``state`` float32 [num_heads, key_dim, value_dim]. Returns [num_tokens, num_heads, value_dim] in
    the dtype of ``v`` and a new state.
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
    return flat[:num_tokens].to(v.dtype), state


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
    return found.squeeze(-2).to(v.dtype)


def _unit(x: Tensor, num_heads: int) -> Tensor:
    """Vectors of length 1, repeated for the heads that share them: float32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
    shared: Tensor = torch.repeat_interleave(x, num_heads // x.shape[1], dim=1)
    return shared


def _unit_queries(q: Tensor, num_heads: int) -> Tensor:
    return _unit(q, num_heads) / math.sqrt(q.shape[-1])
