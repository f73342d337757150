"""`minisgl bench adapters`: what LoRA adapters cost: per step, in throughput, and on arrival.

The adapters are random ones for the model, all from the same files, each under a name of its own.
Three tables: requests that decode together, without adapters, all with one, and with as many as
there are slots; how soon the first token comes if the adapter is in a slot, or only in main memory;
and the longest gap between two tokens of streams while other requests, which have prompts too, go
through more adapters than there are slots.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import click
import numpy as np

from minisgl_backend.cli.interrupt import ended_by_ctrl_c
from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.request import Adapter, SamplingParams
from minisgl_backend.runtime.engine import Engine
from minisgl_bench.engines import (
    Collector,
    check_batches,
    engine_facts,
    running_engine,
    submitted,
)
from minisgl_bench.settled_steps import settled_steps_ms, spare_tokens
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.report import Report, json_option

_TRIES: Final = 8
_BESIDE: Final = 4
_OF_OTHERS: Final = 16
"""Requests that run beside the streams at once, and tokens of each."""


@click.command(cls=EngineCommand)
@engine_options
@click.option("--batch-size", "sizes", multiple=True, type=POSITIVE_INT, help="[default: 1 64 256]")
@click.option("--rank", default=16, type=POSITIVE_INT, show_default=True, help="of the adapters")
@click.option(
    "--context",
    default=256,
    type=POSITIVE_INT,
    show_default=True,
    help="prompt tokens of a request",
)
@click.option(
    "--steps", default=200, type=POSITIVE_INT, show_default=True, help="tokens of an answer"
)
@click.option(
    "--names", default=200, type=POSITIVE_INT, show_default=True, help="adapters that come and go"
)
@json_option
def adapters(
    options: EngineOptions,
    sizes: tuple[int, ...],
    rank: int,
    context: int,
    steps: int,
    names: int,
    json_path: Path | None,
) -> None:
    """What LoRA adapters cost: time of a step, throughput, first token, gaps in other streams."""
    sizes = sizes or (1, 64, 256)
    check_batches(sizes, options)
    options = replace(
        options,
        enable_lora=True,
        max_lora_rank=max(rank, options.max_lora_rank),
        max_cpu_loras=options.max_cpu_loras or max(names, options.max_loras),
    )
    spec = load_spec(resolve_model(options.model, options.model_source))
    with ended_by_ctrl_c():
        import torch

        from minisgl_kit.adapters import write_adapter

    with tempfile.TemporaryDirectory() as folder:
        path = write_adapter(Path(folder), spec, rank=rank, strength=0.1, dtype=torch.bfloat16)
        with running_engine(options) as (engine, _):
            known = [engine.adapters.load(f"adapter-{i}", str(path)) for i in range(names)]
            report = Report("LoRA adapters", info=engine_facts(engine.info, options))
            for size in sizes:
                spare = spare_tokens(size, context, options.max_prefill_tokens)
                slots = known[: options.max_loras]
                _add_mixes(report, engine, slots, size, context, steps, spare)
            report.emit()
            arrivals = Report("first token of a request with an adapter")
            _add_arrivals(arrivals, engine, known, options.max_loras, context)
            arrivals.emit()
            gaps = Report("streams beside requests that go through all adapters")
            _add_gaps(gaps, engine, known, context, steps)
            gaps.emit()
            report.beside = [arrivals, gaps]
            report.write(json_path)


def _add_mixes(
    report: Report,
    engine: Engine,
    slots: Sequence[Adapter],
    size: int,
    context: int,
    steps: int,
    spare: int,
) -> None:
    """Decode ``size`` requests without adapters, with one, and with those of all ``slots``."""
    mixes: dict[str, list[Adapter | None]] = {"none": [None], "one": [slots[0]], "all": [*slots]}
    if size == 1:
        del mixes["all"]
    base_ms = base_rate = 0.0
    for name, mix in mixes.items():
        asked = list(islice(cycle(mix), size))
        _decoded(engine, asked, context, 4, spare)
        step_ms, rate = _decoded(engine, asked, context, steps, spare)
        base_ms, base_rate = base_ms or step_ms, base_rate or rate
        report.add(
            batch=size,
            adapters=name,
            step_ms=round(step_ms, 3),
            of_base=round(step_ms / base_ms, 3),
            tokens_per_s=round(rate),
            of_base_rate=round(rate / base_rate, 3),
        )


def _decoded(
    engine: Engine, asked: Sequence[Adapter | None], context: int, steps: int, spare: int
) -> tuple[float, float]:
    """Milliseconds of a step in which all requests decode, and tokens per second of the run."""
    started = time.perf_counter()
    sinks = [_submitted(engine, adapter, context, steps + spare) for adapter in asked]
    for sink in sinks:
        sink.wait()
    seconds = time.perf_counter() - started
    step_ms = statistics.median(settled_steps_ms(sinks[-1].times_s, steps))
    return step_ms, len(asked) * (steps + spare) / seconds


def _add_arrivals(
    report: Report, engine: Engine, known: Sequence[Adapter], num_slots: int, context: int
) -> None:
    """First tokens of lone requests whose adapters are in a slot, and in main memory only: those
    that no request has named before. With no more adapters than slots there are none."""
    in_slot, in_memory = [], []
    for adapter in known[num_slots:][:_TRIES]:
        in_memory.append(_first_token_ms(engine, adapter, context))
        in_slot.append(_first_token_ms(engine, adapter, context))
    if not in_memory:
        _first_token_ms(engine, known[0], context)
        in_slot = [_first_token_ms(engine, known[0], context) for _ in range(_TRIES)]
    report.add(
        in_slot_ms=round(statistics.median(in_slot), 2),
        in_memory_ms=round(statistics.median(in_memory), 2) if in_memory else "-",
        longest_ms=round(max(in_memory), 2) if in_memory else "-",
    )


def _first_token_ms(engine: Engine, adapter: Adapter, context: int) -> float:
    sink = _submitted(engine, adapter, context, 1)
    sink.wait()
    return (sink.times_s[0] - sink.sent_s) * 1e3


def _add_gaps(
    report: Report, engine: Engine, known: Sequence[Adapter], context: int, steps: int
) -> None:
    """The gaps between tokens of eight streams: alone, alongside requests without adapters, a few
    at a time, and alongside as many with an adapter each."""
    num_tokens = steps + _OF_OTHERS * len(known) // _BESIDE  # the streams outlast the others
    for others in ([], [None] * len(known), known):
        streams = [_submitted(engine, None, context, num_tokens) for _ in range(8)]
        _wait_for_tokens(streams)
        begun = time.perf_counter()
        running: deque[Collector] = deque()
        for adapter in others:
            if len(running) == _BESIDE:
                running.popleft().wait()
            running.append(_submitted(engine, adapter, context, _OF_OTHERS))
        for sink in [*running, *streams]:
            sink.wait()
        own = (np.array(stream.times_s) for stream in streams)
        gaps_ms = np.concatenate([np.diff(times_s[times_s >= begun]) for times_s in own]) * 1e3
        report.add(
            requests=len(others),
            adapters=len(set(others) - {None}),
            median_gap_ms=round(float(np.median(gaps_ms)), 2),
            p99_gap_ms=round(float(np.percentile(gaps_ms, 99)), 2),
            longest_gap_ms=round(float(gaps_ms.max()), 2),
        )


def _wait_for_tokens(sinks: Sequence[Collector]) -> None:
    """Wait until all have a token."""
    while not all(sink.times_s or sink.done.is_set() for sink in sinks):
        time.sleep(0.001)


def _submitted(engine: Engine, adapter: Adapter | None, context: int, num_tokens: int) -> Collector:
    """Submit a request of random tokens."""
    rng = np.random.default_rng()
    prompt = rng.integers(0, engine.info.vocab_size, context).astype(np.int32)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.6, ignore_eos=True)
    return submitted(engine, prompt, sampling, adapter)
