"""The requests of throughput benchmarks: random prompts of given lengths, all at once.

Knows lengths and tokens; must not know what runs them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from minisgl_backend.request import IntArray
from minisgl_bench.option_groups import option_group
from minisgl_kit.option_types import POSITIVE_INT, SEED, TEMPERATURE


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of random tokens, and the number of tokens to generate after it."""

    tokens: IntArray
    num_output_tokens: int


def num_drawn_ids(vocab_size: int) -> int:
    """Random prompts are drawn from this many token ids, the first ones."""
    return min(10_001, vocab_size)


def random_prompts(
    count: int,
    *,
    input_length: tuple[int, int],
    output_length: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> list[Prompt]:
    """Prompts with lengths drawn evenly from the two ranges, both ends included.

    All prompts are drawn first, of the first 10,001 token ids, then all output lengths: with seed 0
    and the ranges 100 to 1024 these are the 256 requests that nano-vllm and mini-sglang publish
    figures for (142,827 tokens in, 133,966 out).
    """
    rng = random.Random(seed)
    most = num_drawn_ids(vocab_size) - 1
    prompts = [
        np.array([rng.randint(0, most) for _ in range(rng.randint(*input_length))], dtype=np.int32)
        for _ in range(count)
    ]
    return [Prompt(tokens, rng.randint(*output_length)) for tokens in prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRequests:
    """The requests of a run; ranges of lengths in tokens, both ends included."""

    requests: int
    input_length: tuple[int, int]
    output_length: tuple[int, int]
    temperature: float
    prompt_seed: int

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """The measured prompts."""
        return self._drawn(vocab_size, self.prompt_seed, self.output_length)

    def warm_up(self, vocab_size: int) -> list[Prompt]:
        """The same number of other tokens, so that no measured prompt is in the prefix cache."""
        return self._drawn(vocab_size, self.prompt_seed + 1, (8, 8))

    def again(self, vocab_size: int) -> list[Prompt]:
        """Other tokens and lengths once more, for a run that is traced."""
        return self._drawn(vocab_size, self.prompt_seed + 2, self.output_length)

    def arguments(self) -> list[str]:
        """The requests as command-line arguments."""
        return [
            *("--requests", str(self.requests)),
            *("--input-length", *map(str, self.input_length)),
            *("--output-length", *map(str, self.output_length)),
            *("--temperature", str(self.temperature)),
            *("--prompt-seed", str(self.prompt_seed)),
        ]

    def _drawn(self, vocab_size: int, seed: int, output_length: tuple[int, int]) -> list[Prompt]:
        return random_prompts(
            self.requests,
            input_length=self.input_length,
            output_length=output_length,
            vocab_size=vocab_size,
            seed=seed,
        )


def _span(_context: click.Context, _option: click.Parameter, span: tuple[int, int]) -> Any:
    if span[0] > span[1]:
        raise click.BadParameter(f"MIN {span[0]} exceeds MAX {span[1]}")
    return span


request_options = option_group(
    RandomRequests,
    "requests",
    (
        click.option(
            "--requests",
            type=POSITIVE_INT,
            default=16,
            show_default=True,
            help="requests in flight at once",
        ),
        click.option(
            "--input-length",
            nargs=2,
            type=POSITIVE_INT,
            default=(16, 64),
            show_default=True,
            metavar="MIN MAX",
            callback=_span,
        ),
        click.option(
            "--output-length",
            nargs=2,
            type=POSITIVE_INT,
            default=(64, 128),
            show_default=True,
            metavar="MIN MAX",
            callback=_span,
        ),
        click.option(
            "--temperature", type=TEMPERATURE, default=0.0, show_default=True, help="0 is greedy"
        ),
        click.option(
            "--prompt-seed",
            type=SEED,
            default=0,
            show_default=True,
            help="of the random prompts",
        ),
    ),
)
"""The options of ``RandomRequests``, which a click callback gets as ``requests``."""
