"""The planner: continuous batching with chunked prefill, shared prefixes and retraction.

``plan`` works by length: it decides from counts, looks at tokens only to guess, and needs none that
is not committed. So it may run again while the steps planned before are still in flight.
``commit`` works by value, in the order of the plans (``intake``). The loop decides whether to
overlap the two; the tokens of a request are the same either way.

A step first decodes every row that can decode. Then it spends ``max_prefill_tokens`` on chunks of
prompts in the order of precedence, and admits sequences as it goes. So prefill never keeps decode
waiting.

Rows may decode with guesses at their next tokens (``guesses``), with at most half of the budget.
What is looked up depends on all tokens of a row, and what is planned next on how many guesses were
right. So while a step that they wait for, or that checks some, is in flight, nothing is planned,
unless only the MTP layer guesses.

With such a layer, a step also names the rows for which the layer makes guesses in it. The layer
computes a few positions ahead of a row, which need pages; rows for which there are none to spare
decode without. How many tokens it guesses is known: what it guesses stays on the device, unless a
grammar has to allow it. So the next step can be planned *ahead*, while one with guesses is in
flight, as if all of these were right: then rows need the most pages, and are nearest to their ends.
Before it is launched, rows are moved back to before wrong guesses (``checks.moved_back``). No row
is worse off than if the step had waited: it waits unless all rows can have all their guesses,
wherever they are.

Recurrent states cannot go back to before a wrong guess. So a step with guesses keeps the updates of
all rows that decode in it, and the next step with a row adds those that count (``plan.Checks``).
All that the planner does about it is to bound the number of such rows, and to end guesses where
states are kept.

When the pool of pages is empty, the running sequences that are last in precedence are retracted:
their computed pages are published, and they return to their old place in the queue. Later they
prefill only what the cache has lost in the meantime. The first running sequence is never retracted,
and it fits the empty pool, so it always makes progress.

Must not know clocks, threads, devices or tensors, nor what a token means.

Invariants:
- Rows and pages are given back only when no step in flight can write to them.
- While a request is live and no step is in flight, ``plan`` returns a step.
- A row with guesses in flight is in at most one other step in flight, which checks guesses, too.
- At most ``speculative_max_requests`` rows have updates that are not added to their states yet, if
  those of released rows do not count.
- Steps run in the order in which they were planned. So a page freed here may be granted again at
  once: the step that writes to it runs after all steps that read what it held.
- A page that may hold NaN and is freed is named as broken by the next plan, so at the latest by the
  one that grants it again. ``cache.kv`` knows which pages these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import (
    LAST_TOKEN,
    NO_SNAPSHOT,
    TO_SAMPLE,
    Admission,
    Decodes,
    SampledTokens,
    StepPlan,
)
from minisgl_backend.request import (
    EMPTY,
    IntArray,
    Request,
    RequestId,
)
from minisgl_backend.scheduling.adapter_places import AdapterPlaces
from minisgl_backend.scheduling.admission import AdmissionControl
from minisgl_backend.scheduling.draft import Draft
from minisgl_backend.scheduling.guesses import Guesser
from minisgl_backend.scheduling.intake import Intake
from minisgl_backend.scheduling.lifecycle import Lifecycle
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.lookup import RecentAnswers
from minisgl_backend.scheduling.report import Counters, SchedulerStats, StepResult
from minisgl_backend.scheduling.room import Room
from minisgl_backend.scheduling.sequence import Phase, Precedence, Sequence, by_precedence
from minisgl_backend.scheduling.waiting import WaitingQueue

_NO_STEP: Final = -1
_NOT_GRANTED: Final = "the cache does not grant the pages that it counts as available"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The planner's share of the options.

    ``policy`` (fcfs or lpm), ``max_overtaken`` and ``worthwhile_tokens`` are explained in
    ``waiting``, ``reserve_tokens`` in ``admission``. With ``names_groups`` plans have ``Groups``;
    ``KVCache.groups`` explains ``group_cost_tokens``. ``has_states``: rows have recurrent states,
    so the pages of a prefix are not enough to go on from it. With a ``section`` no chunk crosses a
    multiple of it, as attention in sections requires (``attention.sections``).
    ``num_adapter_slots``: the most adapters that are on the device at once. ``speculative_tokens``
    (0 for none) and ``speculative_max_requests`` limit ``guesses``, and
    ``speculative_recent_tokens`` is the size of ``lookup.RecentAnswers``. ``mtp_tokens`` is the
    number of tokens that the model's MTP layer guesses for a row, 0 without such a layer. No model
    has both states and sections, or an MTP layer and sections.
    """

    max_running_requests: int = 256
    max_prefill_tokens: int = 8192
    policy: str = "fcfs"
    max_overtaken: int = 0
    worthwhile_tokens: int = 128
    names_groups: bool = False
    group_cost_tokens: int = 64
    reserve_tokens: int = 256
    has_states: bool = False
    section: int | None = None
    num_adapter_slots: int = 0
    speculative_tokens: int = 0
    speculative_max_requests: int = 8
    speculative_recent_tokens: int = 0
    mtp_tokens: int = 0

    @property
    def most_guessed(self) -> int:
        """The most guesses of a row that a step checks."""
        return max(self.speculative_tokens, self.mtp_tokens)


class Scheduler:
    """Decides what each step does. ``runtime.ports.Scheduler`` documents the methods in full."""

    def __init__(
        self,
        cache: KVCache,
        config: SchedulerConfig,
        *,
        counters: Counters | None = None,
    ) -> None:
        """``counters`` are those of the planner that this one replaces, if any. Then the first plan
        releases all rows: the executor may not know of those that broken plans have released."""
        self._cache = cache
        self._config = config
        self._counters = counters or Counters(num_checks_by_right=[0] * (1 + config.most_guessed))
        places = AdapterPlaces(config.num_adapter_slots)
        if config.mtp_tokens:
            assert config.section is None
        recent: RecentAnswers | None = None
        if config.most_guessed:
            looks_up = config.speculative_tokens > 0
            recent = RecentAnswers(config.speculative_recent_tokens if looks_up else 0)
        self._life = Lifecycle(
            cache,
            config.max_running_requests,
            WaitingQueue(
                cache,
                config.policy,
                config.max_overtaken,
                worthwhile_tokens=config.worthwhile_tokens,
                places=places,
            ),
            places,
            group_cost_tokens=config.group_cost_tokens if config.names_groups else None,
            has_states=config.has_states,
            released_rows=list(range(config.max_running_requests)) if counters is not None else [],
            recent=recent,
        )
        self._rows = self._life.rows
        self._queue = self._life.queue
        self._admission = AdmissionControl(self._life, config.reserve_tokens)
        self._guesser: Guesser | None = None
        if recent is not None:
            self._guesser = Guesser(
                self._rows,
                recent,
                most_tokens=config.speculative_tokens,
                max_rows=config.speculative_max_requests,
                mtp_tokens=config.mtp_tokens,
            )
        self._last_checks = _NO_STEP  # the last step with guesses ...
        self._checked_rows = EMPTY  # ... and the rows that have some
        self._intake = Intake(self._life, self._guesser, self._counters)
        self._next_step = 0
        self._next_commit = 0

    def add(self, request: Request, generated: IntArray = EMPTY, num_scored: int = 0) -> None:
        """Queue a request, which fits the context and the pool."""
        self._life.enqueue(request, generated, num_scored)

    def abort(self, request_id: RequestId) -> bool:
        """End a request without a result; False if it is not live."""
        sequence = self._life.live.get(request_id)
        if sequence is None:
            return False
        self._life.end(sequence)
        return True

    def plan(self, lookahead: Lookahead | None = None) -> StepPlan | None:
        """The next step, or None if nothing can run now."""
        unjudged = self._unjudged_rows()
        guesses = self._next_guesses(unjudged, lookahead)
        if guesses is None:
            return None
        draft = Draft(self._config.max_prefill_tokens)
        draft.assumes_right = len(unjudged) > 0
        self._life.begin_plan()
        self._plan_guesses(guesses, draft)
        under_pressure = self._plan_decodes(draft)
        self._plan_prefills(draft, admit=not under_pressure)
        if draft.is_empty:
            return None
        self._plan_mtp(draft)
        self._life.grant_remaps(draft)
        plan = draft.freeze(
            self._next_step,
            released_rows=self._life.released_rows,
            broken_pages=self._cache.take_broken(),
            masked=self._rows.masked,
            windows=self._cache.windows,
        )
        self._life.released_rows.clear()
        self._next_step += 1
        return plan

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        """Take the tokens of the oldest plan that is not committed yet."""
        if not self._next_commit == plan.step < self._next_step:
            raise InvariantError(f"step {plan.step} is committed, {self._next_commit} is due")
        self._next_commit += 1
        return self._intake.take(plan, tokens)

    def has_work(self) -> bool:
        """Whether a request is live."""
        return bool(self._life.live)

    def stats(self) -> SchedulerStats:
        """Counts, in constant time."""
        return SchedulerStats(
            num_waiting=self._life.num_waiting,
            num_running=self._rows.num_used,
            total_pages=self._cache.num_pages,
            free_pages=self._cache.num_free,
            cached_pages=self._cache.num_cached,
            evictable_pages=self._cache.num_evictable,
            num_retractions=self._counters.num_retractions,
            prefix_queries=self._counters.prefix_queries,
            prefix_hits=self._counters.prefix_hits,
            num_checks=self._counters.num_checks,
            num_guesses=self._counters.num_guesses,
            num_right_guesses=self._counters.num_right_guesses,
            num_checks_by_right=tuple(self._counters.num_checks_by_right),
            running_adapters=tuple(adapter_id for adapter_id, _ in self._life.places.in_use()),
        )

    def renewed(self) -> Scheduler:
        """An empty planner like this one, with the same counters. Its first plan releases all
        rows, and names all pages as broken."""
        return type(self)(self._cache.emptied(), self._config, counters=self._counters)

    def check(self) -> None:
        """Raise ``InvariantError`` if any part of the bookkeeping contradicts another. Slow."""
        self._life.check()

    def _plan_decodes(self, draft: Draft) -> bool:
        """Decode each row that can decode; True if there were not enough pages for all."""
        rows = self._rows
        ready = rows.ready_to_decode()
        if not len(ready):
            return False
        short = ready[rows.planned[ready] >= rows.capacity[ready]]
        under_pressure = len(short) > 0 and not self._life.grow(short, draft)
        if under_pressure:
            self._grow_first(short, draft)
            ready = rows.ready_to_decode()
            ready = ready[rows.planned[ready] < rows.capacity[ready]]
        groups, ready = self._life.groups_of(ready), rows.by_adapter(ready)
        positions = rows.plan_decode(ready)
        draft.decode(Decodes(ready, positions), groups)
        if self._life.states is not None:
            self._life.states.keep(ready, positions, draft)
        return under_pressure

    def _unjudged_rows(self) -> IntArray:
        """The rows that go on from guesses which are in flight, int32[n]."""
        if self._last_checks < self._next_commit:
            return EMPTY
        rows, checked = self._rows, self._checked_rows
        return checked[rows.accepting[checked] & ~rows.retiring[checked]]

    def _next_guesses(
        self, unjudged: IntArray, lookahead: Lookahead | None
    ) -> Mapping[int, IntArray] | None:
        """The guesses that the next step checks, by row; None if the step has to wait, for those in
        flight or for tokens to guess from."""
        guesser = self._guesser
        if guesser is None:
            return {}
        may_go_ahead = (
            guesser.all_on_device
            and self._next_step - self._next_commit == 1
            and not self._rows.masked.any()
        )
        if len(unjudged) and not may_go_ahead:
            return None
        ready = self._rows.ready_to_decode()
        candidates = np.union1d(ready, unjudged) if len(unjudged) else ready
        guesses = guesser.of_rows(candidates, lookahead)
        waits = any(self._rows.in_flight[row] for row in guesses)
        if (waits or len(unjudged)) and not (
            may_go_ahead and self._have_room(guesses, unjudged, ready)
        ):
            return None
        return guesses

    def _have_room(
        self, guesses: Mapping[int, IntArray], unjudged: IntArray, ready: IntArray
    ) -> bool:
        """Whether a step that is planned ahead can check all ``guesses``, among them as many as
        there can be of each row that is ``unjudged``."""
        rows, size, most = self._rows, self._cache.page_size, self._config.mtp_tokens
        if any(len(guesses.get(row, EMPTY)) < most for row in unjudged.tolist()):
            return False
        # a row whose states are to be kept may not have got to the position
        if (
            self._life.states is not None
            and (rows.planned[unjudged] + 1 + most > rows.keeps_at[unjudged]).any()
        ):
            return False
        lengths = [1 + len(guessed) for guessed in guesses.values()]
        if sum(lengths) > self._config.max_prefill_tokens // 2:
            return False
        checked = np.array([*guesses], np.int32)
        missing = rows.planned[checked] + np.array(lengths, np.int32) - rows.capacity[checked]
        num_pages = int((-(-missing // size)).clip(min=0).sum())
        return num_pages + len(rows.short(ready) - {*guesses}) <= self._life.room.most_rows

    def _plan_guesses(self, guesses: Mapping[int, IntArray], draft: Draft) -> None:
        """Let rows decode with as many of their ``guesses`` as pages and half of the budget allow.
        Rows for which that is none decode without. No row passes a position at which its states are
        to be kept."""
        if not guesses:
            return
        rows, states = self._rows, self._life.states
        checked_rows = []
        left = draft.budget // 2
        ready = rows.ready_to_decode()
        short = rows.short(ready)
        for row, guessed in guesses.items():
            start = int(rows.planned[row])  # the position of the last token
            end = start + min(1 + len(guessed), left)
            if (section := self._config.section) is not None:
                end = min(end, (start // section + 1) * section)
            if states is not None:
                end = min(end, states.kept_next(row, start))
            end = min(end, self._reach(row, short))
            if end < start + 2:  # and is granted nothing, since it may still be retracted at once
                continue
            self._grow_up_to(end, row, short, draft)
            last = LAST_TOKEN if rows.in_flight[row] else rows.last_token(row)
            tokens = np.array([last, *guessed[: end - start - 1]], np.int32)
            left -= len(tokens)
            rows.plan_guesses(row, end)
            draft.check(row, start, tokens)
            if states is not None:
                states.keep(np.array([row], np.int32), np.array([start], np.int32), draft)
            checked_rows.append(row)
        if checked_rows:
            self._last_checks = self._next_step
            self._checked_rows = np.array(checked_rows, np.int32)

    def _plan_mtp(self, draft: Draft) -> None:
        """Let the MTP layer guess at what follows the tokens of this step, for each row that can
        use that and for which there are pages for the layer's passes. The others go on without."""
        if self._guesser is None or not self._config.mtp_tokens:
            return
        rows, sampled = self._rows, draft.sample_rows
        wanting = self._guesser.wanting_mtp(sampled)
        if not len(wanting):
            return
        # [0, planned)     computed by the model and the layer, in this step or before
        # [planned, end)   computed by the layer alone, at the most
        ends = rows.planned[wanting] + np.int32(self._config.mtp_tokens - 1)
        has_pages = ends <= rows.capacity[wanting]
        if not has_pages.all():
            short = rows.short(np.union1d(rows.ready_to_decode(), sampled))
            for index in np.flatnonzero(~has_pages).tolist():
                row, end = int(wanting[index]), int(ends[index])
                if end <= self._reach(row, short):
                    self._grow_up_to(end, row, short, draft)
                    has_pages[index] = True
        draft.guess_next(wanting[has_pages])
        self._guesser.expect_mtp(draft.mtp_rows)

    def _reach(self, row: int, short: set[int]) -> int:
        """The position up to which the row has pages or can be granted some: pages are for the
        other rows that are ``short`` of one first."""
        num_spare = self._life.room.most_rows - len(short - {row})
        return int(self._rows.capacity[row]) + max(0, num_spare) * self._cache.page_size

    def _grow_up_to(self, end: int, row: int, short: set[int], draft: Draft) -> None:
        """Grant the row pages for all positions before ``end``, which it can reach. If it gets one,
        it is not ``short`` anymore."""
        while self._rows.capacity[row] < end:
            if not self._life.grow(np.array([row], np.int32), draft):
                raise InvariantError(_NOT_GRANTED)
            short.discard(row)

    def _grow_first(self, short: IntArray, draft: Draft) -> None:
        """Retract sequences, the last in precedence first, until the others can grow.

        The pages of retiring sequences become free only when their steps in flight are committed.
        Until then, the first rows in precedence get the pages that there are; the others wait.
        """
        running, retiring = self._rows.by_fate()
        running.sort(key=by_precedence)
        needy = sorted((self._rows.sequence(row) for row in short.tolist()), key=by_precedence)
        coming = Room(0, 0)
        for sequence in retiring:
            coming = coming.with_more(self._life.gain(sequence))
        while len(needy) > self._life.room.with_more(coming).most_rows and len(running) > 1:
            victim = running.pop()
            if needy[-1] is victim:
                needy.pop()
            self._counters.num_retractions += 1
            self._life.retract(victim)
            if victim.phase is Phase.RETIRING:
                coming = coming.with_more(self._life.gain(victim))
        first = [sequence.row for sequence in needy[: self._life.room.most_rows]]
        if first and not self._life.grow(np.array(first, dtype=np.int32), draft):
            raise InvariantError(_NOT_GRANTED)

    def _plan_prefills(self, draft: Draft, *, admit: bool) -> None:
        """Prefill running and, with ``admit``, waiting sequences, all in order of precedence.

        If there are no window pages for a sequence, the later ones wait too.
        """
        for sequence in list(self._life.prefilling):
            if admit:
                self._admit(draft, before=sequence.precedence)
            if draft.budget and not self._plan_chunk(sequence, draft):
                self._make_room_for_chunk(sequence, draft)
                return
        if admit:
            self._admit(draft, before=None)

    def _make_room_for_chunk(self, sequence: Sequence, draft: Draft) -> None:
        """Retract sequences behind this one, the last in precedence first, until there are window
        pages for a chunk of it. Does nothing if the step has other work, or if pages will become
        free anyway."""
        while draft.is_empty:
            running, retiring = self._rows.by_fate()
            last = max(running, key=by_precedence)
            if retiring or last is sequence:
                return
            self._counters.num_retractions += 1
            self._life.retract(last)
            self._plan_chunk(sequence, draft)

    def _plan_chunk(self, sequence: Sequence, draft: Draft) -> bool:
        """Prefill as much of the sequence as the budget allows; False if there are no window pages
        for any of it."""
        start = int(self._rows.planned[sequence.row])
        end = min(start + draft.budget, len(sequence.tokens))
        if (section := self._config.section) is not None:
            end = min(end, (start // section + 1) * section)
        end = self._life.cover(sequence, start, end)
        if end == start:
            return False
        tokens = sequence.tokens[start:end]
        is_last = end == len(sequence.tokens)
        self._rows.plan_prefill(sequence.row, end)
        snapshot, sequence.begins_from = sequence.begins_from, NO_SNAPSHOT
        next_token = TO_SAMPLE if is_last else int(sequence.tokens[end])
        draft.chunk(sequence.row, start, tokens, next_token=next_token, snapshot=snapshot)
        if self._life.states is not None:
            for position, taken in self._life.states.save(sequence, start, end):
                draft.save(position, taken)
        # scores belong to the token after a position: the next token to score has the index
        # num_scored + 1, the last one num_to_score
        first, last = max(start, sequence.num_scored), min(end, sequence.num_to_score)
        if first < last:
            draft.score(first, sequence.tokens[first + 1 : last + 1])
        if is_last:
            self._life.planned(sequence)
        return True

    def _admit(self, draft: Draft, *, before: Precedence | None) -> None:
        """Admit waiting sequences that fit, all or those ``before``, and begin to prefill them."""
        if not (len(self._queue) and draft.budget):
            return
        for sequence in self._admission.admit(before):
            if self._guesser is not None:
                self._guesser.begin(sequence.row)
            self._announce(sequence, draft)
            self._plan_chunk(sequence, draft)
            if not draft.budget:
                return

    def _announce(self, sequence: Sequence, draft: Draft) -> None:
        """Tell the executor about a sequence that has taken a row, and about its pages."""
        request, lease = sequence.request, sequence.held()
        self._life.copy_prompt(sequence, draft)
        if not sequence.was_retracted:  # else it finds what it has computed itself
            self._counters.prefix_queries += len(sequence.reusable)
            self._counters.prefix_hits += lease.num_shared * self._cache.page_size
        draft.admit(
            Admission(
                request_id=request.id,
                row=sequence.row,
                num_prompt_tokens=len(request.prompt),
                num_cached_tokens=int(self._rows.planned[sequence.row]),
                sampling=request.sampling,
                history=sequence.tokens if request.sampling.has_penalties else EMPTY,
            )
        )
        if self._config.num_adapter_slots:
            adapter = request.adapter
            if adapter is not None and sequence.loads_adapter:
                draft.load(sequence.adapter_slot, adapter)
            draft.adapt(sequence.row, sequence.adapter_slot)
        pages = np.array(lease.pages, dtype=np.int32)
        draft.grant_row(sequence.row, range(len(pages)), pages)
