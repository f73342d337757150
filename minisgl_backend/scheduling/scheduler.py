"""The planner: continuous batching with chunked prefill, shared prefixes and retraction.

``plan`` works by length: it decides from counts, looks at tokens only to guess, and needs none that
is not committed. So it may run again while the steps planned before are still in flight.
``commit`` works by value, in the order of the plans (``intake``). The loop decides whether to
overlap the two; the tokens of a request are the same either way.

A step first decodes every row that can decode. Then it spends ``max_prefill_tokens`` on chunks of
prompts in the order of precedence, and admits sequences as it goes. So prefill never keeps decode
waiting.

Rows may decode with guesses at their next tokens (``guess_planner``).

When the pool of pages is empty, the running sequences that are last in precedence are retracted:
their computed pages are published, and they return to their old place in the queue. Later they
prefill only what the cache has lost in the meantime. The first running sequence is never retracted,
and it fits the empty pool, so it always makes progress.

Must not know clocks, threads, devices or tensors, nor what a token means.

Invariants:
- Rows and pages are given back only when no step in flight can write to them.
- While a request is live and no step is in flight, ``plan`` returns a step.
- Steps run in the order in which they were planned. So a page freed here may be granted again at
  once: the step that writes to it runs after all steps that read what it held.
- A page that may hold NaN and is freed is named as broken by the next plan, so at the latest by the
  one that grants it again. ``cache.kv`` knows which pages these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import (
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
from minisgl_backend.scheduling.guess_planner import GuessPlanner
from minisgl_backend.scheduling.guesses import Guesser
from minisgl_backend.scheduling.intake import Intake
from minisgl_backend.scheduling.lifecycle import Lifecycle
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.lookup import RecentAnswers
from minisgl_backend.scheduling.report import Counters, SchedulerStats, StepResult
from minisgl_backend.scheduling.room import Room
from minisgl_backend.scheduling.sequence import Phase, Precedence, Sequence, by_precedence
from minisgl_backend.scheduling.waiting import WaitingQueue

_LOADED_LIKE_COMPUTED: Final = 16
"""To load this many tokens from main memory takes about as long as to compute one, and uses up as
much of the budget, so that loading does not keep decode waiting either."""


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
        guesser: Guesser | None = None
        if recent is not None:
            guesser = Guesser(
                self._rows,
                recent,
                most_tokens=config.speculative_tokens,
                max_rows=config.speculative_max_requests,
                mtp_tokens=config.mtp_tokens,
            )
        self._guess_planner = GuessPlanner(
            self._life,
            guesser,
            max_prefill_tokens=config.max_prefill_tokens,
            mtp_tokens=config.mtp_tokens,
            section=config.section,
        )
        self._intake = Intake(self._life, guesser, self._counters)
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
        in_flight = range(self._next_commit, self._next_step)
        guesses = self._guess_planner.next_guesses(in_flight, lookahead)
        if guesses is None:
            return None
        draft = Draft(self._config.max_prefill_tokens)
        self._life.begin_plan()
        self._guess_planner.plan(guesses, self._next_step, draft)
        under_pressure = self._plan_decodes(draft)
        self._plan_prefills(draft, admit=not under_pressure)
        if draft.is_empty:
            return None
        self._guess_planner.plan_mtp(draft)
        self._life.grant_remaps(draft)
        plan = draft.freeze(
            self._next_step,
            released_rows=self._life.released_rows,
            broken_pages=self._cache.take_broken(),
            masked=self._rows.masked,
            windows=self._cache.windows,
            host=self._cache.host,
        )
        if self._cache.host is not None:
            self._count_host_copies(plan)
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
        host = self._cache.host
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
            host_saved_tokens=self._counters.host_saved_tokens,
            host_loaded_tokens=self._counters.host_loaded_tokens,
            host_slots=0 if host is None else host.num_slots,
            used_host_slots=0 if host is None else host.num_used,
            state_slots=0 if host is None else host.num_state_slots or 0,
            used_state_slots=0 if host is None else host.num_used_states,
        )

    def renewed(self) -> Scheduler:
        """An empty planner like this one, with the same counters. Its first plan releases all
        rows, and names all pages as broken. Main memory keeps nothing either: broken plans may not
        have saved what they should."""
        return type(self)(self._cache.emptied(), self._config, counters=self._counters)

    def check(self) -> None:
        """Raise ``InvariantError`` if any part of the bookkeeping contradicts another. Slow."""
        self._life.check()

    def _count_host_copies(self, plan: StepPlan) -> None:
        """Count the tokens that a plan saves to and loads from main memory."""
        size, counters = self._cache.page_size, self._counters
        counters.host_saved_tokens += len(plan.host_saves.pages) * size
        counters.host_loaded_tokens += len(plan.host_loads.pages) * size

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
        if first:
            self._life.grow_surely(np.array(first, dtype=np.int32), draft)

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
            self._guess_planner.begin(sequence.row)
            self._announce(sequence, draft)
            self._plan_chunk(sequence, draft)
            if not draft.budget:
                return

    def _announce(self, sequence: Sequence, draft: Draft) -> None:
        """Tell the executor about a sequence that has taken a row, and about its pages."""
        request, lease = sequence.request, sequence.held()
        num_loaded = self._life.load_prefix(sequence, draft)
        draft.budget = max(1, draft.budget - num_loaded // _LOADED_LIKE_COMPUTED)
        if not sequence.was_retracted:  # else it finds what it has computed itself
            self._counters.prefix_queries += len(sequence.reusable)
            self._counters.prefix_hits += lease.num_shared * self._cache.page_size + num_loaded
        self._life.copy_prompt(sequence, draft)
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
