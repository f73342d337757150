"""`minisgl check`: bad inputs, load, clients that leave and faults; one table, and an exit code.

Without addresses it starts a server of its own, with the demo model and few pages, in which faults
are provoked too; a server that others run gets no faults. It should have nothing else to do
meanwhile: what it must give back is read from its health port.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from minisgl_backend.bench.report import json_option
from minisgl_backend.check.canary import Canary
from minisgl_backend.check.case import Case, emit
from minisgl_backend.check.faults import Faults
from minisgl_backend.check.invariants import Invariants
from minisgl_backend.check.leavers import Leavers
from minisgl_backend.check.own_server import OwnServer, started
from minisgl_backend.check.refusals import bad_inputs
from minisgl_backend.check.shapes import Extent, Shapes
from minisgl_backend.check.target import Target
from minisgl_backend.errors import ConfigError

SHORT: Final = Extent(load_s=3.0, num_cut=30, num_churned=40, is_timed=False)
FULL: Final = Extent(load_s=60.0, num_cut=1000, num_churned=1500, is_timed=True)


@click.command()
@click.option("--url", help="gRPC address of a server that runs, as grpc://HOST:PORT")
@click.option("--http-url", help="its HTTP address, as http://HOST:PORT")
@click.option("--health-url", help="its health port, as http://HOST:PORT")
@click.option("--short", "extent", flag_value="short", default="short", help="90 s (the default)")
@click.option("--full", "extent", flag_value="full", help="15 minutes, and times are judged too")
@click.option("--hours", type=float, help="as --full, its load again and again for so long")
@click.option("--seed", type=int, help="of everything that is random; drawn where absent")
@click.option("--tritonserver", metavar="PATH", help="another tritonserver than the wheel's")
@json_option
def check(
    url: str | None,
    http_url: str | None,
    health_url: str | None,
    extent: str,
    hours: float | None,
    seed: int | None,
    tritonserver: str | None,
    json_path: Path | None,
) -> None:
    """Try to break a server; exit code 1 where that succeeds."""
    seed = secrets.randbelow(2**31) if seed is None else seed
    until_s = time.monotonic() + (hours or 0.0) * 3600
    sizes = FULL if hours is not None or extent == "full" else SHORT
    given = [one for one in (url, http_url, health_url) if one is not None]
    if len(given) not in (0, 3):
        raise ConfigError("--url, --http-url and --health-url go together")
    click.echo(f"seed {seed}")
    with ExitStack() as stack:
        if url and http_url and health_url:
            address = url.removeprefix("grpc://")
            target = Target(address, http_url.rstrip("/"), health_url.rstrip("/"))
        else:
            target = stack.enter_context(started(tritonserver=tritonserver))
        cases = list(run_cases(target, sizes, random.Random(seed), until_s, _say))
    emit(cases, {"seed": seed, "extent": "full" if sizes is FULL else "short"}, json_path)
    if any(case.failures for case in cases):
        raise click.exceptions.Exit(1)


def _say(case: Case) -> None:
    click.echo(f"{case.result:8}{case.name}: {case.what}")


def run_cases(
    target: Target,
    extent: Extent,
    rng: random.Random,
    until_s: float = 0.0,
    on_case: Callable[[Case], None] = lambda case: None,
) -> Iterator[Case]:
    """Every case in turn, the load again and again until ``until_s`` of the monotonic clock.

    After each the invariants are held against it.
    """
    canary = Canary(target)
    try:
        canary.record()
        leavers = Leavers(target, extent, rng)
        shapes = Shapes(target, extent, rng)
        shapes.steady()  # for libraries to start their threads
        invariants = Invariants(target)

        def judged(cases: list[Case]) -> Iterator[Case]:
            cases[-1].failures += invariants.violations()
            for case in cases:
                on_case(case)
            yield from cases

        loads: tuple[Callable[[], list[Case]], ...] = (
            lambda: bad_inputs(target, is_timed=extent.is_timed),
            lambda: [shapes.steady()],
            lambda: [shapes.burst()],
            lambda: [shapes.overload()],
            lambda: [leavers.cancel_storm()],
            lambda: [shapes.churn()],
            lambda: [shapes.small_pool()],
            lambda: [leavers.slow_readers(shapes)],
            lambda: [shapes.poisoned()],
        )
        while True:
            for load in loads:
                with canary.watching():
                    cases = load()
                yield from judged(cases)
            yield from judged([leavers.cancel_alone()])
            if time.monotonic() >= until_s:
                break
        yield from judged([canary.case()])
        if isinstance(target, OwnServer):
            faults = Faults(target, canary, is_timed=extent.is_timed)
            for fault in (
                faults.paused,
                lambda: faults.killed("llm_engine"),
                lambda: faults.killed("tokenizer"),
                lambda: faults.killed("detokenizer"),
                faults.server_killed,
            ):
                case = fault()
                invariants.renew()
                yield from judged([case])
    finally:
        canary.close()
