"""The loads that a command line asks for, each with prompts of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from minisgl_backend.errors import ConfigError
from minisgl_bench.serve.trace import TraceEntry, calls_of_trace, read_trace
from minisgl_kit.calls import Call, calls_of_file, random_calls
from minisgl_kit.loads import Load, closed_loop, poisson, replay

_Request = TypeVar("_Request", Call, TraceEntry)

_NUM_RANDOM = 64
_WARM_UP_VARIANT = 1_000_000
"""A variant of its own, so that no prompt of the warm-up is among those that are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The options of the command line; lengths in tokens, rates in requests a second."""

    concurrency: Sequence[int] = ()
    rate: Sequence[float] = ()
    trace: Path | None = None
    time_scale: Sequence[float] = ()
    block_size: int = 512
    prompts: Path | None = None
    requests: int | None = None
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    vocab_size: int = 1000
    seed: int = 0

    def loads(self) -> list[Load]:
        """In the order in which they are put on the server; raises ``ConfigError``."""
        if self.time_scale and not self.trace:
            raise ConfigError("--time-scale needs --trace")
        if self.prompts and self.trace:
            raise ConfigError("--prompts and --trace exclude each other")
        entries: list[TraceEntry] = []
        if self.trace:
            entries = self._first_of(read_trace(self.trace, block_size=self.block_size), self.trace)
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

    def _calls(self, entries: Sequence[TraceEntry], variant: int) -> list[Call]:
        if entries:
            return calls_of_trace(
                entries,
                block_size=self.block_size,
                vocab_size=self.vocab_size,
                seed=self.seed,
                variant=variant,
            )
        if self.prompts:
            calls = calls_of_file(self.prompts, max_tokens=self.output_len)
            return self._first_of(calls, self.prompts)
        return random_calls(
            self.requests or _NUM_RANDOM,
            input_length=self.input_len,
            output_length=self.output_len,
            range_ratio=self.range_ratio,
            vocab_size=self.vocab_size,
            seed=self.seed,
            variant=variant,
        )

    def _first_of(self, requests: list[_Request], path: Path) -> list[_Request]:
        """As many as are asked for, all of them by default."""
        if self.requests is not None and self.requests > len(requests):
            raise ConfigError(f"{path} has {len(requests)} requests, not {self.requests}")
        return requests[: self.requests]
