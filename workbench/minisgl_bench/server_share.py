"""`minisgl bench server-share`: throughput through tritonserver as a share of the engine's alone.

First `minisgl bench offline` runs in a process of its own, unless its figures are given. Then a
real tritonserver with the same options gets the same requests, as token ids, all at once over gRPC
streams from several processes, through the whole ensemble: its rate is the tokens over the time
from the first request sent to the last response.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from minisgl_backend.cli.options import EngineCommand, engine_options, tritonserver_option
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import EngineFailure
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.server.options import located, options_as_text
from minisgl_bench.clients import Answer, ask_at_once, requests_of
from minisgl_bench.own_process import option_arguments, run_bench
from minisgl_bench.prompts import RandomRequests, request_options
from minisgl_bench.runs import p50_and_p99
from minisgl_bench.servers import started
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.report import Report, json_option

_MODEL: Final = "minisgl"
_COUNTS: Final = ("requests", "prompt_tokens", "output_tokens")
"""What `bench offline` writes of its requests."""


@click.command("server-share", cls=EngineCommand)
@engine_options
@request_options
@click.option(
    "--clients",
    default=8,
    type=POSITIVE_INT,
    show_default=True,
    help="processes that send requests",
)
@click.option(
    "--alone",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="the --json of `bench offline` with the same options and requests, to leave that out",
)
@tritonserver_option
@json_option
def server_share(
    options: EngineOptions,
    requests: RandomRequests,
    clients: int,
    alone: Path | None,
    tritonserver: str | None,
    json_path: Path | None,
) -> None:
    """Throughput through tritonserver, also as a share of that of the engine alone."""
    options = located(options)
    arguments = [*option_arguments(options), *requests.arguments()]
    vocab_size = load_spec(Path(options.model)).vocab_size
    prompts = requests.prompts(vocab_size)
    expected = sum(prompt.num_output_tokens for prompt in prompts)
    if alone is None:
        offline = run_bench(["offline", *arguments])
    else:
        offline = _written_figures(alone)
        num_prompt = sum(len(prompt.tokens) for prompt in prompts)
        if offline["counts"] != [len(prompts), num_prompt, expected]:
            raise click.UsageError("--alone is of other requests")
    warm_up, measured = (
        requests_of(drawn, model=_MODEL, temperature=requests.temperature)
        for drawn in (requests.warm_up(vocab_size), prompts)
    )
    with started(options_as_text(options), tritonserver=tritonserver) as server:
        address = f"127.0.0.1:{server.grpc_port}"
        ask_at_once(address, warm_up, num_processes=clients)
        answers = ask_at_once(address, measured, num_processes=clients)
    num_tokens = sum(answer.num_tokens for answer in answers)
    if num_tokens != expected:
        raise EngineFailure(f"expected {expected} tokens from the server, got {num_tokens}")
    report = Report("through tritonserver", info={**offline["info"], "clients": clients})
    figures, rate = figures_of(answers), offline["tokens_per_s"]
    share = figures["tokens_per_s"] / rate
    report.add(requests=len(answers), **figures, offline_tokens_per_s=rate, share=share)
    report.emit(json_path)


def _written_figures(file: Path) -> dict[str, Any]:
    """What `bench offline` has written; raises ``click.UsageError`` if that is not in the file."""
    try:
        found = json.loads(file.read_text("utf-8"))
        return {
            "counts": [int(found[name]) for name in _COUNTS],
            "tokens_per_s": float(found["tokens_per_s"]),
            "info": dict(found["info"]),
        }
    except (ValueError, LookupError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise click.UsageError(f"--alone {file} is not of `bench offline`: {told}") from None


def figures_of(answers: list[Answer]) -> dict[str, float]:
    """The figures of a run; TTFT counts from each request's own start, in milliseconds."""
    num_tokens = sum(answer.num_tokens for answer in answers)
    seconds = max(a.arrived_s[-1] for a in answers) - min(a.sent_s for a in answers)
    each_ms = [
        1e3 * (a.arrived_s[-1] - a.arrived_s[0]) / (a.num_tokens - 1)
        for a in answers
        if a.num_tokens > 1
    ]
    return {
        "output_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        **p50_and_p99("ttft", [1e3 * (a.arrived_s[0] - a.sent_s) for a in answers]),
        **p50_and_p99("tpot", each_ms),
        "tokens_per_response": num_tokens / sum(len(a.arrived_s) for a in answers),
    }
