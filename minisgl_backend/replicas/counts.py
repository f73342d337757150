"""What a replica counts, over all processes that have served as it.

Must not know how counts arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from minisgl_backend.runtime.recorder import EngineStats
from minisgl_backend.scheduling.report import Counters

_NO_STATS: Final = EngineStats.sum([])


@dataclass(slots=True)
class ReplicaCounts:
    """``past`` sums up the processes that have ended, ``now`` is the last report of the one that
    serves."""

    past: EngineStats = _NO_STATS
    now: EngineStats = _NO_STATS

    def end(self) -> None:
        """The process has ended: what it counted stays, what it held is gone."""
        counted = {spec.name: getattr(self.now.scheduler, spec.name) for spec in fields(Counters)}
        gone = replace(_NO_STATS.scheduler, **counted)
        ended = replace(
            self.now, scheduler=gone, num_open=0, running_adapters=(), waiting_adapters=()
        )
        self.past = EngineStats.sum([self.past, ended])
        self.now = _NO_STATS

    def total(self) -> EngineStats:
        """The counts of all processes."""
        return EngineStats.sum([self.past, self.now])
