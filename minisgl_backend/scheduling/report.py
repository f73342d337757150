"""What the planner reports to the loop: the results of a commit, and how full the planner is.

Must not know how either came about, or who reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from minisgl_backend.request import (
    FloatArray,
    IntArray,
    PromptLogprobs,
    RequestId,
    TerminalEvent,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The results of a commit: new tokens of live requests, and the requests that ended with it.

    ``request_ids`` and ``token_ids``, int32[num_tokens], run in parallel; a request whose guesses
    were right occurs several times. ``logprobs`` is keyed by index in them. ``scored`` has
    log-probabilities of prompts, ``embedded`` their embeddings, ``ended`` the terminal events.
    Requests that have since been aborted do not appear.
    """

    request_ids: list[RequestId]
    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    scored: list[tuple[RequestId, PromptLogprobs]] = field(default_factory=list)
    ended: dict[RequestId, TerminalEvent] = field(default_factory=dict)
    embedded: list[tuple[RequestId, FloatArray]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Counters:
    """The counts of ``SchedulerStats`` that only grow, even when the planner is replaced."""

    num_retractions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_checks: int = 0
    num_guesses: int = 0
    num_right_guesses: int = 0
    num_checks_by_right: list[int]
    host_saved_tokens: int = 0
    host_loaded_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts of the planner. ``num_retractions`` and the counts of guesses, of tokens, and of
    prefixes that were looked up or found, only grow.

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
    """Number of tokens that were looked up in the prefix cache, not by sequences that had been
    retracted."""
    prefix_hits: int
    """Number of those that were found."""
    num_checks: int = 0
    """Number of times that the guesses of a row were checked; several rows in a step count each."""
    num_guesses: int = 0
    num_right_guesses: int = 0
    """Those that were the tokens that the row got."""
    num_checks_by_right: tuple[int, ...] = ()
    """Number of checks by how many guesses were right: none, one, up to the most that a row has."""
    running_adapters: tuple[int, ...] = ()
    """The ids of the LoRA adapters that rows have."""
    host_saved_tokens: int = 0
    """Number of tokens whose pages were copied to main memory."""
    host_loaded_tokens: int = 0
    """Number of tokens whose pages were copied from there; ``prefix_hits`` has them, too, unless
    their sequence had been retracted."""
    host_slots: int = 0
    """Pages that main memory can keep."""
    used_host_slots: int = 0
    """Pages that it keeps."""
    state_slots: int = 0
    """Snapshots of recurrent states that it can keep."""
    used_state_slots: int = 0
    """Snapshots that it keeps."""

    @classmethod
    def sum(cls, parts: Sequence[SchedulerStats]) -> SchedulerStats:
        """The counts of several planners together, without ``running_adapters``; 0 if none."""
        apart = ("num_checks_by_right", "running_adapters")
        names = [spec.name for spec in fields(cls) if spec.name not in apart]
        by_right = itertools.zip_longest(*(it.num_checks_by_right for it in parts), fillvalue=0)
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in names},
            num_checks_by_right=tuple(map(sum, by_right)),
        )

    @property
    def num_right_by_place(self) -> tuple[int, ...]:
        """Number of right guesses at each place of a check, from the first on. A guess after a
        wrong one is not right."""
        from_last = itertools.accumulate(self.num_checks_by_right[:0:-1])
        return tuple(from_last)[::-1]

    @property
    def used_pages(self) -> int:
        """Pages that the leases of sequences hold, private or shared."""
        return self.total_pages - self.free_pages - self.evictable_pages
