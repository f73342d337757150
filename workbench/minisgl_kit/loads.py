"""How densely requests come: a fixed number in flight, or at moments of their own.

Closed loops (``concurrency``) show what a server can carry; each answer makes room for the next
request, so that a slow server is asked less. Open loops (``rate``, ``time scale``) do not wait for
answers, as users do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_kit.calls import Call


@dataclass(frozen=True, slots=True)
class Load:
    """Calls and their moments: ``arrivals_s`` from the start on, or so many in flight at a time.

    ``name`` and ``level`` are what plots and tables call it, as ``rate`` and 4.0.
    """

    name: str
    level: float
    calls: Sequence[Call]
    concurrency: int | None = None
    arrivals_s: Sequence[float] | None = None

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name} {self.level:g}"


def closed_loop(calls: Sequence[Call], concurrency: int) -> Load:
    """So many requests in flight until all are answered."""
    return Load("concurrency", concurrency, calls, concurrency=concurrency)


def poisson(calls: Sequence[Call], rate: float, *, seed: int) -> Load:
    """Requests that know nothing of each other, ``rate`` a second on average."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, size=len(calls))
    return Load("rate", rate, calls, arrivals_s=np.cumsum(gaps_s).tolist())


def replay(calls: Sequence[Call], arrivals_s: Sequence[float], time_scale: float) -> Load:
    """The moments of a trace, stretched: a scale of 0.5 is twice as dense."""
    scaled = [arrival_s * time_scale for arrival_s in arrivals_s]
    return Load("time scale", time_scale, calls, arrivals_s=scaled)
