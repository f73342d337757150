"""How much of the pools there is, or is needed: pages and window pages, counted together.

Must not know which pages these are, or who holds them.
"""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """A number of pages, and of window pages (``cache.windows``). If no layer has window pages,
    there is always room for more of them."""

    pages: int
    window_pages: int

    @property
    def most_rows(self) -> int:
        """Number of rows that can be granted one more of each."""
        return min(self)

    def with_more(self, other: Room) -> Room:
        return Room(self.pages + other.pages, self.window_pages + other.window_pages)

    def without(self, other: Room) -> Room:
        return Room(self.pages - other.pages, self.window_pages - other.window_pages)

    def holds(self, cost: Room) -> bool:
        return cost.pages <= self.pages and cost.window_pages <= self.window_pages
