"""`minisgl check`: bad inputs, load, clients that leave and faults; one table, and an exit code.

Without addresses it starts servers of its own, with the demo model and few pages, in which it also
provokes faults; a server that others run gets no faults. Such a server should be otherwise idle,
since the check reads from its health port whether all rows and pages were given back.

Ctrl-C, SIGTERM and SIGHUP end it with the report so far, and with exit codes other than 0: what was
not checked has not passed.
"""

from __future__ import annotations

import random
import secrets
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Literal

import click
from minisgl_client.client import Client
from minisgl_client.errors import MinisglError

from minisgl_backend.cli.interrupt import INTERRUPTED
from minisgl_backend.cli.options import tritonserver_option
from minisgl_backend.errors import ConfigError
from minisgl_backend.server.installation import find_installation
from minisgl_check.asking import Extent
from minisgl_check.case import Case, Cases
from minisgl_check.catalogue import MEASURED, SCENES, entries, scenes_of
from minisgl_check.fault import Scene, Settings
from minisgl_check.own_server import started
from minisgl_check.restarts import restarts
from minisgl_check.target import Target
from minisgl_kit.option_types import FiniteRange
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
"""One round of a soak: so short that there are many rounds, each in a different order."""
_NUM_RESTARTS: Final = 10
"""Number of restarts in a whole check of our own server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The command's options, under its names for them."""

    url: str | None
    http_url: str | None
    health_url: str | None
    metrics_url: str | None
    short: bool
    figures: bool
    full: bool
    hours: float | None
    faults: tuple[str, ...]
    num_requests: int | None
    with_gateway: bool
    is_list: bool
    seed: int | None
    tritonserver: str | None
    json_path: Path | None

    @property
    def addresses(self) -> list[str]:
        """Those of a server that runs, all three of them; none for servers of the check's own."""
        return [one for one in (self.url, self.http_url, self.health_url) if one is not None]

    @property
    def extents(self) -> list[str]:
        """The extents that are given, by their names in the report."""
        flags = {"short": self.short, "figures": self.figures, "full": self.full}
        names = [name for name, is_given in flags.items() if is_given]
        return names if self.hours is None else [*names, f"{self.hours:g} hours"]

    @property
    def extent(self) -> Extent:
        if self.hours is not None:
            return SOAK
        return FIGURES if self.figures else FULL if self.full else SHORT

    def check(self) -> None:
        """Raise ``UsageError`` for options that do not go together."""
        addresses, extents, hours = self.addresses, self.extents, self.hours
        if len(extents) > 1:
            raise click.UsageError("--short, --figures, --full and --hours exclude each other")
        if len(addresses) not in (0, 3) or not all(addresses):  # perhaps an unset shell variable
            raise click.UsageError("--url, --http-url and --health-url go together")
        if self.metrics_url is not None and not addresses:
            raise click.UsageError("--metrics-url is for a server that runs: give --url, too")
        if self.tritonserver is not None and addresses:
            raise click.UsageError("--tritonserver is for servers of the check's own")
        if self.faults and (addresses or extents or self.with_gateway):
            raise click.UsageError(
                "--fault goes with servers of the check's own, and with no loads"
            )
        has_replicas = "F28" in self.faults or ((self.full or hours is not None) and not addresses)
        if self.num_requests is not None and not has_replicas:
            raise click.UsageError("--requests is for F28: give --fault F28, --full or --hours")


@click.command()
@click.option("--url", help="gRPC address of a server that runs, as HOST:PORT")
@click.option("--http-url", help="its HTTP address, as http://HOST:PORT")
@click.option("--health-url", help="its health port, as http://HOST:PORT")
@click.option("--metrics-url", help="its metrics, as http://HOST:PORT/metrics; else left out")
@click.option("--short", is_flag=True, help="90 s (the default)")
@click.option("--figures", is_flag=True, help="6 minutes, and times are judged too")
@click.option("--full", is_flag=True, help="15 minutes, with all faults")
@click.option("--hours", type=FiniteRange(0), help="repeat all loads for this many hours")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NUMBER",
    help="only this fault of the catalogue, and no loads; may be given again",
)
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(min=1),
    help="of F28, in place of its own number; signals in proportion",
)
@click.option(
    "--gateway", "with_gateway", is_flag=True, help="bad inputs through a gateway in --short, too"
)
@click.option("--list", "is_list", is_flag=True, help="print the catalogue of faults")
@click.option("--seed", type=int, help="of everything that is random; drawn if absent")
@tritonserver_option
@json_option
def check(**options: Any) -> None:
    """Try to break a server; exit code 1 if that succeeds."""
    asked = _Asked(**options)
    if asked.is_list:
        _print_catalogue()
        return
    asked.check()
    if not asked.addresses:
        find_installation(asked.tritonserver)  # a missing one is no fault of a server
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    click.echo(f"seed {seed}")
    extent = ", ".join(asked.faults or asked.extents or ["short"])
    info = {"seed": str(seed), "extent": extent}
    if commit := _commit():
        info["commit"] = commit
    report = Cases()
    is_whole = _gather(_cases(asked, random.Random(seed)), report)
    if not is_whole:
        info["extent"] += ", interrupted"
    report.emit(info, asked.json_path)
    if report.has_failed:
        raise click.exceptions.Exit(1)
    if not is_whole:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED)


def _cases(asked: _Asked, rng: random.Random) -> Iterator[Case]:
    """All cases, as they end."""
    extent, addresses = asked.extent, asked.addresses
    settings = Settings(
        rng=rng,
        is_timed=extent.is_timed,
        num_requests=asked.num_requests,
        tritonserver=asked.tritonserver,
    )
    if asked.faults:
        yield from _cases_of(scenes_of(asked.faults), settings)
        return
    from minisgl_check.run import run_cases  # brings torch, for which help need not wait

    with ExitStack() as stack:
        target: Target
        metrics = asked.metrics_url
        if addresses:
            target = _running(*addresses)
        else:
            target = own = stack.enter_context(started(tritonserver=asked.tritonserver))
            metrics = f"http://127.0.0.1:{own.server.metrics_port}/metrics"
        yield from run_cases(
            target,
            extent,
            rng,
            until_s=time.monotonic() + (asked.hours or 0.0) * 3600,
            with_gateway=asked.with_gateway or extent is not SHORT,
            metrics_url=metrics,
            say=click.echo,
        )
    if not addresses and extent is FIGURES:
        yield from _cases_of(MEASURED, settings)
    elif not addresses and extent is not SHORT:
        yield from _cases_of(SCENES, settings)
        yield restarts(_NUM_RESTARTS, tritonserver=asked.tritonserver)


def _cases_of(scenes: Iterable[Scene[Any]], settings: Settings) -> Iterator[Case]:
    for scene in scenes:
        yield from scene.cases(settings)


def _gather(cases: Iterator[Case], report: Cases) -> bool:
    """Add all cases up to the end, an interruption or an error. Returns whether there was no
    interruption.

    Raises ``ConfigError`` if a server cannot be started or reached.
    """
    try:
        for case in cases:
            report.add(case)
    except KeyboardInterrupt:
        return False
    except ConfigError:
        raise
    except Exception as error:  # a broken server may give any answer
        told = f"stumbled over {type(error).__name__}: {error}"
        report.add(Case("the check itself", failures=[told]))
    return True


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
    """A server that others started; ``ConfigError`` if a port does not answer, or it is not
    ready."""
    http_url, health_url = (
        (one if "://" in one else f"http://{one}").rstrip("/") for one in (http_url, health_url)
    )
    target = Target(url.removeprefix("grpc://"), http_url, health_url)
    try:
        is_ready = target.is_ready() and target.stats().num_positions > 0
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{health_url} does not answer as a health port does: {told}") from None
    if not is_ready:
        raise ConfigError(f"{health_url} says that the server is not ready")
    _check_answers("--url", target.grpc_address, "grpc")
    _check_answers("--http-url", target.http_url, "http")
    return target


def _check_answers(option: str, address: str, protocol: Literal["grpc", "http"]) -> None:
    try:
        with Client(address, protocol=protocol, retries=0) as client:
            answers = client.is_ready()
    except MinisglError:
        answers = False
    if not answers:
        raise ConfigError(f"{option} {address} does not answer as Triton's {protocol} port does")
