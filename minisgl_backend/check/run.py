"""Which cases there are, and in what order; after each the server must be as it was.

Knows all parts of the check. A case that stumbles, because a server that broke no longer says what
it should, is a case that failed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from minisgl_client.errors import MinisglError

from minisgl_backend.check import records
from minisgl_backend.check.canary import Canary
from minisgl_backend.check.case import Case
from minisgl_backend.check.faults import Faults
from minisgl_backend.check.invariants import Invariants
from minisgl_backend.check.leavers import Leavers
from minisgl_backend.check.own_server import OwnServer
from minisgl_backend.check.refusals import bad_inputs
from minisgl_backend.check.shapes import Extent, Shapes
from minisgl_backend.check.target import Target
from minisgl_backend.errors import MiniSGLError

Job: TypeAlias = Callable[[], list[Case]]


def run_cases(
    target: Target,
    extent: Extent,
    rng: random.Random,
    *,
    until_s: float = 0.0,
    metrics_url: str | None = None,
) -> Iterator[Case]:
    """The cases as they end; load again and again until ``until_s`` of the monotonic clock.

    Faults come last, and only where the server is our own.
    """
    canary = Canary(target)
    try:
        try:
            canary.record()
        except (MinisglError, MiniSGLError) as error:
            yield Case("canary", failures=[f"could not be recorded: {error}"])
            return
        leavers = Leavers(target, extent, rng)
        shapes = Shapes(target, extent, rng)
        shapes.steady()  # libraries start their threads when they are first used
        invariants = Invariants(target)
        memory = records.Memory()
        loads: dict[str, Job] = {
            "bad inputs": lambda: bad_inputs(target, is_timed=extent.is_timed),
            "closed loop": lambda: [shapes.steady()],
            "burst": lambda: [shapes.burst()],
            "overload": lambda: [shapes.overload()],
            "cancel storm": lambda: [leavers.cancel_storm()],
            "prefix churn": lambda: [shapes.churn()],
            "small pool": lambda: [shapes.small_pool()],
            "slow readers": lambda: [leavers.slow_readers(shapes)],
            "poisoned": lambda: [shapes.poisoned()],
        }
        num_rounds = 0
        while num_rounds == 0 or time.monotonic() < until_s:
            num_rounds += 1
            for name, job in loads.items():
                yield from _held(name, job, invariants, canary.watching())
                memory.read(target)
            yield from _held("cancels", lambda: [leavers.cancel_alone()], invariants)
        yield canary.case()
        yield memory.case(is_judged=num_rounds > 2)
        if metrics_url is not None:
            url = metrics_url
            yield from _held("metrics", lambda: [records.metrics(target, url)], invariants)
        if isinstance(target, OwnServer):
            yield records.log(list(target.server.log))
            for name, job in Faults(target, canary, is_timed=extent.is_timed).jobs().items():
                yield from _held(name, job, invariants, is_fault=True)
    finally:
        canary.close()


def _held(
    name: str,
    job: Job,
    invariants: Invariants,
    beside: AbstractContextManager[None] | None = None,
    *,
    is_fault: bool = False,
) -> list[Case]:
    """The cases of a job; what it leaves behind is a failure of the last one."""
    begin_s = time.perf_counter()
    try:
        with beside or nullcontext():
            cases = job()
        cases[-1].seconds = time.perf_counter() - begin_s
        if is_fault:
            invariants.renew()
        cases[-1].failures += invariants.violations()
    except Exception as error:
        cases = [Case(name, failures=[f"stumbled over {type(error).__name__}: {error}"])]
    return cases
