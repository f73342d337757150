"""Sampling: splits of each row in parallel, then a program per row.

The first launch scores each split by its largest logit or, for rows that draw from all tokens, by
the logarithm of the sum of its weights, plus noise. The last launch takes the best split, and in it
the best token or a drawn one. Between them are two more launches for rows with filters, which other
rows leave at once (``filters``).

What reads logits is compiled twice: rows that adjust nothing must not be slowed by those that do.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.dispatch import can_start_early
from minisgl_backend.kernels.sampling_rule import split_size
from minisgl_backend.kernels.sampling_table import SamplingTable
from minisgl_backend.kernels.sampling_workspace import BLOCK, SamplingWorkspace
from minisgl_backend.kernels.triton_kernels.filter_splits import collect_splits, count_splits
from minisgl_backend.kernels.triton_kernels.filters import choose_filtered
from minisgl_backend.kernels.triton_kernels.gumbel_noise import gumbel, noise_key
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.triton_kernels.row_logits import (
    NEIGHBOURS,
    TEMPERATURE,
    Logits,
    load_adjustment,
    load_filters,
    load_logits,
    load_number,
    load_row,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_DRAW_BLOCK = tl.constexpr(1024)  # a split has some thousand tokens: a larger block would mask many
_LEAST = tl.constexpr(-3.0e38)  # finite, so that -inf is never subtracted from -inf


@triton.jit
def _score(
    row_ptr,
    split,
    adjustment,
    noisy,
    inverse,
    key,
    VOCAB: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """The split's score, inf if a logit is inf or NaN; and its best token unless ``noisy``."""
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    broken = tl.zeros([BLOCK], tl.int32)
    # these stay loops: unrolled, the loops for adjusted rows would take registers from all rows
    if noisy:
        # Weights are exp2(x * scale - best), summed online (arXiv 1805.02867). Neighbours share a
        # best, so that a token takes one exp2 instead of two.
        scale = inverse * _LOG2_E
        bests = tl.full([BLOCK // NEIGHBOURS], _LEAST, tl.float32)
        mass = tl.zeros([BLOCK // NEIGHBOURS], tl.float32)
        for start in (tl.range if ADJUSTED else tl.static_range)(0, PER_SPLIT, BLOCK):
            at = begin + start + tl.arange(0, BLOCK)
            x = load_logits(row_ptr, at, at < end, adjustment, ADJUSTED)
            broken |= tl.where(x < float("inf"), 0, 1)  # inf or NaN
            scaled = tl.reshape(x * scale, [BLOCK // NEIGHBOURS, NEIGHBOURS])
            new_bests = tl.maximum(bests, tl.max(scaled, axis=1))
            weights = tl.exp2(scaled - new_bests[:, None])
            mass = mass * tl.exp2(bests - new_bests) + tl.sum(weights, axis=1)
            bests = new_bests
        top = tl.max(bests, axis=0)
        whole = tl.sum(mass * tl.exp2(bests - top), axis=0)
        # the noise of splits is that of token ids beyond the vocabulary
        drawn = gumbel(key, VOCAB + split + tl.zeros([1], tl.int32))
        score = (top + tl.log2(tl.maximum(whole, 1.0))) / _LOG2_E + tl.max(drawn, axis=0)
        score = tl.where(whole > 0, score, float("-inf"))
        chosen = VOCAB
    else:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        token = tl.full([BLOCK], VOCAB, tl.int32)
        for start in (tl.range if ADJUSTED else tl.static_range)(0, PER_SPLIT, BLOCK):
            at = begin + start + tl.arange(0, BLOCK)
            x = load_logits(row_ptr, at, at < end, adjustment, ADJUSTED)
            broken |= tl.where(x < float("inf"), 0, 1)
            better = x > best
            best = tl.where(better, x, best)
            token = tl.where(better, at, token)
        score = tl.max(best, axis=0)
        # the smallest token among equals
        chosen = tl.min(tl.where(best == score, token, VOCAB), axis=0)
    if tl.max(broken, axis=0) > 0:
        score = float("inf")
    return score, chosen


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])
def _best_of_split(
    scores_ptr,
    tokens_ptr,
    logits,
    rows_ptr,
    positions_ptr,
    table,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # logits begin with those of the split FIRST
    index = tl.program_id(0).to(tl.int64)
    split = FIRST + tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(positions_ptr + index)
    temperature = load_number(table.numbers, row, TEMPERATURE)
    _, _, _, filtered = load_filters(table.numbers, row, VOCAB)
    noisy = (temperature > 0) & (filtered == 0)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    key = noise_key(tl.load(table.seeds + row), position)
    adjustment = load_adjustment(table, index, row, position, VOCAB)
    row_ptr = logits.start + index * logits.stride - FIRST * PER_SPLIT
    if adjustment[0]:
        score, chosen = _score(
            row_ptr, split, adjustment, noisy, inverse, key, VOCAB, PER_SPLIT, BLOCK, True
        )
    else:
        score, chosen = _score(
            row_ptr, split, adjustment, noisy, inverse, key, VOCAB, PER_SPLIT, BLOCK, False
        )
    if PDL:
        allow_next()
    tl.store(scores_ptr + index * SPLITS + split, score)
    tl.store(tokens_ptr + index * SPLITS + split, chosen)


@triton.jit
def _draw(
    row_ptr,
    split,
    adjustment,
    inverse,
    key,
    VOCAB: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """A token of the split, drawn from the softmax over it."""
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    best = tl.full([_DRAW_BLOCK], float("-inf"), tl.float32)
    token = tl.full([_DRAW_BLOCK], VOCAB, tl.int32)
    for start in tl.static_range(0, PER_SPLIT, _DRAW_BLOCK):
        at = begin + start + tl.arange(0, _DRAW_BLOCK)
        x = load_logits(row_ptr, at, at < end, adjustment, ADJUSTED)
        x = x * inverse + gumbel(key, at)
        better = x > best
        best = tl.where(better, x, best)
        token = tl.where(better, at, token)
    return tl.min(tl.where(best == tl.max(best, axis=0), token, VOCAB), axis=0)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])
def _choose(
    out_ptr,
    tokens_ptr,
    collected,
    counted,
    scores_ptr,
    logits,
    rows_ptr,
    positions_ptr,
    table,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_previous()
    index = tl.program_id(0).to(tl.int64)
    is_drawn, filters, row, key = load_row(
        index, scores_ptr, logits, rows_ptr, positions_ptr, table, VOCAB, SPLITS
    )
    s = tl.arange(0, SPLITS)
    bests = tl.load(scores_ptr + index * SPLITS + s)
    tokens = tl.load(tokens_ptr + index * SPLITS + s)
    best = tl.max(bests, axis=0)
    token = tl.min(tl.where(bests == best, tokens, VOCAB), axis=0)
    if is_drawn:
        row_ptr, adjustment, _top, inverse = row
        _top_k, _top_p, _min_p, filtered = filters
        split = tl.min(tl.where(bests == best, s, SPLITS), axis=0)
        if filtered:
            token = choose_filtered(
                index,
                filters,
                row,
                key,
                collected,
                counted,
                VOCAB,
                SPLITS,
                BINS,
                CANDIDATES,
                BLOCK,
            )
        elif adjustment[0]:
            token = _draw(row_ptr, split, adjustment, inverse, key, VOCAB, PER_SPLIT, True)
        else:
            token = _draw(row_ptr, split, adjustment, inverse, key, VOCAB, PER_SPLIT, False)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(out_ptr + index, tl.where(finite & (token < VOCAB), token, -1))


def _split_constants(
    table: SamplingTable, workspace: SamplingWorkspace, *, pdl: bool
) -> dict[str, int]:
    """The constants of every kernel that divides the vocabulary."""
    vocab_size, splits = table.vocab_size, workspace.scores.shape[1]
    return {"VOCAB": vocab_size, "SPLITS": splits, "PER_SPLIT": split_size(vocab_size), "PDL": pdl}


def launch_sample(
    out: Tensor,
    logits: Tensor,
    table: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """See ``minisgl_backend.kernels.sampling.sample``."""
    batch_size, vocab_size = logits.shape
    collected, counted = workspace.collected, workspace.counted
    splits, bins = counted.counts.shape[2:]
    assert table.vocab_size == vocab_size and rows.dtype == positions.dtype
    inputs = (Logits(logits, logits.stride(0)), rows, positions, table)
    pdl = can_start_early(logits.device)
    constants = _split_constants(table, workspace, pdl=pdl)
    scores, tokens = workspace.scores, workspace.tokens
    grid = (batch_size, splits)
    _best_of_split[grid](scores, tokens, *inputs, **constants, FIRST=0, BLOCK=BLOCK, num_warps=4)
    # Few programs per row in a large batch: if no row has filters, they cost time for nothing.
    grid = (batch_size, max(4, min(512 // batch_size, splits)))
    filtering = {**constants, **launch_options(pdl), "BINS": bins}
    counting = (counted, scores, *inputs)
    count_splits[grid](*counting, **filtering, BLOCK=BLOCK, num_warps=4)
    filtering["CANDIDATES"] = collected.scaled.shape[1]
    collect_splits[grid](collected, *counting, **filtering, BLOCK=BLOCK, num_warps=4)
    choosing = (out, tokens, collected, *counting)
    _choose[(batch_size,)](*choosing, **filtering, BLOCK=4096, num_warps=16)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])
def _best_of_part(
    out_ptr,
    scores_ptr,
    tokens_ptr,
    logits,
    rows_ptr,
    positions_ptr,
    table,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_previous()
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(positions_ptr + index)
    temperature = load_number(table.numbers, row, TEMPERATURE)
    s = tl.arange(0, SPLITS)
    is_own = (s >= FIRST) & (s < FIRST + COUNT)
    bests = tl.load(scores_ptr + index * SPLITS + s, mask=is_own, other=float("-inf"))
    tokens = tl.load(tokens_ptr + index * SPLITS + s, mask=is_own, other=VOCAB)
    best = tl.max(bests, axis=0)
    token = tl.min(tl.where(bests == best, tokens, VOCAB), axis=0)
    if (temperature > 0) & (best < float("inf")) & (best > float("-inf")):
        split = tl.min(tl.where(bests == best, s, SPLITS), axis=0)
        row_ptr = logits.start + index * logits.stride - FIRST * PER_SPLIT
        key = noise_key(tl.load(table.seeds + row), position)
        adjustment = load_adjustment(table, index, row, position, VOCAB)
        inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
        token = _draw(row_ptr, split, adjustment, inverse, key, VOCAB, PER_SPLIT, False)
    tl.store(out_ptr + index * 2, best)
    tl.store(out_ptr + index * 2 + 1, token.to(tl.float32))


def launch_best_of_part(
    out: Tensor,
    part: Tensor,
    table: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    workspace: SamplingWorkspace,
    splits: range,
) -> None:
    """See ``minisgl_backend.kernels.sampling.best_of_part``."""
    batch_size, num_splits = len(part), len(splits)
    inputs = (Logits(part, part.stride(0)), rows, positions, table)
    pdl = can_start_early(part.device)
    constants = {**_split_constants(table, workspace, pdl=pdl), "FIRST": splits.start}
    found = (workspace.scores, workspace.tokens, *inputs)
    _best_of_split[(batch_size, num_splits)](*found, **constants, BLOCK=BLOCK, num_warps=4)
    options = {**launch_options(pdl), "COUNT": num_splits, "num_warps": 16}
    _best_of_part[(batch_size,)](out, *found, **constants, **options)


@triton.jit(do_not_specialize=["batch_size"])
def _best_of_parts(out_ptr, found_ptr, batch_size, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < batch_size
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], -1.0, tl.float32)
    for rank in tl.static_range(RANKS):
        pair = found_ptr + (rank * batch_size + at) * 2
        score = tl.load(pair, mask=is_in, other=float("-inf"))
        other = tl.load(pair + 1, mask=is_in, other=-1.0)
        better = score > best  # of equals the first: the smallest token
        best = tl.where(better, score, best)
        token = tl.where(better, other, token)
    tl.store(out_ptr + at, tl.where(best < float("inf"), token, -1.0).to(tl.int32), mask=is_in)


def launch_best_of_parts(out: Tensor, found: Tensor) -> None:
    """See ``minisgl_backend.kernels.sampling.best_of_parts``."""
    num_ranks, batch_size, _ = found.shape
    grid = (triton.cdiv(batch_size, 128),)
    _best_of_parts[grid](out, found, batch_size, RANKS=num_ranks, BLOCK=128, num_warps=4)
