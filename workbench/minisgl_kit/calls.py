"""What is asked: prompts of random tokens, or those of a file.

Knows prompts and lengths. Must not know when they are sent, nor over which protocol.

Random tokens are drawn anew for each ``variant``, of the same lengths: a server that is measured
under several loads must not find the prompts of the first in its prefix cache at the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Call:
    """One request to be made, with exactly one of the three kinds of prompt."""

    max_tokens: int
    input_ids: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def random_calls(
    count: int,
    *,
    input_length: int,
    output_length: int,
    range_ratio: float,
    vocab_size: int,
    seed: int,
    variant: int = 0,
) -> list[Call]:
    """Prompts of random tokens.

    Lengths are drawn evenly from ``length * (1 - range_ratio)`` to ``length * (1 + range_ratio)``.
    """
    lengths = np.random.default_rng(seed)
    tokens = np.random.default_rng([seed, variant])

    def drawn(length: int) -> list[int]:
        low = max(1, round(length * (1 - range_ratio)))
        high = max(low, round(length * (1 + range_ratio)))
        return [int(number) for number in lengths.integers(low, high + 1, size=count)]

    return [
        Call(num_out, input_ids=tokens.integers(0, vocab_size, size=num_in).tolist())
        for num_in, num_out in zip(drawn(input_length), drawn(output_length), strict=True)
    ]


def calls_of_file(path: Path, *, max_tokens: int) -> list[Call]:
    """The prompts of a JSONL file, in order.

    Each line is an object with one of ``prompt`` (text), ``messages`` and ``input_ids``, and
    optionally its own ``max_tokens``. Raises ``ConfigError`` for a line that is none, with its
    place, or if there are no lines.
    """
    calls = [_call(line, max_tokens, place) for place, line in json_lines(path)]
    if not calls:
        raise ConfigError(f"{path.name} is empty")
    return calls


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its place for messages; blank lines are skipped."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            place = f"{path.name}, line {number}"
            try:
                line = json.loads(text.decode("utf-8"))
            except ValueError as error:
                raise ConfigError(f"{place}: {error}") from None
            if not isinstance(line, dict):
                raise ConfigError(f"{place}: not an object")
            yield place, line


def _call(line: dict[str, Any], max_tokens: int, place: str) -> Call:
    kinds: dict[str, type] = {"prompt": str, "messages": list, "input_ids": list}
    if unknown := line.keys() - kinds.keys() - {"max_tokens"}:
        raise ConfigError(f"{place}: unknown name {min(unknown)!r}")
    given = [name for name, kind in kinds.items() if isinstance(line.get(name), kind)]
    if len(given) != 1:
        raise ConfigError(f"{place}: needs one of prompt, messages and input_ids")
    limit = line.get("max_tokens", max_tokens)
    if type(limit) is not int or limit < 1:
        raise ConfigError(f"{place}: max_tokens must be an integer of at least 1")
    return Call(limit, line.get("input_ids"), line.get("prompt"), line.get("messages"))
