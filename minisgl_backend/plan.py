"""``StepPlan``, which the planner sends to the executor, and the tokens that come back.

A ``StepPlan`` says what one forward pass does: which requests take a row, which pages the rows are
granted, which prompt tokens are prefilled, and which rows decode. With overlap a plan is made
before the tokens of the running step are known. So the tokens in a plan are committed ones or
guesses, and the executor itself keeps the last sampled token of each row.

Must not know tensors, devices, caches or queues. A plan consists of plain numbers, so the other
tensor-parallel ranks get the very same plan, encoded as 32-bit words.

Invariants: a step computes at least one token; row and page numbers are those of the planner's
tables; grants are written to the page table before the step computes anything; in a step a row
decodes, has one check, or one chunk; rows of a group have the same pages there, full of committed
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, islice, pairwise
from operator import attrgetter
from typing import Any, Final, Protocol, TypeVar

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

_T = TypeVar("_T")

NO_TOKEN: Final = -1
"""In place of a token: the row's logits were not finite."""

LAST_TOKEN: Final = -1
"""In place of a token to compute: the last one that the row sampled, which the device knows."""

MTP_GUESS: Final = -2
"""In place of a token to compute: the first guess of the MTP layer at what follows the token that
the row sampled last, which the device knows. The guess after it is this number less 1, and so on:
-1 - k stands for the k-th token after the last."""

TO_SAMPLE: Final = -1
"""In place of the token after a chunk: it is sampled after the chunk."""

NO_SNAPSHOT: Final = -1
"""In place of a snapshot's number: there is none."""

WHOLE_EVERY: Final = 8
"""The states of a decoding row can be kept at positions that are multiples of this. At others, some
layers may hold parts of them elsewhere."""

NO_PAGE: Final = -1
"""In place of a window page: there is none. In a grant, since no later position sees it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission:
    """A request takes a row: everything that the executor needs to know about it, sent once.

    ``history``, int32[num_tokens], holds the tokens known so far if ``sampling`` has penalties, and
    is empty if not. The known tokens are the prompt and, if the request was retracted, its output
    so far. ``num_prompt_tokens`` separates the two: the token at position p is the output token
    with index p - num_prompt_tokens.
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
class Draws:
    """What ranks other than 0 must know about how admitted rows are sampled, int32[num_rows].

    ``temperatures`` are the bits of float32 numbers, 0 for greedy rows; each of the ``seeds``
    [2 * num_rows] is two words. ``need_all_logits`` is 1 for a row that only rank 0 can sample,
    from the logits of all ranks or with what only it knows; the other fields are then unused.
    """

    rows: IntArray = field(default_factory=_none)
    temperatures: IntArray = field(default_factory=_none)
    seeds: IntArray = field(default_factory=_none)
    need_all_logits: IntArray = field(default_factory=_none)

    @classmethod
    def of(cls, admissions: Sequence[Admission]) -> Draws:
        asked = [admission.sampling for admission in admissions]
        temperatures = [0.0 if params.is_greedy else params.temperature for params in asked]
        return cls(
            np.array([admission.row for admission in admissions], np.int32),
            np.array(temperatures, np.float32).view(np.int32),
            np.array([params.seed for params in asked], np.uint64).view(np.int32),
            np.array([_needs_all_logits(params) for params in asked], np.int32),
        )


def _needs_all_logits(params: SamplingParams) -> bool:
    """``Draws.need_all_logits`` of a row."""
    has_filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return (
        (has_filters and not params.is_greedy)
        or params.has_penalties
        or bool(params.logit_bias)
        or (params.min_tokens > 0 and bool(params.stop_token_ids))
        or params.grammar is not None
        or params.num_logprobs is not None
    )


@dataclass(frozen=True, slots=True, eq=False)
class Grants:
    """Entries of a page table, int32[num_grants]: table[row, index] = page."""

    rows: IntArray = field(default_factory=_none)
    indices: IntArray = field(default_factory=_none)
    pages: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies of pages, int32[num_copies]: the keys and values of the first ``lengths[i]`` positions
    of page ``sources[i]`` go to page ``targets[i]``. No page is the target of two copies, or both a
    source and a target."""

    sources: IntArray = field(default_factory=_none)
    targets: IntArray = field(default_factory=_none)
    lengths: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class HostCopies:
    """Copies to or from main memory: of whole pages, page ``pages[i]`` and slot ``slots[i]``; of
    window pages and window slots likewise; and of recurrent states, snapshot ``snapshots[i]`` and
    state slot ``state_slots[i]``; int32 all. What is written, on either side, is written once."""

    pages: IntArray = field(default_factory=_none)
    slots: IntArray = field(default_factory=_none)
    window_pages: IntArray = field(default_factory=_none)
    window_slots: IntArray = field(default_factory=_none)
    snapshots: IntArray = field(default_factory=_none)
    state_slots: IntArray = field(default_factory=_none)

    @property
    def is_empty(self) -> bool:
        return not (len(self.pages) or len(self.window_pages) or len(self.snapshots))


NO_HOST_COPIES: Final = HostCopies()


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunks:
    """Chunks of prompts to compute, int32[num_chunks]: positions start .. start + length - 1 of a
    row.

    ``tokens`` [sum of lengths] holds their tokens, chunk after chunk, and ``next_tokens`` the token
    after each chunk; or ``TO_SAMPLE``, if the chunk ends with the row's last known token.
    """

    rows: IntArray = field(default_factory=_none)
    starts: IntArray = field(default_factory=_none)
    lengths: IntArray = field(default_factory=_none)
    next_tokens: IntArray = field(default_factory=_none)
    tokens: IntArray = field(default_factory=_none)

    @property
    def ends(self) -> IntArray:
        """The positions after each chunk's last one."""
        return self.starts + self.lengths

    @property
    def sampled(self) -> IntArray:
        """The indices of the chunks after which a token is sampled."""
        if not len(self.rows):
            return EMPTY
        return np.flatnonzero(self.next_tokens == TO_SAMPLE).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Checks:
    """Rows that decode with guesses at their next tokens (``scheduling.guesses``),
    int32[num_checks]: positions start .. start + length - 1 of a row.

    ``tokens`` [sum of lengths] holds their tokens, check after check: the row's last token, and
    then the guesses, each a token id or one of ``MTP_GUESS`` and below. A token is sampled after
    each of them; those up to the first that is not what was guessed count, and the row goes on from
    the last of these.

    A recurrent state cannot go back to before a wrong guess. So a step with guesses leaves the
    states of all rows that decode in it as they are, those in ``Decodes`` too, and keeps the
    updates of their tokens beside them. In the next plan with the row, its first position tells how
    many of these count. They are added to its states before anything else, and the others are
    dropped: the states are *settled*. A row that is released, or taken anew, has no updates left.
    """

    rows: IntArray = field(default_factory=_none)
    starts: IntArray = field(default_factory=_none)
    lengths: IntArray = field(default_factory=_none)
    tokens: IntArray = field(default_factory=_none)

    @property
    def token_rows(self) -> IntArray:
        """The row of each token, int32[sum of lengths]."""
        return np.repeat(self.rows, self.lengths)

    @property
    def positions(self) -> IntArray:
        """The position of each token, int32[sum of lengths]."""
        begins = np.repeat(self.starts + self.lengths - np.cumsum(self.lengths), self.lengths)
        return np.asarray(begins + np.arange(len(begins)), np.int32)

    def guesses(self) -> dict[int, IntArray]:
        """The guesses of each row, int32[n]."""
        ends = np.cumsum(self.lengths).tolist()
        lines = zip(self.rows.tolist(), self.lengths.tolist(), ends, strict=True)
        return {row: self.tokens[end - length + 1 : end] for row, length, end in lines}


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Prompt positions to score, int32[num_scores]: ``lengths[i]`` of them, from ``starts[i]`` on,
    in the chunk with the index ``chunks[i]``.

    The score of a position is the log-probability of the token after it, given all tokens up to it.
    ``tokens`` [sum of lengths] holds these next tokens, chunk after chunk.
    """

    chunks: IntArray = field(default_factory=_none)
    starts: IntArray = field(default_factory=_none)
    lengths: IntArray = field(default_factory=_none)
    tokens: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """Decoding rows, int32[num_decodes]: the step computes the row's last sampled token, which is
    at that position, and samples the next one.

    Rows are sorted by adapter slot, then by row: kernels are fastest with adapters in runs.
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
    """The snapshots of recurrent states that a step reads and makes; int32.

    ``begun_from`` [num_chunks]: the snapshot from which the chunk's row begins, if it continues a
    cached prefix; else ``NO_SNAPSHOT``, and the row goes on from its own states, which are zero at
    position 0.
    ``saved_chunks`` [num_saved]: indices of the chunks in which the states after the row's first
    ``saved_positions`` tokens are kept as ``saved``. Ascending by chunk and position.
    ``kept_rows`` [num_kept]: once settled, and before the step computes anything, the states of
    these rows, which decode, with guesses or without, are copied to ``kept``: their states after
    all tokens before the positions in ``Decodes`` or ``Checks``, which are multiples of
    ``WHOLE_EVERY``. No snapshot is in both ``kept`` and ``begun_from``.
    """

    begun_from: IntArray = field(default_factory=_none)
    saved_chunks: IntArray = field(default_factory=_none)
    saved_positions: IntArray = field(default_factory=_none)
    saved: IntArray = field(default_factory=_none)
    kept_rows: IntArray = field(default_factory=_none)
    kept: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMoves:
    """Which adapters are loaded onto the device, and which rows use them; int32.

    ``load_slots``, ``load_ids``, ``load_ranks``, ``load_targets`` [num_loads]: before anything is
    computed, each slot takes the adapter with this id, rank and targets (``request.Adapter``). No
    row of a step in flight uses what the slot held before.
    ``rows``, ``slots`` [num_adapted]: from then on, these rows use the adapters in these slots; 0
    is none. If there are slots, all admitted rows are listed.
    """

    load_slots: IntArray = field(default_factory=_none)
    load_ids: IntArray = field(default_factory=_none)
    load_ranks: IntArray = field(default_factory=_none)
    load_targets: IntArray = field(default_factory=_none)
    rows: IntArray = field(default_factory=_none)
    slots: IntArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One forward pass. The executor carries out its parts in the order of the fields.

    ``released_rows``: rows that no request holds anymore. An admission overwrites everything about
    a row but what its last step with guesses has kept for recurrent states.
    ``host_saves``: pages, window pages and snapshots that are kept in main memory. They are copied
    before any of them is written, since this very plan may clear and grant them.
    ``broken_pages``: pages that no request uses and that may hold NaN. The executor clears them
    before they are used, since this very plan may grant them. All other pages hold finite numbers,
    or NaN that was computed by the requests that use them.
    ``broken_window_pages``: the same for window pages.
    ``host_loads``: pages, window pages and snapshots that are filled from main memory. ``copies``
    may read the pages, and chunks may begin from the snapshots.
    ``window_grants``: grants of window pages, or of ``NO_PAGE``, if layers with windows have pages
    of their own. No entry is granted twice.
    ``groups``: rows of ``decodes`` whose shared pages are worth reading together. Results do not
    depend on them.
    ``mtp_rows``: rows that get a token and whose next tokens the model's MTP layer then guesses,
    each once, in the order of ``sample_rows``. They have pages for all positions that this may
    take: ``speculative_mtp_tokens`` - 1 after those of the step. The guesses stay on the device for
    the row's next check. Those for ``reported_rows`` come back, too.
    ``masked_rows``: the rows that get a token and whose request has a grammar, each once, in the
    order of ``sample_rows``. If there are any, the step waits for the masks of their samples before
    it samples (``Pending.mask``).
    ``draws``: in place of the admissions, on ranks other than 0.
    ``assumes_right``: rows with guesses in the step before begin where they do if all of these are
    right. Such a plan is not launched before the tokens of that step are known, and says where rows
    begin (``scheduling.checks.moved_back``).
    """

    step: int
    released_rows: IntArray = field(default_factory=_none)
    host_saves: HostCopies = NO_HOST_COPIES
    broken_pages: IntArray = field(default_factory=_none)
    broken_window_pages: IntArray = field(default_factory=_none)
    adapters: AdapterMoves = field(default_factory=AdapterMoves)
    host_loads: HostCopies = NO_HOST_COPIES
    copies: Copies = field(default_factory=Copies)
    admissions: tuple[Admission, ...] = ()
    grants: Grants = field(default_factory=Grants)
    window_grants: Grants = field(default_factory=Grants)
    snapshots: Snapshots = field(default_factory=Snapshots)
    checks: Checks = field(default_factory=Checks)
    chunks: PromptChunks = field(default_factory=PromptChunks)
    decodes: Decodes = field(default_factory=Decodes)
    groups: Groups = NO_GROUPS
    scores: Scores = field(default_factory=Scores)
    mtp_rows: IntArray = field(default_factory=_none)
    masked_rows: IntArray = field(default_factory=_none)
    draws: Draws = field(default_factory=Draws)
    assumes_right: bool = False

    @property
    def sample_rows(self) -> IntArray:
        """The rows for which a token is sampled, in the order of ``SampledTokens``; a row with
        guesses occurs once for each of its tokens."""
        if not len(self.checks.rows) and not len(self.chunks.rows):
            return self.decodes.rows
        of_chunks = self.chunks.rows[self.chunks.sampled]
        return np.concatenate([self.checks.token_rows, of_chunks, self.decodes.rows])

    @property
    def sample_positions(self) -> IntArray:
        """The positions of these tokens."""
        of_chunks = self.chunks.ends[self.chunks.sampled]
        return np.concatenate([self.checks.positions + 1, of_chunks, self.decodes.positions + 1])

    @property
    def reported(self) -> IntArray:
        """The indices in ``mtp_rows`` of the rows for which the planner must know the guesses,
        int32[n]; on rank 0 only, as ``masked_rows``."""
        if not len(self.masked_rows):
            return EMPTY
        return np.flatnonzero(np.isin(self.mtp_rows, self.masked_rows)).astype(np.int32)

    @property
    def reported_rows(self) -> IntArray:
        """These rows."""
        return self.mtp_rows[self.reported]

    @property
    def groups_by_index(self) -> Groups:
        """The groups, with members as indices of ``decodes``, not as rows."""
        groups, rows = self.groups, self.decodes.rows
        if not len(groups.sizes):
            return NO_GROUPS
        order = np.argsort(rows)
        members = order[np.searchsorted(rows, groups.members, sorter=order)]
        return Groups(groups.sizes, groups.begins, groups.ends, members.astype(np.int32))

    @property
    def num_tokens(self) -> int:
        """Number of token positions that this step computes."""
        return len(self.checks.tokens) + len(self.chunks.tokens) + len(self.decodes.rows)


_ARRAYS: Final = ("released_rows", "broken_pages", "broken_window_pages", "mtp_rows")
_PARTS: Final[Mapping[str, type[Any]]] = {
    "adapters": AdapterMoves,
    "copies": Copies,
    "grants": Grants,
    "window_grants": Grants,
    "snapshots": Snapshots,
    "checks": Checks,
    "chunks": PromptChunks,
    "decodes": Decodes,
    "groups": Groups,
    "scores": Scores,
    "draws": Draws,
}
_HOST_PARTS: Final = ("host_saves", "host_loads")
_NAMES: Final = {name: [array.name for array in fields(part)] for name, part in _PARTS.items()}
_PATHS: Final = (*_ARRAYS, *(f"{part}.{name}" for part in _NAMES for name in _NAMES[part]))
_HOST_PATHS: Final = tuple(
    f"{part}.{array.name}" for part in _HOST_PARTS for array in fields(HostCopies)
)
_arrays_of: Final[Callable[[StepPlan], tuple[IntArray, ...]]] = attrgetter(*_PATHS)
_host_arrays_of: Final[Callable[[StepPlan], tuple[IntArray, ...]]] = attrgetter(*_HOST_PATHS)


def encode_plan(plan: StepPlan) -> IntArray:
    """Encode a plan that is to be launched, with draws in place of admissions and without masked
    rows, into one flat buffer, int32[num_words].

        header    the step and the length of each array, as 64-bit numbers of two words each
        arrays    one after another, in the order of ``_PATHS``

    Arrays of copies to and from main memory, if there are any, are the last ones; the bits of the
    step are inverted then. What is left out is needed only for sampling that rank 0 does alone.
    """
    if plan.admissions:
        plan = replace(plan, draws=Draws.of(plan.admissions))
    step, arrays, of_host = plan.step, _arrays_of(plan), _host_arrays_of(plan)
    if any(map(len, of_host)):
        step, arrays = ~step, (*arrays, *of_host)
    header = np.array([step, *map(len, arrays)], dtype=np.int64)
    return np.concatenate([header.view(np.int32), *arrays], dtype=np.int32)


def decode_plan(buffer: IntArray) -> StepPlan:
    """The plan that ``encode_plan`` wrote at the front of a buffer; arrays are views of it."""
    step = int(buffer[:2].view(np.int64)[0])
    has_host = step < 0
    num_arrays = len(_PATHS) + (len(_HOST_PATHS) if has_host else 0)
    begin = 2 * (1 + num_arrays)
    borders = accumulate(buffer[2:begin].view(np.int64).tolist(), initial=begin)
    arrays = iter([buffer[first:last] for first, last in pairwise(borders)])
    values: dict[str, Any] = {name: next(arrays) for name in _ARRAYS}
    for name, part in _PARTS.items():
        values[name] = part(*islice(arrays, len(_NAMES[name])))
    if has_host:
        num_arrays = len(_HOST_PATHS) // len(_HOST_PARTS)
        values |= {name: HostCopies(*islice(arrays, num_arrays)) for name in _HOST_PARTS}
    return StepPlan(step=~step if has_host else step, **values)


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """What a step sampled: ``token_ids`` int32[num_samples], in the order of
    ``StepPlan.sample_rows``.

    ``logprobs`` and ``embeddings``, float32[hidden_size], are keyed by indices of ``token_ids``:
    one for each token of a row that asked for logprobs, and for each row whose prompt is embedded
    and ends in this step.
    ``prompt_logprobs`` has one element for each of the plan's ``scores``, in their order.
    ``mtp_guesses``, int32[num_reported_rows, speculative_mtp_tokens], are guesses at the tokens
    after the last one that the step has sampled for each of the plan's ``reported_rows``.
    ``checked`` are the tokens of the plan's checks, int32[n], if it left some to the device.
    """

    token_ids: IntArray
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: Mapping[int, FloatArray] = field(default_factory=dict)
    mtp_guesses: IntArray = field(default_factory=_none)
    checked: IntArray | None = None

    def at(self, indices: IntArray) -> SampledTokens:
        """The samples at ``indices``, with their log-probabilities and embeddings."""
        return SampledTokens(
            self.token_ids[indices],
            _renumbered(self.logprobs, indices),
            embeddings=_renumbered(self.embeddings, indices),
        )


def _renumbered(of_samples: Mapping[int, _T], indices: IntArray) -> Mapping[int, _T]:
    """The entries of ``indices``, keyed by their positions in ``indices``."""
    if not of_samples:
        return {}
    return {new: of_samples[old] for new, old in enumerate(indices.tolist()) if old in of_samples}


class Pending(Protocol):
    """A launched step."""

    def masks(self, num_masks: int) -> IntArray:
        """Memory for the masks of the step, int32[num_masks, words of 32 tokens]: uninitialized,
        and quick to copy to the device. Any thread may write to it once all earlier steps are
        done."""

    def mask(self, samples: IntArray) -> None:
        """Let a step with masked rows sample. Each of ``samples``, int32[n], which are indices of
        ``StepPlan.sample_rows``, gets a token whose bit is set in its line of ``masks(n)``. The
        others of masked rows get any tokens. Comes before another step is launched."""

    def tokens(self) -> SampledTokens:
        """Wait for the step and return what it sampled: the one host sync of a step. If the step
        still waits for masks, its masked rows get any tokens."""
