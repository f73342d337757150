"""Encodes a step plan as 32-bit words, to be sent to the other tensor-parallel ranks.

    header       step; numbers of releases, broken pages, grants, chunks, chunk tokens and decodes
    arrays       those of the plan, in the order in which ``StepPlan`` declares them

Admissions are left out: they say how rows are sampled, and rank 0 alone samples. 64-bit numbers
take two words. Must not know who sends a plan, or how (``plan_channel``).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray

_NUM_HEADER_WORDS: Final = 14  # seven numbers of 64 bits


def encode_plan(plan: StepPlan) -> IntArray:
    """Encode a plan into one flat buffer, int32[num_words]."""
    header = np.array(
        [
            plan.step,
            len(plan.released_rows),
            len(plan.broken_pages),
            len(plan.grant_rows),
            len(plan.prefill_rows),
            len(plan.prefill_tokens),
            len(plan.decode_rows),
        ],
        dtype=np.int64,
    )
    return np.concatenate(
        [
            header.view(np.int32),
            plan.released_rows,
            plan.broken_pages,
            plan.grant_rows,
            plan.grant_indices,
            plan.grant_pages,
            plan.prefill_rows,
            plan.prefill_starts,
            plan.prefill_lengths,
            plan.prefill_samples,
            plan.prefill_tokens,
            plan.decode_rows,
            plan.decode_positions,
        ],
        dtype=np.int32,
    )


def decode_plan(buffer: IntArray) -> StepPlan:
    """The plan that ``encode_plan`` made the buffer of. Its arrays are views of the buffer."""
    header = buffer[:_NUM_HEADER_WORDS].view(np.int64).tolist()
    step, num_released, num_broken, num_grants, num_chunks, num_tokens, num_decodes = header
    words = _Words(buffer, _NUM_HEADER_WORDS)
    return StepPlan(
        step=step,
        released_rows=words.take(num_released),
        broken_pages=words.take(num_broken),
        grant_rows=words.take(num_grants),
        grant_indices=words.take(num_grants),
        grant_pages=words.take(num_grants),
        prefill_rows=words.take(num_chunks),
        prefill_starts=words.take(num_chunks),
        prefill_lengths=words.take(num_chunks),
        prefill_samples=words.take(num_chunks),
        prefill_tokens=words.take(num_tokens),
        decode_rows=words.take(num_decodes),
        decode_positions=words.take(num_decodes),
        admissions=(),
    )


class _Words:
    """Reads a buffer, int32[num_words], from front to back."""

    def __init__(self, buffer: IntArray, start: int) -> None:
        self._buffer = buffer
        self._next = start

    def take(self, count: int) -> IntArray:
        """The next ``count`` words, as a view."""
        start, self._next = self._next, self._next + count
        return self._buffer[start : self._next]
