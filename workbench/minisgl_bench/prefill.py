"""`minisgl bench prefill`: time to the first token of a lone request, by prompt length, and how
much log-probabilities of the prompt add to it."""

from __future__ import annotations

import statistics
from pathlib import Path

import click
import numpy as np

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.limits import Limits
from minisgl_backend.request import IntArray, SamplingParams
from minisgl_backend.runtime.engine import Engine
from minisgl_bench.comparison import compare_option, measure_both
from minisgl_bench.engines import engine_facts, running_engine, submitted
from minisgl_bench.profiling import labelled, nvtx_option, profile_option, profiled
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.report import Report, json_option


def prompt_of(length: int, num_shared: int, *, seed: int, vocab_size: int) -> IntArray:
    """Random tokens; all prompts of a length share the first ``num_shared``."""
    shared = np.random.default_rng(length).integers(0, vocab_size, num_shared)
    rest = np.random.default_rng(seed).integers(0, vocab_size, length - num_shared)
    prompt: IntArray = np.concatenate([shared, rest]).astype(np.int32)
    return prompt


def first_token_ms(
    engine: Engine, prompt: IntArray, num_prompt_logprobs: int | None = None
) -> tuple[float, int]:
    """Milliseconds from submitting a prompt to its first token, which comes after all its
    log-probabilities, if they are asked for; and how many tokens were cached."""
    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, num_prompt_logprobs=num_prompt_logprobs
    )
    sink = submitted(engine, prompt, sampling)
    sink.wait()
    return (sink.times_s[0] - sink.sent_s) * 1e3, sink.num_cached_tokens


def figures_of(
    engine: Engine, prompts: list[IntArray], repeats: int, num_prompt_logprobs: int | None
) -> dict[str, float]:
    """The figures of ``repeats`` requests of one length, after one that compiles the kernels that
    are left. Takes their prompts, and those with log-probabilities, from the end of ``prompts``."""
    both = num_prompt_logprobs is not None
    first_token_ms(engine, prompts.pop())
    if both:
        first_token_ms(engine, prompts.pop(), num_prompt_logprobs)
    measured, scored_ms = [], []
    for _ in range(repeats):
        measured.append(first_token_ms(engine, prompts.pop()))
        if both:
            scored_ms.append(first_token_ms(engine, prompts.pop(), num_prompt_logprobs)[0])
    length, times_ms = len(prompts[0]), [ms for ms, _ in measured]
    median_ms = statistics.median(times_ms)
    figures = {
        "prompt_tokens": length,
        "cached_tokens": min(num_cached for _, num_cached in measured),
        "median_ms": round(median_ms, 3),
        "least_ms": round(min(times_ms), 3),
        "tokens_per_s": round(length / median_ms * 1e3),
    }
    if both:
        figures["prompt_logprobs_ms"] = round(statistics.median(scored_ms), 3)
        figures["times_as_long"] = round(statistics.median(scored_ms) / median_ms, 3)
    return figures


@click.command(cls=EngineCommand)
@engine_options
@click.option(
    "--length", "lengths", multiple=True, type=POSITIVE_INT, help="[default: 128 1024 4000]"
)
@click.option(
    "--shared-tokens",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="number of leading tokens of a prompt in the prefix cache, as in a conversation",
)
@click.option(
    "--prompt-logprobs",
    type=click.IntRange(0, Limits().logprobs),
    metavar="N",
    help="also with log-probabilities of the prompt and N alternatives a token, in turns",
)
@click.option(
    "--repeats", type=POSITIVE_INT, default=15, show_default=True, help="requests of a length"
)
@compare_option
@nvtx_option
@profile_option
@json_option
def prefill(
    options: EngineOptions,
    lengths: tuple[int, ...],
    shared_tokens: int,
    prompt_logprobs: int | None,
    repeats: int,
    compare: str | None,
    nvtx: bool,
    profile_path: Path | None,
    json_path: Path | None,
) -> None:
    """Time to the first token by prompt length, one request at a time."""
    lengths = lengths or (128, 1024, 4000)
    if not 0 <= shared_tokens < min(lengths):
        raise click.UsageError("--shared-tokens must be less than every length")
    if prompt_logprobs is not None and shared_tokens:
        raise click.UsageError("--prompt-logprobs takes no tokens from the prefix cache")
    both = prompt_logprobs is not None

    def measure(options: EngineOptions, trace: Path | None) -> Report:
        with running_engine(options, nvtx=nvtx) as (engine, _):
            report = Report("time to the first token", info=engine_facts(engine.info, options))
            for length in lengths:
                # each prompt is new except for its shared tokens, so that no more are cached
                prompts = [
                    prompt_of(
                        length,
                        shared_tokens,
                        seed=length * 1000 + index,
                        vocab_size=engine.info.vocab_size,
                    )
                    for index in range((repeats + 1) * (1 + both) + 1)
                ]
                report.add(batch=1, **figures_of(engine, prompts, repeats, prompt_logprobs))
                if trace is not None:
                    path = labelled(trace, str(length)) if len(lengths) > 1 else trace
                    with profiled(path):
                        first_token_ms(engine, prompts.pop(), prompt_logprobs)
        return report

    measure_both(
        measure,
        options,
        compare,
        keys=("batch", "prompt_tokens", "cached_tokens"),
        trace=profile_path,
        json_path=json_path,
    )
