"""Which pages of layers with windows are kept: those that a window sees and, while there is room,
others that may be reused.

Layers with windows have a pool of their own, sized for windows, not for whole sequences. A page of
the other layers may have a *window page*, which holds the keys and values of the same tokens in the
layers with windows. A lease holds the window pages of its window:

    [0, window_begin)             every window of the lease has passed them
    [window_begin, window_end)    held: attached, and in the lease's line of the table
    [window_end, len(pages))      for positions that no step computes yet

A window page that no lease holds is *idle*. It stays attached, so that a request may begin after
it, until the pool needs it. First to go are those that windows have passed, then those before
positions at which requests have begun or ended, or are likely to begin. A cached prefix is found up
to the last position whose whole window is attached.

Knows the ids of pages and of window pages. Must not know tokens, the tree, or who holds a line.

Invariants, verified by ``check``:
- A window page is free or attached to one page. Attached ones are held, or idle in one of the two
  orders of eviction.
- A page that is free has no window page.
- No free window page is suspect (``pages``). One is suspect from the moment it is attached.
- A line of the table has the window pages that its lease holds, and ``NO_PAGE`` elsewhere.
Rules for the caller: ``slide`` comes after the last plan that reads what leaves the window.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from minisgl_backend.cache.pages import PagePool
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_PAGE, Grants
from minisgl_backend.request import IntArray


def usable_length(attached: IntArray, span: int) -> int:
    """Number of pages of a sequence that can be a prefix, by their window pages, int32[num_pages],
    ``NO_PAGE`` for none: each of the last ``span`` pages of the prefix must have one."""
    if not len(attached):
        return 0
    index = np.arange(len(attached))
    missing = np.where(attached == NO_PAGE, index, -1)
    run = index - np.maximum.accumulate(missing)  # pages with window pages up to each
    found = np.flatnonzero(run >= np.minimum(span, index + 1))
    return int(found[-1]) + 1 if len(found) else 0


@dataclass(slots=True, eq=False)
class WindowLease:
    """A lease as this module knows it: its ``pages``, in the order of its positions, the first
    ``num_shared`` of which others have written; its window (see the map above); and its ``line`` in
    the table, -1 until it has one. Windows that end at the indices ``keeps`` are worth keeping."""

    pages: array[int] = field(default_factory=lambda: array("i"))
    num_shared: int = 0
    window_begin: int = 0
    window_end: int = 0
    line: int = -1
    keeps: tuple[int, ...] = ()


class WindowPages:
    """The window pages of all pages of a cache."""

    def __init__(
        self,
        num_window_pages: int,
        *,
        num_pages: int,
        page_size: int,
        window: int,
        is_clean: bool = True,
    ) -> None:
        """``num_pages`` are those of the cache; ``window`` counts the positions that a token sees,
        its own included."""
        self.num_window_pages = num_window_pages
        self.page_size = page_size
        self.window = window
        self.span = -(-(window - 1) // page_size)
        """Number of earlier pages that the first token of a page sees."""
        self._pool = PagePool(num_window_pages, is_clean=is_clean)
        self._attached = np.full(num_pages, NO_PAGE, dtype=np.int32)  # window pages, by page
        self._users = np.zeros(num_pages, dtype=np.int32)  # leases that hold the page's
        self._passed: OrderedDict[int, None] = OrderedDict()  # idle: pages, the oldest first
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._grants: dict[tuple[int, int], int] = {}  # by line and index

    @property
    def num_available(self) -> int:
        """Window pages that can be attached now."""
        return self._pool.num_free + len(self._passed) + len(self._kept)

    @property
    def most_held(self) -> int:
        """Most window pages of a lease that decodes: the window, the page that is being filled, and
        one to spare, as ``slide`` only hears of committed positions. With guesses, it has more for
        a while if there are some."""
        return min(self.span + 2, self.num_window_pages)

    def num_missing(self, lease: WindowLease, num_pages: int) -> int:
        """Number of window pages that a lease of ``num_pages`` pages still needs to decode."""
        held = lease.window_end - lease.window_begin
        return max(0, min(self.most_held, num_pages) - held)

    def usable(self, pages: IntArray) -> int:
        """Number of ``pages``, the first ones of a sequence, that can be its cached prefix: the
        window at the end of the prefix must be attached."""
        return usable_length(self._attached[pages], self.span)

    def enter(self, lease: WindowLease) -> None:
        """Hold the window at the end of the shared pages of a new lease."""
        lease.window_end = lease.num_shared
        lease.window_begin = max(0, lease.num_shared - self.span)
        lease.keeps = (lease.num_shared,)
        for page in lease.pages[lease.window_begin : lease.window_end]:
            if not self._users[page]:
                self._wake(page)
            self._users[page] += 1

    def seat(self, lease: WindowLease, line: int, keeps: Iterable[int]) -> None:
        """Give a lease a line of the table. Besides the window with which it began, those before
        the indices ``keeps`` of its pages are worth keeping."""
        lease.line = line
        lease.keeps = (*lease.keeps, *keeps)
        for index in range(lease.window_begin, lease.window_end):
            self._grants[line, index] = int(self._attached[lease.pages[index]])

    def slide(self, lease: WindowLease, position: int, *, num_verified: int = 0) -> None:
        """Let go of what no position from ``position`` on sees. A finite token has verified the
        positions before ``num_verified`` that the lease itself has written."""
        first = min(max(0, position - self.window + 1) // self.page_size, lease.window_end)
        if first <= lease.window_begin:
            return
        indices = range(lease.window_begin, first)
        verified = lease.pages[
            max(indices.start, lease.num_shared) : min(first, num_verified // self.page_size)
        ]
        if len(verified):
            self._pool.trust(self._attached[np.array(verified)])
        for index in indices:
            self._grants[lease.line, index] = NO_PAGE
            is_kept = any(end - self.span <= index < end for end in lease.keeps)
            self._let_go(lease.pages[index], self._kept if is_kept else self._passed)
        lease.window_begin = first

    def extend(self, lease: WindowLease, num_pages: int) -> None:
        """Attach and hold window pages up to the first ``num_pages`` of a lease.

        Raises ``InvariantError`` if too few are available.
        """
        missing = num_pages - lease.window_end
        if missing <= 0:
            return
        self._evict(missing - self._pool.num_free)
        pages = np.array(lease.pages[lease.window_end : num_pages], dtype=np.int32)
        taken = self._pool.allocate(missing)
        if (self._attached[pages] != NO_PAGE).any():
            raise InvariantError("a page gets a second window page")
        self._attached[pages] = taken
        self._users[pages] = 1
        self._pool.suspect(taken)
        for index, window_page in enumerate(taken.tolist(), lease.window_end):
            self._grants[lease.line, index] = window_page
        lease.window_end = num_pages

    def resume(self, lease: WindowLease, num_pages: int) -> range | None:
        """Let a lease that was just seated go on after its first ``num_pages``, more than are
        shared: hold the window before that. Returns the indices of its pages that got new window
        pages, which must be filled; None if too few are available, and then nothing changes."""
        first = max(0, num_pages - self.span)
        indices = range(max(first, lease.window_end), num_pages)
        if len(indices) > self.num_available:
            return None
        for index in range(lease.window_begin, min(first, lease.window_end)):
            self._grants[lease.line, index] = NO_PAGE
            self._let_go(lease.pages[index], self._kept)
        lease.window_begin = first
        lease.window_end = indices.start
        self.extend(lease, num_pages)
        return indices

    def pages_of(self, lease: WindowLease, indices: range) -> IntArray:
        """The window pages of these indices of a lease's pages, int32[len(indices)]."""
        pages = np.array(lease.pages[indices.start : indices.stop], dtype=np.int32)
        return self._attached[pages]

    def worth_keeping(self, lease: WindowLease, num_pages: int) -> IntArray:
        """The window pages of the first ``num_pages`` of a lease that are finite and in a window
        that is worth keeping, or in its last, int32[num_pages]; ``NO_PAGE`` for others."""
        ends = {end for end in (*lease.keeps, num_pages) if end <= num_pages}
        indices = [i for end in ends for i in range(max(0, end - self.span), end)]
        found = np.full(num_pages, NO_PAGE, dtype=np.int32)
        found[indices] = self._attached[np.array(lease.pages[:num_pages], dtype=np.int32)[indices]]
        held = np.flatnonzero(found != NO_PAGE)
        found[held[self._pool.are_suspects(found[held])]] = NO_PAGE
        return found

    def replace(self, lease: WindowLease, start: int, known: IntArray) -> None:
        """The pages of a lease from index ``start`` on are about to be replaced by ``known``, which
        hold the same tokens. Those without a window page take over that of the page they replace.
        """
        for index, other in enumerate(known.tolist(), start):
            own = lease.pages[index]
            held = lease.window_begin <= index < lease.window_end
            if self._attached[other] == NO_PAGE and self._attached[own] != NO_PAGE:
                self._attached[other], self._attached[own] = self._attached[own], NO_PAGE
                self._users[other], self._users[own] = self._users[own], 0
                for order in (self._passed, self._kept):
                    if own in order:
                        del order[own]
                        order[other] = None
            elif held:
                self._users[own] -= 1
                if not self._users[other]:
                    self._wake(other)
                self._users[other] += 1
                self._grants[lease.line, index] = int(self._attached[other])

    def leave(self, lease: WindowLease) -> None:
        """End the hold of a lease; others may begin after its last window."""
        for index in range(lease.window_begin, lease.window_end):
            if lease.line >= 0:
                self._grants[lease.line, index] = NO_PAGE
            self._let_go(lease.pages[index], self._kept)
        lease.window_begin = lease.window_end

    def drop(self, pages: IntArray) -> None:
        """Detach the window pages of ``pages``, which become free."""
        attached = pages[self._attached[pages] != NO_PAGE]
        if not len(attached):
            return
        for page in attached.tolist():
            self._passed.pop(page, None)
            self._kept.pop(page, None)
        if self._users[attached].any():
            raise InvariantError("a window page that is held is dropped")
        self._pool.free(self._attached[attached])
        self._attached[attached] = NO_PAGE

    def num_alone(self, lease: WindowLease) -> int:
        """Number of window pages that become available when the lease ends."""
        pages = np.array(lease.pages[lease.window_begin : lease.window_end], dtype=np.int32)
        return int(np.count_nonzero(self._users[pages] == 1))

    def trust(self, pages: IntArray) -> None:
        """Note that the window pages of ``pages`` hold finite numbers only."""
        if self._pool.num_suspect:
            self._pool.trust(self._of(pages))

    def suspect(self, pages: IntArray) -> None:
        """Note that the window pages of ``pages`` may hold NaN."""
        self._pool.suspect(self._of(pages))

    def has_suspects(self, pages: IntArray) -> bool:
        """Whether a window page of ``pages`` may hold NaN."""
        return self._pool.has_suspects(self._of(pages))

    def take_broken(self) -> IntArray:
        """The free window pages that may hold NaN and were not returned before."""
        return self._pool.take_broken()

    def take_grants(self) -> Grants:
        """The changes of the table since the last call: window pages, or ``NO_PAGE``. No entry is
        named twice."""
        if not self._grants:
            return Grants()
        places = np.array(list(self._grants), dtype=np.int32)
        pages = np.array(list(self._grants.values()), dtype=np.int32)
        self._grants.clear()
        return Grants(places[:, 0], places[:, 1], pages)

    def emptied(self, leases: Iterable[WindowLease]) -> WindowPages:
        """New window pages for an emptied cache, whose ``leases`` are lost: all are broken, and the
        lines of the table that name some are cleared."""
        fresh = WindowPages(
            self.num_window_pages,
            num_pages=len(self._attached),
            page_size=self.page_size,
            window=self.window,
            is_clean=False,
        )
        fresh._grants = dict.fromkeys(self._grants, NO_PAGE)
        for lease in leases:
            if lease.line >= 0:
                for index in range(lease.window_begin, lease.window_end):
                    fresh._grants[lease.line, index] = NO_PAGE
        return fresh

    def check(self, leases: Iterable[WindowLease], free: IntArray) -> None:
        """Raise ``InvariantError`` if the bookkeeping contradicts itself, these leases, or the
        ``free`` pages. Slow."""
        self._pool.check()
        attached = np.flatnonzero(self._attached != NO_PAGE)
        known = np.concatenate([self._pool.free_pages(), self._attached[attached]])
        if not np.array_equal(np.sort(known), np.arange(self.num_window_pages)):
            raise InvariantError("a window page is neither free nor attached to one page")
        if (self._attached[free] != NO_PAGE).any():
            raise InvariantError("a free page has a window page")
        pages = [
            page for lease in leases for page in lease.pages[lease.window_begin : lease.window_end]
        ]
        num_users = np.bincount(np.array(pages, dtype=np.int32), minlength=len(self._users))
        if not np.array_equal(num_users, self._users):
            raise InvariantError("not exactly the windows of leases are held")
        idle = [*self._passed, *self._kept]
        if sorted([*idle, *set(pages)]) != attached.tolist():
            raise InvariantError("a window page is neither held nor idle, or both")

    def _of(self, pages: IntArray) -> IntArray:
        found = self._attached[pages]
        attached: IntArray = found[found != NO_PAGE]
        return attached

    def _wake(self, page: int) -> None:
        """An idle window page is about to be held."""
        self._passed.pop(page, None)
        self._kept.pop(page, None)

    def _let_go(self, page: int, order: OrderedDict[int, None]) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            order[page] = None

    def _evict(self, count: int) -> None:
        """Detach ``count`` idle window pages."""
        if count > len(self._passed) + len(self._kept):
            raise InvariantError(f"{count} window pages wanted, {self.num_available} available")
        for _ in range(count):
            page, _ = (self._passed or self._kept).popitem(last=False)
            self._pool.free(self._attached[page : page + 1].copy())
            self._attached[page] = NO_PAGE
