"""Attention of runs of queries to runs of keys and values in contiguous memory, without pages.

``ragged_attention_reference`` is the twin of FlashAttention-3's ``flash_attn_varlen_func``, and is
what a CPU computes. Must not know pages, or what keys and values were made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32

_MOST_SCORES: Final = 2**24
"""Scores in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Where runs begin: ``offsets`` int32 [num_runs + 1]; and the length of the ``longest``."""

    offsets: Tensor
    longest: int


def ragged_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    of_q: Ragged,
    of_keys: Ragged,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v for each run of queries and its run of keys.

    ``q`` [num_queries, num_heads, key_dim]; ``keys`` [num_keys, num_heads, key_dim]; ``values``
    [num_keys, num_heads, value_dim]. If ``causal``, a run's last query sees all its keys, and each
    query before it one key less. Returns [num_queries, num_heads, value_dim], and the log-sum-exps
    of scores, float32 or more [num_heads, num_queries]; 0 and -inf for runs without keys.
    """
    out = q.new_zeros(*q.shape[:2], values.shape[-1])
    exact = at_least_float32(q).dtype
    lses = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=exact)
    runs = zip(pairwise(of_q.offsets.tolist()), pairwise(of_keys.offsets.tolist()), strict=True)
    for (first, end), (first_key, end_key) in runs:
        if first_key == end_key:
            continue
        own_keys = keys[first_key:end_key].permute(1, 2, 0).to(exact)  # [heads, key_dim, keys]
        own_values = values[first_key:end_key].transpose(0, 1).to(exact)  # [heads, keys, value_dim]
        block = max(_MOST_SCORES // (q.shape[1] * (end_key - first_key)), 1)
        for begin in range(first, end, block):
            of_block = slice(begin, min(begin + block, end))
            scores = q[of_block].transpose(0, 1).to(exact) @ own_keys * scale  # [heads, n, keys]
            if causal:
                seen = end_key - first_key - (end - begin)  # keys before that of the first query
                hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
                scores.masked_fill_(hidden.triu(seen + 1), -torch.inf)
            lses[:, of_block] = scores.logsumexp(dim=-1)
            out[of_block] = (scores.softmax(dim=-1) @ own_values).transpose(0, 1).to(out.dtype)
    return out, lses
