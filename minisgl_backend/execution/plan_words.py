"""Encodes a step plan as 32-bit words, to be sent to the other tensor-parallel ranks.

    header    the step, and the length of each array; numbers of 64 bits, which take two words
    arrays    one after another, in the order of ``_ARRAYS``

Admissions are left out: they say how rows are sampled, and rank 0 alone samples. Must not know who
sends a plan, or how (``rank_channel``).
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray

_ARRAYS: Final = (
    "released_rows",
    "broken_pages",
    "grant_rows",
    "grant_indices",
    "grant_pages",
    "prefill_rows",
    "prefill_starts",
    "prefill_lengths",
    "prefill_samples",
    "prefill_tokens",
    "decode_rows",
    "decode_positions",
)
_NUM_HEADER_WORDS: Final = 2 * (1 + len(_ARRAYS))


def encode_plan(plan: StepPlan) -> IntArray:
    """Encode a plan into one flat buffer, int32[num_words]."""
    arrays: list[IntArray] = [getattr(plan, name) for name in _ARRAYS]
    header = np.array([plan.step, *map(len, arrays)], dtype=np.int64)
    return np.concatenate([header.view(np.int32), *arrays], dtype=np.int32)


def decode_plan(buffer: IntArray) -> StepPlan:
    """The plan at the front of a buffer by ``encode_plan``, without admissions.

    Its arrays are views of the buffer.
    """
    step, *lengths = buffer[:_NUM_HEADER_WORDS].view(np.int64).tolist()
    borders = accumulate(lengths, initial=_NUM_HEADER_WORDS)
    arrays = (buffer[begin:end] for begin, end in pairwise(borders))
    return StepPlan(step=step, admissions=(), **dict(zip(_ARRAYS, arrays, strict=True)))
