"""``kernels.sampling_table`` in Triton: a number of a row, and a block of its adjusted logits."""

import triton
import triton.language as tl

from minisgl_backend.kernels import sampling_table
from minisgl_backend.kernels.sampling_table import COLUMNS

TEMPERATURE = tl.constexpr(COLUMNS.index("temperature"))
TOP_K = tl.constexpr(COLUMNS.index("top_k"))
TOP_P = tl.constexpr(COLUMNS.index("top_p"))
MIN_P = tl.constexpr(COLUMNS.index("min_p"))
MARKED = tl.constexpr(COLUMNS.index("marked"))
_REPETITION = tl.constexpr(COLUMNS.index("repetition"))
_PRESENCE = tl.constexpr(COLUMNS.index("presence"))
_FREQUENCY = tl.constexpr(COLUMNS.index("frequency"))
_STOPS_FROM = tl.constexpr(COLUMNS.index("stops_from"))
_BIASED = tl.constexpr(COLUMNS.index("biased"))
_NUM_COLUMNS = tl.constexpr(len(COLUMNS))

ONCE = tl.constexpr(sampling_table.ONCE)
_IS_STOP = tl.constexpr(sampling_table.IS_STOP)


@triton.jit
def load_number(numbers_ptr, row, COLUMN: tl.constexpr):
    """The number of one row, or of each of a block of rows."""
    return tl.load(numbers_ptr + row * _NUM_COLUMNS + COLUMN)


@triton.jit
def load_adjustment(numbers_ptr, marks_ptr, bias_ptr, row, position, VOCAB: tl.constexpr):
    """What ``load_logits`` has to know of a row: whether it has marks and a bias, where these are,
    the penalties, and which mark makes a token impossible."""
    is_early = position < load_number(numbers_ptr, row, _STOPS_FROM)
    # as integers: Triton's interpreter cannot combine a comparison of floats with a block
    return (
        load_number(numbers_ptr, row, MARKED).to(tl.int32) > 0,
        load_number(numbers_ptr, row, _BIASED).to(tl.int32) > 0,
        marks_ptr + row * VOCAB,
        bias_ptr + row * VOCAB,
        load_number(numbers_ptr, row, _REPETITION),
        load_number(numbers_ptr, row, _PRESENCE),
        load_number(numbers_ptr, row, _FREQUENCY),
        tl.where(is_early, _IS_STOP, 0),
    )


@triton.jit
def load_logits(row_ptr, at, mask, adjustment, ADJUSTED: tl.constexpr):
    """float32 logits of the tokens ``at``; -inf outside of ``mask``.

    Rows that have neither marks nor a bias are not ``ADJUSTED``, and give the same so.
    """
    x = tl.load(row_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    if ADJUSTED:
        marked, biased, marks_ptr, bias_ptr, repetition, presence, frequency, never = adjustment
        mark = tl.load(marks_ptr + at, mask=mask & marked, other=0)
        count = (mark // ONCE).to(tl.float32)
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where((mark & ~_IS_STOP) > 0, repeated, x)
        x = x - frequency * count - tl.where(count > 0, presence, 0.0)
        x += tl.load(bias_ptr + at, mask=mask & biased, other=0.0)
        x = tl.where((mark & never) > 0, float("-inf"), x)
    return x
