"""`minisgl bench scaling`: one model on 1, 2, 4, ... ranks, with each communication library.

Each configuration runs `minisgl bench decode` and `minisgl bench offline` in processes of its own.
If one fails, or hangs for longer than ``--patience``, only its figures are missing; if all do, the
command fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.server.options import located
from minisgl_bench.own_process import option_arguments, run_bench
from minisgl_bench.prompts import RandomRequests, request_options
from minisgl_kit.option_types import POSITIVE, POSITIVE_INT, numbers
from minisgl_kit.report import Report, json_option


def _comms(_context: click.Context, _option: click.Parameter, value: str) -> Sequence[str]:
    """Refuses what is no library before anything is measured."""
    comms = value.split(",")
    try:
        for comm in comms:
            EngineOptions(comm=comm)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return comms


@click.command(cls=EngineCommand)
@engine_options
@click.option(
    "--sizes", default="1,2,4", show_default=True, callback=numbers(int), help="ranks, as 1,2,4"
)
@click.option(
    "--comms",
    default="nccl,pynccl,cuda",
    show_default=True,
    callback=_comms,
    help="how ranks talk",
)
@click.option(
    "--batches",
    default="1,64,256",
    show_default=True,
    callback=numbers(int),
    help="batch sizes of decode steps",
)
@click.option(
    "--context",
    type=POSITIVE_INT,
    default=256,
    show_default=True,
    help="prompt tokens of a decode request",
)
@click.option(
    "--steps",
    type=POSITIVE_INT,
    default=200,
    show_default=True,
    help="steps to measure a batch size",
)
@click.option(
    "--patience",
    type=POSITIVE,
    default=300.0,
    show_default=True,
    help="seconds for a configuration",
)
@request_options
@json_option
def scaling(
    options: EngineOptions,
    requests: RandomRequests,
    sizes: Sequence[int],
    comms: Sequence[str],
    batches: Sequence[int],
    context: int,
    steps: int,
    patience: float,
    json_path: Path | None,
) -> None:
    """Time of decode steps, throughput and scaling efficiency by the number of ranks."""
    options = located(options)
    decode = ["--context", str(context), "--steps", str(steps)]
    decode += ["--temperature", str(requests.temperature)]
    decode += [word for batch in batches for word in ("--batch-size", str(batch))]
    report = Report("scaling")
    any_measured = False
    for changed in configurations(options, sizes, comms):
        arguments = option_arguments(changed)
        steps_ms: dict[int, float] = {}
        tokens_per_s = 0.0
        try:
            found = run_bench(["decode", *arguments, *decode], timeout_s=patience)
            if not any_measured:
                report.info = found["info"]
            any_measured = True
            steps_ms = {row["batch"]: row["mean_ms"] for row in found["rows"]}
            found = run_bench(["offline", *arguments, *requests.arguments()], timeout_s=patience)
            tokens_per_s = found["tokens_per_s"]
        except click.ClickException as error:
            error.show()
        report.add(
            ranks=changed.tensor_parallel_size,
            comm=changed.comm or "-",
            **{f"batch_{batch}_ms": steps_ms.get(batch, "-") for batch in batches},
            offline_tokens_per_s=tokens_per_s or "-",
        )
    add_efficiency(report.rows)
    report.emit(json_path)
    if not any_measured:
        raise click.ClickException("no configuration could be measured")


def configurations(
    options: EngineOptions, sizes: Sequence[int], comms: Sequence[str]
) -> Iterator[EngineOptions]:
    """The options of each run; a single rank needs no library."""
    for size in sizes:
        for comm in comms if size > 1 else (None,):
            yield replace(options, tensor_parallel_size=size, comm=comm)


def add_efficiency(rows: list[dict[str, Any]]) -> None:
    """Compare each row with the first.

    ``of_first`` is the time of a step over that of the first; ``efficiency`` is the throughput per
    rank over that of the first.
    """
    first = rows[0]
    for row in rows:
        for name in [name for name in row if name.endswith("_ms")]:
            row[name.replace("_ms", "_of_first")] = _ratio(row[name], first[name])
        share = _ratio(row["offline_tokens_per_s"], first["offline_tokens_per_s"])
        row["efficiency"] = "-" if share == "-" else share * first["ranks"] / row["ranks"]


def _ratio(value: Any, first: Any) -> Any:
    return "-" if "-" in (value, first) else value / first
