"""What the planner reports about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot of the planner. The last three only grow, the others go up and down.

    Leased pages are the rest: free + cached + leased == total. Evictable pages are cached ones that
    no lease uses.
    """

    num_waiting: int
    num_running: int
    total_pages: int
    free_pages: int
    cached_pages: int
    evictable_pages: int
    num_retractions: int
    prefix_queries: int
    """How many tokens were looked up in the prefix cache at admissions."""
    prefix_hits: int
    """How many of these were found."""

    @property
    def used_pages(self) -> int:
        """Pages that the leases of sequences hold, private or shared."""
        return self.total_pages - self.free_pages - self.evictable_pages
