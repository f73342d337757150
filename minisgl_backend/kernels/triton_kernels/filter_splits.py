"""What the splits of a row with filters do before its token is chosen, in two launches.

The first launch counts the tokens of rows with top_k or top_p by bins. This brackets the threshold:
tokens above the bracket pass these two filters, and those inside it are candidates, which the
second launch writes down. If there are too many candidates, as in a nearly flat row, it counts once
more instead, in finer bins. In rows with only min_p no token is a candidate: all lie above.

Nothing depends on how splits are shared among programs, or on their order.
"""

import triton
import triton.language as tl

from minisgl_backend.kernels import sampling_workspace
from minisgl_backend.kernels.triton_kernels.bins import (
    ONE,
    bin_of,
    bits_of,
    bracket_of,
    count_bins,
    finer_bins,
    load_scaled,
    reach_of,
)
from minisgl_backend.kernels.triton_kernels.gumbel_noise import gumbel
from minisgl_backend.kernels.triton_kernels.pdl import wait_previous
from minisgl_backend.kernels.triton_kernels.row_logits import load_row

ROUNDS = tl.constexpr(sampling_workspace.ROUNDS)
SUMS = tl.constexpr(sampling_workspace.SUMS)
BRACKET = tl.constexpr(sampling_workspace.BRACKET)
_SHIFT = tl.constexpr(22)  # of the first round's bins: two bins halve the weight


@triton.jit
def first_round(index, counted, SPLITS: tl.constexpr, BINS: tl.constexpr):
    """Where a row's counts and masses of the first round are."""
    return (
        counted.counts + index * ROUNDS * SPLITS * BINS,
        counted.sums + index * ROUNDS * SPLITS * SUMS,
    )


@triton.jit
def _second_round(first, SPLITS: tl.constexpr, BINS: tl.constexpr):
    counts_ptr, sums_ptr = first
    return counts_ptr + SPLITS * BINS, sums_ptr + SPLITS * SUMS


@triton.jit
def candidates_of(index, collected, CANDIDATES: tl.constexpr):
    """Where a row's candidates are: scaled logits, and tokens."""
    return collected.scaled + index * CANDIDATES, collected.candidates + index * CANDIDATES


@triton.jit
def _target(top_k, top_p, total):
    """What the tokens from the threshold up must reach, and whether that is a count or a mass."""
    by_count = top_k > 0
    return tl.where(by_count, top_k.to(tl.float32), top_p * total), by_count


@triton.jit
def _load_reach(of_round, num_above, top, shift, SPLITS: tl.constexpr, BINS: tl.constexpr):
    """What all splits of a row have counted in one round, the ``reach_of`` that, and the row's
    mass."""
    counts_ptr, sums_ptr = of_round
    counts = tl.zeros([BINS], tl.int32)
    for split in tl.range(0, SPLITS, loop_unroll_factor=8):
        counts += tl.load(counts_ptr + split * BINS + tl.arange(0, BINS))
    s = tl.arange(0, SPLITS)
    above = tl.sum(tl.load(sums_ptr + s * SUMS), axis=0)
    inside = tl.sum(tl.load(sums_ptr + s * SUMS + 1), axis=0)
    below = tl.sum(tl.load(sums_ptr + s * SUMS + 2), axis=0)
    reach = reach_of(counts, (above, inside, below), num_above, top, shift, BINS)
    return counts, reach, above + inside + below


@triton.jit
def _find_bracket(
    of_round,
    top_k,
    top_p,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """What the first round says about the threshold: bins, the number of tokens above the
    candidates, the number of candidates, and the row's mass.

    The bins are (top, shift, first, last): the arguments of ``bin_of``, and the first and the last
    bin of candidates. If there is room, or if top_p has yet to cut what top_k keeps, all tokens
    down to the last bin are candidates.
    """
    top = tl.full([], -1, tl.int32)
    first = tl.full([], 0, tl.int32)
    last = tl.full([], -1, tl.int32)
    num_above = tl.full([], 0, tl.int32)
    through = tl.full([], 0, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    if (top_k > 0) | (top_p < 1):
        top += ONE + 1
        counts, reach, total = _load_reach(of_round, 0, top, _SHIFT, SPLITS, BINS)
        target, by_count = _target(top_k, top_p, total)
        first, last, num_above, through = bracket_of(counts, reach, target, by_count, BINS)
        if (through <= CANDIDATES) | (by_count & (top_p < 1)):
            first, num_above = first * 0, num_above * 0
    return (top, _SHIFT, first, last), num_above, through - num_above, total


@triton.jit
def _store_bracket(bracket_ptr, bins, num_above, num_candidates, total):
    top, _shift, first, last = bins
    tl.store(bracket_ptr, top)
    tl.store(bracket_ptr + 1, first)
    tl.store(bracket_ptr + 2, last)
    tl.store(bracket_ptr + 3, num_above)
    tl.store(bracket_ptr + 4, num_candidates)
    tl.store(bracket_ptr + 5, total.to(tl.int32, bitcast=True))


@triton.jit
def load_bracket(bracket_ptr):
    """What ``collect_splits`` has found. It is not computed again: another kernel's sums could
    differ in the last bit, and then it would expect different candidates from those written."""
    top = tl.load(bracket_ptr)
    first = tl.load(bracket_ptr + 1)
    last = tl.load(bracket_ptr + 2)
    num_above = tl.load(bracket_ptr + 3)
    num_candidates = tl.load(bracket_ptr + 4)
    total = tl.load(bracket_ptr + 5).to(tl.float32, bitcast=True)
    return (top, _SHIFT, first, last), num_above, num_candidates, total


@triton.jit
def load_finer_bracket(
    of_first,
    top_k,
    top_p,
    bins,
    num_above,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
):
    """The same for the second round, within the bracket of the first, but without the mass."""
    top, shift = finer_bins(bins, BINS)
    of_round = _second_round(of_first, SPLITS, BINS)
    counts, reach, total = _load_reach(of_round, num_above, top, shift, SPLITS, BINS)
    target, by_count = _target(top_k, top_p, total)
    first, last, num_above, through = bracket_of(counts, reach, target, by_count, BINS)
    if by_count & (top_p < 1):
        first, num_above = first * 0, num_above * 0
    return (top, shift, first, last), num_above, through - num_above


@triton.jit
def _count_splits(
    heaviest_ptr,
    of_round,
    row,
    top,
    shift,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes what ``count_bins`` finds in the program's splits of its row."""
    counts_ptr, sums_ptr = of_round
    for split in tl.range(tl.program_id(1), SPLITS, tl.num_programs(1)):
        begin = split * PER_SPLIT
        end = tl.minimum(begin + PER_SPLIT, VOCAB)
        at = heaviest_ptr + split * tl.cdiv(PER_SPLIT, BLOCK)
        counts, above, inside, below = count_bins(row, begin, end, top, shift, at, BLOCK, BINS)
        tl.store(counts_ptr + split * BINS + tl.arange(0, BINS), counts)
        tl.store(sums_ptr + split * SUMS, above)
        tl.store(sums_ptr + split * SUMS + 1, inside)
        tl.store(sums_ptr + split * SUMS + 2, below)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "previous_ptr"])
def count_splits(
    counted,
    scores_ptr,
    logits,
    rows_ptr,
    positions_ptr,
    previous_ptr,
    table,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first round, for rows with top_k or top_p."""
    if PDL:
        wait_previous()
    index = tl.program_id(0).to(tl.int64)
    is_drawn, filters, row, _key = load_row(
        index, scores_ptr, logits, rows_ptr, positions_ptr, previous_ptr, table, VOCAB, SPLITS
    )
    top_k, top_p, _min_p, _filtered = filters
    if is_drawn & ((top_k > 0) | (top_p < 1)):
        heaviest_ptr = counted.heaviest + index * SPLITS * tl.cdiv(PER_SPLIT, BLOCK)
        of_round = first_round(index, counted, SPLITS, BINS)
        _count_splits(
            heaviest_ptr, of_round, row, ONE, _SHIFT, VOCAB, SPLITS, PER_SPLIT, BINS, BLOCK
        )


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "previous_ptr"])
def collect_splits(
    collected,
    counted,
    scores_ptr,
    logits,
    rows_ptr,
    positions_ptr,
    previous_ptr,
    table,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the candidates and, for the tokens above them, their mass and the token with the
    largest noisy logit. If there are too many candidates, counts the second round instead."""
    if PDL:
        wait_previous()
    index = tl.program_id(0).to(tl.int64)
    is_drawn, filters, row, key = load_row(
        index, scores_ptr, logits, rows_ptr, positions_ptr, previous_ptr, table, VOCAB, SPLITS
    )
    top_k, top_p, min_p, filtered = filters
    if is_drawn & filtered:
        heaviest_ptr = counted.heaviest + index * SPLITS * tl.cdiv(PER_SPLIT, BLOCK)
        of_round = first_round(index, counted, SPLITS, BINS)
        candidates = candidates_of(index, collected, CANDIDATES)
        bins, num_above, num_candidates, total = _find_bracket(
            of_round, top_k, top_p, SPLITS, BINS, CANDIDATES
        )
        if tl.program_id(1) == 0:
            bracket_ptr = collected.brackets + index * BRACKET
            _store_bracket(bracket_ptr, bins, num_above, num_candidates, total)
        top, shift, first, last = bins
        if num_candidates > CANDIDATES:
            finer_top, finer_shift = finer_bins(bins, BINS)
            _count_splits(
                heaviest_ptr,
                _second_round(of_round, SPLITS, BINS),
                row,
                finer_top,
                finer_shift,
                VOCAB,
                SPLITS,
                PER_SPLIT,
                BINS,
                BLOCK,
            )
        else:
            for split in tl.range(tl.program_id(1), SPLITS, tl.num_programs(1)):
                begin = split * PER_SPLIT
                end = tl.minimum(begin + PER_SPLIT, VOCAB)
                at = heaviest_ptr + split * tl.cdiv(PER_SPLIT, BLOCK)
                if num_candidates > 0:
                    place = _num_before(of_round[0], split, first, last, BINS)
                    write_candidates(
                        candidates,
                        row,
                        begin,
                        end,
                        bins,
                        place,
                        at,
                        BLOCK,
                        BINS,
                        CANDIDATES,
                    )
                if (num_above > 0) | (num_candidates == 0):
                    high, low = top - (first << shift), bits_of(tl.minimum(min_p, 1.0))
                    above, score, token = choose_above(
                        row, begin, end, high, low, key, VOCAB, BLOCK
                    )
                    tl.store(collected.above + index * SPLITS + split, above)
                    tl.store(collected.scores + index * SPLITS + split, score)
                    tl.store(collected.tokens + index * SPLITS + split, token)


@triton.jit
def _num_before(counts_ptr, split, first, last, BINS: tl.constexpr):
    """How many tokens earlier splits have in the bins ``first`` to ``last``."""
    b = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for earlier in tl.range(0, split, loop_unroll_factor=8):
        counts += tl.load(counts_ptr + earlier * BINS + b)
    return tl.sum(tl.where((b >= first) & (b <= last), counts, 0), axis=0)


@triton.jit
def write_candidates(
    candidates,
    row,
    begin,
    end,
    bins,
    place,
    heaviest_ptr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Writes the tokens in [begin, end) that are in the bins of candidates, from ``place`` on."""
    top, shift, first, last = bins
    scaled_ptr, tokens_ptr = candidates
    for start in tl.range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        num_fits = tl.full([], 1, tl.int32)
        if heaviest_ptr is not None:
            heaviest = tl.load(heaviest_ptr + (start - begin) // BLOCK)
            num_fits = (bin_of(heaviest, top, shift, BINS) <= last).to(tl.int32)
        if num_fits > 0:
            scaled = load_scaled(row, token, token < end)
            w = tl.exp(scaled)
            bin = bin_of(w, top, shift, BINS)
            fits = (token < end) & (bits_of(w) <= top) & (bin >= first) & (bin <= last)
            places = place + tl.cumsum(fits.to(tl.int32), axis=0) - 1
            places = tl.minimum(places, CANDIDATES - 1)  # never another row's, whatever the counts
            tl.store(scaled_ptr + places, scaled, mask=fits)
            tl.store(tokens_ptr + places, token, mask=fits)
            place += tl.sum(fits.to(tl.int32), axis=0)


@triton.jit
def choose_above(row, begin, end, high, low, key, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """For the tokens in [begin, end) with weights above the bits ``high``: their mass and, among
    those that also reach the bits ``low``, the largest noisy logit and its token."""
    above = tl.zeros([BLOCK], tl.float32)
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK], VOCAB, tl.int32)
    for start in tl.range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        scaled = load_scaled(row, token, token < end)
        w = tl.exp(scaled)
        is_above = bits_of(w) > high
        above += tl.where(is_above, w, 0.0)
        passes = is_above & (bits_of(w) >= low)
        score = tl.where(passes, scaled + gumbel(key, token), float("-inf"))
        better = score > best_score
        best_score = tl.where(better, score, best_score)
        chosen = tl.where(better, token, chosen)
    top = tl.max(best_score, axis=0)
    token = tl.min(tl.where(best_score == top, chosen, VOCAB), axis=0)
    return tl.sum(above, axis=0), top, token
