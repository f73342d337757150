"""`minisgl check`: bad inputs, load, clients that leave and faults; one table, and an exit code.

Without addresses it starts servers of its own, with the demo model and few pages, in which faults
are provoked too; a server that others run gets no faults. That server should be otherwise idle,
since the check reads from its health port whether all rows and pages were given back.

Ctrl-C, SIGTERM and SIGHUP end it with the report so far.
"""

from __future__ import annotations

import math
import random
import secrets
import subprocess
import time
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from typing import Final

import click

from minisgl_backend.cli.options import tritonserver_option
from minisgl_backend.errors import ConfigError
from minisgl_check.asking import Extent
from minisgl_check.case import Case, Cases
from minisgl_check.catalogue import MEASURED, SCENES, entries
from minisgl_check.fault import Settings
from minisgl_check.own_server import OwnServer, started
from minisgl_check.restarts import restarts
from minisgl_check.run import run_cases
from minisgl_check.target import Target
from minisgl_kit.report import json_option

SHORT: Final = Extent(load_s=3.0, num_cut=30, num_churned=40, num_hostile=60, num_loads=60)
FIGURES: Final = Extent(
    load_s=15.0,
    num_cut=1000,
    num_churned=300,
    num_hostile=1000,
    num_loads=1000,
    is_timed=True,
    is_long=True,
)
FULL: Final = Extent(
    load_s=40.0,
    num_cut=1000,
    num_churned=1000,
    num_hostile=10_000,
    num_loads=10_000,
    is_long=True,
)
SOAK: Final = Extent(
    load_s=10.0, num_cut=200, num_churned=200, num_hostile=300, num_loads=300, is_long=True
)
"""One round of a soak: so short that there are many rounds, each in an order of its own."""
_NUM_RESTARTS: Final = 10
"""How many restarts a whole check of a server of our own has."""


@click.command()
@click.option("--url", help="gRPC address of a server that runs, as grpc://HOST:PORT")
@click.option("--http-url", help="its HTTP address, as http://HOST:PORT")
@click.option("--health-url", help="its health port, as http://HOST:PORT")
@click.option("--metrics-url", help="its metrics, as http://HOST:PORT/metrics; else left out")
@click.option("--short", is_flag=True, help="90 s (the default)")
@click.option("--figures", is_flag=True, help="6 minutes, and times are judged too")
@click.option("--full", is_flag=True, help="15 minutes, with all faults")
@click.option("--hours", type=click.FloatRange(0), help="all loads again and again for so long")
@click.option(
    "--gateway", "with_gateway", is_flag=True, help="bad inputs through a gateway in --short, too"
)
@click.option("--list", "is_list", is_flag=True, help="print the catalogue of faults")
@click.option("--seed", type=int, help="of everything that is random; drawn if absent")
@tritonserver_option
@json_option
def check(
    url: str | None,
    http_url: str | None,
    health_url: str | None,
    metrics_url: str | None,
    short: bool,
    figures: bool,
    full: bool,
    hours: float | None,
    with_gateway: bool,
    is_list: bool,
    seed: int | None,
    tritonserver: str | None,
    json_path: Path | None,
) -> None:
    """Try to break a server; exit code 1 if that succeeds."""
    if is_list:
        _print_catalogue()
        return
    if short + figures + full + (hours is not None) > 1:
        raise click.UsageError("--short, --figures, --full and --hours exclude each other")
    if hours is not None and not math.isfinite(hours):
        raise click.UsageError(f"--hours must be finite, got {hours}")
    addresses = [one for one in (url, http_url, health_url) if one]
    if len(addresses) not in (0, 3):
        raise click.UsageError("--url, --http-url and --health-url go together")
    seed = secrets.randbelow(2**31) if seed is None else seed
    rng = random.Random(seed)
    until_s = time.monotonic() + (hours or 0.0) * 3600
    extent = "figures" if figures else "full" if full else "short"
    extents = {"short": SHORT, "figures": FIGURES, "full": FULL}
    size = extents[extent] if hours is None else SOAK
    click.echo(f"seed {seed}")
    report = Cases()
    info = {"seed": str(seed), "extent": extent if hours is None else f"{hours:g} hours"}
    if commit := _commit():
        info["commit"] = commit
    try:
        with ExitStack() as stack:
            if url and http_url and health_url:
                target = _running(url, http_url, health_url)
            else:
                target = stack.enter_context(started(tritonserver=tritonserver))
                metrics_url = f"http://127.0.0.1:{target.server.metrics_port}/metrics"
            for case in run_cases(
                target,
                size,
                rng,
                until_s=until_s,
                with_gateway=with_gateway or size is not SHORT,
                metrics_url=metrics_url,
                say=click.echo,
            ):
                report.add(case)
        if isinstance(target, OwnServer) and size is not SHORT:
            settings = Settings(rng=rng, is_timed=size.is_timed, tritonserver=tritonserver)
            for scene in MEASURED if size is FIGURES else SCENES:
                for case in scene.cases(settings):
                    report.add(case)
            if size is not FIGURES:
                report.add(restarts(_NUM_RESTARTS, tritonserver=tritonserver))
    except KeyboardInterrupt:
        info["extent"] += ", interrupted"
    except ConfigError:
        raise
    except Exception as error:  # a broken server may give any answer
        told = f"stumbled over {type(error).__name__}: {error}"
        report.add(Case("the check itself", failures=[told]))
    report.emit(info, json_path)
    if report.has_failed:
        raise click.exceptions.Exit(1)


def _commit() -> str | None:
    """The commit of this module's repository; None if it is not in one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def _print_catalogue() -> None:
    for entry in entries():
        click.echo(f"{entry.number:5}{entry.extent:9}{entry.sentence}")


def _running(url: str, http_url: str, health_url: str) -> Target:
    """A server that others started; ``ConfigError`` if it is not ready."""
    target = Target(url.removeprefix("grpc://"), http_url.rstrip("/"), health_url.rstrip("/"))
    try:
        if target.is_ready() and target.stats().num_positions:
            return target
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{health_url} does not answer as a health port does: {told}") from None
    raise ConfigError(f"{health_url} says that the server is not ready")
