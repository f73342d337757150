"""The cases and their order; after each the server must be as it was before.

Knows all parts of the check. A case that raises is a failed case: a broken server may give any
answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias

from minisgl_client.errors import MinisglError

from minisgl_backend.errors import MiniSGLError
from minisgl_check import records
from minisgl_check.adapters import AdapterTraffic
from minisgl_check.asking import Extent
from minisgl_check.canary import Canary
from minisgl_check.case import Case
from minisgl_check.catalogue import SHORT
from minisgl_check.endings import endings
from minisgl_check.fault import Settings, Stage
from minisgl_check.invariants import Invariants
from minisgl_check.leavers import Leavers
from minisgl_check.mixes import Mixes
from minisgl_check.own_server import OwnServer
from minisgl_check.rates import Rates
from minisgl_check.refusals import (
    bad_gateway_inputs,
    bad_inputs,
    hostile_grammars,
    send_largest,
    warm_grammars,
)
from minisgl_check.target import Target

_ALL_AT_ONCE: Final = 0.6

Job: TypeAlias = Callable[[], list[Case]]


def run_cases(
    target: Target,
    extent: Extent,
    rng: random.Random,
    *,
    until_s: float,
    with_gateway: bool,
    metrics_url: str | None,
    say: Callable[[str], None],
) -> Iterator[Case]:
    """The cases as they end: rounds of loads until ``until_s`` (monotonic clock), then faults.

    ``say`` gets the resources of the processes after each load. Faults are only for our own server;
    after Ctrl-C they are left out.
    """
    canary = Canary(target)
    try:
        try:
            canary.record()
        except (MinisglError, MiniSGLError) as error:
            yield Case("canary", failures=[f"could not be recorded: {error}"])
            return
        leavers = Leavers(target, extent, rng)
        rates, mixes = Rates(target, extent, rng), Mixes(target, extent, rng)
        send_largest(target)
        warm_grammars(target)
        traffic: AdapterTraffic | None = None
        if isinstance(target, OwnServer):
            traffic = AdapterTraffic(target, extent, rng)
            traffic.warm()
        rates.steady()  # libraries start their threads when they are first used
        invariants = Invariants(target)
        loads = _loads(target, extent, rng, rates=rates, mixes=mixes, leavers=leavers)
        if traffic is not None:
            come_and_go = traffic.come_and_go
            loads["adapters"] = lambda: [come_and_go()]
        if extent.is_long:
            loads["all at once"] = lambda: [_all_at_once(rates, leavers)]
        if with_gateway:
            loads["gateway"] = lambda: bad_gateway_inputs(target, is_timed=extent.is_timed)
        yield from _rounds(
            target, loads, invariants, canary, leavers, rng=rng, until_s=until_s, say=say
        )
        if metrics_url is not None:
            url = metrics_url
            yield from _held("metrics", lambda: [records.metrics(target, url)], invariants)
        if isinstance(target, OwnServer):
            yield records.log(list(target.server.log))
            settings = Settings(rng=rng, is_timed=extent.is_timed)
            stage = Stage(target, canary, invariants, settings)
            for fault in SHORT:
                yield fault.tried(stage)
    finally:
        canary.close()


def _rounds(
    target: Target,
    loads: Mapping[str, Job],
    invariants: Invariants,
    canary: Canary,
    leavers: Leavers,
    *,
    rng: random.Random,
    until_s: float,
    say: Callable[[str], None],
) -> Iterator[Case]:
    """The cases of the loads, and of what was watched beside them. There is one round, and others
    until ``until_s``. From the second on the order is random."""
    footprints = records.Footprints(target)
    num_rounds = 0

    def watched() -> list[Case]:
        return [canary.case(), footprints.case(is_judged=num_rounds > 2)]

    try:
        while num_rounds == 0 or time.monotonic() < until_s:
            num_rounds += 1
            names = list(loads)
            if num_rounds > 1:
                rng.shuffle(names)
            for name in names:
                yield from _held(name, loads[name], invariants, canary.watching())
                text = footprints.read(target)
                if num_rounds > 1:
                    say(text)
            yield from _held("cancels", lambda: [leavers.cancel_alone()], invariants)
    except KeyboardInterrupt:
        yield from watched()
        raise
    yield from watched()


def _loads(
    target: Target,
    extent: Extent,
    rng: random.Random,
    *,
    rates: Rates,
    mixes: Mixes,
    leavers: Leavers,
) -> dict[str, Job]:
    """The loads of every extent by name, in order."""
    return {
        "bad inputs": lambda: bad_inputs(target, is_timed=extent.is_timed),
        "hostile grammars": lambda: hostile_grammars(
            target, extent.num_hostile, rng, is_timed=extent.is_timed
        ),
        "endings": lambda: [endings(target)],
        "closed loop": lambda: [rates.steady()],
        "burst": lambda: [rates.burst()],
        "overload": lambda: [rates.overload()],
        "cancel storm": lambda: [leavers.cancel_storm()],
        "prefix churn": lambda: [mixes.churn()],
        "small pool": lambda: [mixes.small_pool()],
        "slow readers": lambda: [leavers.slow_readers(rates)],
        "poisoned": lambda: [mixes.poisoned(rates.capacity)],
    }


def _all_at_once(rates: Rates, leavers: Leavers) -> Case:
    """Callers at a pace that the server can keep, among clients that leave or do not read."""
    with ThreadPoolExecutor(2) as pool, leavers.silent():
        storm = pool.submit(leavers.cancel_storm, num_clients=1, share=0.1)
        case, outcomes = pool.submit(rates.open_loop, _ALL_AT_ONCE).result()
        other = storm.result()
    case.name = f"all at once, at {_ALL_AT_ONCE:g} of the capacity"
    case.count += other.count
    case.ended += other.ended
    case.failures += other.failures
    num_refused = sum(one.error is not None for one in outcomes)
    case.what = f"{num_refused} of {len(outcomes)} refused; {other.what} beside them"
    return case


def _held(
    name: str,
    job: Job,
    invariants: Invariants,
    beside: AbstractContextManager[None] | None = None,
) -> list[Case]:
    """Do a job; returns its cases, the last of which fails if something is left behind."""
    begin_s = time.perf_counter()
    cases: list[Case] = []
    try:
        with beside or nullcontext():
            cases = job()
        cases[-1].seconds = time.perf_counter() - begin_s
        cases[-1].failures += invariants.violations()
    except Exception as error:
        told = f"stumbled over {type(error).__name__}: {error}"
        cases = [*cases, Case(name, failures=[told])]
    return cases
