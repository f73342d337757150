"""`minisgl bench prefill`: time to the first token of a lone request, by prompt length."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import click
import numpy as np

from minisgl_backend.bench.comparison import compare_option, measure_both
from minisgl_backend.bench.engines import running_engine
from minisgl_backend.bench.facts import engine_facts
from minisgl_backend.bench.profiling import labelled, nvtx_option, profile_option, profiled
from minisgl_backend.bench.report import Report, json_option
from minisgl_backend.cli.options import engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import MiniSGLError
from minisgl_backend.request import Event, Failed, Finished, Generated, Request, SamplingParams
from minisgl_backend.runtime.engine import Engine


class _FirstToken:
    """The sink of one request: when its first token came."""

    def __init__(self) -> None:
        self.came_s = 0.0
        self.error: MiniSGLError | None = None
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Generated):
            self.came_s = time.perf_counter()
        elif isinstance(event, Failed):
            self.error = event.error
            self.done.set()
        elif isinstance(event, Finished):
            self.done.set()


def first_token_ms(engine: Engine, length: int, *, seed: int) -> float:
    """Milliseconds from submitting a prompt of random tokens to its first token."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, engine.info.vocab_size, length).astype(np.int32)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    sink = _FirstToken()
    started = time.perf_counter()
    engine.submit(Request(id=engine.new_id(), prompt=prompt, sampling=sampling), sink)
    sink.done.wait()
    if sink.error is not None:
        raise sink.error
    return (sink.came_s - started) * 1e3


@click.command()
@engine_options
@click.option("--length", "lengths", multiple=True, type=int, help="[default: 128 1024 4000]")
@click.option("--repeats", default=15, show_default=True, help="requests of a length")
@compare_option
@nvtx_option
@profile_option
@json_option
def prefill(
    options: EngineOptions,
    lengths: tuple[int, ...],
    repeats: int,
    compare: str | None,
    nvtx: bool,
    profile_path: Path | None,
    json_path: Path | None,
) -> None:
    """Time to the first token by prompt length, one request at a time."""
    lengths = lengths or (128, 1024, 4000)

    def measure(options: EngineOptions, trace: Path | None) -> Report:
        with running_engine(options, nvtx=nvtx) as (engine, _):
            report = Report("time to the first token", info=engine_facts(engine.info, options))
            for length in lengths:
                first_token_ms(engine, length, seed=length)
                # each prompt is new, so that the prefix cache does not know it
                seeds = range(length * 1000, length * 1000 + repeats)
                times = [first_token_ms(engine, length, seed=seed) for seed in seeds]
                report.add(
                    prompt_tokens=length,
                    median_ms=round(statistics.median(times), 3),
                    least_ms=round(min(times), 3),
                    tokens_per_s=round(length / statistics.median(times) * 1e3),
                )
                if trace is not None:
                    path = labelled(trace, str(length)) if len(lengths) > 1 else trace
                    with profiled(path):
                        first_token_ms(engine, length, seed=seeds.stop)
        return report

    measure_both(
        measure, options, compare, keys=("prompt_tokens",), trace=profile_path, json_path=json_path
    )
