"""The choice of the positions with the highest scores: a radix selection.

A *key* is an unsigned integer that sorts like its score. The lowest key that is chosen is found
digit by digit, from the highest one: of the keys that begin with the digits known so far, those
with each next digit are counted. Then the slots of chosen positions are written. One program does
all of this for its token. On Hopper ``cuda.position_choice`` is faster.

A NaN is a key like any other, so it neither ends a search early nor makes it choose too many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous

_DIGITS = tl.constexpr(4)
_BITS = tl.constexpr(8)  # of a digit
_BASE = tl.constexpr(256)
_BLOCK = 1024  # positions of an iteration
_NUM_WARPS = 8


@triton.jit
def _load_keys(scores_ptr, at, held):
    """uint32, in the order of float32 scores; of 0.0 and -0.0 the same."""
    scores = tl.load(scores_ptr + at, mask=held, other=0.0)
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _with_digit(scores_ptr, length, lowest, wanted, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest chosen key with one more digit, and how many keys that begin like it are chosen.
    ``wanted`` are chosen of those that begin like ``lowest``."""
    shift: tl.constexpr = _BITS * (_DIGITS - 1 - DIGIT)
    known: tl.constexpr = (1 << 32) - (_BASE << shift)  # bits of the digits before
    i = tl.arange(0, BLOCK)
    counts = tl.zeros([_BASE], tl.int32)  # of keys by their digit
    for start in tl.range(0, length, BLOCK, num_stages=3):
        at = start + i
        held = at < length
        key = _load_keys(scores_ptr, at, held)
        digit = ((key >> shift) & (_BASE - 1)).to(tl.int32)
        counts += tl.histogram(digit, _BASE, mask=held & (key & known == lowest))
    b = tl.arange(0, _BASE)
    reached = tl.cumsum(counts, axis=0, reverse=True)  # with this digit or a higher one
    digit = tl.max(tl.where(reached >= wanted, b, 0), axis=0)
    wanted -= tl.sum(tl.where(b > digit, counts, 0), axis=0)
    return lowest | (digit.to(tl.uint32) << shift), wanted


@triton.jit(
    do_not_specialize=["scores_stride"],
    do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "lengths_ptr"],
)
def _choose(
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
    page_ptr = table_ptr + row * table_stride
    out_ptr += token * TOP_K
    lowest = tl.full([], 0, tl.uint32)
    wanted = length
    if length > TOP_K:
        wanted = tl.full([], TOP_K, tl.int32)
        for digit in tl.static_range(_DIGITS):
            lowest, wanted = _with_digit(scores_ptr, length, lowest, wanted, digit, BLOCK)
    # keys above the lowest one, and the first ``wanted`` that are equal to it
    i = tl.arange(0, BLOCK)
    above = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for start in tl.range(0, length, BLOCK):
        at = start + i
        held = at < length
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
    if len(scores) == 0:
        return
    assert out.is_contiguous() and scores.stride(1) == 1 and scores.dtype == torch.float32
    _choose[(len(scores),)](
        out,
        scores,
        page_table,
        rows,
        lengths,
        scores.stride(0),
        page_table.stride(0),
        TOP_K=out.shape[1],
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        **launch_options(pdl),
    )
