"""Admission control: whether the pool has room for the next waiting sequence.

A sequence that is admitted gets pages for all its known tokens at once. Beyond these a reserve is
kept free, but not granted, for each running sequence: ``reserve_tokens`` more tokens, or what is
left of its output if that is less. Reserving all of max_tokens would leave most of the pool idle,
since outputs are usually shorter; with no reserve, sequences would be retracted soon after their
admission.

Must not know leases, plans or the budget of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from minisgl_backend.cache.pages import num_pages_for
from minisgl_backend.scheduling.lifecycle import Lifecycle
from minisgl_backend.scheduling.room import Room
from minisgl_backend.scheduling.sequence import Phase, Precedence, Sequence

_MORE_THAN_ALL: Final = Room(2**31, 0)


class AdmissionControl:
    """Starts waiting sequences, one after the other, for as long as they fit."""

    def __init__(self, life: Lifecycle, reserve_tokens: int) -> None:
        self._life = life
        self._page_size = life.cache.page_size
        self._reserve_tokens = reserve_tokens
        self._blocked_cost = Room(0, 0)  # what the last sequence that did not fit would take, ...
        self._blocked_at = -1  # ... when Lifecycle.changes had this value

    def admit(self, before: Precedence | None) -> Iterator[Sequence]:
        """Start waiting sequences while they fit: each gets a row, and pages for its known tokens.

        Stops at the first that does not fit, or that comes after ``before`` in the order of
        service. While no row is in use, the whole pool may be taken, and nothing is reserved.
        """
        life = self._life
        reserved = self._reserved()
        while life.rows.num_free and not self._is_still_blocked(reserved):
            sequence = life.queue.choose()
            if sequence is None:
                self._blocked_at, self._blocked_cost = life.changes, _MORE_THAN_ALL
                return
            if before is not None and sequence.precedence > before:
                return
            known = len(sequence.tokens)
            num_tokens = max(known, min(sequence.limit - 1, known + self._reserve_tokens))
            needed = num_pages_for(num_tokens, self._page_size)
            is_alone = not life.rows.num_used
            room = life.whole_room if is_alone else life.room.without(reserved)
            cost = life.start(sequence, needed, room)
            if sequence.phase is Phase.WAITING:
                self._blocked_at, self._blocked_cost = life.changes, cost
                return
            lease, windows = sequence.held(), life.cache.windows
            more = 0 if windows is None else windows.num_missing(lease, needed)
            reserved = reserved.with_more(Room(needed - len(lease.pages), more))
            yield sequence

    def _reserved(self) -> Room:
        """What to keep free for the running rows, beyond what they hold."""
        rows, size, windows = self._life.rows, self._page_size, self._life.cache.windows
        running = np.flatnonzero(rows.accepting & ~rows.retiring)
        growth = np.minimum(rows.limit[running] - 1 - rows.capacity[running], self._reserve_tokens)
        more = -(-np.maximum(growth, 0) // size)  # [num_running], pages
        if windows is None:
            return Room(int(more.sum()), 0)
        will_hold = np.minimum(windows.most_held, rows.capacity[running] // size + more)
        planned = rows.planned[running]
        holds = -(-planned // size) - np.maximum(planned - windows.window + 1, 0) // size
        return Room(int(more.sum()), int(np.maximum(will_hold - holds, 0).sum()))

    def _is_still_blocked(self, reserved: Room) -> bool:
        """Whether the next sequence did not fit before, or there was none, and nothing has changed
        since.

        Saves going through the queue, and matching a waiting prompt against the cache, in every
        step.
        """
        room = self._life.room.without(reserved)
        is_unchanged = self._blocked_at == self._life.changes
        is_used = self._life.rows.num_used > 0
        return is_unchanged and is_used and not room.holds(self._blocked_cost)
