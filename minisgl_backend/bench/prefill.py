"""`minisgl bench prefill`: time to the first token of a lone request, by prompt length."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import click
import numpy as np

from minisgl_backend.bench.report import Report, engine_facts, json_option
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
@json_option
def prefill(
    options: EngineOptions, lengths: tuple[int, ...], repeats: int, json_path: Path | None
) -> None:
    """Time to the first token by prompt length, one request at a time."""
    from minisgl_backend.build import build_engine

    engine = build_engine(options)
    report = Report("time to the first token", info=engine_facts(engine.info))
    try:
        for length in lengths or (128, 1024, 4000):
            first_token_ms(engine, length, seed=length)
            # each prompt is new, so that the prefix cache does not know it
            times = [
                first_token_ms(engine, length, seed=length * 1000 + repeat)
                for repeat in range(repeats)
            ]
            report.add(
                prompt_tokens=length,
                median_ms=round(statistics.median(times), 3),
                least_ms=round(min(times), 3),
                tokens_per_s=round(length / statistics.median(times) * 1e3),
            )
    finally:
        engine.close(drain_s=0)
    report.emit(json_path)
