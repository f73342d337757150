"""``StepPlan``, which the planner sends to the executor, and the tokens that come back.

A ``StepPlan`` says what one forward pass does: which requests take a row, which pages the rows are
granted, which prompt tokens are prefilled, and which rows decode. A plan never holds a token that
is not committed: with overlap it is made before the tokens of the running step are known. The
executor itself keeps the last sampled token of each row.

Must not know tensors, devices, caches or queues. A plan consists of plain numbers, so the other
tensor-parallel ranks get the very same plan, encoded as 32-bit words.

Invariants: a step computes at least one token; row and page numbers are those of the planner's
tables; grants are written to the page table before the step computes anything; in a step a row
decodes or prefills, never both; rows of a group have the same pages there, full of committed
positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Final, Protocol

import numpy as np

from minisgl_backend.request import (
    EMPTY,
    FloatArray,
    IntArray,
    PromptLogprobs,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)

NO_TOKEN: Final = -1
"""In place of a token: the logits of the row were not finite."""

NO_SNAPSHOT: Final = -1
"""In place of the number of a snapshot: there is none."""

NO_PAGE: Final = -1
"""In place of a window page: the row has none there, as no position sees it any more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission:
    """A request takes a row: all that the executor has to know of it, sent once.

    ``history``, int32[num_tokens], holds the tokens known so far if ``sampling`` has penalties, and
    is empty if not. The known tokens are the prompt, followed by the output so far if the request
    was retracted and comes back. ``num_prompt_tokens`` tells prompt from output: the token at
    position p is the output token of index p - num_prompt_tokens.
    """

    request_id: RequestId
    row: int
    num_prompt_tokens: int
    num_cached_tokens: int
    sampling: SamplingParams
    history: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Decoding rows that share pages, N groups of them; int32.

    Group i has ``sizes[i]`` of the ``members`` [sum of sizes], one group after another. They share
    the pages from index ``begins[i]`` up to ``ends[i]`` of their lines of the page table. A row may
    be in several groups, which together cover its first pages, in order and without gaps.
    """

    sizes: IntArray
    begins: IntArray
    ends: IntArray
    members: IntArray


NO_GROUPS: Final = Groups(EMPTY, EMPTY, EMPTY, EMPTY)


def _empty() -> IntArray:
    return EMPTY


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One forward pass with P prefill chunks, S of them scored, D decoding rows, G grants and C
    copies, which keeps V snapshots of chunks and K of decoding rows.

    All arrays are int32, and empty unless given.

    ``released_rows``: rows that no request holds any more. ``ModelExecutor`` does not need them,
    since an admission overwrites all of a row; wrappers that keep state by row do.
    ``broken_pages``: pages that no request uses and that may hold NaN. The executor clears them
    before it does anything else of the plan, since this plan may already grant them. All other
    pages hold finite numbers, or NaN that the requests that use them have computed themselves.
    ``grant_rows``, ``grant_indices``, ``grant_pages`` [G]: page_table[row, index] = page.
    ``copy_sources``, ``copy_targets``, ``copy_lengths`` [C]: the keys and values of the first
    ``length`` positions of a page are copied to another page, after broken pages are cleared and
    before anything is computed. No page is a target twice, and none is both.
    ``prefill_rows``, ``prefill_starts``, ``prefill_lengths`` [P]: the positions from start up to
    start + length of the row are computed. ``prefill_tokens`` [sum of lengths] has their tokens,
    chunk after chunk.
    ``prefill_samples`` [P] is 1 if the chunk is the last of the row's known tokens, so that a token
    is sampled after it, and otherwise 0.
    ``begun_from`` [P]: the snapshot of recurrent states with which the chunk's row begins, if it
    continues a cached prefix; else ``NO_SNAPSHOT``, and the row goes on from its own states, which
    are zero at position 0.
    ``saved_chunks`` [V]: chunks, by index, in which the states after the first ``saved_positions``
    [V] tokens of the row are kept as ``saved_snapshots`` [V]. Ascending by chunk and position.
    ``kept_rows``, ``kept_snapshots`` [K]: before the step computes anything, the states that these
    decoding rows have by then, after the tokens before ``decode_positions``, are copied to these
    snapshots. None of them is among ``begun_from``.
    ``score_chunks`` [S]: chunks, by index, of which the positions from ``score_starts`` up to
    ``score_starts`` + ``score_lengths`` [S] are scored: the log-probability is wanted of the token
    after each, given all tokens up to it. ``score_tokens`` [sum of score_lengths] has the tokens
    after them, chunk after chunk.
    ``decode_rows``, ``decode_positions`` [D]: the last sampled token of the row stands at that
    position; it is computed, and the next token is sampled. Rows ascend.
    ``group_sizes``, ``group_begins``, ``group_ends`` [N], ``group_rows``: the ``Groups`` of these
    rows whose pages are worth being read together. Results are the same without.
    ``masked_rows``: those of the rows that get a token whose request has a grammar. If there are
    any, the step samples once it has masks for them (``Pending.mask``).
    ``load_slots``, ``load_adapters``, ``load_ranks``, ``load_targets`` [L]: before anything is
    computed, each slot takes an adapter, by its id, with its rank and targets
    (``request.Adapter``). No row of a step in flight has what the slot held.
    ``adapter_rows``, ``adapter_slots`` [A]: after that, these rows have the adapters in these
    slots; 0 is none. Each row that is admitted is among them, if there are slots.
    ``window_rows``, ``window_indices``, ``window_pages`` [W]: window_table[row, index] = page, or
    ``NO_PAGE``, for layers with windows that have pages of their own; no entry twice.
    ``broken_window_pages``: of these pages, as ``broken_pages``.
    """

    step: int
    released_rows: IntArray = field(default_factory=_empty)
    broken_pages: IntArray = field(default_factory=_empty)
    admissions: tuple[Admission, ...] = ()
    grant_rows: IntArray = field(default_factory=_empty)
    grant_indices: IntArray = field(default_factory=_empty)
    grant_pages: IntArray = field(default_factory=_empty)
    copy_sources: IntArray = field(default_factory=_empty)
    copy_targets: IntArray = field(default_factory=_empty)
    copy_lengths: IntArray = field(default_factory=_empty)
    prefill_rows: IntArray = field(default_factory=_empty)
    prefill_starts: IntArray = field(default_factory=_empty)
    prefill_lengths: IntArray = field(default_factory=_empty)
    prefill_samples: IntArray = field(default_factory=_empty)
    prefill_tokens: IntArray = field(default_factory=_empty)
    begun_from: IntArray = field(default_factory=_empty)
    saved_chunks: IntArray = field(default_factory=_empty)
    saved_positions: IntArray = field(default_factory=_empty)
    saved_snapshots: IntArray = field(default_factory=_empty)
    decode_rows: IntArray = field(default_factory=_empty)
    decode_positions: IntArray = field(default_factory=_empty)
    group_sizes: IntArray = field(default_factory=_empty)
    group_begins: IntArray = field(default_factory=_empty)
    group_ends: IntArray = field(default_factory=_empty)
    group_rows: IntArray = field(default_factory=_empty)
    masked_rows: IntArray = field(default_factory=_empty)
    score_chunks: IntArray = field(default_factory=_empty)
    score_starts: IntArray = field(default_factory=_empty)
    score_lengths: IntArray = field(default_factory=_empty)
    score_tokens: IntArray = field(default_factory=_empty)
    kept_rows: IntArray = field(default_factory=_empty)
    kept_snapshots: IntArray = field(default_factory=_empty)
    load_slots: IntArray = field(default_factory=_empty)
    load_adapters: IntArray = field(default_factory=_empty)
    load_ranks: IntArray = field(default_factory=_empty)
    load_targets: IntArray = field(default_factory=_empty)
    adapter_rows: IntArray = field(default_factory=_empty)
    adapter_slots: IntArray = field(default_factory=_empty)
    window_rows: IntArray = field(default_factory=_empty)
    window_indices: IntArray = field(default_factory=_empty)
    window_pages: IntArray = field(default_factory=_empty)
    broken_window_pages: IntArray = field(default_factory=_empty)

    @property
    def sample_rows(self) -> IntArray:
        """The rows that get a token from this step, in the order of ``SampledTokens``."""
        last_chunks = self.prefill_rows[self.prefill_samples != 0]
        return np.concatenate([last_chunks, self.decode_rows])

    @property
    def groups(self) -> Groups:
        """The groups, with indices of ``decode_rows`` as members."""
        if not len(self.group_sizes):
            return NO_GROUPS
        members = np.searchsorted(self.decode_rows, self.group_rows).astype(np.int32)
        return Groups(self.group_sizes, self.group_begins, self.group_ends, members)

    @property
    def num_tokens(self) -> int:
        """Number of token positions that this step computes."""
        return len(self.prefill_tokens) + len(self.decode_rows)


_ARRAYS: Final = tuple(
    field.name
    for field in fields(StepPlan)
    if field.name not in ("step", "admissions", "masked_rows")
)
_NUM_HEADER_WORDS: Final = 2 * (1 + len(_ARRAYS))


def encode_plan(plan: StepPlan) -> IntArray:
    """Encode a plan, without admissions and masked rows, into one flat buffer, int32[num_words].

        header    the step, and the length of each array; numbers of 64 bits, which take two words
        arrays    one after another, in the order of the fields

    What is left out says how rows are sampled, and rank 0 alone samples.
    """
    arrays: list[IntArray] = [getattr(plan, name) for name in _ARRAYS]
    header = np.array([plan.step, *map(len, arrays)], dtype=np.int64)
    return np.concatenate([header.view(np.int32), *arrays], dtype=np.int32)


def decode_plan(buffer: IntArray) -> StepPlan:
    """The plan at the front of a buffer by ``encode_plan``. Its arrays are views of the buffer."""
    step, *lengths = buffer[:_NUM_HEADER_WORDS].view(np.int64).tolist()
    borders = accumulate(lengths, initial=_NUM_HEADER_WORDS)
    arrays = (buffer[begin:end] for begin, end in pairwise(borders))
    named = dict(zip(_ARRAYS, arrays, strict=True))
    return StepPlan(step=step, admissions=(), **named)


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """What a step sampled: ``token_ids`` int32[num_samples], ordered as ``StepPlan.sample_rows``.

    ``logprobs`` is keyed by index in that order, and has an entry for each row that asked for it.
    ``prompt_logprobs`` [S] are those of the scored chunks, in the order of the plan. ``embeddings``
    float32[hidden_size], keyed as ``logprobs`` are, of each prompt that is embedded and ends here.
    """

    token_ids: IntArray
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: Mapping[int, FloatArray] = field(default_factory=dict)


class Pending(Protocol):
    """A launched step."""

    def masks(self, num_rows: int) -> IntArray:
        """Memory for masks of a step with masked rows, int32[num_rows, words of 32 tokens], not
        clear, from which a copy to the device is quick. Once all steps before are done, any thread
        may write there."""

    def mask(self, rows: IntArray) -> None:
        """Let a step with masked rows sample, before another step is launched: for each of
        ``rows``, int32[n], only tokens whose bits are set in its line of ``masks(n)``."""

    def tokens(self) -> SampledTokens:
        """Wait for the step and return what it sampled: the one host sync of a step. A step that
        waits for masks takes those that its rows had last."""
