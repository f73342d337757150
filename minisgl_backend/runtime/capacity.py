"""Which requests can be served at all: checked once, when they are submitted.

The planner relies on this check: a request that fits the empty pool always makes progress. Must not
know which rows and pages are free at the moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.cache.pages import num_pages_for
from minisgl_backend.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The room for one request. The last sampled token needs no place in a page, as nothing is
    computed from it. A prompt that is only scored (``max_tokens`` 0) may fill the whole context."""

    max_sequence_length: int
    num_pages: int
    page_size: int

    def most_tokens(self, num_prompt_tokens: int) -> int:
        """The largest ``max_tokens`` that ``check`` accepts; below 1 if it accepts none but 0."""
        num_positions = self.num_pages * self.page_size + 1
        return min(self.max_sequence_length, num_positions) - num_prompt_tokens

    def check(self, *, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ``InvalidRequest`` if the request exceeds the context, or the pool when empty."""
        if num_prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty")
        if max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 0, got {max_tokens}")
        if num_prompt_tokens + min(max_tokens, 1) > self.max_sequence_length:
            raise InvalidRequest(
                f"prompt of {num_prompt_tokens} tokens does not fit the context "
                f"of {self.max_sequence_length}"
            )
        if num_prompt_tokens + max_tokens > self.max_sequence_length:
            raise InvalidRequest(
                f"max_tokens {max_tokens} with a prompt of {num_prompt_tokens} tokens exceeds the "
                f"context of {self.max_sequence_length}"
            )
        needed = num_pages_for(num_prompt_tokens + max(max_tokens, 1) - 1, self.page_size)
        if needed > self.num_pages:
            raise InvalidRequest(
                f"max_tokens {max_tokens} with a prompt of {num_prompt_tokens} tokens needs "
                f"{needed} pages of {self.page_size} tokens, the KV cache has {self.num_pages}"
            )
