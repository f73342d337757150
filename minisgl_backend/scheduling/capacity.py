"""Whether a request can ever run: one check, made both at the engine's door and by the planner."""

from __future__ import annotations

from minisgl_backend.errors import InvalidRequest


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold ``num_tokens`` positions."""
    return -(-num_tokens // page_size)


def most_tokens(
    num_prompt_tokens: int, *, max_sequence_length: int, num_pages: int, page_size: int
) -> int:
    """The largest ``max_tokens`` for which ``check_fits``; below 1 where there is none."""
    num_positions = num_pages * page_size + 1  # the last token needs none
    return min(max_sequence_length, num_positions) - num_prompt_tokens


def check_fits(
    *,
    num_prompt_tokens: int,
    max_tokens: int,
    max_sequence_length: int,
    num_pages: int,
    page_size: int,
) -> None:
    """Raise ``InvalidRequest`` if the request exceeds the context, or the pool even when empty.

    The last sampled token needs no position in the pool, since nothing is computed from it.
    """
    if num_prompt_tokens < 1:
        raise InvalidRequest("the prompt is empty")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {max_tokens}")
    if num_prompt_tokens + 1 > max_sequence_length:
        raise InvalidRequest(
            f"prompt of {num_prompt_tokens} tokens does not fit the context "
            f"of {max_sequence_length}"
        )
    if num_prompt_tokens + max_tokens > max_sequence_length:
        raise InvalidRequest(
            f"max_tokens {max_tokens} with a prompt of {num_prompt_tokens} tokens exceeds the "
            f"context of {max_sequence_length}"
        )
    needed = num_pages_for(num_prompt_tokens + max_tokens - 1, page_size)
    if needed > num_pages:
        raise InvalidRequest(
            f"max_tokens {max_tokens} with a prompt of {num_prompt_tokens} tokens needs {needed} "
            f"pages of {page_size} tokens, the KV cache has {num_pages}"
        )
