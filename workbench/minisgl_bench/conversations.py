"""`minisgl bench conversations`: time to the first token of each turn of conversations.

Each conversation sends a turn when the answer to the previous one is complete. A turn's prompt is
the whole conversation so far: what was said and answered before, and new random tokens. All
conversations begin at once. ``--compare cache=naive`` shows what the prefix cache saves.
"""

from __future__ import annotations

import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.request import SamplingParams
from minisgl_backend.runtime.engine import Engine
from minisgl_bench.comparison import compare_option, measure_both
from minisgl_bench.engines import Collector, engine_facts, running_engine, submitted
from minisgl_bench.option_groups import option_group
from minisgl_bench.prompts import num_drawn_ids
from minisgl_bench.runs import p50_and_p99
from minisgl_kit.option_types import POSITIVE_INT, SEED, TEMPERATURE
from minisgl_kit.report import Report, json_option


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The load: ``conversations`` at once, each of ``turns``, each with ``said`` new tokens and
    ``answered`` generated ones."""

    conversations: int
    turns: int
    said: int
    answered: int
    prompt_seed: int

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.turns * (self.said + self.answered)

    def hold(self, engine: Engine, temperature: float) -> list[list[Collector]]:
        """The turns of each conversation."""
        sampling = SamplingParams(
            max_tokens=self.answered, temperature=temperature, ignore_eos=True
        )
        with ThreadPoolExecutor(self.conversations) as pool:
            one = functools.partial(self._one, engine, sampling)
            return list(pool.map(one, range(self.conversations)))

    def _one(self, engine: Engine, sampling: SamplingParams, index: int) -> list[Collector]:
        rng = np.random.default_rng([self.prompt_seed, index])
        end = num_drawn_ids(engine.info.vocab_size)
        history, sinks = np.empty(0, np.int32), []
        for _ in range(self.turns):
            said = rng.integers(0, end, self.said, dtype=np.int32)
            prompt = np.concatenate([history, said])
            sink = submitted(engine, prompt, sampling)
            sink.wait()
            sinks.append(sink)
            history = np.concatenate([prompt, np.array(sink.tokens, np.int32)])
        return sinks


def figures_of(held: list[list[Collector]], seconds: float) -> dict[str, Any]:
    """Times to the first token of all turns and of the last ones, and the throughput."""
    sinks = [sink for turns in held for sink in turns]
    first_ms = [(sink.times_s[0] - sink.sent_s) * 1e3 for sink in sinks]
    last_ms = [(turns[-1].times_s[0] - turns[-1].sent_s) * 1e3 for turns in held]
    return {
        **p50_and_p99("ttft", first_ms),
        "last_turn_p50_ms": statistics.median(last_ms),
        "seconds": seconds,
        "output_tokens_per_s": sum(len(sink.tokens) for sink in sinks) / seconds,
    }


_conversation_options = option_group(
    Conversations,
    "load",
    (
        click.option("--conversations", type=POSITIVE_INT, default=64, show_default=True),
        click.option("--turns", type=POSITIVE_INT, default=16, show_default=True),
        click.option(
            "--said", type=POSITIVE_INT, default=400, show_default=True, help="new tokens of a turn"
        ),
        click.option(
            "--answered",
            type=POSITIVE_INT,
            default=100,
            show_default=True,
            help="tokens of an answer",
        ),
        click.option("--prompt-seed", type=SEED, default=0, show_default=True),
    ),
)


@click.command(cls=EngineCommand)
@engine_options
@_conversation_options
@click.option("--temperature", type=TEMPERATURE, default=0.6, show_default=True, help="0 is greedy")
@compare_option
@json_option
def conversations(
    options: EngineOptions,
    load: Conversations,
    temperature: float,
    compare: str | None,
    json_path: Path | None,
) -> None:
    """Time to the first token of the turns of conversations held at once."""

    def measure(options: EngineOptions, _: Path | None) -> Report:
        with running_engine(options) as (engine, _executor):
            if load.longest > engine.info.max_sequence_length:
                raise ConfigError(
                    f"conversations of {load.longest} tokens need a max_sequence_length of as many"
                )
            facts = engine_facts(engine.info, options)
            facts["prompt_seed"], facts["temperature"] = load.prompt_seed, temperature
            report = Report("conversations, turn by turn", info=facts)
            few = Conversations(
                conversations=load.conversations,
                turns=1,
                said=load.said,
                answered=2,
                prompt_seed=load.prompt_seed + 1,
            )
            few.hold(engine, temperature)  # compiles the kernels that are left
            started_s = time.perf_counter()
            held = load.hold(engine, temperature)
            seconds = time.perf_counter() - started_s
            cached = sum(sink.num_cached_tokens for turns in held for sink in turns)
            each = sum(turn * (load.said + load.answered) + load.said for turn in range(load.turns))
            report.add(
                conversations=load.conversations,
                turns=load.turns,
                **figures_of(held, seconds),
                cached_share=cached / (load.conversations * each),
            )
        return report

    keys = ("conversations", "turns")
    measure_both(measure, options, compare, keys=keys, trace=None, json_path=json_path)
