"""A block of one row's logits, after the penalties of the row."""

import triton
import triton.language as tl


@triton.jit
def load_penalty(
    row,
    lines_ptr,
    counts_ptr,
    in_prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    VOCAB: tl.constexpr,
    PENALTIES: tl.constexpr,
):
    """What ``load_logits`` has to know of a row: whether it has a line, where, and its factors."""
    if PENALTIES:
        line = tl.load(lines_ptr + row).to(tl.int64)
        return (
            line >= 0,
            counts_ptr + line * VOCAB,
            in_prompt_ptr + line * VOCAB,
            tl.load(repetition_ptr + row),
            tl.load(presence_ptr + row),
            tl.load(frequency_ptr + row),
        )
    else:
        return (0, 0, 0, 1.0, 0.0, 0.0)


@triton.jit
def load_logits(row_ptr, at, mask, penalty, VOCAB: tl.constexpr, PENALTIES: tl.constexpr):
    """float32 logits of the tokens ``at``; -inf outside of ``mask``."""
    x = tl.load(row_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    if PENALTIES:  # noqa: SIM102  (known when compiled, the other only when run)
        if penalty[0]:
            count = tl.load(penalty[1] + at, mask=mask, other=0).to(tl.float32)
            seen = (tl.load(penalty[2] + at, mask=mask, other=0) != 0) | (count > 0)
            x = tl.where(seen, tl.where(x > 0, x / penalty[3], x * penalty[3]), x)
            x = x - penalty[5] * count - penalty[4] * tl.where(count > 0, 1.0, 0.0)
    return x
