"""Encodes a step plan as 32-bit words, to be sent to the other tensor-parallel ranks.

    header       step; numbers of releases, broken pages, grants, chunks, chunk tokens, decodes and
                 admissions
    arrays       those of the plan, in the order in which ``StepPlan`` declares them
    admissions   one after the other: a record of fixed size, stop ids, logit bias, history

64-bit numbers take two words, and floats are sent as their bits, so nothing is lost. Must not know
who sends a plan, or how (``plan_channel``).
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from minisgl_backend.plan import Admission, StepPlan
from minisgl_backend.request import IntArray, RequestId, SamplingParams

_NUM_HEADER_WORDS: Final = 16  # eight numbers of 64 bits
_RECORD: Final = struct.Struct("<qQ6d11i")  # of an admission; see _encode_admission
_WORD_BYTES: Final = 4


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
            len(plan.admissions),
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
            *(_encode_admission(admission) for admission in plan.admissions),
        ],
        dtype=np.int32,
    )


def decode_plan(buffer: IntArray) -> StepPlan:
    """The plan that ``encode_plan`` made the buffer of. Its arrays are views of the buffer."""
    header = buffer[:_NUM_HEADER_WORDS].view(np.int64).tolist()
    step, num_released, num_broken, num_grants, num_chunks, num_tokens, *rest = header
    num_decodes, num_admissions = rest
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
        admissions=tuple(_decode_admission(words) for _ in range(num_admissions)),
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


def _encode_admission(admission: Admission) -> IntArray:
    sampling = admission.sampling
    record = _RECORD.pack(
        admission.request_id,
        sampling.seed,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        admission.row,
        admission.num_prompt_tokens,
        admission.num_cached_tokens,
        sampling.max_tokens,
        sampling.min_tokens,
        sampling.top_k,
        sampling.ignore_eos,
        -1 if sampling.num_logprobs is None else sampling.num_logprobs,
        len(sampling.stop_token_ids),
        len(sampling.logit_bias),
        len(admission.history),
    )
    biased = [token_id for token_id, _ in sampling.logit_bias]
    biases = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float64)
    return np.concatenate(
        [
            np.frombuffer(record, dtype=np.int32),
            np.array(sampling.stop_token_ids, dtype=np.int32),
            np.array(biased, dtype=np.int32),
            biases.view(np.int32),
            admission.history,
        ],
        dtype=np.int32,
    )


def _decode_admission(words: _Words) -> Admission:
    (
        request_id,
        seed,
        temperature,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        row,
        num_prompt_tokens,
        num_cached_tokens,
        max_tokens,
        min_tokens,
        top_k,
        ignore_eos,
        num_logprobs,
        num_stops,
        num_biases,
        num_history,
    ) = _RECORD.unpack(words.take(_RECORD.size // _WORD_BYTES).tobytes())
    stop_token_ids = tuple(words.take(num_stops).tolist())
    biased = words.take(num_biases).tolist()
    biases = words.take(2 * num_biases).view(np.float64).tolist()
    return Admission(
        request_id=RequestId(request_id),
        row=row,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(ignore_eos),
            logit_bias=tuple(zip(biased, biases, strict=True)),
            num_logprobs=None if num_logprobs < 0 else num_logprobs,
        ),
        history=words.take(num_history),
    )
