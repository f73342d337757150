"""How many tokens a request has taken, whichever API answers it."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_client.answer import Delta, Result


@dataclass(slots=True)
class Counts:
    """Tokens of a request so far; those of thoughts are included in those of the output."""

    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_thought_tokens: int = 0

    def add(self, part: Delta | Result, *, prompt: bool, num_thought_tokens: int = 0) -> None:
        """Add a choice's tokens; with ``prompt``, at its end, also those of its prompt."""
        self.num_output_tokens += part.num_output_tokens or 0
        self.num_thought_tokens += num_thought_tokens
        if prompt and part.finish_reason is not None:
            self.num_input_tokens += part.num_input_tokens or 0
            self.num_cached_tokens += part.num_cached_tokens or 0
