"""`minisgl bench serve`: the command line of the load generator."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minisgl_backend.cli.interrupt import INTERRUPTED
from minisgl_bench.serve.figures import Measured, check_answered, emit, figures_of, objectives_of
from minisgl_bench.serve.workload import BLOCK_SIZE, INPUT_LEN, OUTPUT_LEN, Workload
from minisgl_bench.servers import started
from minisgl_kit.calls import Outcome
from minisgl_kit.loads import Load, run
from minisgl_kit.option_types import SEED, TEMPERATURE, FiniteRange, numbers
from minisgl_kit.report import check_folder, json_option
from minisgl_kit.targets import OpenAITarget, Sampling, Target, TritonTarget

_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_count = click.IntRange(1)


@click.command()
@click.option("--url", help="HOST:PORT or http://HOST:PORT; by default a server is started")
@click.option(
    "--protocol",
    type=click.Choice(["grpc", "http", "openai"]),
    help="Triton's or OpenAI's; by default http if the URL begins with it, else grpc",
)
@click.option("--model", help="the ensemble; of an OpenAI endpoint the first that it offers")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="of an OpenAI endpoint")
@click.option(
    "--concurrency", default="", callback=numbers(int), help="requests in flight, as 1,4,16"
)
@click.option(
    "--rate", default="", callback=numbers(float), help="Poisson arrivals a second, as 1,2"
)
@click.option("--trace", type=_file, help="JSONL of timestamp, lengths and hash_ids, replayed")
@click.option("--time-scale", default="", callback=numbers(float), help="0.5 is twice as dense")
@click.option(
    "--block-size", type=_count, help=f"tokens a hash id stands for  [default: {BLOCK_SIZE}]"
)
@click.option("--prompts", type=_file, help="JSONL of prompt, messages or input_ids")
@click.option("--requests", type=_count, help="how many  [default: 64, or all of a file]")
@click.option("--input-len", type=_count, help=f"tokens of a random prompt  [default: {INPUT_LEN}]")
@click.option("--output-len", type=_count, help=f"tokens to make  [default: {OUTPUT_LEN}]")
@click.option(
    "--range-ratio",
    type=FiniteRange(0, 1, max_open=True),
    help="random lengths lie in length * (1 - ratio) .. length * (1 + ratio)  [default: 0]",
)
@click.option(
    "--vocab-size", type=_count, default=1000, show_default=True, help="random ids are below it"
)
@click.option(
    "--seed", type=SEED, default=0, show_default=True, help="of prompts, lengths and arrivals"
)
@click.option("--temperature", type=TEMPERATURE, default=0.0, show_default=True, help="0 is greedy")
@click.option("--ignore-eos/--stop-at-eos", default=True, show_default=True)
@click.option(
    "--cache-salt",
    metavar="TEXT",
    help="share the prefix cache with other runs of this salt  [default: a new one, which an OpenAI"
    " endpoint does not get]",
)
@click.option(
    "--warm-up", type=click.IntRange(0), default=8, show_default=True, help="requests not counted"
)
@click.option("--slo", default="", help="bounds in ms, as ttft=200,tpot=50,e2e=3000")
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="folder for PNGs")
@json_option
def serve(
    url: str | None,
    protocol: Literal["grpc", "http", "openai"] | None,
    model: str | None,
    api_key: str | None,
    temperature: float,
    ignore_eos: bool,
    cache_salt: str | None,
    warm_up: int,
    slo: str,
    plots: Path | None,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Latencies and throughput of a server under load over the network.

    Choose closed loops (--concurrency), Poisson arrivals (--rate) or a --trace; several levels make
    several runs. Without --url a server with the demo model is started.
    """
    objectives = objectives_of(slo)
    workload = Workload(**options)
    loads = workload.loads()
    if cache_salt is None and protocol != "openai":
        cache_salt = secrets.token_hex(8)
    sampling = Sampling(temperature, ignore_eos, cache_salt)
    if url is None and protocol not in (None, "grpc"):
        raise click.UsageError(f"--protocol {protocol} needs --url")
    if plots is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise click.UsageError("--plots needs matplotlib: pip install '.[bench]' in a clone")
        make_folder("--plots", plots)
    measured: list[Measured] = []
    interrupted = False
    with address_of(url) as address:

        def target() -> Target:
            if protocol == "openai":
                return OpenAITarget(address, model=model, api_key=api_key, sampling=sampling)
            return TritonTarget(
                address, protocol=protocol, model=model or "minisgl", sampling=sampling
            )

        try:
            warming = [workload.warm_up(warm_up)] if warm_up else []
            asyncio.run(_measure(target, warming, loads, objectives, measured))
        except KeyboardInterrupt:
            interrupted = True
        if measured:  # now, since an interrupt leaves no time after the server has stopped
            info = {"server": url or "its own, with the demo model"}
            title = "serve, interrupted" if interrupted else "serve"
            emit(measured, info, objectives, json_path, title=title)
            if plots is not None:
                from minisgl_bench.serve.plots import write_plots

                for path in write_plots(plots, measured, objectives):
                    click.echo(f"wrote {path}")
    if interrupted:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    check_answered(measured)


def make_folder(option: str, path: Path) -> None:
    """Make the folder of an option before anything is measured; raises ``click.UsageError`` if that
    fails, or if the folder takes no files."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_folder(path)
    except OSError as error:
        raise click.UsageError(f"{option} {path}: {error.strerror}") from None


@contextmanager
def address_of(url: str | None) -> Iterator[str]:
    """``url``, or else the gRPC address of a server of our own, which ends with the block."""
    if url is not None:
        yield url
        return
    with started({}) as server:
        yield f"127.0.0.1:{server.grpc_port}"


async def _measure(
    make_target: Callable[[], Target],
    warming: Sequence[Load],
    loads: Sequence[Load],
    objectives: Mapping[str, float],
    measured: list[Measured],
) -> None:
    """Append the result of each load to ``measured``, as soon as it is over; if it is cancelled,
    that of the requests that have ended."""
    target = make_target()
    try:
        for load in warming:
            outcomes = await run(target, load)
            if all(outcome.error for outcome in outcomes):
                told = f"{outcomes[0].error}: {outcomes[0].reason}"
                raise click.ClickException(f"the server answers no request: {told}")
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[errors]} errors"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        ) as progress:
            for load in loads:
                task = progress.add_task(load.label, total=len(load.calls), errors=0)
                ended: list[Outcome] = []
                num_errors = 0

                def on_done(
                    outcome: Outcome, task: Any = task, ended: list[Outcome] = ended
                ) -> None:
                    nonlocal num_errors
                    ended.append(outcome)
                    num_errors += outcome.error is not None
                    progress.update(task, advance=1, errors=num_errors)

                try:
                    await run(target, load, on_done)
                finally:
                    if ended:
                        measured.append(Measured(load, ended, figures_of(ended, objectives)))
    finally:
        await target.close()
