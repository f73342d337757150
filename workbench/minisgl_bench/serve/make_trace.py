"""A small synthetic trace of conversations: ``python -m minisgl_bench.serve.make_trace``.

Conversations start by a Poisson process. Each has one of a few system prompts; each turn's prompt
is the previous prompt, its answer and a new question, so that prefixes grow as in chats. The same
seed makes the same trace.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import click

from minisgl_kit.option_types import POSITIVE, POSITIVE_INT, SEED

BLOCK_SIZE = 32


def make_trace(*, conversations: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """The lines of the trace, by time; blocks are of 32 tokens, and lengths suit a small model."""
    draw = random.Random(seed)
    numbers = itertools.count()
    systems = [[next(numbers) for _ in range(num_blocks)] for num_blocks in (4, 8, 2)]
    lines = []
    begin_s = 0.0
    for _ in range(conversations):
        begin_s += draw.expovariate(conversations / seconds)
        at_s = begin_s
        blocks = list(draw.choice(systems))
        for _ in range(draw.randint(1, 5)):
            question, answer = draw.randint(10, 90), draw.randint(16, 64)
            length = len(blocks) * BLOCK_SIZE + question
            new = [next(numbers) for _ in range(-(-length // BLOCK_SIZE) - len(blocks))]
            lines.append(
                {
                    "timestamp": round(at_s * 1000),
                    "input_length": length,
                    "output_length": answer,
                    "hash_ids": blocks + new,
                }
            )
            # only whole blocks are shared; what is left over is part of the next question
            whole = (length + answer) // BLOCK_SIZE - len(blocks)
            blocks += [*new, *(next(numbers) for _ in range(whole))][:whole]
            at_s += answer / 20 + draw.expovariate(1 / 4)
    return sorted(lines, key=lambda line: line["timestamp"])


@click.command()
@click.option("--conversations", type=POSITIVE_INT, default=24, show_default=True)
@click.option(
    "--seconds", type=POSITIVE, default=60.0, show_default=True, help="over which they begin"
)
@click.option("--seed", type=SEED, default=0, show_default=True)
def main(conversations: int, seconds: float, seed: int) -> None:
    """Print a trace of blocks of 32 tokens as JSONL."""
    for line in make_trace(conversations=conversations, seconds=seconds, seed=seed):
        click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
