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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate, islice, pairwise
from operator import attrgetter
from typing import Any, Final, Protocol

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


def _none() -> IntArray:
    return EMPTY


@dataclass(frozen=True, slots=True, eq=False)
class Grants:
    """Entries of a page table, int32[num_grants]: table[row, index] = page."""

    rows: IntArray = field(default_factory=_none)
    indices: IntArray = field(default_factory=_none)
    pages: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Of pages, int32[num_copies]: the keys and values of the first ``length`` positions of a
    source go to a target. No page is a target twice, and none is both."""

    sources: IntArray = field(default_factory=_none)
    targets: IntArray = field(default_factory=_none)
    lengths: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunks:
    """Parts of prompts, int32[num_chunks]: the positions from start up to start + length of a row
    are computed.

    ``tokens`` [sum of lengths] has their tokens, chunk after chunk. ``samples`` is 1 if the chunk
    is the last of the row's known tokens, so that a token is sampled after it, and otherwise 0.
    """

    rows: IntArray = field(default_factory=_none)
    starts: IntArray = field(default_factory=_none)
    lengths: IntArray = field(default_factory=_none)
    samples: IntArray = field(default_factory=_none)
    tokens: IntArray = field(default_factory=_none)

    @property
    def ends(self) -> IntArray:
        """The positions after each chunk's last one."""
        return self.starts + self.lengths


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Positions of chunks whose log-probabilities are wanted, int32[num_scores]: of ``chunks``, by
    index, the positions from start up to start + length are scored, each by the token after it,
    given all tokens up to it. ``tokens`` [sum of lengths] has these tokens, chunk after chunk."""

    chunks: IntArray = field(default_factory=_none)
    starts: IntArray = field(default_factory=_none)
    lengths: IntArray = field(default_factory=_none)
    tokens: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """Decoding rows, int32[num_decodes]: the last sampled token of the row stands at that position;
    it is computed, and the next token is sampled.

    Rows with the same adapter stand together, in the order of their slots, and ascend: so kernels
    compute adapters the fastest.
    """

    rows: IntArray = field(default_factory=_none)
    positions: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Decoding rows that share pages, int32[num_groups].

    Group i has ``sizes[i]`` of the ``members`` [sum of sizes], one group after another. They share
    the pages from index ``begins[i]`` up to ``ends[i]`` of their lines of the page table. A row may
    be in several groups, which together cover its first pages, in order and without gaps.
    """

    sizes: IntArray = field(default_factory=_none)
    begins: IntArray = field(default_factory=_none)
    ends: IntArray = field(default_factory=_none)
    members: IntArray = field(default_factory=_none)


NO_GROUPS: Final = Groups()


@dataclass(frozen=True, slots=True, eq=False)
class Snapshots:
    """Of recurrent states; int32.

    ``begun_from`` [num_chunks]: the snapshot with which the chunk's row begins, if it continues a
    cached prefix; else ``NO_SNAPSHOT``, and the row goes on from its own states, which are zero at
    position 0.
    ``saved_chunks`` [num_saved]: chunks, by index, in which the states after the first
    ``saved_positions`` tokens of the row are kept as ``saved``. Ascending by chunk and position.
    ``kept_rows`` [num_kept]: before the step computes anything, the states that these decoding rows
    have by then, after the tokens before their positions, are copied to ``kept``, none of which is
    among ``begun_from``.
    """

    begun_from: IntArray = field(default_factory=_none)
    saved_chunks: IntArray = field(default_factory=_none)
    saved_positions: IntArray = field(default_factory=_none)
    saved: IntArray = field(default_factory=_none)
    kept_rows: IntArray = field(default_factory=_none)
    kept: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMoves:
    """Which adapters come to the device, and which rows have them; int32.

    ``load_slots``, ``load_ids``, ``load_ranks``, ``load_targets`` [num_loads]: before anything is
    computed, each slot takes an adapter, by its id, with its rank and targets
    (``request.Adapter``). No row of a step in flight has what the slot held.
    ``rows``, ``slots`` [num_adapted]: after that, these rows have the adapters in these slots; 0 is
    none. Each row that is admitted is among them, if there are slots.
    """

    load_slots: IntArray = field(default_factory=_none)
    load_ids: IntArray = field(default_factory=_none)
    load_ranks: IntArray = field(default_factory=_none)
    load_targets: IntArray = field(default_factory=_none)
    rows: IntArray = field(default_factory=_none)
    slots: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One forward pass; its parts are done in this order.

    ``released_rows``: rows that no request holds any more. ``ModelExecutor`` does not need them,
    since an admission overwrites all of a row; wrappers that keep state by row do.
    ``broken_pages``: pages that no request uses and that may hold NaN. The executor clears them
    before it does anything else of the plan, since this plan may already grant them. All other
    pages hold finite numbers, or NaN that the requests that use them have computed themselves.
    ``broken_window_pages``: the same of window pages.
    ``window_grants``: of window pages, or ``NO_PAGE``, if layers with windows have pages of their
    own; no entry twice.
    ``groups`` have rows as members: those of ``decodes`` whose pages are worth being read together.
    Results are the same without.
    ``masked_rows``: those of the rows that get a token whose request has a grammar. If there are
    any, the step samples once it has masks for them (``Pending.mask``).
    """

    step: int
    released_rows: IntArray = field(default_factory=_none)
    broken_pages: IntArray = field(default_factory=_none)
    broken_window_pages: IntArray = field(default_factory=_none)
    adapters: AdapterMoves = field(default_factory=AdapterMoves)
    copies: Copies = field(default_factory=Copies)
    admissions: tuple[Admission, ...] = ()
    grants: Grants = field(default_factory=Grants)
    window_grants: Grants = field(default_factory=Grants)
    snapshots: Snapshots = field(default_factory=Snapshots)
    chunks: PromptChunks = field(default_factory=PromptChunks)
    decodes: Decodes = field(default_factory=Decodes)
    groups: Groups = NO_GROUPS
    scores: Scores = field(default_factory=Scores)
    masked_rows: IntArray = field(default_factory=_none)

    @property
    def sample_rows(self) -> IntArray:
        """The rows that get a token from this step, in the order of ``SampledTokens``."""
        last_chunks = self.chunks.rows[self.chunks.samples != 0]
        return np.concatenate([last_chunks, self.decodes.rows])

    @property
    def groups_by_index(self) -> Groups:
        """The groups, with indices of ``decodes`` as members."""
        groups, rows = self.groups, self.decodes.rows
        if not len(groups.sizes):
            return NO_GROUPS
        order = np.argsort(rows)
        members = order[np.searchsorted(rows, groups.members, sorter=order)]
        return Groups(groups.sizes, groups.begins, groups.ends, members.astype(np.int32))

    @property
    def num_tokens(self) -> int:
        """Number of token positions that this step computes."""
        return len(self.chunks.tokens) + len(self.decodes.rows)


_ARRAYS: Final = ("released_rows", "broken_pages", "broken_window_pages")
_PARTS: Final[Mapping[str, type[Any]]] = {
    "adapters": AdapterMoves,
    "copies": Copies,
    "grants": Grants,
    "window_grants": Grants,
    "snapshots": Snapshots,
    "chunks": PromptChunks,
    "decodes": Decodes,
    "groups": Groups,
    "scores": Scores,
}
_NAMES: Final = {name: [array.name for array in fields(part)] for name, part in _PARTS.items()}
_PATHS: Final = (*_ARRAYS, *(f"{part}.{name}" for part in _NAMES for name in _NAMES[part]))
_NUM_HEADER_WORDS: Final = 2 * (1 + len(_PATHS))
_arrays_of: Final[Callable[[StepPlan], tuple[IntArray, ...]]] = attrgetter(*_PATHS)


def encode_plan(plan: StepPlan) -> IntArray:
    """Encode a plan, without admissions and masked rows, into one flat buffer, int32[num_words].

        header    the step, and the length of each array; numbers of 64 bits, which take two words
        arrays    one after another, in the order of ``_PATHS``

    What is left out says how rows are sampled, and rank 0 alone samples.
    """
    arrays = _arrays_of(plan)
    header = np.array([plan.step, *map(len, arrays)], dtype=np.int64)
    return np.concatenate([header.view(np.int32), *arrays], dtype=np.int32)


def decode_plan(buffer: IntArray) -> StepPlan:
    """The plan at the front of a buffer by ``encode_plan``. Its arrays are views of the buffer."""
    step, *lengths = buffer[:_NUM_HEADER_WORDS].view(np.int64).tolist()
    borders = accumulate(lengths, initial=_NUM_HEADER_WORDS)
    arrays = iter([buffer[begin:end] for begin, end in pairwise(borders)])
    values: dict[str, Any] = {name: next(arrays) for name in _ARRAYS}
    for name, part in _PARTS.items():
        values[name] = part(*islice(arrays, len(_NAMES[name])))
    return StepPlan(step=step, **values)


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
