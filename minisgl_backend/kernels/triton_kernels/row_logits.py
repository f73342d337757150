"""``kernels.sampling_table`` in Triton: a row's sampling parameters, and its adjusted logits."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels import sampling_table
from minisgl_backend.kernels.sampling_table import COLUMNS
from minisgl_backend.kernels.triton_kernels.gumbel_noise import noise_key

TEMPERATURE = tl.constexpr(COLUMNS.index("temperature"))
_TOP_K = tl.constexpr(COLUMNS.index("top_k"))
_TOP_P = tl.constexpr(COLUMNS.index("top_p"))
_MIN_P = tl.constexpr(COLUMNS.index("min_p"))
MARKED = tl.constexpr(COLUMNS.index("marked"))
_REPETITION = tl.constexpr(COLUMNS.index("repetition"))
_PRESENCE = tl.constexpr(COLUMNS.index("presence"))
_FREQUENCY = tl.constexpr(COLUMNS.index("frequency"))
_STOPS_FROM = tl.constexpr(COLUMNS.index("stops_from"))
_BIASED = tl.constexpr(COLUMNS.index("biased"))
_MASKED = tl.constexpr(COLUMNS.index("masked"))
_NUM_COLUMNS = tl.constexpr(len(COLUMNS))

NEIGHBOURS = tl.constexpr(8)  # tokens that a thread loads at once, of bf16 logits
ONCE = tl.constexpr(sampling_table.ONCE)
_IS_STOP = tl.constexpr(sampling_table.IS_STOP)
_WORD = tl.constexpr(sampling_table.WORD)


class Logits(NamedTuple):
    """The logits of a batch, as kernels take them: where they start, and the stride of a row."""

    start: Tensor
    stride: int


@triton.jit
def load_number(numbers_ptr, row, COLUMN: tl.constexpr):
    """The number in ``COLUMN`` of one row, or of each row of a block."""
    return tl.load(numbers_ptr + row * _NUM_COLUMNS + COLUMN)


@triton.jit
def load_filters(numbers_ptr, row, VOCAB: tl.constexpr):
    """top_k, top_p, min_p, and whether any of them is on."""
    top_k = tl.minimum(load_number(numbers_ptr, row, _TOP_K), VOCAB)
    top_p = load_number(numbers_ptr, row, _TOP_P)
    min_p = load_number(numbers_ptr, row, _MIN_P)
    return top_k.to(tl.int32), top_p, min_p, (top_k > 0) | (top_p < 1) | (min_p > 0)


@triton.jit
def load_adjustment(table, index, row, position, VOCAB: tl.constexpr):
    """What ``load_logits`` needs for the sample ``index`` of a row: whether anything changes its
    logits, whether it has marks, a bias and a mask, pointers to these, the penalties, and the mark
    that makes a token impossible."""
    is_early = position < load_number(table.numbers, row, _STOPS_FROM)
    # as integers: Triton's interpreter cannot combine a comparison of floats with a block
    marked = load_number(table.numbers, row, MARKED).to(tl.int32) > 0
    biased = load_number(table.numbers, row, _BIASED).to(tl.int32) > 0
    masked = load_number(table.numbers, row, _MASKED).to(tl.int32) > 0
    return (
        marked | biased | masked,
        marked,
        biased,
        masked,
        (
            table.marks + row * VOCAB,
            table.bias + row * VOCAB,
            table.masks + index * ((VOCAB + _WORD - 1) // _WORD),
        ),
        load_number(table.numbers, row, _REPETITION),
        load_number(table.numbers, row, _PRESENCE),
        load_number(table.numbers, row, _FREQUENCY),
        tl.where(is_early, _IS_STOP, 0),
    )


@triton.jit
def load_row(
    index,
    scores_ptr,
    logits,
    rows_ptr,
    positions_ptr,
    table,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """For the row ``index`` of the batch: whether a token is drawn, its filters, its logits as
    (pointer, adjustment, the largest logit, 1 / temperature), and the key of its noise.

    ``scores_ptr`` has the score of each split. It is inf if a logit is inf or NaN. For rows with
    filters it is the largest logit, and for other rows that are drawn, a number that is not a
    logit.
    """
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(positions_ptr + index)
    temperature = load_number(table.numbers, row, TEMPERATURE)
    best = tl.max(tl.load(scores_ptr + index * SPLITS + tl.arange(0, SPLITS)), axis=0)
    adjustment = load_adjustment(table, index, row, position, VOCAB)
    return (
        (temperature > 0) & (best < float("inf")) & (best > float("-inf")),
        load_filters(table.numbers, row, VOCAB),
        (
            logits.start + index * logits.stride,
            adjustment,
            best,
            1.0 / tl.where(temperature > 0, temperature, 1.0),
        ),
        noise_key(tl.load(table.seeds + row), position),
    )


@triton.jit
def load_logits(row_ptr, at, mask, adjustment, ADJUSTED: tl.constexpr):
    """float32 logits of the tokens ``at``; -inf outside of ``mask``.

    For rows whose adjustment is off, the result is the same without ``ADJUSTED``.
    """
    x = tl.load(row_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    if ADJUSTED:
        _, marked, biased, masked, lines, repetition, presence, frequency, never = adjustment
        marks_ptr, bias_ptr, masks_ptr = lines
        mark = tl.load(marks_ptr + at, mask=mask & marked, other=0)
        count = (mark // ONCE).to(tl.float32)
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where((mark & ~_IS_STOP) > 0, repeated, x)
        x = x - frequency * count - tl.where(count > 0, presence, 0.0)
        x += tl.load(bias_ptr + at, mask=mask & biased, other=0.0)
        x = tl.where((mark & never) > 0, float("-inf"), x)
        word = tl.load(masks_ptr + at // _WORD, mask=mask & masked, other=-1)
        x = tl.where((word >> (at % _WORD)) & 1 != 0, x, float("-inf"))
    return x
