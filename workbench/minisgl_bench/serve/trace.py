"""Traces of requests as the Mooncake project publishes them, and the prompts that they stand for.

A trace is JSONL of ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens) and
``hash_ids``: one number for each block of the prompt, the last of which may be a part. Equal
numbers stand for equal blocks after equal prompts so far, so that equal leading numbers are a
shared prefix. The format and its blocks of 512 tokens are those of Qin et al., "Mooncake: Trading
More Storage for Less Computation" (FAST 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.errors import ConfigError
from minisgl_kit.calls import Call, json_lines


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace; ``at_s`` counts from the first one."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, *, block_size: int) -> list[TraceEntry]:
    """The entries by time; raises ``ConfigError`` with the line that is none."""
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
    """Prompts of random tokens that share what the trace says they share, and nothing else."""
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
    if not isinstance(timestamp, (int, float)) or isinstance(timestamp, bool) or timestamp < 0:
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
