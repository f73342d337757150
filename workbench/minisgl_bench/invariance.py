"""`minisgl bench invariance`: whether requests get the same tokens in any company.

Each request runs alone, with nothing cached; then all run together, cold; then together once more,
in another order, with their prompts in the cache; and in a second engine with pages for only some
of them, so that requests are retracted and come back. For each of these runs, the figure is the
number of requests that get the same tokens as alone. Random weights are the harder test: their
logits are close to each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.request import Request, SamplingParams
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.ports import Scheduler as SchedulerPort
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from minisgl_bench.comparison import compare_option, measure_both
from minisgl_bench.engines import Collector, engine_facts, running_engine
from minisgl_bench.prompts import Prompt, RandomRequests, request_options
from minisgl_kit.report import Report, json_option

_FEW_PAGES: Final = 0.4
"""The pages of the second engine, as a share of those that all requests need in the end."""


def _without_reserve(cache: KVCache, config: SchedulerConfig) -> SchedulerPort:
    """A planner that admits requests without room for their answers, and so has to retract some."""
    return Scheduler(cache, replace(config, reserve_tokens=0))


class _Requests:
    """The requests of a run, which differ in prompt, length and seed."""

    def __init__(self, prompts: Sequence[Prompt], temperature: float) -> None:
        self._prompts = prompts
        self._temperature = temperature

    def __len__(self) -> int:
        return len(self._prompts)

    def num_pages(self, page_size: int) -> list[int]:
        """How many pages each request fills in the end."""
        return [
            -(-(len(prompt.tokens) + prompt.num_output_tokens) // page_size)
            for prompt in self._prompts
        ]

    def submit(self, engine: Engine, index: int, salt: str) -> Collector:
        """Submit one request, which finds in the cache what others with this ``salt`` have left."""
        prompt, sink = self._prompts[index], Collector()
        sampling = SamplingParams(
            temperature=self._temperature,
            max_tokens=prompt.num_output_tokens,
            seed=index,
            ignore_eos=True,
        )
        request = Request(
            id=engine.new_id(), prompt=prompt.tokens, sampling=sampling, cache_salt=salt
        )
        engine.submit(request, sink)
        return sink

    def alone(self, engine: Engine) -> list[list[int]]:
        """The tokens of each, with no other in the engine and nothing cached."""
        found = []
        for index in range(len(self)):
            sink = self.submit(engine, index, f"alone-{index}")
            sink.wait()
            found.append(sink.tokens)
        return found

    def together(self, engine: Engine, salt: str, *, shuffled: bool = False) -> list[list[int]]:
        """The tokens of each, all submitted at once."""
        order = list(range(len(self)))
        if shuffled:
            random.Random(0).shuffle(order)
        sinks = {index: self.submit(engine, index, salt) for index in order}
        for sink in sinks.values():
            sink.wait()
        return [sinks[index].tokens for index in range(len(self))]


@click.command(cls=EngineCommand)
@engine_options
@request_options
@compare_option
@json_option
def invariance(
    options: EngineOptions, requests: RandomRequests, compare: str | None, json_path: Path | None
) -> None:
    """How many requests get the same tokens alone, together, from the cache and after retractions.

    --compare batch_invariant=false counts them without the option, too."""

    def measure(options: EngineOptions, _trace: Path | None) -> Report:
        with running_engine(options) as (engine, _):
            prompts = requests.prompts(engine.info.vocab_size)
            own = _Requests(prompts, requests.temperature)
            page_size = engine.info.page_size
            report = Report("the same tokens", info=engine_facts(engine.info, options))
            own.together(engine, "warm-up")
            started = time.perf_counter()
            alone = own.alone(engine)
            alone_s = time.perf_counter() - started
            runs = {"together": own.together(engine, "together")}
            runs["warm"] = own.together(engine, "together", shuffled=True)
        from minisgl_backend.parts import STANDARD  # brings torch, which help need not wait for

        of_each = own.num_pages(page_size)
        num_pages = max(int(_FEW_PAGES * sum(of_each)), *of_each)
        parts = replace(STANDARD, scheduler=_without_reserve)
        with running_engine(replace(options, num_pages=num_pages), parts=parts) as (engine, _):
            runs["retracted"] = own.together(engine, "retracted")
            num_retractions = engine.stats().scheduler.num_retractions
        figures: dict[str, Any] = {"requests": len(own)}
        figures["output_tokens"] = sum(map(len, alone))
        for name, tokens in runs.items():
            figures[name] = sum(map(list.__eq__, tokens, alone))
        figures["in_all"] = sum(
            all(tokens[index] == alone[index] for tokens in runs.values())
            for index in range(len(own))
        )
        figures["retractions"] = num_retractions
        figures["alone_s"] = alone_s
        report.add(**figures)
        return report

    keys = ("requests", "output_tokens")
    measure_both(measure, options, compare, keys=keys, trace=None, json_path=json_path)
