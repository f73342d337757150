"""Window pages in main memory: copies of those before positions after which sequences may begin.

A prefix in slots of main memory (``cache.host``) can be gone on from if the last window of it is
there, too. So some slots have a *window slot*, with a copy of the window page of the same tokens.
Window slots have an order of eviction of their own.

Knows slots and window slots. Must not know tokens, the tree, or the device's window pages.

Invariants, verified by ``check``:
- A window slot is free or attached to one slot.
- A slot that is free has no window slot.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from minisgl_backend.cache.pages import PagePool
from minisgl_backend.cache.windows import usable_length
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_PAGE
from minisgl_backend.request import EMPTY, IntArray


class HostWindows:
    """Window slots 0 .. num_window_slots - 1 of ``num_slots`` slots."""

    def __init__(self, num_window_slots: int, *, num_slots: int, span: int) -> None:
        """``span``: see ``WindowPages``."""
        self.num_window_slots = num_window_slots
        self.span = span
        self._pool = PagePool(num_window_slots)
        self._attached = np.full(num_slots, NO_PAGE, dtype=np.int32)  # window slots, by slot
        self._recency: OrderedDict[int, None] = OrderedDict()  # slots, the oldest first
        self._spared: set[int] = set()  # slots that were matched since the last plan
        self._pending: dict[int, int] = {}  # window pages to save, by window slot

    def usable(self, slots: IntArray) -> int:
        """Number of ``slots``, the first ones of a sequence, after which it can go on."""
        return usable_length(self._attached[slots], self.span)

    def match(self, slots: IntArray) -> IntArray:
        """The window slots of the last window of these slots, which are ``usable``. The plan that
        is being made may load them."""
        last = slots[max(0, len(slots) - self.span) :]
        for slot in last.tolist():
            self._recency.move_to_end(slot)
            self._spared.add(slot)
        window_slots: IntArray = self._attached[last]
        return window_slots

    def save(self, slots: IntArray, window_pages: IntArray) -> None:
        """Keep ``window_pages``, int32[num_slots], of ``slots``; ``NO_PAGE`` for none."""
        for index in np.flatnonzero(window_pages != NO_PAGE).tolist():
            slot = int(slots[index])
            if self._attached[slot] != NO_PAGE:
                self._recency.move_to_end(slot)
                continue
            if not self._pool.num_free and not self._evict_oldest():
                return
            (window_slot,) = self._pool.allocate(1).tolist()
            self._attached[slot] = window_slot
            self._recency[slot] = None
            # one that was to be saved to, and was evicted before, gets the newer page
            self._pending[window_slot] = int(window_pages[index])

    def drop(self, slots: IntArray) -> None:
        """Detach the window slots of ``slots``, which become free."""
        for slot in slots[self._attached[slots] != NO_PAGE].tolist():
            self._detach(slot)

    def take_saves(self) -> tuple[IntArray, IntArray]:
        """The window pages that the plan that is being made must save, and their window slots; it
        is complete."""
        self._spared.clear()
        return taken(self._pending)

    def emptied(self) -> HostWindows:
        """New window slots, all of them free."""
        return HostWindows(self.num_window_slots, num_slots=len(self._attached), span=self.span)

    def check(self, free: IntArray) -> None:
        """Raise ``InvariantError`` if the bookkeeping contradicts itself, or the ``free`` slots.
        Slow."""
        self._pool.check()
        attached = np.flatnonzero(self._attached != NO_PAGE)
        known = np.concatenate([self._pool.free_pages(), self._attached[attached]])
        if not np.array_equal(np.sort(known), np.arange(self.num_window_slots)):
            raise InvariantError("a window slot is neither free nor attached to one slot")
        if (self._attached[free] != NO_PAGE).any():
            raise InvariantError("a free slot has a window slot")
        if sorted(self._recency) != attached.tolist():
            raise InvariantError("not exactly the slots with window slots can lose them")

    def _evict_oldest(self) -> bool:
        """Free the least recently used window slot that the plan does not load."""
        oldest = next((slot for slot in self._recency if slot not in self._spared), None)
        if oldest is not None:
            self._detach(oldest)
        return oldest is not None

    def _detach(self, slot: int) -> None:
        del self._recency[slot]
        self._pool.free(self._attached[slot : slot + 1].copy())
        self._attached[slot] = NO_PAGE


def taken(pending: dict[int, int]) -> tuple[IntArray, IntArray]:
    """What is to be saved and the slots that it goes to, int32[num_copies] each, of ``pending``,
    which has the former by slot and is emptied."""
    if not pending:
        return EMPTY, EMPTY
    sources, slots = list(pending.values()), list(pending)
    pending.clear()
    return np.array(sources, dtype=np.int32), np.array(slots, dtype=np.int32)
