"""`minisgl bench perf-analyzer`: Triton's own load generator, with the flags that streams need.

Prepares the inputs as clients of vllm_backend or tensorrtllm_backend would send them, runs the real
perf_analyzer once per level, and reads the times from its profile export: the latency that it
prints is that of first responses or of whole requests, depending on its version.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import click

from minisgl_backend.errors import ConfigError
from minisgl_bench.perf_analyzer_binary import PerfAnalyzer, find_perf_analyzer
from minisgl_bench.serve.command import address_of, make_folder
from minisgl_bench.serve.figures import Measured, check_answered, emit, figures_of, objectives_of
from minisgl_kit.calls import Call, Chunk, Outcome, calls_of_file
from minisgl_kit.loads import Load
from minisgl_kit.option_types import POSITIVE_INT, numbers
from minisgl_kit.report import json_option

Style: TypeAlias = Literal["vllm", "tensorrtllm"]

MODELS: Final[Mapping[Style, str]] = {"vllm": "minisgl", "tensorrtllm": "minisgl_batched"}
"""The ensemble that takes each style."""

_COUNTS: Final = ("num_output_tokens", "num_input_tokens", "num_cached_tokens")

_WORDS: Final = (
    "river stone market window letter garden bridge silver winter mountain paper engine music "
    "harbor forest candle kitchen library station island doctor summer pocket mirror shadow village"
).split()


@dataclass(frozen=True, slots=True)
class Level:
    """One run, at a number of requests in flight or a rate."""

    name: Literal["concurrency", "rate"]
    value: float

    @property
    def arguments(self) -> list[str]:
        """The level as perf_analyzer's arguments."""
        if self.name == "concurrency":
            return ["--concurrency-range", f"{self.value:g}"]
        rate = ["--request-rate-range", f"{self.value:g}"]
        return [*rate, "--request-distribution", "poisson"]


@click.command("perf-analyzer")
@click.option("--url", help="HOST:PORT of gRPC; by default a server is started")
@click.option(
    "--style",
    type=click.Choice(list(MODELS)),
    default="vllm",
    show_default=True,
    help="whose clients' inputs to send",
)
@click.option("--concurrency", default="", callback=numbers(int), help="in flight, as 1,4,16")
@click.option("--rate", default="", callback=numbers(float), help="Poisson arrivals a second")
@click.option("--requests", type=POSITIVE_INT, default=32, show_default=True, help="a level")
@click.option("--warm-up", type=click.IntRange(0), default=4, show_default=True)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSONL of prompt; by default random words",
)
@click.option(
    "--input-words",
    type=POSITIVE_INT,
    default=32,
    show_default=True,
    help="words of a random prompt",
)
@click.option(
    "--output-len", type=POSITIVE_INT, default=64, show_default=True, help="tokens to make"
)
@click.option(
    "--request-parameter",
    "parameters",
    multiple=True,
    metavar="NAME:VALUE:TYPE",
    help="sent with each request, as top_p:0.9:double",
)
@click.option("--slo", default="", help="bounds in ms, as ttft=200,tpot=50,e2e=3000")
@click.option("--seed", default=0, show_default=True, help="of random prompts")
@click.option("--binary", metavar="PATH", help="perf_analyzer itself  [default: on PATH]")
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="a wheel of tritonclient that holds it",
)
@click.option(
    "--export", type=click.Path(file_okay=False, path_type=Path), help="keep its exports here"
)
@json_option
def perf_analyzer(
    url: str | None,
    style: Style,
    concurrency: Sequence[int],
    rate: Sequence[float],
    requests: int,
    warm_up: int,
    prompts: Path | None,
    input_words: int,
    output_len: int,
    parameters: Sequence[str],
    slo: str,
    seed: int,
    binary: str | None,
    wheel: Path | None,
    export: Path | None,
    json_path: Path | None,
) -> None:
    """Latencies of the streaming ensemble, measured by NVIDIA's perf_analyzer."""
    objectives = objectives_of(slo)
    if export is not None:
        make_folder("--export", export)
    levels = [Level("concurrency", value) for value in concurrency]
    levels += [Level("rate", value) for value in rate]
    measured = []
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as name:
        folder = Path(name)
        tool = find_perf_analyzer(folder, binary=binary, wheel=wheel)
        with address_of(url) as address:
            arguments = ["-u", address, *flags(style, parameters)]
            for number, level in enumerate(levels or [Level("concurrency", 1)]):
                if prompts is None:
                    calls = random_texts(requests, input_words, output_len, f"{seed}.{number}")
                else:
                    calls = calls_of_file(prompts, max_tokens=output_len)[:requests]
                if warm_up and not number:
                    first = Level("concurrency", 1)
                    warm = random_texts(warm_up, input_words, output_len, f"{seed}.warm-up")
                    _run(tool, [*arguments, *first.arguments], style, warm, warm_up, folder)
                content = _run(tool, [*arguments, *level.arguments], style, calls, requests, folder)
                if export is not None:
                    file = export / f"{style}-{level.name}-{level.value:g}.json"
                    file.write_text(content, encoding="utf-8")
                outcomes = _outcomes_in(content)
                load = Load(level.name, level.value, calls)
                measured.append(Measured(load, outcomes, figures_of(outcomes, objectives)))
    emit(measured, {"model": MODELS[style]}, objectives, json_path, title="perf_analyzer")
    check_answered(measured)


def flags(style: Style, parameters: Sequence[str]) -> list[str]:
    """The flags of every run: asynchronous gRPC streams of a decoupled model."""
    arguments = ["-m", MODELS[style], "--service-kind", "triton", "-i", "grpc"]
    arguments += ["--streaming", "--async"]
    for parameter in parameters:
        arguments += ["--request-parameter", parameter]
    return arguments


def input_data(style: Style, calls: Sequence[Call]) -> dict[str, Any]:
    """The content of perf_analyzer's input file; it takes its entries in turn."""
    return {"data": [_inputs(style, call) for call in calls]}


def outcomes_of(export: Mapping[str, Any]) -> list[Outcome]:
    """The requests of a profile export; its times are in nanoseconds.

    It also holds tensors that were not asked for, with arbitrary content.
    """
    outcomes = []
    for request in export["experiments"][0]["requests"]:
        outcome = Outcome(request["timestamp"] / 1e9)
        arrivals = request["response_timestamps"]
        for now_ns, response in zip(arrivals, request["response_outputs"], strict=True):
            # the last response may be the empty one that says that it is the last
            if response.get("num_output_tokens"):
                counts = [response[name] for name in _COUNTS]
                outcome.add(Chunk(True, *counts), now_ns / 1e9)
        outcome.ended_s = arrivals[-1] / 1e9 if arrivals else outcome.due_s
        if not outcome.chunks_s:
            outcome.error, outcome.reason = "no response", "the export has none with tokens"
        outcomes.append(outcome)
    return outcomes


def _outcomes_in(content: str) -> list[Outcome]:
    """Raises ``click.ClickException`` if something of the export is missing."""
    try:
        outcomes = outcomes_of(json.loads(content))
    except (ValueError, LookupError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise click.ClickException(f"perf_analyzer's export is not whole: {told}") from error
    if not outcomes:
        raise click.ClickException("perf_analyzer's export has no requests")
    return outcomes


def random_texts(count: int, num_words: int, output_len: int, seed: str) -> list[Call]:
    """Prompts that no prefix cache has seen, unless it has seen this seed."""
    draw = random.Random(seed)
    return [
        Call(output_len, text=" ".join(draw.choices(_WORDS, k=num_words))) for _ in range(count)
    ]


def _inputs(style: Style, call: Call) -> dict[str, Any]:
    if call.text is None:
        raise ConfigError("perf_analyzer is given texts: each line of --prompts needs `prompt`")
    asked = {f"return_{name}": [True] for name in _COUNTS}
    common = {"text_input": [call.text], "stream": [True], **asked}
    if style == "tensorrtllm":
        lengths = {"max_tokens": [call.max_tokens], "min_length": [call.max_tokens]}
        return {**common, **lengths, "beam_width": [1], "temperature": [0.0]}
    # clients of vllm_backend send all numbers as strings
    sampling = {"max_tokens": str(call.max_tokens), "temperature": "0", "ignore_eos": True}
    return {**common, "sampling_parameters": [json.dumps(sampling)]}


def _run(
    tool: PerfAnalyzer,
    arguments: Sequence[str],
    style: Style,
    calls: Sequence[Call],
    count: int,
    folder: Path,
) -> str:
    """The profile export of one run; if the tool fails, its last lines are the error."""
    inputs, export = folder / "input.json", folder / "export.json"
    export.unlink(missing_ok=True)  # the tool refuses to overwrite one
    inputs.write_text(json.dumps(input_data(style, calls)), encoding="utf-8")
    command = [*arguments, "--input-data", str(inputs), "--request-count", str(count)]
    done = tool.run([*command, "--profile-export-file", str(export)])
    if done.returncode or not export.exists():
        raise click.ClickException(
            f"perf_analyzer failed: {_complaint(done.stderr or done.stdout)}"
        )
    return export.read_text(encoding="utf-8")


def _complaint(said: str) -> str:
    """The last lines before any pages of usage."""
    lines = [line for line in said.partition("\nUsage:")[0].splitlines() if line.strip()]
    return "\n".join(lines[-8:])
