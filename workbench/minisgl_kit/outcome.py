"""What one call brought: chunks, and the outcome that they add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream; counts are None where it does not tell.

    ``num_output_tokens`` adds up over the chunks of an answer; the other two stand alone.
    """

    is_text: bool
    num_output_tokens: int | None = None
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class Outcome:
    """What became of one call; times are of ``time.perf_counter``.

    ``chunks_s`` are the arrivals of what brought text or tokens. ``error`` is a code, or None;
    ``reason`` is the sentence that came with it. ``num_output_tokens`` is None where the server did
    not tell.
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
        """One more chunk has arrived."""
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
        """None where nothing came."""
        return 1e3 * (self.chunks_s[0] - self.due_s) if self.chunks_s else None

    @property
    def tpot_ms(self) -> float | None:
        """None for fewer than two tokens."""
        count = self.num_output_tokens
        if not self.chunks_s or count is None or count < 2:
            return None
        return 1e3 * (self.chunks_s[-1] - self.chunks_s[0]) / (count - 1)

    @property
    def e2e_ms(self) -> float:
        """From when it was due to the end of its stream."""
        return 1e3 * (self.ended_s - self.due_s)

    def meets(self, objectives: Mapping[str, float]) -> bool:
        """Whether it was answered, within all bounds; a time that is None misses no bound."""
        times = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return self.error is None and all(
            (time_ms := times[name]) is None or time_ms <= bound_ms
            for name, bound_ms in objectives.items()
        )
