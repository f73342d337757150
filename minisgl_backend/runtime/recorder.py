"""What the engine reports about itself: counts that only grow, and observations for histograms.

Knows numbers only. The engine's threads write them; metrics and health reports read them. Must not
know where they are reported.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

from minisgl_backend.scheduling.report import SchedulerStats

StepKind: TypeAlias = Literal["prefill", "decode", "mixed"]
"""What a step computes: chunks of prompts, decoding rows (guesses included), or both."""

Refusal: TypeAlias = Literal["invalid", "unsupported", "queue_full", "draining", "down"]
"""Why a request was refused on arrival."""
REFUSALS: Final[tuple[Refusal, ...]] = get_args(Refusal)

_Key = TypeVar("_Key", bound=str)

_MOST_KEPT: Final = 4096
"""Observations of one kind that are kept between two readings; older ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts of the engine. All numbers but ``num_open`` and those of ``scheduler`` only grow."""

    scheduler: SchedulerStats
    num_open: int
    """Requests that are accepted and have not ended."""
    num_prompt_tokens: int
    num_generated_tokens: int
    """All tokens that requests got, including those of requests that were cancelled. What a row
    samples after its end does not count, nor what it samples for a prompt that is only embedded or
    scored."""
    num_cancelled: int
    rejected: Mapping[Refusal, int]
    """Requests refused on arrival, by reason."""
    failed: Mapping[str, int]
    """Accepted requests that ended with an error, by its code."""
    num_steps: int
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    """The names of the LoRA adapters of open requests: those that rows have, and the others."""

    @classmethod
    def sum(cls, parts: Sequence[EngineStats]) -> EngineStats:
        """The counts of several engines together; of none, all are 0."""

        def total(mappings: Sequence[Mapping[_Key, int]]) -> dict[_Key, int]:
            return {
                name: sum(mapping.get(name, 0) for mapping in mappings)
                for name in dict.fromkeys(name for mapping in mappings for name in mapping)
            }

        running = tuple(dict.fromkeys(name for part in parts for name in part.running_adapters))
        return cls(
            scheduler=SchedulerStats.sum([part.scheduler for part in parts]),
            num_open=sum(part.num_open for part in parts),
            num_prompt_tokens=sum(part.num_prompt_tokens for part in parts),
            num_generated_tokens=sum(part.num_generated_tokens for part in parts),
            num_cancelled=sum(part.num_cancelled for part in parts),
            rejected=total([part.rejected for part in parts]),
            failed=total([part.failed for part in parts]),
            num_steps=sum(part.num_steps for part in parts),
            running_adapters=running,
            waiting_adapters=tuple(
                dict.fromkeys(
                    name for part in parts for name in part.waiting_adapters if name not in running
                )
            ),
        )


def _newest() -> deque[Any]:
    return deque(maxlen=_MOST_KEPT)


@dataclass(slots=True)
class Observations:
    """Observations since the last reading, the oldest first; times are in seconds."""

    time_to_first_token_s: deque[float] = field(default_factory=_newest)
    time_per_output_token_s: deque[float] = field(default_factory=_newest)
    e2e_latency_s: deque[float] = field(default_factory=_newest)
    prompt_tokens: deque[int] = field(default_factory=_newest)
    generation_tokens: deque[int] = field(default_factory=_newest)
    step_s: deque[tuple[StepKind, float]] = field(default_factory=_newest)
    batch_size: deque[int] = field(default_factory=_newest)

    def extend(self, newer: Observations) -> None:
        """Add the observations of another reading, or of another engine."""
        for spec in fields(self):
            getattr(self, spec.name).extend(getattr(newer, spec.name))


class Recorder:
    """The engine's counters. Safe to write and read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observations = Observations()
        self._rejected: Counter[Refusal] = Counter()
        self._failed: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_cancelled = 0
        self._num_steps = 0

    def request_refused(self, reason: Refusal) -> None:
        """Count a request that was refused on arrival."""
        with self._lock:
            self._rejected[reason] += 1

    def request_failed(self, code: str) -> None:
        """Count an accepted request that ended with an error."""
        with self._lock:
            self._failed[code] += 1

    def request_cancelled(self) -> None:
        """Count a request that its caller cancelled."""
        with self._lock:
            self._num_cancelled += 1

    def request_admitted(self, num_prompt_tokens: int) -> None:
        """Count a request that has a row for the first time."""
        with self._lock:
            self._num_prompt_tokens += num_prompt_tokens
            self._observations.prompt_tokens.append(num_prompt_tokens)

    def request_started(self, time_to_first_token_s: float) -> None:
        """Count a request whose first token is known."""
        with self._lock:
            self._observations.time_to_first_token_s.append(time_to_first_token_s)

    def request_finished(self, *, num_tokens: int, e2e_s: float, decode_s: float) -> None:
        """Count a request that ended with an answer; ``decode_s`` is from first to last token."""
        with self._lock:
            observations = self._observations
            observations.generation_tokens.append(num_tokens)
            observations.e2e_latency_s.append(e2e_s)
            if num_tokens > 1:
                observations.time_per_output_token_s.append(decode_s / (num_tokens - 1))

    def step_committed(
        self, kind: StepKind, *, batch_size: int, num_tokens: int, duration_s: float
    ) -> None:
        """Count a step of ``batch_size`` rows that gave requests ``num_tokens`` tokens."""
        with self._lock:
            self._num_steps += 1
            self._num_generated_tokens += num_tokens
            self._observations.step_s.append((kind, duration_s))
            self._observations.batch_size.append(batch_size)

    def snapshot(self, scheduler: SchedulerStats, num_open: int) -> EngineStats:
        """All counts at this moment."""
        with self._lock:
            return EngineStats(
                scheduler=scheduler,
                num_open=num_open,
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_generated_tokens,
                num_cancelled=self._num_cancelled,
                rejected=dict(self._rejected),
                failed=dict(self._failed),
                num_steps=self._num_steps,
            )

    def add_observations(self, observations: Observations) -> None:
        """Add the observations of an engine that has a recorder of its own."""
        with self._lock:
            self._observations.extend(observations)

    def take_observations(self) -> Observations:
        """The observations since the last call."""
        with self._lock:
            taken, self._observations = self._observations, Observations()
            return taken
