"""What the planner tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot of the planner. Pages: free + cached + leased == total; counters only grow."""

    num_waiting: int
    num_running: int
    total_pages: int
    free_pages: int
    cached_pages: int
    evictable_pages: int
    num_retractions: int
    prefix_queries: int
    """Tokens looked up in the prefix cache at admissions so far."""
    prefix_hits: int
    """Of these, tokens that were found."""
