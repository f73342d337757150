"""The pool of free pages.

Knows the page ids 0 .. num_pages - 1 and which of them are free. Must not know what a page holds,
or who holds it.

Invariant: a page is on the stack of free pages if and only if its flag says that it is free.
"""

from __future__ import annotations

import numpy as np

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray


class PagePool:
    """A stack of free page ids. Pages are handed out and taken back as int32 arrays."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._stack = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # the top is at the end
        self._is_free = np.ones(num_pages, dtype=np.bool_)

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
        if self._is_free[pages].any():
            raise InvariantError(f"pages {pages[self._is_free[pages]].tolist()} are freed twice")
        after = self.num_free + len(pages)
        self._is_free[pages] = True
        self._stack[self.num_free : after] = pages
        self.num_free = after

    def free_pages(self) -> IntArray:
        """The free pages, int32[num_free], in no particular order."""
        return self._stack[: self.num_free].copy()

    def check(self) -> None:
        """Raise ``InvariantError`` unless the stack and the flags agree."""
        if not np.array_equal(np.sort(self.free_pages()), np.flatnonzero(self._is_free)):
            raise InvariantError("the stack of free pages and their flags differ")
