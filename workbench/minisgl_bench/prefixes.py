"""`minisgl bench prefixes`: throughput of groups of requests that share a long beginning.

Like `offline`, except for the prompts: those of a group begin with the same random tokens, and each
goes on with its own. They are submitted at once, shuffled. With one group the beginning is a system
prompt; without a beginning the requests have nothing in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.request import SamplingParams
from minisgl_bench.comparison import compare_option, measure_both
from minisgl_bench.engines import engine_facts, running_engine_or_replicas
from minisgl_bench.option_groups import option_group
from minisgl_bench.profiling import profile_option, profiled
from minisgl_bench.prompts import Prompt, num_drawn_ids
from minisgl_bench.runs import figures_of, run_engine
from minisgl_kit.option_types import POSITIVE_INT, SEED, TEMPERATURE
from minisgl_kit.report import Report, json_option


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """The requests of a run: ``groups`` groups of ``each``. All of a group begin with ``shared``
    tokens, followed by ``own`` tokens each, and ``output_length`` tokens are generated."""

    groups: int
    each: int
    shared: int
    own: int
    output_length: int
    prompt_seed: int

    def prompts(self, vocab_size: int, *, run: int = 0) -> list[Prompt]:
        """The requests in random order; another ``run`` has other tokens."""
        rng = np.random.default_rng([self.prompt_seed, run])
        end = num_drawn_ids(vocab_size)
        found = []
        for _ in range(self.groups):
            beginning = rng.integers(0, end, self.shared, dtype=np.int32)
            for _ in range(self.each):
                own = rng.integers(0, end, self.own, dtype=np.int32)
                found.append(Prompt(np.concatenate([beginning, own]), self.output_length))
        return [found[index] for index in rng.permutation(len(found))]


_prefix_options = option_group(
    SharedPrefixes,
    "requests",
    (
        click.option("--groups", type=POSITIVE_INT, default=64, show_default=True),
        click.option(
            "--each", type=POSITIVE_INT, default=16, show_default=True, help="requests of a group"
        ),
        click.option(
            "--shared",
            type=click.IntRange(min=0),
            default=2048,
            show_default=True,
            help="tokens that all requests of a group begin with",
        ),
        click.option(
            "--own", type=POSITIVE_INT, default=128, show_default=True, help="tokens after them"
        ),
        click.option("--output-length", type=POSITIVE_INT, default=256, show_default=True),
        click.option(
            "--prompt-seed", type=SEED, default=0, show_default=True, help="of tokens and order"
        ),
    ),
)


@click.command(cls=EngineCommand)
@engine_options
@_prefix_options
@click.option("--temperature", type=TEMPERATURE, default=0.6, show_default=True, help="0 is greedy")
@click.option(
    "--repeats",
    type=POSITIVE_INT,
    default=1,
    show_default=True,
    help="runs, of other tokens each, on one engine",
)
@compare_option
@profile_option
@json_option
def prefixes(
    options: EngineOptions,
    requests: SharedPrefixes,
    temperature: float,
    repeats: int,
    compare: str | None,
    profile_path: Path | None,
    json_path: Path | None,
) -> None:
    """Throughput of groups of requests that share a prefix, all submitted at once, shuffled."""
    sampling = SamplingParams(temperature=temperature)

    def measure(options: EngineOptions, trace: Path | None) -> Report:
        with running_engine_or_replicas(options, traced=trace is not None) as engine:
            facts = engine_facts(engine.info, options)
            facts["prompt_seed"] = requests.prompt_seed
            facts["temperature"] = temperature
            report = Report("requests with shared prefixes", info=facts)
            vocab_size = engine.info.vocab_size
            few = requests.prompts(vocab_size, run=repeats)[: requests.each]
            run_engine(engine, [Prompt(prompt.tokens, 8) for prompt in few], sampling)
            for run in range(repeats):
                prompts = requests.prompts(vocab_size, run=run)
                before = engine.stats()
                sinks, seconds = run_engine(engine, prompts, sampling)
                after = engine.stats()
                figures = figures_of(prompts, sinks, seconds)
                num_steps = after.num_steps - before.num_steps
                cached = sum(sink.num_cached_tokens for sink in sinks)
                figures["mean_batch"] = figures["output_tokens"] / num_steps
                figures["cached_share"] = cached / figures["prompt_tokens"]
                report.add(
                    groups=requests.groups, each=requests.each, shared=requests.shared, **figures
                )
            if trace is not None:
                again = requests.prompts(vocab_size, run=repeats + 1)
                with profiled(trace):
                    run_engine(engine, again, sampling)
        return report

    keys = ("groups", "each", "shared", "requests", "prompt_tokens", "output_tokens", "longest")
    measure_both(measure, options, compare, keys=keys, trace=profile_path, json_path=json_path)
