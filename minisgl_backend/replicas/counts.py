"""What a replica counts, over all processes that have served as it.

Must not know how counts arrive.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Final

from minisgl_backend.runtime.recorder import EngineStats
from minisgl_backend.scheduling.report import SchedulerStats

_NO_STATS: Final = EngineStats.sum([])


@dataclass(slots=True)
class ReplicaCounts:
    """``past`` sums up the processes that have ended, ``now`` is the last report of the one that
    serves."""

    past: EngineStats = _NO_STATS
    now: EngineStats = _NO_STATS

    def end(self) -> None:
        """The process has ended: what it counted stays, what it held is gone."""
        gone = SchedulerStats(
            **{
                **asdict(_NO_STATS.scheduler),
                "num_retractions": self.now.scheduler.num_retractions,
                "prefix_queries": self.now.scheduler.prefix_queries,
                "prefix_hits": self.now.scheduler.prefix_hits,
                "num_checks": self.now.scheduler.num_checks,
                "num_guesses": self.now.scheduler.num_guesses,
                "num_right_guesses": self.now.scheduler.num_right_guesses,
            }
        )
        ended = replace(
            self.now, scheduler=gone, num_open=0, running_adapters=(), waiting_adapters=()
        )
        self.past = EngineStats.sum([self.past, ended])
        self.now = _NO_STATS

    def total(self) -> EngineStats:
        """The counts of all processes."""
        return EngineStats.sum([self.past, self.now])
