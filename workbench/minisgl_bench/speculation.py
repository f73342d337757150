"""`minisgl bench speculation`: what a step that checks guesses costs, beside a plain decode step.

A bias forces one token, which prompts end with, so that all guesses that are looked up are right,
and each step checks as many as it may: with recurrent states some check fewer. Those of an MTP or
EAGLE-3 layer, which does not know of the bias, are wrong, and as many are checked. The same
requests run in an engine that guesses nothing. The ratio of the two durations is the number of
tokens that a check must give on average to save time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click
import numpy as np

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.request import SamplingParams
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_bench.engines import check_batches, engine_facts, running_engine
from minisgl_bench.prompts import Prompt, num_drawn_ids
from minisgl_bench.runs import run_engine
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.report import Report, json_option

_TOKEN: Final = 5
_REPEATED: Final = 8
"""Number of these at the end of a prompt, so that there are guesses from the first token on."""
_FORCED: Final = SamplingParams(temperature=0.0, logit_bias=((_TOKEN, 100.0),))
_BATCHES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Steps:
    """The mean duration of steps, and the mean number of tokens that one computes of a request."""

    ms: float
    num_tokens: float


def steps(engine: Engine, batch: int, *, prompt_tokens: int, output_tokens: int) -> Steps:
    """The steps of ``batch`` requests once all have their first token. Each gives each of them one
    token and those that were guessed right."""
    rng = np.random.default_rng()  # no prompt may be in the prefix cache
    num_ids = num_drawn_ids(engine.info.vocab_size)
    prompts = []
    for _ in range(batch):
        tokens = rng.integers(0, num_ids, prompt_tokens, dtype=np.int32)
        tokens[-_REPEATED:] = _TOKEN
        prompts.append(Prompt(tokens, output_tokens))
    before = engine.stats().scheduler
    sinks, _ = run_engine(engine, prompts, _FORCED)
    after = engine.stats().scheduler
    num_right = after.num_right_guesses - before.num_right_guesses
    num_guesses = after.num_guesses - before.num_guesses
    last = max(sinks, key=lambda sink: sink.times_s[0])
    num_steps = output_tokens - 1 - num_right / batch
    ms = 1e3 * (last.times_s[-1] - last.times_s[0]) / num_steps
    return Steps(ms, 1 + num_guesses / batch / num_steps)


@click.command(cls=EngineCommand)
@engine_options
@click.option(
    "--batch-size",
    "batch_sizes",
    multiple=True,
    type=POSITIVE_INT,
    help="requests at once  [default: 1 2 4 8]",
)
@click.option("--prompt-tokens", type=click.IntRange(min=16), default=500, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=2), default=800, show_default=True)
@json_option
def speculation(
    options: EngineOptions,
    batch_sizes: tuple[int, ...],
    prompt_tokens: int,
    output_tokens: int,
    json_path: Path | None,
) -> None:
    """Steps that check guesses beside plain ones. Needs --speculative-tokens, or
    --speculative-mtp-tokens."""
    batch_sizes = batch_sizes or _BATCHES
    if bool(options.speculative_tokens) == bool(options.speculative_mtp_tokens):
        raise click.UsageError(
            "exactly one of --speculative-tokens and --speculative-mtp-tokens must be above 0"
        )
    if max(batch_sizes) > options.speculative_max_requests:
        raise click.UsageError("--batch-size is at most --speculative-max-requests")
    of_step = 1 + options.most_guessed
    if output_tokens <= of_step:
        raise click.UsageError(f"--output-tokens must be above {of_step}, for a whole check")
    output_tokens = 1 + (output_tokens - 1) // of_step * of_step
    _check_budget(options, max(batch_sizes))
    check_batches(batch_sizes, options)

    def measured(options: EngineOptions) -> tuple[EngineInfo, list[Steps]]:
        lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        with running_engine(options) as (engine, _):
            for batch in batch_sizes:  # compiles the kernels that are left
                steps(engine, batch, **lengths)
            return engine.info, [steps(engine, batch, **lengths) for batch in batch_sizes]

    info, checks = measured(options)  # first, as the model may lack what is asked for
    defaults = EngineOptions()
    without = replace(
        options,
        speculative_tokens=0,
        speculative_mtp_tokens=0,
        speculative_mtp_model=None,
        speculative_max_requests=defaults.speculative_max_requests,
        speculative_recent_tokens=defaults.speculative_recent_tokens,
    )
    _, plain = measured(without)
    report = Report("steps that check guesses", info=engine_facts(info, options))
    for batch, alone, check in zip(batch_sizes, plain, checks, strict=True):
        report.add(
            batch=batch,
            guesses=options.most_guessed,
            plain_ms=round(alone.ms, 3),
            check_ms=round(check.ms, 3),
            tokens_to_save_time=round(check.ms / alone.ms, 2),
            times_as_fast_at_most=round(check.num_tokens * alone.ms / check.ms, 2),
        )
    report.emit(json_path)


def _check_budget(options: EngineOptions, batch: int) -> None:
    """Refuse what would leave a step no room for all guesses of ``batch`` requests."""
    least = 2 * batch * (1 + options.most_guessed)
    if least > options.max_prefill_tokens:
        raise click.UsageError(
            f"--max-prefill-tokens must be at least {least}, so that a step checks all guesses"
        )
