"""The second level of the prefix cache: prefixes in main memory, in whole pages.

It is written through: when a sequence gives back its pages, copies of those that it has published
go to main memory, whether the device still has them or not. Memory there consists of *slots*, each
for one page. The prefixes in them are kept in a radix tree over slots, with its own order of
eviction; pages of the device and slots come and go independently.

For models with recurrent layers there are *state slots*, too, each for one snapshot of states
(``cache.snapshots``): those along the sequence are copied with its pages. A prefix is then found up
to the last position that has one. If layers have window pages, ``HostWindows`` has window slots for
those that are worth keeping, and a prefix is found up to the last position whose window is there.

A copy is made by the plan after the one that was made last (``take_saves``): first of all, since
the plan may grant the page again. A prefix is found as soon as it is to be saved, since plans run
in order, and in each plan saves come before loads.

Knows tokens, salts and slots. Must not know tensors, leases, or what the device still has.

Invariants:
- Every slot is free or in the tree (verified by ``check``); so is every state slot.
- A slot that a plan loads is not saved to by this plan, but with the very prefix that was matched:
  what ``match`` finds is pinned, or spared, until ``take_saves`` ends the plan. A later plan may
  save to it, as it runs later. The same holds for state slots and window slots.
Rule for the caller: only pages that are known to be finite are saved, full of committed positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minisgl_backend.cache.host_windows import HostWindows, taken
from minisgl_backend.cache.pages import PagePool
from minisgl_backend.cache.radix import Node, RadixTree, salt_key
from minisgl_backend.cache.tree_snapshots import TreeSnapshots
from minisgl_backend.cache.tree_watch import TreeWatch
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_HOST_COPIES, NO_SNAPSHOT, HostCopies
from minisgl_backend.request import EMPTY, IntArray


class HostPrefix(NamedTuple):
    """The ``slots`` of a prefix's pages, int32[num_pages]; the slot of the states after them,
    ``NO_SNAPSHOT`` if none are kept; and the window slots of its last pages, as many as a window
    spans, if there are any."""

    slots: IntArray
    state_slot: int = NO_SNAPSHOT
    window_slots: IntArray = EMPTY


class HostCache:
    """Prefixes in slots 0 .. num_slots - 1."""

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        *,
        num_state_slots: int | None = None,
        windows: HostWindows | None = None,
        watch: TreeWatch | None = None,
    ) -> None:
        """``num_state_slots`` is None if there are no recurrent states, and ``windows`` if there
        are no window pages. One of the two is."""
        self.num_slots = num_slots
        self.num_state_slots = num_state_slots
        self.page_size = page_size
        self._pool = PagePool(num_slots)
        self._tree = RadixTree(page_size, needs_snapshots=num_state_slots is not None)
        self._states = TreeSnapshots(self._tree, num_state_slots or 0)
        self._windows = windows
        self._watch = watch
        self._pending: dict[int, int] = {}  # pages to save, by slot
        self._pending_states: dict[int, int] = {}  # snapshots to save, by state slot
        self._matched: list[Node] = []  # since the last plan; pinned
        self._matched_states: set[int] = set()  # likewise; spared

    @property
    def keeps_states(self) -> bool:
        return self.num_state_slots is not None

    @property
    def keeps_windows(self) -> bool:
        return self._windows is not None

    @property
    def num_used(self) -> int:
        """Number of slots that hold a page."""
        return self._tree.num_pages

    @property
    def num_used_states(self) -> int:
        """Number of state slots that hold a snapshot."""
        return self._states.num_attached

    def save(
        self,
        tokens: IntArray,
        salt: str,
        pages: IntArray,
        *,
        snapshots: Sequence[tuple[int, int]] = (),
        window_pages: IntArray = EMPTY,
    ) -> None:
        """Keep ``pages``, which hold the first of ``tokens``, unless they are kept already; and
        ``snapshots``, each the one after so many of these pages, and ``window_pages``, int32[len(
        pages)], ``NO_PAGE`` for those of which none is to be kept.

        The least recently used slots make room. The end of a prefix that does not fit is left out.
        """
        size, key = self.page_size, salt_key(salt)
        node, kept = self._tree.match(tokens[: len(pages) * size], key, whole=True)
        # indices of ``pages``:
        # [0, len(kept))   kept already: most recently used from now on
        # [len(kept), end) get slots: free ones, or after evicting others
        # [end, ...)       left out
        room = self._pool.num_free + self._tree.num_evictable
        end, slots = min(len(pages), len(kept) + room), kept
        if end > len(kept):
            missing = end - len(kept)
            self._make_room(missing)
            new = self._pool.allocate(missing)
            node, _ = self._tree.insert(node, tokens[len(kept) * size : end * size], new, key)
            if self._watch is not None:
                self._watch.published(tokens[: end * size], salt, new)
            # a slot that was to be saved to, and was evicted before, gets the newer page
            self._pending |= zip(new.tolist(), pages[len(kept) : end].tolist(), strict=True)
            slots = np.concatenate([kept, new])
        for num_pages, snapshot in snapshots:
            if num_pages <= end and not self._tree.use_snapshot(node, num_pages):
                self._save_states(node, num_pages, snapshot)
        if self._windows is not None:
            self._windows.save(slots, window_pages[:end])
        self._tree.unpin(node)

    def match_length(self, tokens: IntArray, salt: str) -> int:
        """Number of tokens of the prefix that ``match`` would find. Changes nothing."""
        return self._tree.match_length(tokens[:-1], salt_key(salt)) * self.page_size

    def match(self, tokens: IntArray, salt: str) -> HostPrefix:
        """The longest prefix of ``tokens[:-1]``. The plan that is being made may load it."""
        node, slots = self._tree.match(tokens[:-1], salt_key(salt))
        self._matched.append(node)
        if self._windows is not None:
            slots = slots[: self._windows.usable(slots)]
            return HostPrefix(slots, window_slots=self._windows.match(slots))
        if node.snapshot != NO_SNAPSHOT:
            self._matched_states.add(node.snapshot)
        return HostPrefix(slots, node.snapshot)

    def take_saves(self) -> HostCopies:
        """What the plan that is being made must save; it is complete."""
        for node in self._matched:
            self._tree.unpin(node)
        self._matched.clear()
        self._matched_states.clear()
        of_windows = (EMPTY, EMPTY) if self._windows is None else self._windows.take_saves()
        copies = HostCopies(*taken(self._pending), *of_windows, *taken(self._pending_states))
        return NO_HOST_COPIES if copies.is_empty else copies

    def emptied(self) -> HostCache:
        """New slots, all of them free."""
        if self._watch is not None:
            self._watch.emptied()
        return HostCache(
            self.num_slots,
            self.page_size,
            num_state_slots=self.num_state_slots,
            windows=None if self._windows is None else self._windows.emptied(),
            watch=self._watch,
        )

    def check(self) -> None:
        """Raise ``InvariantError`` if the bookkeeping contradicts itself. Slow."""
        self._pool.check()
        self._tree.check()
        self._states.check()
        if self._states.num_taken:
            raise InvariantError("a state slot is taken and belongs to no prefix")
        if self._windows is not None:
            self._windows.check(self._pool.free_pages())
        slots = np.concatenate([self._pool.free_pages(), *(n.pages for n in self._tree.nodes())])
        if not np.array_equal(np.sort(slots), np.arange(self.num_slots)):
            raise InvariantError("a slot of main memory is neither free nor in the tree, or both")
        pins = sum(node.pins for node in self._tree.root.children.values())
        if pins != sum(node is not self._tree.root for node in self._matched):
            raise InvariantError("not exactly the prefixes that were matched are pinned")

    def _save_states(self, node: Node, num_pages: int, snapshot: int) -> None:
        """Keep a snapshot, which is after ``num_pages`` of the path to ``node``, if a state slot is
        free or can be evicted."""
        slot = self._states.take(self._matched_states)
        if slot is not None and self._states.attach(node, num_pages, slot):
            self._pending_states[slot] = snapshot

    def _make_room(self, num_slots: int) -> None:
        """Evict until so many slots are free."""
        short = num_slots - self._pool.num_free
        if short > 0:
            evicted = self._tree.evict(short)
            self._states.reclaim()
            if self._windows is not None:
                self._windows.drop(evicted)
            self._pool.free(evicted)
            if self._watch is not None:
                self._watch.left(evicted)
