"""Who follows what is in a tree of prefixes, such as the router of replicas.

Must not know who that is, or what the tree is for.
"""

from __future__ import annotations

from typing import Protocol

from minisgl_backend.request import IntArray


class TreeWatch(Protocol):
    """Learns, in order, what enters and leaves the tree of a cache. What is said of pages holds for
    slots, if a tree has these in their place."""

    def published(self, tokens: IntArray, salt: str, pages: IntArray) -> None:
        """``pages`` are in the tree from now on: the last full ones of ``tokens``."""

    def left(self, pages: IntArray) -> None:
        """``pages`` are no longer in the tree."""

    def emptied(self) -> None:
        """An empty cache takes the place of the one that was watched."""
