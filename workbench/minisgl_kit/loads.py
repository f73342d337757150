"""Loads, closed and open, and their runs against a target.

Closed loops (``concurrency``) show what a server can carry: each answer makes room for the next
request, so a slow server is asked less. Open loops (``rate``, ``time scale``) do not wait for
answers, as users do not. Must not know protocols or figures.

A run that is cancelled closes its streams, so that the server stops working for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from minisgl_kit.calls import Call, Outcome
from minisgl_kit.targets import Refused, Target


@dataclass(frozen=True, slots=True)
class Load:
    """Calls and their schedule: ``arrivals_s`` after the start, or a ``concurrency``.

    ``name`` and ``level`` label it in plots and tables, as ``rate`` and 4.0.
    """

    name: str
    level: float
    calls: Sequence[Call]
    concurrency: int | None = None
    arrivals_s: Sequence[float] | None = None

    @property
    def label(self) -> str:
        """Name and level in one string."""
        return f"{self.name} {self.level:g}"


def closed_loop(calls: Sequence[Call], concurrency: int) -> Load:
    """``concurrency`` requests in flight until all are answered."""
    return Load("concurrency", concurrency, calls, concurrency=concurrency)


def poisson(calls: Sequence[Call], rate: float, *, seed: int) -> Load:
    """Independent arrivals, ``rate`` per second on average."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, size=len(calls))
    return Load("rate", rate, calls, arrivals_s=np.cumsum(gaps_s).tolist())


def replay(calls: Sequence[Call], arrivals_s: Sequence[float], time_scale: float) -> Load:
    """The arrivals of a trace, stretched: a scale of 0.5 makes it twice as dense."""
    scaled = [arrival_s * time_scale for arrival_s in arrivals_s]
    return Load("time scale", time_scale, calls, arrivals_s=scaled)


OnDone = Callable[[Outcome], None]
_T = TypeVar("_T")


async def run(target: Target, load: Load, on_done: OnDone = lambda outcome: None) -> list[Outcome]:
    """The outcome of each call, in the order of the calls."""
    if load.arrivals_s is not None:
        return await _open_loop(target, load.calls, load.arrivals_s, on_done)
    assert load.concurrency is not None
    return await _closed_loop(target, load.calls, load.concurrency, on_done)


async def _open_loop(
    target: Target, calls: Sequence[Call], arrivals_s: Sequence[float], on_done: OnDone
) -> list[Outcome]:
    begin_s = time.perf_counter()

    async def at(call: Call, due_s: float) -> Outcome:
        await asyncio.sleep(due_s - time.perf_counter())
        return await _measure(target, call, due_s, on_done)

    pairs = zip(calls, arrivals_s, strict=True)
    return await _together([at(call, begin_s + arrival_s) for call, arrival_s in pairs])


async def _closed_loop(
    target: Target, calls: Sequence[Call], concurrency: int, on_done: OnDone
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    waiting = iter(enumerate(calls))

    async def worker() -> None:
        for index, call in waiting:  # shared: each call goes to one worker
            outcomes[index] = await _measure(target, call, time.perf_counter(), on_done)

    await _together([worker() for _ in range(min(concurrency, len(calls)))])
    return [outcomes[index] for index in range(len(calls))]


async def _measure(target: Target, call: Call, due_s: float, on_done: OnDone) -> Outcome:
    outcome = Outcome(due_s)
    try:
        async with aclosing(target.stream(call)) as chunks:
            async for chunk in chunks:
                outcome.add(chunk, time.perf_counter())
    except Refused as error:
        outcome.error, outcome.reason = error.code, error.reason
    outcome.ended_s = time.perf_counter()
    on_done(outcome)
    return outcome


async def _together(runs: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """All results; if one fails or this is cancelled, the others are cancelled, and awaited."""
    tasks = [asyncio.ensure_future(one) for one in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
