"""The choice of the positions with the highest scores: a radix selection.

A *key* is an unsigned integer that sorts like its score. The lowest key that is chosen is found
digit by digit, from the highest one: of the keys that begin with the digits known so far, those
with each next digit are counted. Then the slots of chosen positions are written.

With many tokens one program does all of this for its token. With few the positions of a token are
divided into splits, and each digit takes a kernel, as does writing.

A NaN is a key like any other, so it neither ends a search early nor makes it choose too many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_DIGITS = tl.constexpr(4)
_BITS = tl.constexpr(8)  # of a digit
_BASE = tl.constexpr(256)
_BLOCK = 1024  # positions of an iteration
_MOST_SPLITS = tl.constexpr(32)
_RESIDENT = 4  # programs of a multiprocessor, of few tokens
_NUM_WARPS = 8


@triton.jit
def _load_keys(scores_ptr, at, held):
    """uint32, in the order of float32 scores; of 0.0 and -0.0 the same."""
    scores = tl.load(scores_ptr + at, mask=held, other=0.0)
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _count(scores_ptr, begin, end, lowest, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the keys of positions [begin, end): how many begin like ``lowest`` up to ``DIGIT``, by
    this digit, int32 [_BASE]; and how many are above all of those."""
    shift: tl.constexpr = _BITS * (_DIGITS - 1 - DIGIT)
    known: tl.constexpr = (1 << 32) - (_BASE << shift)  # bits of the digits before
    i = tl.arange(0, BLOCK)
    counts = tl.zeros([_BASE], tl.int32)
    above = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(begin, end, BLOCK, num_stages=3):
        at = start + i
        held = at < end
        key = _load_keys(scores_ptr, at, held)
        digit = ((key >> shift) & (_BASE - 1)).to(tl.int32)
        counts += tl.histogram(digit, _BASE, mask=held & (key & known == lowest))
        above += (held & (key & known > lowest)).to(tl.int32)
    return counts, tl.sum(above, axis=0)


@triton.jit
def _with_digit(lowest, wanted, counts, DIGIT: tl.constexpr):
    """The lowest chosen key with one more digit, and how many keys that begin like it are chosen.
    ``counts`` [_BASE] of ``_count``, of which ``wanted`` are chosen."""
    b = tl.arange(0, _BASE)
    reached = tl.cumsum(counts, axis=0, reverse=True)  # with this digit or a higher one
    digit = tl.max(tl.where(reached >= wanted, b, 0), axis=0)
    wanted -= tl.sum(tl.where(b > digit, counts, 0), axis=0)
    return lowest | (digit.to(tl.uint32) << (_BITS * (_DIGITS - 1 - DIGIT))), wanted


@triton.jit
def _write(
    out_ptr,
    scores_ptr,
    page_ptr,
    begin,
    end,
    lowest,
    wanted,
    above,
    equal,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the slots of positions in [begin, end): of those with keys above ``lowest``, and of the
    first ``wanted`` with this key. ``above`` and ``equal`` of them are before ``begin``."""
    i = tl.arange(0, BLOCK)
    for start in tl.range(begin, end, BLOCK):
        at = start + i
        held = at < end
        key = _load_keys(scores_ptr, at, held)
        is_above = held & (key > lowest)
        is_equal = held & (key == lowest)
        both = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)  # two counts in one
        reached = tl.cumsum(both, axis=0)
        num_equal = equal + (reached >> 16)
        chosen = is_above | (is_equal & (num_equal <= wanted))
        place = above + (reached & 0xFFFF) + tl.minimum(num_equal, wanted) - 1
        page = tl.load(page_ptr + at // PAGE_SIZE, mask=chosen, other=0)
        tl.store(out_ptr + place, page * PAGE_SIZE + at % PAGE_SIZE, mask=chosen)
        total = tl.sum(both, axis=0)
        above += total & 0xFFFF
        equal += total >> 16


@triton.jit
def _share_of(length, split, splits, BLOCK: tl.constexpr):
    """The positions [begin, end) of a split."""
    per_split = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    begin = tl.minimum(split * per_split, length)
    return begin, tl.minimum(begin + per_split, length)


@triton.jit(
    do_not_specialize=["scores_stride"],
    do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "lengths_ptr"],
)
def _choose_alone(
    out_ptr,
    scores_ptr,
    table_ptr,
    rows_ptr,
    lengths_ptr,
    scores_stride,
    table_stride,
    TOP_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        allow_next()
        wait_previous()
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + token)
    row = tl.load(rows_ptr + token).to(tl.int64)
    scores_ptr += token * scores_stride
    lowest = tl.full([], 0, tl.uint32)
    wanted = length
    if length > TOP_K:
        wanted = tl.full([], TOP_K, tl.int32)
        for digit in tl.static_range(_DIGITS):
            counts, _ = _count(scores_ptr, 0, length, lowest, digit, BLOCK)
            lowest, wanted = _with_digit(lowest, wanted, counts, digit)
    page_ptr = table_ptr + row * table_stride
    to = out_ptr + token * TOP_K
    none = tl.full([], 0, tl.int32)
    _write(to, scores_ptr, page_ptr, 0, length, lowest, wanted, none, none, PAGE_SIZE, BLOCK)


@triton.jit
def _load_counts(counts_ptr, token, splits):
    """int32 [_MOST_SPLITS, _BASE]"""
    s = tl.arange(0, _MOST_SPLITS)
    at = (token * splits + s)[:, None] * _BASE + tl.arange(0, _BASE)[None, :]
    return tl.load(counts_ptr + at, mask=(s < splits)[:, None], other=0)


@triton.jit(
    do_not_specialize=["scores_stride"],
    do_not_specialize_on_alignment=["lengths_ptr", "known_ptr", "last_known_ptr", "aboves_ptr"],
)
def _count_digit(
    scores_ptr,
    lengths_ptr,
    known_ptr,  # [num_tokens, 2]: what is known before this digit
    new_counts_ptr,  # [num_tokens, splits, _BASE]
    aboves_ptr,  # [num_tokens, splits]
    last_known_ptr,  # as of the digit before
    counts_ptr,
    scores_stride,
    TOP_K: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        allow_next()
        wait_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    token = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + token)
    if length <= TOP_K:
        return
    if DIGIT == 0:
        lowest = tl.full([], 0, tl.uint32)
        wanted = tl.full([], TOP_K, tl.int32)
    else:
        lowest = tl.load(last_known_ptr + 2 * token).to(tl.uint32, bitcast=True)
        wanted = tl.load(last_known_ptr + 2 * token + 1)
        counts = tl.sum(_load_counts(counts_ptr, token, splits), axis=0)
        lowest, wanted = _with_digit(lowest, wanted, counts, DIGIT - 1)
    if split == 0:
        tl.store(known_ptr + 2 * token, lowest.to(tl.int32, bitcast=True))
        tl.store(known_ptr + 2 * token + 1, wanted)
    begin, end = _share_of(length, split, splits, BLOCK)
    scores_ptr += token * scores_stride
    counts, above = _count(scores_ptr, begin, end, lowest, DIGIT, BLOCK)
    place = token * splits + split
    tl.store(new_counts_ptr + place * _BASE + tl.arange(0, _BASE), counts)
    tl.store(aboves_ptr + place, above)


@triton.jit(
    do_not_specialize=["scores_stride"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "rows_ptr",
        "lengths_ptr",
        "known_ptr",
        "aboves_ptr",
    ],
)
def _write_share(
    out_ptr,
    scores_ptr,
    table_ptr,
    rows_ptr,
    lengths_ptr,
    known_ptr,
    counts_ptr,
    aboves_ptr,
    scores_stride,
    table_stride,
    TOP_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        allow_next()
        wait_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    token = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + token)
    row = tl.load(rows_ptr + token).to(tl.int64)
    begin, end = _share_of(length, split, splits, BLOCK)
    if begin >= end:
        return
    lowest = tl.full([], 0, tl.uint32)
    wanted = length
    above = begin
    equal = tl.full([], 0, tl.int32)
    if length > TOP_K:
        lowest = tl.load(known_ptr + 2 * token).to(tl.uint32, bitcast=True)
        wanted = tl.load(known_ptr + 2 * token + 1)
        counts = _load_counts(counts_ptr, token, splits)
        lowest, wanted = _with_digit(lowest, wanted, tl.sum(counts, axis=0), _DIGITS - 1)
        s = tl.arange(0, _MOST_SPLITS)
        digit = tl.arange(0, _BASE)[None, :]
        last_digit = (lowest & (_BASE - 1)).to(tl.int32)
        is_before = (s < split)[:, None]
        above = tl.sum(tl.load(aboves_ptr + token * splits + s, mask=s < split, other=0), axis=0)
        above += tl.sum(tl.where(is_before & (digit > last_digit), counts, 0))
        equal = tl.sum(tl.where(is_before & (digit == last_digit), counts, 0))
    scores_ptr += token * scores_stride
    page_ptr = table_ptr + row * table_stride
    to = out_ptr + token * TOP_K
    _write(to, scores_ptr, page_ptr, begin, end, lowest, wanted, above, equal, PAGE_SIZE, BLOCK)


def launch_choose_slots(
    out: Tensor,
    scores: Tensor,
    page_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.indexer.choose_slots``."""
    num_tokens, width = scores.shape
    if num_tokens == 0:
        return
    assert out.is_contiguous() and scores.stride(1) == 1 and scores.dtype == torch.float32
    top_k = out.shape[1]
    splits = num_splits(num_tokens, width, num_processors(scores.device))
    if splits == 1:
        _choose_alone[(num_tokens,)](
            out,
            scores,
            page_table,
            rows,
            lengths,
            scores.stride(0),
            page_table.stride(0),
            TOP_K=top_k,
            PAGE_SIZE=page_size,
            BLOCK=_BLOCK,
            PDL=pdl,
            num_warps=_NUM_WARPS,
            **launch_options(pdl),
        )
        return
    grid = splits, num_tokens
    known = out.new_empty(_DIGITS.value, num_tokens, 2)
    counts = out.new_empty(2, num_tokens, splits, _BASE.value)
    aboves = out.new_empty(num_tokens, splits)
    for digit in range(_DIGITS.value):
        _count_digit[grid](
            scores,
            lengths,
            known[digit],
            counts[digit % 2],
            aboves,
            known[digit - 1],
            counts[(digit - 1) % 2],
            scores.stride(0),
            TOP_K=top_k,
            DIGIT=digit,
            BLOCK=_BLOCK,
            PDL=pdl,
            num_warps=_NUM_WARPS,
            **launch_options(pdl),
        )
    _write_share[grid](
        out,
        scores,
        page_table,
        rows,
        lengths,
        known[-1],
        counts[(_DIGITS.value - 1) % 2],
        aboves,
        scores.stride(0),
        page_table.stride(0),
        TOP_K=top_k,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        **launch_options(pdl),
    )


def num_splits(num_tokens: int, width: int, processors: int) -> int:
    """Into how many splits the positions of a token are divided: as many as fill the
    multiprocessors, if each gets a block of the widest token."""
    most: int = min(_MOST_SPLITS.value, width // _BLOCK)
    return max(min(_RESIDENT * processors // num_tokens, most), 1)
