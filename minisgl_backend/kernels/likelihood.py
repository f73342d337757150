"""How likely a token of each row of logits is: log-probability, rank, and the likeliest tokens.

On a GPU one Triton kernel reads the logits once, and keeps the largest of each block of the
vocabulary. The k likeliest tokens are then looked for only in the k blocks with the largest logits:
no other block has a larger one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32, use_triton

BLOCK: Final = 128
"""Tokens of a block of the vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class Likelihoods:
    """For n rows: ``logprobs`` [n] and ``ranks`` int64 [n] of their tokens, 1 for the most likely;
    ``top`` [n, num_top], the largest log-probabilities in descending order, and ``top_ids`` int64
    [n, num_top], the tokens that have them. Among equal ones, any may be listed."""

    logprobs: Tensor
    ranks: Tensor
    top: Tensor
    top_ids: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Likelihoods:
        """The same with ``change`` applied to every tensor, for example to copy it elsewhere."""
        return Likelihoods(*map(change, (self.logprobs, self.ranks, self.top, self.top_ids)))


def likelihoods(logits: Tensor, tokens: Tensor, num_top: int) -> Likelihoods:
    """``Likelihoods`` of ``tokens`` int [n] under the softmax of ``logits`` [n, vocab_size].

    ``num_top`` is at most vocab_size. Computed in float32, or float64 if the logits are.
    """
    if not use_triton(logits):
        return likelihoods_reference(logits, tokens, num_top)
    from minisgl_backend.kernels.triton_kernels.likelihood_kernels import launch_likelihoods

    num_rows, vocab_size = logits.shape
    of_tokens = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    totals = torch.empty_like(of_tokens)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    num_blocks = -(-vocab_size // BLOCK) if num_top else 0
    maxima = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    launch_likelihoods(of_tokens, totals, ranks, maxima, logits, tokens, block=BLOCK)
    top, top_ids = _largest(logits, maxima, num_top)
    return Likelihoods(of_tokens - totals, ranks, top - totals[:, None], top_ids)


def likelihoods_reference(logits: Tensor, tokens: Tensor, num_top: int) -> Likelihoods:
    """The twin of ``likelihoods``."""
    x = at_least_float32(logits)  # [n, vocab_size]
    totals = x.logsumexp(dim=-1, keepdim=True)  # [n, 1]
    of_tokens = x.gather(1, tokens.long().unsqueeze(1))  # [n, 1]
    ranks = (x > of_tokens).sum(dim=-1) + 1
    top, top_ids = x.topk(num_top, dim=-1)  # [n, num_top] each
    return Likelihoods((of_tokens - totals).squeeze(1), ranks, top - totals, top_ids)


def _largest(logits: Tensor, maxima: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest logits of each row, float32, and their tokens, int64. ``maxima``
    [n, num_blocks] are the largest logits of blocks, and not read if ``count`` is 0."""
    num_rows, vocab_size = logits.shape
    if not count:
        shape, device = (num_rows, 0), logits.device
        nothing = torch.empty(shape, dtype=torch.int64, device=device)
        return torch.empty(shape, dtype=torch.float32, device=device), nothing
    blocks = maxima.topk(min(count, maxima.shape[1]), sorted=False).indices  # [n, <= count]
    within = torch.arange(BLOCK, device=logits.device)
    tokens = (blocks[:, :, None] * BLOCK + within).flatten(1)  # [n, <= count * BLOCK]
    found = logits.gather(1, tokens.clamp_max(vocab_size - 1)).float()
    values, at = found.masked_fill(tokens >= vocab_size, -torch.inf).topk(count)
    return values, tokens.gather(1, at)
