"""The least weight that passes a row's filters, and the choice among what passes.

A weight w = exp((x - max) / temperature) lies in [0, 1], and floats of one sign order as their bit
patterns do: thresholds are searched among these integers, four ways at a time. First over all
tokens, until few enough are left to be written down as candidates, then among these. Partial sums
stay in vectors until a pass is over, since a reduction across warps costs more than a block's
arithmetic.
"""

import triton
import triton.language as tl

from minisgl_backend.kernels.jit.noise import gumbel
from minisgl_backend.kernels.jit.sampling_table import load_logits

_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight
_STAGES = tl.constexpr(3)  # more of them spill registers, which costs more than it hides


@triton.jit
def _bits(w):
    return w.to(tl.int32, bitcast=True)


@triton.jit
def _tally(
    row_ptr,
    adjustment,
    best,
    inverse,
    a,
    b,
    c,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """How many tokens reach the weights of bits a <= b <= c, and the sums of their weights."""
    i = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.float32)
    count_a, count_b, count_c = zeros, zeros, zeros
    mass_a, mass_b, mass_c = zeros, zeros, zeros
    for start in tl.range(0, VOCAB, BLOCK, num_stages=_STAGES):
        x = load_logits(row_ptr, start + i, start + i < VOCAB, adjustment, ADJUSTED)
        w = tl.exp((x - best) * inverse)
        bits = tl.where(start + i < VOCAB, _bits(w), -1)
        count_a += tl.where(bits >= a, 1.0, 0.0)
        count_b += tl.where(bits >= b, 1.0, 0.0)
        count_c += tl.where(bits >= c, 1.0, 0.0)
        mass_a += tl.where(bits >= a, w, 0.0)
        mass_b += tl.where(bits >= b, w, 0.0)
        mass_c += tl.where(bits >= c, w, 0.0)
    return (
        tl.sum(count_a, axis=0),
        tl.sum(count_b, axis=0),
        tl.sum(count_c, axis=0),
        tl.sum(mass_a, axis=0),
        tl.sum(mass_b, axis=0),
        tl.sum(mass_c, axis=0),
    )


@triton.jit
def _search(
    row_ptr,
    adjustment,
    best,
    inverse,
    low,
    count,
    target,
    by_count,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """The largest bits whose tokens reach the target, or smaller ones that CANDIDATES reach.

    ``low`` reaches the target, with ``count`` tokens. Returns the bits and their count.
    """
    high = tl.full([], _ONE + 1, tl.int32)
    while (high - low > 1) & (count > CANDIDATES):
        step = tl.maximum((high - low) // 4, 1)
        a = low + step
        b = tl.minimum(a + step, high)
        c = tl.minimum(b + step, high)
        count_a, count_b, count_c, mass_a, mass_b, mass_c = _tally(
            row_ptr, adjustment, best, inverse, a, b, c, VOCAB, BLOCK, ADJUSTED
        )
        # nothing reaches the bits of high where it still stands above those of 1.0
        reached_a = tl.where(by_count, count_a, mass_a) >= target
        reached_b = (tl.where(by_count, count_b, mass_b) >= target) & (b < high)
        reached_c = (tl.where(by_count, count_c, mass_c) >= target) & (c < high)
        if reached_c:
            low, count = c, count_c
        elif reached_b:
            low, count, high = b, count_b, c
        elif reached_a:
            low, count, high = a, count_a, b
        else:
            high = a
    return low, count


@triton.jit
def choose_filtered(
    row_ptr,
    adjustment,
    best,
    inverse,
    top_k,
    top_p,
    min_p,
    key,
    scaled_ptr,
    candidates_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """The token of one row with the largest noisy logit among those that pass its filters.

    ``best`` is the largest logit, ``inverse`` 1 / temperature; ``scaled_ptr`` and
    ``candidates_ptr`` have room for CANDIDATES values.
    """
    i = tl.arange(0, BLOCK)
    # top_p's share is one of all that top_k keeps, so min_p must not drop any of these yet
    floor = tl.maximum(_bits(tl.minimum(min_p, 1.0)), 0)
    low = tl.where((top_k > 0) & (top_p < 1), 0, floor)
    nothing = tl.full([], 0, tl.int32)
    _, count, _, total, _, _ = _tally(
        row_ptr, adjustment, best, inverse, nothing, low, low, VOCAB, BLOCK, ADJUSTED
    )
    target = top_p * total
    by_count = top_k > 0
    if by_count | (top_p < 1):
        low, count = _search(
            row_ptr,
            adjustment,
            best,
            inverse,
            low,
            count,
            tl.where(by_count, top_k.to(tl.float32), target),
            by_count,
            VOCAB,
            BLOCK,
            CANDIDATES,
            ADJUSTED,
        )
    if by_count & (count > CANDIDATES) & (top_p < 1):
        # top_k keeps more than there is room for, and low is its threshold: go on by weight
        _, _, _, kept, _, _ = _tally(
            row_ptr, adjustment, best, inverse, low, low, low, VOCAB, BLOCK, ADJUSTED
        )
        by_count = top_k < 0
        target = top_p * kept
        low, count = _search(
            row_ptr,
            adjustment,
            best,
            inverse,
            low,
            count,
            target,
            by_count,
            VOCAB,
            BLOCK,
            CANDIDATES,
            ADJUSTED,
        )

    few = count <= CANDIDATES
    lowest = tl.where(few, low, tl.maximum(low, floor))
    written = 0
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK], VOCAB, tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=_STAGES):
        at = start + i
        x = load_logits(row_ptr, at, at < VOCAB, adjustment, ADJUSTED)
        scaled = (x - best) * inverse
        passes = (_bits(tl.exp(scaled)) >= lowest) & (at < VOCAB)
        if few:
            num_passes = tl.sum(passes.to(tl.int32), axis=0)
            if num_passes > 0:
                place = written + tl.cumsum(passes.to(tl.int32), axis=0) - 1
                tl.store(scaled_ptr + place, scaled, mask=passes)
                tl.store(candidates_ptr + place, at, mask=passes)
                written += num_passes
        else:
            score = tl.where(passes, scaled + gumbel(key, at), float("-inf"))
            better = score > best_score
            best_score = tl.where(better, score, best_score)
            chosen = tl.where(better, at, chosen)
    top = tl.max(best_score, axis=0)
    token = tl.min(tl.where(best_score == top, chosen, VOCAB), axis=0)
    if few:
        tl.debug_barrier()
        token = _choose_candidate(
            scaled_ptr,
            candidates_ptr,
            written,
            low,
            floor,
            top_k,
            top_p,
            target,
            by_count,
            key,
            VOCAB,
            CANDIDATES,
        )
    return token


@triton.jit
def _add_pairs(mass, count, other_mass, other_count):
    return mass + other_mass, count + other_count


@triton.jit
def _weigh(w, passes):
    """The sum of the weights that pass and their number, in one reduction."""
    return tl.reduce(
        (tl.where(passes, w, 0.0), tl.where(passes, 1.0, 0.0)), axis=0, combine_fn=_add_pairs
    )


@triton.jit
def _choose_candidate(
    scaled_ptr,
    candidates_ptr,
    written,
    low,
    floor,
    top_k,
    top_p,
    target,
    by_count,
    key,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The same among the candidates alone, which hold all that passes."""
    c = tl.arange(0, CANDIDATES)
    at = tl.load(candidates_ptr + c, mask=c < written, other=0)
    scaled = tl.load(scaled_ptr + c, mask=c < written, other=float("-inf"))
    w = tl.exp(scaled)
    bits = tl.where(c < written, _bits(w), -1)
    # Halving ends early, where one distinct place is left between the two ends: most do by then.
    if by_count:
        high = tl.full([], _ONE + 1, tl.int32)
        above = 0.0
        count = written.to(tl.float32)
        while (high - low > 1) & (count - above > 1.5):
            middle = (low + high) // 2
            _, num_passes = _weigh(w, bits >= middle)
            if num_passes >= top_k:
                low, count = middle, num_passes
            else:
                high, above = middle, num_passes
        kept, _ = _weigh(w, bits >= low)
        target = top_p * kept
    if top_p < 1:
        high = tl.full([], _ONE + 1, tl.int32)
        above = 0.0
        _, count = _weigh(w, bits >= low)
        while (high - low > 1) & (count - above > 1.5):
            middle = (low + high) // 2
            mass, num_passes = _weigh(w, bits >= middle)
            if mass >= target:
                low, count = middle, num_passes
            else:
                high, above = middle, num_passes
    low = tl.maximum(low, floor)
    score = tl.where(bits >= low, scaled + gumbel(key, at), float("-inf"))
    top = tl.max(score, axis=0)
    return tl.min(tl.where(score == top, at, VOCAB), axis=0)
