"""Which guesses a step checks, and for which rows the MTP layer makes guesses in it.

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

Knows rows, pages and which steps are in flight. Must not know the queue, or how guesses are made.

Invariants:
- A row with guesses in flight is in at most one other step in flight, which checks guesses, too.
- At most ``speculative_max_requests`` rows have updates that are not added to their states yet, if
  those of released rows do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl_backend.plan import LAST_TOKEN
from minisgl_backend.request import EMPTY, IntArray
from minisgl_backend.scheduling.draft import Draft
from minisgl_backend.scheduling.guesses import Guesser
from minisgl_backend.scheduling.lifecycle import Lifecycle
from minisgl_backend.scheduling.lookahead import Lookahead

_NO_STEP: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class NextGuesses:
    """The guesses that a step is to check, by row. ``assumes_right``: see ``StepPlan``."""

    by_row: Mapping[int, IntArray]
    assumes_right: bool = False


class GuessPlanner:
    """The part of the planner that is about guesses. Costs nothing without a ``guesser``."""

    def __init__(
        self,
        life: Lifecycle,
        guesser: Guesser | None,
        *,
        max_prefill_tokens: int,
        mtp_tokens: int,
        section: int | None,
    ) -> None:
        """For the last three see ``SchedulerConfig``."""
        self._life = life
        self._rows = life.rows
        self._guesser = guesser
        self._page_size = life.cache.page_size
        self._max_prefill_tokens = max_prefill_tokens
        self._mtp_tokens = mtp_tokens
        self._section = section
        self._last_checks = _NO_STEP  # the last step with guesses ...
        self._checked_rows = EMPTY  # ... and the rows that have some

    def begin(self, row: int) -> None:
        """A sequence has taken the row."""
        if self._guesser is not None:
            self._guesser.begin(row)

    def next_guesses(self, in_flight: range, lookahead: Lookahead | None) -> NextGuesses | None:
        """The guesses that the next step checks; None if it has to wait, for those in flight or for
        tokens to guess from. ``in_flight`` are the numbers of the steps that are."""
        guesser = self._guesser
        if guesser is None:
            return NextGuesses({})
        unjudged = self._unjudged_rows(in_flight)
        may_go_ahead = guesser.all_on_device and len(in_flight) == 1 and not self._rows.masked.any()
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
        return NextGuesses(guesses, assumes_right=len(unjudged) > 0)

    def plan(self, guesses: NextGuesses, step: int, draft: Draft) -> None:
        """Let rows decode with as many of their ``guesses`` as pages and half of the budget allow.
        Rows for which that is none decode without. No row passes a position at which its states are
        to be kept. ``step`` is the step's number."""
        if not guesses.by_row:
            return
        draft.assumes_right = guesses.assumes_right
        rows, states = self._rows, self._life.states
        checked_rows = []
        left = draft.budget // 2
        ready = rows.ready_to_decode()
        short = rows.short(ready)
        for row, guessed in guesses.by_row.items():
            start = int(rows.planned[row])  # the position of the last token
            end = start + min(1 + len(guessed), left)
            if (section := self._section) is not None:
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
            self._last_checks = step
            self._checked_rows = np.array(checked_rows, np.int32)

    def plan_mtp(self, draft: Draft) -> None:
        """Let the MTP layer guess at what follows the tokens of this step, for each row that can
        use that and for which there are pages for the layer's passes. The others go on without."""
        if self._guesser is None or not self._mtp_tokens:
            return
        rows, sampled = self._rows, draft.sample_rows
        wanting = self._guesser.wanting_mtp(sampled)
        if not len(wanting):
            return
        # [0, planned)     computed by the model and the layer, in this step or before
        # [planned, end)   computed by the layer alone, at the most
        ends = rows.planned[wanting] + np.int32(self._mtp_tokens - 1)
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

    def _unjudged_rows(self, in_flight: range) -> IntArray:
        """The rows that go on from guesses which are in flight, int32[n]."""
        if self._last_checks not in in_flight:
            return EMPTY
        rows, checked = self._rows, self._checked_rows
        return checked[rows.accepting[checked] & ~rows.retiring[checked]]

    def _have_room(
        self, guesses: Mapping[int, IntArray], unjudged: IntArray, ready: IntArray
    ) -> bool:
        """Whether a step that is planned ahead can check all ``guesses``, among them as many as
        there can be of each row that is ``unjudged``."""
        rows, size, most = self._rows, self._page_size, self._mtp_tokens
        if any(len(guesses.get(row, EMPTY)) < most for row in unjudged.tolist()):
            return False
        # a row whose states are to be kept may not have got to the position
        if (
            self._life.states is not None
            and (rows.planned[unjudged] + 1 + most > rows.keeps_at[unjudged]).any()
        ):
            return False
        lengths = [1 + len(guessed) for guessed in guesses.values()]
        if sum(lengths) > self._max_prefill_tokens // 2:
            return False
        checked = np.array([*guesses], np.int32)
        missing = rows.planned[checked] + np.array(lengths, np.int32) - rows.capacity[checked]
        num_pages = int((-(-missing // size)).clip(min=0).sum())
        return num_pages + len(rows.short(ready) - {*guesses}) <= self._life.room.most_rows

    def _reach(self, row: int, short: set[int]) -> int:
        """The position up to which the row has pages or can be granted some: pages are for the
        other rows that are ``short`` of one first."""
        num_spare = self._life.room.most_rows - len(short - {row})
        return int(self._rows.capacity[row]) + max(0, num_spare) * self._page_size

    def _grow_up_to(self, end: int, row: int, short: set[int], draft: Draft) -> None:
        """Grant the row pages for all positions before ``end``, which it can reach. If it gets one,
        it is not ``short`` anymore."""
        while self._rows.capacity[row] < end:
            self._life.grow_surely(np.array([row], np.int32), draft)
            short.discard(row)
