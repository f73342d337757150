"""`minisgl bench decode`: time of a decode step by batch size, in the engine and on the GPU alone.

For each batch size, that number of requests of equal length decode together. A step of the engine
is the time between two tokens of one of them, so it includes scheduling, launching and delivering.
If decode steps are captured, the same graph is then replayed alone, over the same contexts: the
ratio shows what the host costs. ``--eager`` measures the same steps in an engine without CUDA
graphs, too. ``--memory-tb-per-s`` puts beside them the time that memory alone takes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.plan import Decodes
from minisgl_backend.request import EMPTY, SamplingParams
from minisgl_backend.runtime.engine import Engine
from minisgl_bench.comparison import changed, compare_option, measure_both
from minisgl_bench.engines import check_batches, engine_facts, running_engine, submitted
from minisgl_bench.profiling import labelled, nvtx_option, profile_option, profiled
from minisgl_bench.settled_steps import SETTLING, settled_steps_ms, spare_tokens
from minisgl_kit.option_types import POSITIVE, POSITIVE_INT, TEMPERATURE
from minisgl_kit.report import Report, json_option

if TYPE_CHECKING:
    import torch

    from minisgl_backend.execution.ranks import RankExecutor

_FIRST_KERNEL: Final = "_begin_decode"
"""The kernel that begins each captured decode step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """One measurement: requests of ``context`` prompt tokens, over ``steps`` decode steps."""

    context: int
    steps: int
    temperature: float
    max_prefill_tokens: int

    def step_times_ms(self, engine: Engine, batch_size: int) -> list[float]:
        """Milliseconds of each step in which all requests decode."""
        rng = np.random.default_rng(batch_size)
        sinks = []
        spare = spare_tokens(batch_size, self.context, self.max_prefill_tokens)
        for index in range(batch_size):
            prompt = rng.integers(0, engine.info.vocab_size, self.context).astype(np.int32)
            sampling = SamplingParams(
                max_tokens=self.steps + spare,
                temperature=self.temperature,
                seed=index,
                ignore_eos=True,
            )
            sinks.append(submitted(engine, prompt, sampling))
        for sink in sinks:
            sink.wait()
        return settled_steps_ms(sinks[-1].times_s, self.steps)

    def settled_times_ms(self, engine: Engine, batch_size: int) -> list[float]:
        """The same after a short run, which compiles the kernels that are left."""
        replace(self, steps=4).step_times_ms(engine, batch_size)
        return self.step_times_ms(engine, batch_size)

    def eager_ms(self, options: EngineOptions, sizes: tuple[int, ...]) -> dict[int, float]:
        """The median step of each batch size in an engine without CUDA graphs."""
        eager = replace(
            options,
            cuda_graph_max_batch_size=0,
            cuda_graph_batch_sizes=None,
            cuda_graph_max_tokens=None,
        )
        with running_engine(eager) as (engine, _):
            return {size: statistics.median(self.settled_times_ms(engine, size)) for size in sizes}

    def row(
        self,
        batch_size: int,
        times_ms: list[float],
        replay_ms: float | None,
        eager_ms: float | None,
        memory_ms: float | None,
    ) -> dict[str, Any]:
        """A row of the report; what was not measured is a dash."""

        def told(number: float | None) -> float | str:
            return round(number, 3) if number else "-"

        begin, mean = self.context + SETTLING, statistics.fmean(times_ms)
        return {
            "batch": batch_size,
            "context": f"{begin}-{begin + self.steps}",
            "step_ms": told(statistics.median(times_ms)),
            "mean_ms": told(mean),
            "replay_ms": told(replay_ms),
            "of_replay": told(mean / replay_ms if replay_ms else None),
            "eager_ms": told(eager_ms),
            "tokens_per_s": round(batch_size / mean * 1e3),
            "memory_ms": told(memory_ms),
        }

    def replay_ms(self, executor: RankExecutor, batch_size: int) -> float | None:
        """Milliseconds of one replay of a captured decode step and nothing else; None if there is
        no graph for ``batch_size`` rows.

        Rows 0 .. batch_size - 1 advance from the context at which steps are counted, over pages of
        their own if there are enough. No request may be running, and there may be no other ranks:
        they would have to replay their graphs at the same time.
        """
        import torch

        from minisgl_backend.execution.executor import ModelExecutor

        assert isinstance(executor, ModelExecutor)
        graphs, rows_of = executor.graphs.decode, executor.stages.rows
        if graphs is None or not graphs.fits(batch_size):
            return None
        table, page_size = rows_of.table, rows_of.page_size
        begin = self.context + SETTLING

        def replay() -> tuple[torch.cuda.Event, torch.cuda.Event]:
            needed = -(-(begin + self.steps + 1) // page_size)
            pages = torch.arange(batch_size * needed, device=table.pages.device)
            pages = (pages % int(table.pages[table.dummy_row, 0])).view(batch_size, needed)
            table.pages[:batch_size, : min(needed, table.pages.shape[1])] = pages.to(torch.int32)
            if table.window_pages is not None:
                of_windows = pages % int(table.window_pages[table.dummy_row, 0])
                width = min(needed, table.pages.shape[1])
                table.window_pages[:batch_size, :width] = of_windows[:, :width].to(torch.int32)
            table.lengths[:batch_size] = begin
            rows = np.arange(batch_size, dtype=np.int32)
            positions = np.full(batch_size, begin, np.int32)
            no_grants = np.empty((3, 0), np.int32)
            graphs.replay(Decodes(rows, positions), EMPTY, no_grants)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for step in range(1, self.steps + 1):
                graphs.replay(Decodes(rows, positions + np.int32(step)), EMPTY, no_grants)
            last.record()
            return first, last

        first, last = executor.device.submit(replay).result()
        return float(first.elapsed_time(last)) / self.steps


def bytes_of_step(executor: RankExecutor, batch_size: int, context: int) -> int:
    """What a decode step of this rank must move (``step_bytes``)."""
    from minisgl_backend.execution.executor import ModelExecutor
    from minisgl_bench.step_bytes import bytes_of_decode

    assert isinstance(executor, ModelExecutor)
    return bytes_of_decode(executor.stages.model, batch_size, context)


def graph_facts(executor: RankExecutor) -> dict[str, Any]:
    """The cost of capturing this rank's CUDA graphs, of all kinds, for the ``info`` of a report;
    empty if there are none."""
    from minisgl_backend.execution.executor import ModelExecutor

    assert isinstance(executor, ModelExecutor)
    sets = executor.graphs, executor.adapter_graphs
    facts: dict[str, Any] = {}
    for name, each in (
        ("decode", [of.decode for of in sets]),
        ("chunk", [of.chunk for of in sets]),
    ):
        captured = [one for graphs in each if graphs is not None for one in graphs.captured]
        if captured:
            facts[f"{name}_graphs"] = sum(len(one.graphs) for one in captured)
            facts[f"{name}_capture_s"] = round(sum(one.seconds for one in captured), 2)
            num_bytes = sum(one.num_bytes for one in captured)
            facts[f"{name}_graphs_gib"] = round(num_bytes / 2**30, 3)
    return facts


@click.command(cls=EngineCommand)
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
@click.option("--eager", is_flag=True, help="also measure the steps without CUDA graphs")
@click.option(
    "--memory-tb-per-s",
    type=POSITIVE,
    help="also say how long a step's bytes take at this rate, such as the 4.8 of an H200",
)
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
    eager: bool,
    memory_tb_per_s: float | None,
    compare: str | None,
    nvtx: bool,
    profile_path: Path | None,
    json_path: Path | None,
) -> None:
    """Time of a decode step by batch size, compared with a bare replay of its CUDA graph."""
    sizes = sizes or (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for each in (options, *([changed(options, compare)] if compare else [])):
        check_batches(sizes, each)

    def measure(options: EngineOptions, trace: Path | None) -> Report:
        decoding = Decoding(
            context=context,
            steps=steps,
            temperature=temperature,
            max_prefill_tokens=options.max_prefill_tokens,
        )
        eager_ms = decoding.eager_ms(options, sizes) if eager else {}
        with running_engine(options, nvtx=nvtx) as (engine, executor):
            facts = engine_facts(engine.info, options) | graph_facts(executor)
            facts["temperature"] = temperature
            report = Report("decode, milliseconds a step", info=facts)
            for size in sizes:
                times = decoding.settled_times_ms(engine, size)
                is_alone = options.tensor_parallel_size == 1
                replay = decoding.replay_ms(executor, size) if is_alone else None
                memory = None
                if memory_tb_per_s is not None:
                    middle = context + SETTLING + steps // 2
                    memory = bytes_of_step(executor, size, middle) / memory_tb_per_s / 1e9
                report.add(**decoding.row(size, times, replay, eager_ms.get(size), memory))
                if trace is not None:
                    path = labelled(trace, f"batch-{size}") if len(sizes) > 1 else trace
                    with profiled(path, step=None if replay is None else _FIRST_KERNEL):
                        decoding.step_times_ms(engine, size)
        return report

    measure_both(
        measure,
        options,
        compare,
        keys=("batch", "context"),
        trace=profile_path,
        json_path=json_path,
    )
