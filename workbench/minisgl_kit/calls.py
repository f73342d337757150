"""Calls and their outcomes: prompts of random tokens or from a file, chunks, times.

Knows prompts, lengths and times. Must not know when calls are sent, nor over which protocol.

Each ``variant`` has other random tokens of the same lengths: a server that is measured under
several loads must not find the prompts of one in its prefix cache at the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send, with exactly one of the three kinds of prompt."""

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
    optionally its own ``max_tokens``. Raises ``ConfigError`` for any other line, with its place, or
    if there are no lines.
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream; counts that it does not carry are None.

    ``num_output_tokens`` is of this chunk; the other two are of the whole request.
    """

    is_text: bool
    num_output_tokens: int | None = None
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class Outcome:
    """The result of one call; times are readings of ``time.perf_counter``.

    ``chunks_s`` are the arrivals of chunks with text or tokens. ``error`` is a code, or None;
    ``reason`` is its message. ``num_output_tokens`` is None if the server did not report it.
    """

    due_s: float
    chunks_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    reason: str = ""

    def add(self, chunk: Chunk, now_s: float) -> None:
        """Add a chunk that has arrived."""
        if chunk.is_text:
            self.chunks_s.append(now_s)
        if chunk.num_output_tokens is not None:
            self.num_output_tokens = (self.num_output_tokens or 0) + chunk.num_output_tokens
        if chunk.num_input_tokens is not None:
            self.num_input_tokens = chunk.num_input_tokens
        if chunk.num_cached_tokens is not None:
            self.num_cached_tokens = chunk.num_cached_tokens

    @property
    def ttft_ms(self) -> float | None:
        """The time to the first token; None if nothing came."""
        return 1e3 * (self.chunks_s[0] - self.due_s) if self.chunks_s else None

    @property
    def tpot_ms(self) -> float | None:
        """The time per output token; None for fewer than two tokens."""
        count = self.num_output_tokens
        if not self.chunks_s or count is None or count < 2:
            return None
        return 1e3 * (self.chunks_s[-1] - self.chunks_s[0]) / (count - 1)

    @property
    def e2e_ms(self) -> float:
        """The time from when it was due to the end of its stream."""
        return 1e3 * (self.ended_s - self.due_s)

    def meets(self, objectives: Mapping[str, float]) -> bool:
        """Whether it was answered within all bounds; a time that is None misses no bound."""
        times = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return self.error is None and all(
            (time_ms := times[name]) is None or time_ms <= bound_ms
            for name, bound_ms in objectives.items()
        )


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
