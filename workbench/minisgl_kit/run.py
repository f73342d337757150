"""Puts a load on a target and takes the times.

Knows when calls are due and what clocks say; must not know protocols or figures. A run that is
cancelled closes its streams, so that the server stops working for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from minisgl_kit.calls import Call
from minisgl_kit.loads import Load
from minisgl_kit.outcome import Outcome
from minisgl_kit.targets import Refused, Target

OnDone = Callable[[Outcome], None]
_T = TypeVar("_T")


async def run(target: Target, load: Load, on_done: OnDone = lambda outcome: None) -> list[Outcome]:
    """What became of each call, in the order of the calls."""
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
        for index, call in waiting:  # shared: each call goes to one of the workers
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
    """All results; where one fails or this is cancelled, the others are cancelled, and awaited."""
    tasks = [asyncio.ensure_future(one) for one in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
