"""The loads that a command line asks for, each with its own prompts, including those of a trace.

Traces have the format of the Mooncake project: JSONL of ``timestamp`` (ms), ``input_length`` and
``output_length`` (tokens) and ``hash_ids``: one number for each block of the prompt; the last block
may be partial. Equal numbers stand for equal blocks after equal prefixes, so that equal leading
numbers are a shared prefix. The format and its blocks of 512 tokens are those of Qin et
al., "Mooncake: Trading More Storage for Less Computation" (FAST 2025).

Must not know servers, or how a load is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from minisgl_backend.errors import ConfigError
from minisgl_kit.calls import Call, calls_of_file, json_lines, random_calls
from minisgl_kit.loads import Load, closed_loop, poisson, replay

_NUM_RANDOM = 64
BLOCK_SIZE: Final = 512
INPUT_LEN: Final = 128
OUTPUT_LEN: Final = 64
_LATEST_MS = sys.float_info.max
_WARM_UP_VARIANT = 1_000_000
"""A variant of its own, so that no prompt of the warm-up is measured."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace; ``at_s`` counts from the first one."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


_Request = TypeVar("_Request", Call, TraceEntry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The options of the command line; lengths in tokens, rates in requests per second.

    Lengths that are None have defaults; those that a trace or a file of prompts gives are refused.
    """

    concurrency: Sequence[int] = ()
    rate: Sequence[float] = ()
    trace: Path | None = None
    time_scale: Sequence[float] = ()
    block_size: int | None = None
    prompts: Path | None = None
    requests: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float | None = None
    vocab_size: int = 1000
    seed: int = 0

    def loads(self) -> list[Load]:
        """The loads in the order of their runs; raises ``ConfigError``."""
        if self.time_scale and not self.trace:
            raise ConfigError("--time-scale needs --trace")
        if self.prompts and self.trace:
            raise ConfigError("--prompts and --trace exclude each other")
        self._check_lengths()
        entries: list[TraceEntry] = []
        if self.trace:
            entries = self._first_of(
                read_trace(self.trace, block_size=self._block_size), self.trace
            )
        concurrency, time_scale = self.concurrency, self.time_scale
        if not (concurrency or self.rate or time_scale):
            concurrency, time_scale = ((), (1.0,)) if self.trace else ((1, 4, 16), ())
        loads: list[Load] = []
        for level in concurrency:
            loads.append(closed_loop(self._calls(entries, len(loads)), level))
        for rate in self.rate:
            loads.append(poisson(self._calls(entries, len(loads)), rate, seed=self.seed))
        for scale in time_scale:
            calls = self._calls(entries, len(loads))
            loads.append(replay(calls, [entry.at_s for entry in entries], scale))
        return loads

    def warm_up(self, count: int) -> Load:
        """Short requests, all at once."""
        calls = random_calls(
            count,
            input_length=32,
            output_length=16,
            range_ratio=0,
            vocab_size=self.vocab_size,
            seed=self.seed,
            variant=_WARM_UP_VARIANT,
        )
        return closed_loop(calls, count)

    @property
    def _block_size(self) -> int:
        return self.block_size or BLOCK_SIZE

    def _check_lengths(self) -> None:
        """Raise ``ConfigError`` for lengths that are given elsewhere."""
        lengths = {"--input-len": self.input_len, "--range-ratio": self.range_ratio}
        if self.trace:
            lengths["--output-len"] = self.output_len
        for name, value in lengths.items():
            if value is not None and (self.trace or self.prompts):
                source = "--trace" if self.trace else "--prompts"
                raise ConfigError(f"{name} does not go with {source}, whose lines say it")
        if self.block_size is not None and not self.trace:
            raise ConfigError("--block-size needs --trace")

    def _calls(self, entries: Sequence[TraceEntry], variant: int) -> list[Call]:
        if entries:
            return calls_of_trace(
                entries,
                block_size=self._block_size,
                vocab_size=self.vocab_size,
                seed=self.seed,
                variant=variant,
            )
        if self.prompts:
            calls = calls_of_file(self.prompts, max_tokens=self.output_len or OUTPUT_LEN)
            return self._first_of(calls, self.prompts)
        return random_calls(
            self.requests or _NUM_RANDOM,
            input_length=self.input_len or INPUT_LEN,
            output_length=self.output_len or OUTPUT_LEN,
            range_ratio=self.range_ratio or 0.0,
            vocab_size=self.vocab_size,
            seed=self.seed,
            variant=variant,
        )

    def _first_of(self, requests: list[_Request], path: Path) -> list[_Request]:
        """As many as the option ``requests`` says, by default all."""
        if self.requests is not None and self.requests > len(requests):
            raise ConfigError(f"{path} has {len(requests)} requests, not {self.requests}")
        return requests[: self.requests]


def read_trace(path: Path, *, block_size: int) -> list[TraceEntry]:
    """The entries by time; raises ``ConfigError`` with the place of a line that is not an entry."""
    entries = [_entry(line, block_size, place) for place, line in json_lines(path)]
    if not entries:
        raise ConfigError(f"{path.name} is empty")
    first_s = min(entry.at_s for entry in entries)
    shifted = [
        TraceEntry(entry.at_s - first_s, entry.input_length, entry.output_length, entry.hash_ids)
        for entry in entries
    ]
    return sorted(shifted, key=lambda entry: entry.at_s)


def calls_of_trace(
    entries: Sequence[TraceEntry],
    *,
    block_size: int,
    vocab_size: int,
    seed: int,
    variant: int = 0,
) -> list[Call]:
    """Prompts of random tokens that share what the trace says, and nothing else."""
    blocks: dict[int, list[int]] = {}

    def block(hash_id: int) -> list[int]:
        if hash_id not in blocks:
            tokens = np.random.default_rng([seed, variant, 1 + hash_id])
            blocks[hash_id] = tokens.integers(0, vocab_size, size=block_size).tolist()
        return blocks[hash_id]

    # requests without blocks share nothing
    unshared = np.random.default_rng([seed, variant, 0])
    calls = []
    for entry in entries:
        prompt = [token for hash_id in entry.hash_ids for token in block(hash_id)]
        if not prompt:
            prompt = unshared.integers(0, vocab_size, size=entry.input_length).tolist()
        calls.append(Call(entry.output_length, input_ids=prompt[: entry.input_length]))
    return calls


def _entry(line: dict[str, Any], block_size: int, place: str) -> TraceEntry:
    timestamp = line.get("timestamp")
    if (
        not isinstance(timestamp, (int, float))
        or isinstance(timestamp, bool)
        or not 0 <= timestamp <= _LATEST_MS  # NaN is refused, too
    ):
        raise ConfigError(f"{place}: timestamp must be a number of at least 0")
    for name in ("input_length", "output_length"):
        if type(line.get(name)) is not int or line[name] < 1:
            raise ConfigError(f"{place}: {name} must be an integer of at least 1")
    hash_ids = line.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(i) is int and i >= 0 for i in hash_ids):
        raise ConfigError(f"{place}: hash_ids must be a list of integers of at least 0")
    num_blocks = -(-line["input_length"] // block_size)
    if hash_ids and len(hash_ids) != num_blocks:
        raise ConfigError(
            f"{place}: {line['input_length']} tokens are {num_blocks} blocks of {block_size}, "
            f"but there are {len(hash_ids)} hash_ids; see --block-size"
        )
    return TraceEntry(
        timestamp / 1000, line["input_length"], line["output_length"], tuple(hash_ids)
    )
