"""`minisgl bench decode`: time of a decode step by batch size, in the engine and on the GPU alone.

For each batch size, requests of equal length decode together. A step of the engine is the time
between two tokens of one of them, so scheduling, launching and delivering are in it. If decode
steps are captured, the same graph is then replayed alone, over the same contexts: the ratio
says what the host costs.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Final

import click
import numpy as np
import torch

from minisgl_backend.cli.options import POSITIVE_INT, TEMPERATURE, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.cuda_executor import CudaExecutor
from minisgl_backend.request import SamplingParams
from minisgl_backend.runtime.engine import Engine
from minisgl_bench.comparison import compare_option, measure_both
from minisgl_bench.engines import engine_facts, running_engine, submitted
from minisgl_bench.profiling import labelled, nvtx_option, profile_option, profiled
from minisgl_kit.report import Report, json_option

_SETTLING: Final = 8
"""Steps after the last prefill that are not counted."""
_FIRST_KERNEL: Final = "_begin_decode"
"""Begins each captured decode step."""


def step_times_ms(
    engine: Engine,
    batch_size: int,
    *,
    context: int,
    steps: int,
    temperature: float,
    max_prefill_tokens: int,
) -> list[float]:
    """Milliseconds of each of ``steps`` steps in which all requests decode."""
    rng = np.random.default_rng(batch_size)
    sinks = []
    # the first requests decode while the last ones are still prefilled, and must outlast these
    margin = -(-batch_size * context // max_prefill_tokens) + 2 * _SETTLING
    for index in range(batch_size):
        prompt = rng.integers(0, engine.info.vocab_size, context).astype(np.int32)
        sampling = SamplingParams(
            max_tokens=steps + margin, temperature=temperature, seed=index, ignore_eos=True
        )
        sinks.append(submitted(engine, prompt, sampling))
    for sink in sinks:
        sink.wait()
    # The last request to begin decodes with all others until the first one ends.
    times = np.array(sinks[-1].times_s[_SETTLING : _SETTLING + steps + 1]) * 1e3
    return [float(duration) for duration in np.diff(times)]


def replay_ms(executor: CudaExecutor, batch_size: int, *, context: int, steps: int) -> float | None:
    """Milliseconds of one replay of a captured decode step and nothing else; None if no graph
    has room for that number of rows.

    Rows 0 .. batch_size - 1 advance from ``context`` positions by ``steps``, over pages of their
    own as far as there are enough. No request may be running.
    """
    graphs, table = executor.graphs, executor.rows.table
    if graphs is None or not graphs.fits(batch_size, 0):
        return None
    dummy, max_pages = table.dummy_row, table.pages.shape[1]
    with executor.device.queue():
        needed = -(-(context + steps + 1) // executor.rows.page_size)
        pages = torch.arange(batch_size * needed, device=table.pages.device)
        pages = (pages % int(table.pages[dummy, 0])).view(batch_size, needed)
        table.pages[:batch_size, : min(needed, max_pages)] = pages.to(torch.int32)
        table.lengths[:batch_size] = context
        rows = np.arange(batch_size, dtype=np.int32)
        positions = np.full(batch_size, context, np.int32)
        no_grants = np.empty((3, 0), np.int32)
        graphs.replay(rows, positions, no_grants)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(executor.device.stream)
        for step in range(1, steps + 1):
            graphs.replay(rows, positions + np.int32(step), no_grants)
        last.record(executor.device.stream)
        last.synchronize()
    return float(first.elapsed_time(last)) / steps


@click.command()
@engine_options
@click.option(
    "--batch-size", "sizes", multiple=True, type=POSITIVE_INT, help="[default: 1 2 4 ... 256]"
)
@click.option(
    "--context",
    type=POSITIVE_INT,
    default=256,
    show_default=True,
    help="prompt tokens of a request",
)
@click.option(
    "--steps",
    type=POSITIVE_INT,
    default=200,
    show_default=True,
    help="steps to measure a batch size",
)
@click.option("--temperature", type=TEMPERATURE, default=0.6, show_default=True, help="0 is greedy")
@compare_option
@nvtx_option
@profile_option
@json_option
def decode(
    options: EngineOptions,
    sizes: tuple[int, ...],
    context: int,
    steps: int,
    temperature: float,
    compare: str | None,
    nvtx: bool,
    profile_path: Path | None,
    json_path: Path | None,
) -> None:
    """Time of a decode step by batch size, beside a replay of the same CUDA graph."""
    sizes = sizes or (1, 2, 4, 8, 16, 32, 64, 128, 256)
    if max(sizes) > options.max_running_requests:
        raise ConfigError(f"a batch of {max(sizes)} needs max_running_requests of as many")

    def measure(options: EngineOptions, trace: Path | None) -> Report:
        with running_engine(options, nvtx=nvtx) as (engine, executor):
            facts = {**engine_facts(engine.info, options), "temperature": temperature}
            report = Report("decode, milliseconds a step", info=facts)
            for size in sizes:
                times_of = partial(
                    step_times_ms,
                    engine,
                    size,
                    context=context,
                    temperature=temperature,
                    max_prefill_tokens=options.max_prefill_tokens,
                )
                times_of(steps=4)
                times = times_of(steps=steps)
                replay = None
                # other ranks would have to replay their graphs at the same time
                if isinstance(executor, CudaExecutor) and options.tensor_parallel_size == 1:
                    replay = replay_ms(executor, size, context=context + _SETTLING, steps=steps)
                mean = statistics.fmean(times)
                report.add(
                    batch=size,
                    context=f"{context + _SETTLING}-{context + _SETTLING + steps}",
                    step_ms=round(statistics.median(times), 3),
                    mean_ms=round(mean, 3),
                    replay_ms=round(replay, 3) if replay else "-",
                    of_replay=round(mean / replay, 3) if replay else "-",
                    tokens_per_s=round(size / mean * 1e3),
                )
                if trace is not None:
                    path = labelled(trace, f"batch-{size}") if len(sizes) > 1 else trace
                    with profiled(path, step=None if replay is None else _FIRST_KERNEL):
                        times_of(steps=steps)
        return report

    measure_both(
        measure,
        options,
        compare,
        keys=("batch", "context"),
        trace=profile_path,
        json_path=json_path,
    )
