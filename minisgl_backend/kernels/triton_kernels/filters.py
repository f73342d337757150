"""The choice among the tokens that pass a row's filters, after its splits have collected
candidates.

The threshold is found among the candidates by bisection. If the splits have counted again instead,
a single program writes the candidates down. If these are still too many, as with thousands of equal
logits, or with top_p and a top_k of thousands, it searches the whole row.
"""

import triton
import triton.language as tl

from minisgl_backend.kernels.triton_kernels.bins import ONE, bits_of, load_scaled
from minisgl_backend.kernels.triton_kernels.filter_splits import (
    BRACKET,
    candidates_of,
    choose_above,
    first_round,
    load_bracket,
    load_finer_bracket,
    write_candidates,
)
from minisgl_backend.kernels.triton_kernels.gumbel_noise import gumbel


@triton.jit
def choose_filtered(
    index,
    filters,
    row,
    key,
    collected,
    counted,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token with the largest noisy logit among those that pass a row's filters, after
    ``collect_splits``."""
    of_round = first_round(index, counted, SPLITS, BINS)
    candidates = candidates_of(index, collected, CANDIDATES)
    top_k, top_p, min_p, _filtered = filters
    floor = bits_of(tl.minimum(min_p, 1.0))
    bins, num_above, num_candidates, total = load_bracket(collected.brackets + index * BRACKET)
    is_recounted = num_candidates > CANDIDATES
    if is_recounted:
        bins, num_above, num_candidates = load_finer_bracket(
            of_round, top_k, top_p, bins, num_above, SPLITS, BINS
        )
    if num_candidates <= CANDIDATES:
        above = 0.0
        score = float("-inf")
        token = VOCAB
        if is_recounted:
            top, shift, first, _last = bins
            if num_above > 0:
                high = top - (first << shift)
                above, score, token = choose_above(row, 0, VOCAB, high, floor, key, VOCAB, BLOCK)
            write_candidates(
                candidates,
                row,
                0,
                VOCAB,
                bins,
                num_above * 0,
                None,
                BLOCK,
                BINS,
                CANDIDATES,
            )
            tl.debug_barrier()
        elif (num_above > 0) | (num_candidates == 0):
            s = index * SPLITS + tl.arange(0, SPLITS)
            above = tl.sum(tl.load(collected.above + s), axis=0)
            scores = tl.load(collected.scores + s)
            score = tl.max(scores, axis=0)
            token = tl.min(tl.where(scores == score, tl.load(collected.tokens + s), VOCAB), axis=0)
        if num_candidates > 0:
            others = (num_above.to(tl.float32), above)
            candidate_score, candidate = _choose_candidate(
                candidates, num_candidates, others, filters, total, key, VOCAB, CANDIDATES
            )
            token = tl.where(candidate_score > score, candidate, token)
    else:
        low = floor
        if top_k > 0:
            low_k, total = _search(row, total, top_k.to(tl.float32), True, VOCAB, BLOCK)
            low = tl.maximum(low, low_k)
        if top_p < 1:
            low_p, _kept = _search(row, total, top_p * total, False, VOCAB, BLOCK)
            low = tl.maximum(low, low_p)
        _kept, score, token = choose_above(row, 0, VOCAB, low - 1, low, key, VOCAB, BLOCK)
    return token


@triton.jit
def _choose_candidate(
    candidates,
    num_candidates,
    others,
    filters,
    total,
    key,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The largest noisy logit among the candidates that pass, and its token. ``others`` are the
    number and the mass of the tokens above all candidates."""
    top_k, top_p, min_p, _filtered = filters
    c = tl.arange(0, CANDIDATES)
    scaled_ptr, tokens_ptr = candidates
    at = tl.load(tokens_ptr + c, mask=c < num_candidates, other=VOCAB)
    scaled = tl.load(scaled_ptr + c, mask=c < num_candidates, other=float("-inf"))
    w = tl.exp(scaled)
    bits = tl.where(c < num_candidates, bits_of(w), -1)
    low = tl.min(tl.where(c < num_candidates, bits, ONE), axis=0)
    if top_k > 0:
        low = _halve(w, bits, others, low, top_k.to(tl.float32), True)
        total, _num_kept = _weigh(w, bits >= low)
    if top_p < 1:
        low = _halve(w, bits, others, low, top_p * total, False)
    low = tl.maximum(low, bits_of(tl.minimum(min_p, 1.0)))
    score = tl.where(bits >= low, scaled + gumbel(key, at), float("-inf"))
    top = tl.max(score, axis=0)
    return top, tl.min(tl.where(score == top, at, VOCAB), axis=0)


@triton.jit
def _weigh(w, passes):
    """The sum of the weights that pass, and their number, in one reduction."""
    return tl.reduce(
        (tl.where(passes, w, 0.0), tl.where(passes, 1.0, 0.0)), axis=0, combine_fn=_add_pairs
    )


@triton.jit
def _add_pairs(mass, count, other_mass, other_count):
    return mass + other_mass, count + other_count


@triton.jit
def _halve(w, bits, above, low, target, by_count):
    """The largest bits, from ``low`` up, such that the candidates at or above them reach the target
    together with the tokens and the mass ``above``; ``low`` if there are none."""
    num_above, mass_above = above
    high = tl.max(bits, axis=0) + 1
    none = 0.0
    mass, count = _weigh(w, bits >= low)
    # as in most rows, this ends early, once only one token is left between the two ends
    while (high - low > 1) & (count - none > 1.5):
        middle = low + (high - low) // 2
        mass, num_passes = _weigh(w, bits >= middle)
        if tl.where(by_count, num_above + num_passes, mass_above + mass) >= target:
            low, count = middle, num_passes
        else:
            high, none = middle, num_passes
    return low


@triton.jit
def _search(row, total, target, by_count, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest bits such that the tokens of the whole row at or above them reach the target, and
    the mass of these tokens; also by bisection. ``total`` is the row's mass."""
    low = tl.full([], 0, tl.int32)
    high = low + ONE + 1
    count = low + VOCAB
    none = low
    kept = total
    while (high - low > 1) & (count - none > 1):
        middle = low + (high - low) // 2
        num_passes = tl.zeros([BLOCK], tl.int32)
        masses = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, VOCAB, BLOCK):
            at = start + tl.arange(0, BLOCK)
            w = tl.exp(load_scaled(row, at, at < VOCAB))
            passes = bits_of(w) >= middle
            num_passes += passes.to(tl.int32)
            masses += tl.where(passes, w, 0.0)
        num = tl.sum(num_passes, axis=0)
        mass = tl.sum(masses, axis=0)
        if tl.where(by_count, num.to(tl.float32), mass) >= target:
            low, count, kept = middle, num, mass
        else:
            high, none = middle, num
    return low, kept
