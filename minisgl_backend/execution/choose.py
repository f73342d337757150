"""Choosing one token per row from logits, greedily or at random, on a CPU.

Pure functions of tensors, over whole batches. The result of a row depends on that row alone. Random
choice inverts the cumulative distribution: one uniform number per row (``uniform``) decides.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_FIRST_CANDIDATES: Final = 1024
_BLOCK: Final = 1024


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, [num_rows, vocab_size] -> int64[num_rows].

    Of equally likely tokens it is the one with the least id.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size <= 2 * _BLOCK:
        return logits.argmax(dim=-1)
    # amax is vectorized and argmax is not: amax finds the block, argmax the place in it.
    num_blocks = vocab_size // _BLOCK
    blocks = logits[:, : num_blocks * _BLOCK].reshape(num_rows, num_blocks, _BLOCK)
    best_block = blocks.amax(dim=-1).argmax(dim=-1)  # [num_rows]
    begin = (best_block * _BLOCK).unsqueeze(1)  # [num_rows, 1]
    tail = logits[:, num_blocks * _BLOCK :]  # [num_rows, vocab_size % _BLOCK]
    # [num_rows, _BLOCK]
    within = logits.gather(1, begin + torch.arange(_BLOCK))
    best = begin.squeeze(1) + within.argmax(dim=-1)  # [num_rows]
    if tail.shape[1] == 0:
        return best
    in_tail = tail.amax(dim=-1) > within.amax(dim=-1)
    return torch.where(in_tail, num_blocks * _BLOCK + tail.argmax(dim=-1), best)


def at_random(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row, int64[num_rows], drawn from softmax(logits / temperature).

    ``logits`` is [num_rows, vocab_size]; ``temperature`` and ``uniform`` are [num_rows, 1].
    """
    return _draw(_weights(logits, temperature), uniform)


def at_random_filtered(
    logits: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    *,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """As ``at_random``, among the tokens that pass top_k, then top_p, then min_p.

    Each of the three is [num_rows, 1]. ``top_k`` keeps the k most likely tokens; 0 keeps all.
    ``top_p`` keeps the smallest set of most likely tokens whose probability, among those that
    passed ``top_k``, reaches p (nucleus sampling, arXiv 1904.09751). ``min_p`` drops tokens less
    likely than p times the most likely one (arXiv 2407.01082). The most likely token always passes.
    """
    vocab_size = logits.shape[1]
    weights = _weights(logits, temperature)  # [num_rows, vocab_size], 1 for the most likely token
    limit = torch.where(top_k > 0, top_k, vocab_size)  # [num_rows, 1]
    total = weights.sum(dim=-1, keepdim=True)  # [num_rows, 1]
    count = int(torch.where(top_k > 0, top_k, _FIRST_CANDIDATES).max())
    while True:
        # Sorting a whole vocabulary is expensive, and a few tokens have nearly all of the weight:
        # take more candidates only if the filters turn out to need them.
        count = min(count, vocab_size)
        candidates, ids = weights.topk(count, dim=-1)  # [num_rows, count], descending
        rank = torch.arange(count)  # [count]
        passed = candidates.masked_fill(rank >= limit, 0)  # [num_rows, count], those of top_k
        total = torch.where(top_k > 0, passed.sum(dim=-1, keepdim=True), total)
        before = passed.cumsum(dim=-1) - passed  # the weight of all more likely tokens
        kept = (before < top_p * total) & (passed >= min_p)  # bool[num_rows, count]
        kept[:, 0] = True
        # Kept candidates are a prefix: if the last one is dropped, so are all tokens after it.
        complete = torch.where(top_k > 0, limit <= count, ~kept[:, -1:])
        if count == vocab_size or bool(complete.all()):
            break
        count *= 8
    return ids.gather(1, _draw(passed * kept, uniform).unsqueeze(1)).squeeze(1)


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - max) / temperature): relative to the maximum nothing overflows."""
    return ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).exp_()


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the cumulative weight exceeds ``uniform`` times the total weight.

    int64[num_rows]. The index never has weight 0, since ``right`` steps over such indices. The
    clamp matters only to rows that hold NaN.
    """
    cumulative = weights.cumsum(dim=-1)
    threshold = uniform * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    return index.clamp_max(weights.shape[1] - 1)
