"""`minisgl check`: bad inputs, load, clients that leave and faults; one table, and an exit code.

Without addresses it starts a server of its own, with the demo model and few pages, in which faults
are provoked too; a server that others run gets no faults. It should have nothing else to do
meanwhile: what it must give back is read from its health port.
"""

from __future__ import annotations

import random
import secrets
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from minisgl_backend.bench.report import json_option
from minisgl_backend.check.case import Case, emit
from minisgl_backend.check.own_server import OwnServer, started
from minisgl_backend.check.restarts import restarts
from minisgl_backend.check.run import run_cases
from minisgl_backend.check.shapes import Extent
from minisgl_backend.check.target import Target
from minisgl_backend.errors import ConfigError

SHORT: Final = Extent(load_s=3.0, num_cut=30, num_churned=40, is_timed=False)
FULL: Final = Extent(load_s=60.0, num_cut=1000, num_churned=1500, is_timed=True)
_NUM_RESTARTS: Final = 10
"""With a whole check of a server of our own."""


@click.command()
@click.option("--url", help="gRPC address of a server that runs, as grpc://HOST:PORT")
@click.option("--http-url", help="its HTTP address, as http://HOST:PORT")
@click.option("--health-url", help="its health port, as http://HOST:PORT")
@click.option("--metrics-url", help="its metrics, as http://HOST:PORT/metrics; else left out")
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
    metrics_url: str | None,
    extent: str,
    hours: float | None,
    seed: int | None,
    tritonserver: str | None,
    json_path: Path | None,
) -> None:
    """Try to break a server; exit code 1 where that succeeds."""
    seed = secrets.randbelow(2**31) if seed is None else seed
    until_s = time.monotonic() + (hours or 0.0) * 3600
    size = FULL if hours is not None or extent == "full" else SHORT
    addresses = [one for one in (url, http_url, health_url) if one]
    if len(addresses) not in (0, 3):
        raise ConfigError("--url, --http-url and --health-url go together")
    click.echo(f"seed {seed}")
    cases: list[Case] = []
    with ExitStack() as stack:
        if url and http_url and health_url:
            target = _running(url, http_url, health_url)
        else:
            target = stack.enter_context(started(tritonserver=tritonserver))
            metrics_url = f"http://127.0.0.1:{target.server.metrics_port}/metrics"
        found = run_cases(
            target, size, random.Random(seed), until_s=until_s, metrics_url=metrics_url
        )
        for case in found:
            _say(case)
            cases.append(case)
    if size is FULL and isinstance(target, OwnServer):
        case = restarts(_NUM_RESTARTS, tritonserver=tritonserver)
        _say(case)
        cases.append(case)
    emit(cases, {"seed": seed, "extent": "full" if size is FULL else "short"}, json_path)
    if any(case.failures for case in cases):
        raise click.exceptions.Exit(1)


def _running(url: str, http_url: str, health_url: str) -> Target:
    """A server that others started; ``ConfigError`` where it is not ready."""
    target = Target(url.removeprefix("grpc://"), http_url.rstrip("/"), health_url.rstrip("/"))
    try:
        if target.is_ready() and target.stats().engine:
            return target
    except (OSError, ValueError) as error:
        raise ConfigError(f"{health_url} does not answer as a health port does: {error}") from None
    raise ConfigError(f"{health_url} says that the server is not ready")


def _say(case: Case) -> None:
    click.echo(f"{case.result:8}{case.name}: {case.what}")
