"""The pool of free pages.

Knows the page ids 0 .. num_pages - 1, which of them are free, and which may hold NaN or infinity.
Must not know what else a page holds, or what it is leased for.

Invariants:
- A page is on the stack of free pages if and only if its flag says that it is free.
- A free page is not marked as suspect: a suspect page that is freed moves to the broken pages, to
  be cleared before it is written again.
"""

from __future__ import annotations

from array import array

import numpy as np

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import EMPTY, IntArray, Mask


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Number of pages that hold ``num_tokens`` positions."""
    return -(-num_tokens // page_size)


class PagePool:
    """A stack of free page ids. Pages are handed out and taken back as int32 arrays."""

    def __init__(self, num_pages: int, *, is_clean: bool = True) -> None:
        """Unless ``is_clean``, any page may hold NaN at first."""
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_suspect = 0
        self._stack = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # the top is at the end
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._is_suspect = np.zeros(num_pages, dtype=np.bool_)
        self._broken: list[IntArray] = []
        if not is_clean:
            self._broken.append(np.arange(num_pages, dtype=np.int32))

    def allocate(self, num_pages: int) -> IntArray:
        """Take pages, int32[num_pages]. Raises ``InvariantError`` if fewer are free."""
        if num_pages > self.num_free:
            raise InvariantError(f"{num_pages} pages wanted, {self.num_free} are free")
        rest = self.num_free - num_pages
        pages = self._stack[rest : self.num_free][::-1].copy()
        self._is_free[pages] = False
        self.num_free = rest
        return pages

    def free(self, pages: IntArray) -> None:
        """Put ``pages`` back. Raises ``InvariantError`` if one of them is free already."""
        if not len(pages):
            return
        if self._is_free[pages].any():
            raise InvariantError(f"pages {pages[self._is_free[pages]].tolist()} are freed twice")
        after = self.num_free + len(pages)
        self._is_free[pages] = True
        self._stack[self.num_free : after] = pages
        self.num_free = after
        if self.num_suspect:
            suspects = pages[self._is_suspect[pages]]
            if len(suspects):
                self._broken.append(suspects)
                self.trust(suspects)

    def suspect(self, pages: IntArray) -> None:
        """Note that these pages, which are not free, may hold NaN."""
        self.num_suspect += int(np.count_nonzero(~self._is_suspect[pages]))
        self._is_suspect[pages] = True

    def trust(self, pages: IntArray) -> None:
        """Note that these pages hold finite numbers only."""
        self.num_suspect -= int(np.count_nonzero(self._is_suspect[pages]))
        self._is_suspect[pages] = False

    def has_suspects(self, pages: IntArray) -> bool:
        """Whether one of ``pages`` may hold NaN."""
        return bool(self._is_suspect[pages].any())

    def are_suspects(self, pages: IntArray) -> Mask:
        """Which of ``pages`` may hold NaN, bool[num_pages]."""
        return self._is_suspect[pages]

    def num_trusted(self, pages: IntArray) -> int:
        """Number of leading ``pages`` that hold finite numbers only."""
        suspects = np.flatnonzero(self._is_suspect[pages]) if self.num_suspect else EMPTY
        return int(suspects[0]) if len(suspects) else len(pages)

    def take_broken(self) -> IntArray:
        """The suspect pages that were freed since the last call, int32[num_pages]."""
        if not self._broken:
            return EMPTY
        broken = np.concatenate(self._broken)
        self._broken.clear()
        return broken

    def free_pages(self) -> IntArray:
        """The free pages, int32[num_free], in no particular order."""
        return self._stack[: self.num_free].copy()

    def check(self) -> None:
        """Raise ``InvariantError`` unless the stack and the flags agree."""
        if not np.array_equal(np.sort(self.free_pages()), np.flatnonzero(self._is_free)):
            raise InvariantError("the stack of free pages and their flags differ")
        if (self._is_free & self._is_suspect).any():
            raise InvariantError("a free page is still marked as suspect")
        if np.count_nonzero(self._is_suspect) != self.num_suspect:
            raise InvariantError("the count of suspect pages does not match their flags")


def as_array(pages: array[int]) -> IntArray:
    """A copy, int32[num_pages]."""
    return np.array(pages, dtype=np.int32)
