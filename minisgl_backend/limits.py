"""The limits on each part of one request, which no option changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """One table, which the tokenizer, the engine and ``LLM`` share."""

    prompt_bytes: int = 8 * 2**20
    other_bytes: int = 4 * 2**20
    """Everything in a request except its prompt."""
    messages: int = 8192
    tools: int = 1024
    message_depth: int = 32
    stop_strings: int = 16
    stop_string_bytes: int = 1024
    stop_token_ids: int = 256
    logit_bias_entries: int = 1024
    logprobs: int = 20
    cache_salt_characters: int = 64
