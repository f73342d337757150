"""`minisgl bench guesses`: how often the engine would guess right in a text, without a model.

The planner serves a request whose every sample is the text's next token. So it guesses, and what it
guesses is judged, as if a model had written the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import sub
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer

from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import ConfigError
from minisgl_backend.plan import SampledTokens
from minisgl_backend.request import IntArray, Request, RequestId, SamplingParams
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from minisgl_backend.text.tokenizer_files import understood
from minisgl_kit.report import Report, json_option

_PAGE_SIZE = 16
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Replay:
    """How a request got the tokens of an answer after the first: the number of decode steps, how
    many of them were checks, and the numbers of guesses and of right ones, also by their place in
    a check."""

    num_steps: int
    num_checks: int
    num_guesses: int
    num_right: int
    num_right_by_place: tuple[int, ...]


def replayed(
    prompt: IntArray, answers: Sequence[IntArray], *, most_guesses: int, recent_tokens: int = 0
) -> Iterator[Replay]:
    """Serve a request with this ``prompt`` for each of ``answers``, one after another; all are
    int32[num_tokens]."""
    most_tokens = len(prompt) + max(map(len, answers))
    config = SchedulerConfig(
        speculative_tokens=most_guesses,
        speculative_recent_tokens=recent_tokens,
        max_prefill_tokens=max(most_tokens, 2 * (1 + most_guesses)),  # guesses get half of it
    )
    scheduler = Scheduler(RadixCache(-(-most_tokens // _PAGE_SIZE), _PAGE_SIZE), config)
    for number, answer in enumerate(answers):
        before, num_steps = scheduler.stats(), -1  # without the prompt's
        tokens, sampling = np.concatenate([prompt, answer]), SamplingParams(max_tokens=len(answer))
        scheduler.add(Request(id=RequestId(number), prompt=prompt, sampling=sampling))
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, SampledTokens(tokens[plan.sample_positions]))
            num_steps += 1
        after = scheduler.stats()
        yield Replay(
            num_steps,
            after.num_checks - before.num_checks,
            after.num_guesses - before.num_guesses,
            after.num_right_guesses - before.num_right_guesses,
            tuple(map(sub, after.num_right_by_place, before.num_right_by_place)),
        )


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is not a text in UTF-8") from error


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
@click.option("--speculative-recent-tokens", type=click.IntRange(0, 2**20), default=65536)
@json_option
def guesses(
    answers: tuple[Path, ...],
    prompt_file: Path | None,
    tokenizer: Path,
    speculative_tokens: int,
    speculative_recent_tokens: int,
    json_path: Path | None,
) -> None:
    """How often guesses would be right if a model wrote ANSWERS, which are text files, one after
    another.

    tokens a check: that a step with guesses gives on average; compare "tokens to save time" of
    `minisgl bench speculation`. tokens a step: of all steps. right by place: right guesses at the
    first place of a check, at the second, and so on.
    """
    try:
        with understood(tokenizer):
            encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error

    def encoded(text: str) -> IntArray:
        return np.array(encoder.encode(text, add_special_tokens=False).ids, np.int32)

    prompt = encoded("\n" if prompt_file is None else _text_of(prompt_file))
    texts = [encoded(_text_of(file)) for file in answers]
    if not all(map(len, [prompt, *texts])):
        raise click.UsageError("an answer or the prompt is empty")
    info = {
        "speculative_tokens": speculative_tokens,
        "speculative_recent_tokens": speculative_recent_tokens,
    }
    report = Report("guesses at texts", info=info)
    replays = replayed(
        prompt, texts, most_guesses=speculative_tokens, recent_tokens=speculative_recent_tokens
    )
    for file, text, replay in zip(answers, texts, replays, strict=True):
        report.add(
            answer=file.name,
            tokens=len(text),
            steps=replay.num_steps,
            checks=replay.num_checks,
            guesses=replay.num_guesses,
            right=replay.num_right,
            right_by_place=replay.num_right_by_place,
            tokens_a_check=round(1 + replay.num_right / max(1, replay.num_checks), 2),
            tokens_a_step=round((len(text) - 1) / max(1, replay.num_steps), 2),
        )
    report.emit(json_path)
