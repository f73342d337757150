"""``Output``, which ``LLM`` returns. Plain values; must not know engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl_backend.request import TokenId, TokenLogprobs
from minisgl_backend.wire.packets import Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output for one prompt: all of it (``generate``), or its new part (``stream``).

    In a stream, ``text``, ``token_ids``, ``num_output_tokens`` and ``logprobs`` are those since the
    last output, and add up to the whole; the other fields are about the request so far.
    """

    index: int
    """The prompt's place among those of the call."""
    text: str
    """Whole characters, without a stop string."""
    token_ids: list[TokenId]
    """[num_output_tokens], with the token that ended the request."""
    finish_reason: str | None
    """``stop``, ``length`` or ``timeout``; None while a stream runs."""
    stop_reason: str | TokenId | None
    """The stop string or token id that matched."""
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Tokens of the prompt that came from the prefix cache."""
    logprobs: Sequence[TokenLogprobs]
    """[num_output_tokens], each with ``num_logprobs`` alternatives; empty if not asked for."""
    cumulative_logprob: float | None
    """The sum over all tokens so far; None if not asked for."""
    times: Times | None
    """None if not asked for."""
