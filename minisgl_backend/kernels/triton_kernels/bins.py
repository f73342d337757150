"""Counts the weights of a row by bins, and finds the bins in which a threshold lies.

A weight w = exp((x - max) / temperature) lies in [0, 1], and floats of one sign sort like their bit
patterns. So bins are ranges of patterns, all of the same size. The edges of a bin bound the weights
of its tokens, so counts are enough to bracket a threshold, even one that is set by a share of the
mass.
"""

import triton
import triton.language as tl

from minisgl_backend.kernels.triton_kernels.row_logits import NEIGHBOURS, load_logits

ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight


@triton.jit
def bits_of(w):
    return w.to(tl.int32, bitcast=True)


@triton.jit
def _weight(bits):
    return tl.maximum(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def bin_of(w, top, shift, BINS: tl.constexpr):
    """The bins of weights, counted down from the bits ``top``; the last bin has all the rest."""
    return tl.minimum(tl.maximum(top - bits_of(w), 0) >> shift, BINS - 1)


@triton.jit
def load_scaled(row, at, mask):
    """(x - max) / temperature of tokens ``at``, at most 0; -inf outside of ``mask``."""
    row_ptr, adjustment, best, inverse = row
    if adjustment[0]:
        x = load_logits(row_ptr, at, mask, adjustment, True)
    else:
        x = load_logits(row_ptr, at, mask, adjustment, False)
    return tl.minimum((x - best) * inverse, 0.0)


@triton.jit
def _sum_neighbours(w, BLOCK: tl.constexpr):
    """float32 [BLOCK // 8]: sums over the tokens that one thread loads at once."""
    return tl.sum(tl.reshape(w, [BLOCK // NEIGHBOURS, NEIGHBOURS]), axis=1)


@triton.jit
def count_bins(row, begin, end, top, shift, heaviest_ptr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """For the tokens in [begin, end): how many are in each bin, int32 [BINS]; the mass of tokens
    above ``top``, which are in no bin; the mass of all bins but the last; and the mass of the last
    bin. ``heaviest_ptr``, unless None, gets the largest weight of each block."""
    i = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    above = tl.zeros([BLOCK // NEIGHBOURS], tl.float32)
    inside = tl.zeros([BLOCK // NEIGHBOURS], tl.float32)
    below = tl.zeros([BLOCK // NEIGHBOURS], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        at = start + i
        w = tl.exp(load_scaled(row, at, at < end))
        bin = bin_of(w, top, shift, BINS)
        if heaviest_ptr is not None:
            tl.store(heaviest_ptr + (start - begin) // BLOCK, tl.max(w, axis=0))
        is_above = bits_of(w) > top
        is_inside = (bits_of(w) <= top) & (bin < BINS - 1)
        counts += tl.histogram(bin, BINS, mask=(at < end) & (bits_of(w) <= top))
        above += _sum_neighbours(tl.where(is_above, w, 0.0), BLOCK)
        inside += _sum_neighbours(tl.where(is_inside, w, 0.0), BLOCK)
        below += _sum_neighbours(tl.where(is_above | is_inside, 0.0, w), BLOCK)
    return counts, tl.sum(above, axis=0), tl.sum(inside, axis=0), tl.sum(below, axis=0)


@triton.jit
def reach_of(counts, masses, num_above, top, shift, BINS: tl.constexpr):
    """For each bin, what it and all bins above it hold: the number of tokens, int32 [BINS], and the
    least and the most that these may weigh together, float32 [BINS] each."""
    above, inside, below = masses
    b = tl.arange(0, BINS)
    counted = tl.where(b < BINS - 1, counts, 0).to(tl.float32)
    heavy = tl.cumsum(counted * _weight(top - (b << shift)), axis=0)
    light = tl.cumsum(counted * _weight(top - ((b + 1) << shift) + 1), axis=0)
    # Counting from above and from below both bound a mass; the side with less mass is tighter.
    most = above + tl.minimum(heavy, inside - (tl.max(light, axis=0) - light))
    least = above + tl.maximum(light, inside - (tl.max(heavy, axis=0) - heavy))
    total = above + inside + below
    is_last = b == BINS - 1
    return (
        num_above + tl.cumsum(counts, axis=0),
        tl.where(is_last, total, least),
        tl.where(is_last, total, most),
    )


@triton.jit
def bracket_of(counts, reach, target, by_count, BINS: tl.constexpr):
    """The first and the last bin that may hold the threshold, the number of tokens above the first,
    and the number down to the end of the last."""
    num_tokens, least, most = reach
    b = tl.arange(0, BINS)
    last_bin = tl.full([], BINS - 1, tl.int32)
    maybe = tl.where(by_count, num_tokens.to(tl.float32), most) >= target
    surely = tl.where(by_count, num_tokens.to(tl.float32), least) >= target
    first = tl.min(tl.where(maybe, b, last_bin), axis=0)
    last = tl.min(tl.where(surely, b, last_bin), axis=0)
    return (
        first,
        last,
        tl.sum(tl.where(b == first, num_tokens - counts, 0), axis=0),
        tl.sum(tl.where(b == last, num_tokens, 0), axis=0),
    )


@triton.jit
def finer_bins(bins, BINS: tl.constexpr):
    """Top and shift of the finest bins with which all bins but the last cover a bracket."""
    top, shift, first, last = bins
    top -= first << shift
    extent = tl.where(last < BINS - 1, (last - first + 1) << shift, top + 1)
    finer = 0
    while extent >> finer >= BINS - 1:
        finer += 1
    return top, finer
