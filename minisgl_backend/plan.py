"""The one value that crosses from the planner to the executor, and what comes back.

A ``StepPlan`` says what one forward pass does: which rows come to life, which pages they are
granted, which prompt tokens are prefilled and which rows decode. It is written by length alone: a
plan never holds a sampled token, since with overlap the last ones are not known yet. The executor
keeps the last sampled token of each row itself.

Must not know tensors, devices, caches or queues. It holds nothing but ints, so it is also what the
other tensor-parallel ranks get (``execution.plan_words``).

Invariants: row and page numbers are those of the planner's tables; grants are written to the page
table before anything else of the step runs; a row decodes or prefills in a step, never both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

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


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """What a step sampled: ``token_ids`` int32[num_samples], ordered as ``StepPlan.sample_rows``.

    ``logprobs`` has an entry, by index in that order, for each row that asked for them.
    """

    token_ids: IntArray
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)


class Pending(Protocol):
    """A launched step."""

    def tokens(self) -> SampledTokens:
        """Wait for the step and return what it sampled: the one host sync of a step."""


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
