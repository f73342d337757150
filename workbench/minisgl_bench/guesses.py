"""`minisgl bench guesses`: how often the engine would guess right in a text, without a model.

The planner serves a request whose every sample is the text's next token. So it guesses, and what it
guesses is judged, as if a model had written the text.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer

from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.plan import SampledTokens
from minisgl_backend.request import IntArray, Request, RequestId, SamplingParams
from minisgl_backend.scheduling.report import SchedulerStats
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from minisgl_kit.report import Report, json_option

_PAGE_SIZE = 16
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def replayed(prompt: IntArray, answer: IntArray, most_guesses: int) -> tuple[int, SchedulerStats]:
    """The number of decode steps in which a request with this ``prompt`` gets the tokens of
    ``answer`` after the first, both int32[num_tokens], and the planner's counts after them."""
    tokens = np.concatenate([prompt, answer])
    config = SchedulerConfig(speculative_tokens=most_guesses, max_prefill_tokens=len(tokens) + 1)
    scheduler = Scheduler(RadixCache(-(-len(tokens) // _PAGE_SIZE), _PAGE_SIZE), config)
    sampling = SamplingParams(max_tokens=len(answer))
    scheduler.add(Request(id=RequestId(0), prompt=prompt, sampling=sampling))
    num_steps = -1  # without the prompt's
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, SampledTokens(tokens[plan.sample_positions]))
        num_steps += 1
    return num_steps, scheduler.stats()


@click.command()
@click.argument("answers", nargs=-1, required=True, type=_FILE)
@click.option("--prompt", "prompt_file", type=_FILE, help="what the answers follow")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=DEMO_MODEL,
    show_default="the demo model's",
    help="folder with a tokenizer.json",
)
@click.option("--speculative-tokens", type=click.IntRange(1, 64), default=7, show_default=True)
@json_option
def guesses(
    answers: tuple[Path, ...],
    prompt_file: Path | None,
    tokenizer: Path,
    speculative_tokens: int,
    json_path: Path | None,
) -> None:
    """How often guesses would be right if a model wrote ANSWERS, which are text files.

    tokens a check: that a step with guesses gives on average; compare "tokens to gain" of `minisgl
    bench speculation`. tokens a step: of all steps.
    """
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def encoded(text: str) -> IntArray:
        return np.array(encoder.encode(text, add_special_tokens=False).ids, np.int32)

    prompt = encoded("\n" if prompt_file is None else prompt_file.read_text(encoding="utf-8"))
    report = Report("guesses at texts", info={"speculative_tokens": speculative_tokens})
    for file in answers:
        answer = encoded(file.read_text(encoding="utf-8"))
        if min(len(prompt), len(answer)) < 1:
            raise click.UsageError(f"{file} or the prompt is empty")
        num_steps, stats = replayed(prompt, answer, speculative_tokens)
        report.add(
            answer=file.name,
            tokens=len(answer),
            steps=num_steps,
            checks=stats.num_checks,
            guesses=stats.num_guesses,
            right=stats.num_right_guesses,
            tokens_a_check=round(1 + stats.num_right_guesses / max(1, stats.num_checks), 2),
            tokens_a_step=round((len(answer) - 1) / max(1, num_steps), 2),
        )
    report.emit(json_path)
