"""The one value that crosses from the planner to the executor, and what comes back.

A ``StepPlan`` says what one forward pass does: which rows come to life, which pages they are
granted, which prompt tokens are prefilled and which rows decode. It is written by length alone: a
plan never holds a sampled token, since with overlap the last ones are not known yet. The executor
keeps the last sampled token of each row itself.

Must not know tensors, devices, caches or queues. It can be encoded as one flat buffer of ints,
which is how it reaches the other tensor-parallel ranks:

    header       step; numbers of releases, grants, chunks, chunk tokens, decodes and admissions
    arrays       those of the plan, in the order in which ``StepPlan`` declares them
    admissions   one after the other: a record of fixed size, stop ids, logit bias, history

Numbers of 64 bits take two words, floats travel as their bits: nothing is lost.

Invariants: row and page numbers are those of the planner's tables; grants are written to the page
table before anything else of the step runs; a row decodes or prefills in a step, never both.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from minisgl_backend.request import (
    FinishReason,
    IntArray,
    RequestId,
    SamplingParams,
    TokenId,
    TokenLogprobs,
)

NO_TOKEN = -1
"""Stands for a token in ``SampledTokens`` where the logits of a row were not finite."""

_NUM_HEADER_WORDS = 14  # seven numbers of 64 bits
_RECORD = struct.Struct("<qQ6d11i")  # of an admission; see _encode_admission
_WORD = 4  # bytes of an int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission:
    """A request takes a row: all that the executor has to know of it, told once.

    ``history`` holds the tokens known so far (prompt, then output where the request was retracted
    and comes back), int32[num_tokens], when ``sampling`` has penalties; else it is empty.
    ``num_prompt_tokens`` tells prompt from output: the output token at position p has index
    p - num_prompt_tokens.
    """

    request_id: RequestId
    row: int
    num_prompt_tokens: int
    num_cached_tokens: int
    sampling: SamplingParams
    history: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One forward pass. All arrays are int32; P prefill chunks, D decoding rows, G grants.

    ``grant_rows``, ``grant_indices``, ``grant_pages`` [G]: page_table[row, index] = page.
    ``prefill_rows``, ``prefill_starts``, ``prefill_lengths`` [P]: positions start .. start + length
    of the row are computed, from ``prefill_tokens`` [sum of lengths], chunk after chunk.
    ``prefill_samples`` [P], 0 or 1: the chunk is the prompt's last, so a token is sampled from it.
    ``decode_rows``, ``decode_positions`` [D]: the row's last sampled token stands at that position,
    is computed there, and the next one is sampled.
    ``released_rows``: rows that no request holds any more (their state may be dropped before the
    admissions of this plan are applied).
    """

    step: int
    released_rows: IntArray
    admissions: tuple[Admission, ...]
    grant_rows: IntArray
    grant_indices: IntArray
    grant_pages: IntArray
    prefill_rows: IntArray
    prefill_starts: IntArray
    prefill_lengths: IntArray
    prefill_samples: IntArray
    prefill_tokens: IntArray
    decode_rows: IntArray
    decode_positions: IntArray

    @property
    def sample_rows(self) -> IntArray:
        """Rows that get a token from this step, in the order of ``SampledTokens``."""
        last_chunks = self.prefill_rows[self.prefill_samples != 0]
        return np.concatenate([last_chunks, self.decode_rows])

    @property
    def num_tokens(self) -> int:
        """Token positions that this step computes."""
        return len(self.prefill_tokens) + len(self.decode_rows)

    def encode(self) -> IntArray:
        """The plan as one flat buffer, int32[num_words]."""
        header = np.array(
            [
                self.step,
                len(self.released_rows),
                len(self.grant_rows),
                len(self.prefill_rows),
                len(self.prefill_tokens),
                len(self.decode_rows),
                len(self.admissions),
            ],
            dtype=np.int64,
        )
        return np.concatenate(
            [
                header.view(np.int32),
                self.released_rows,
                self.grant_rows,
                self.grant_indices,
                self.grant_pages,
                self.prefill_rows,
                self.prefill_starts,
                self.prefill_lengths,
                self.prefill_samples,
                self.prefill_tokens,
                self.decode_rows,
                self.decode_positions,
                *(_encode_admission(admission) for admission in self.admissions),
            ],
            dtype=np.int32,
        )

    @classmethod
    def decode(cls, buffer: IntArray) -> StepPlan:
        """The plan that ``encode`` wrote to the front of ``buffer``; its arrays are views of it."""
        header = buffer[:_NUM_HEADER_WORDS].view(np.int64).tolist()
        step, num_released, num_grants, num_chunks, num_tokens, num_decodes, num_admissions = header
        words = _Words(buffer, _NUM_HEADER_WORDS)
        return cls(
            step=step,
            released_rows=words.take(num_released),
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


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """What a step sampled: ``token_ids`` int32[num_samples], ordered as ``StepPlan.sample_rows``.

    ``logprobs`` has an entry, by index in that order, for each row that asked for them.
    """

    token_ids: IntArray
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that a commit ended; ``reason`` is None where its logits were not finite."""

    request_id: RequestId
    reason: FinishReason | None
    stop_token_id: TokenId | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a commit made known: new tokens of live requests, and the requests that ended with it.

    ``request_ids`` and ``token_ids`` run in parallel; ``logprobs`` is keyed by index in them.
    Tokens of requests that were aborted meanwhile do not appear.
    """

    request_ids: list[RequestId]
    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)


class _Words:
    """Reads a buffer of int32 from front to back."""

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
    ) = _RECORD.unpack(words.take(_RECORD.size // _WORD).tobytes())
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
