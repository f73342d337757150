"""Logprobs of the engine in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_client import answer as engine

from minisgl_gateway.answer_schema import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob


def chat_logprobs(tokens: Sequence[engine.TokenLogprobs], num_top: int) -> ChatLogprobs:
    """One element a token, with the ``num_top`` likeliest at its place."""
    content = []
    for token in tokens:
        top = [
            TopLogprob(token=one.text, logprob=one.logprob, bytes=_bytes(one.text))
            for one in token.top(num_top)
        ]
        chosen = token.chosen
        content.append(
            TokenLogprob(
                token=chosen.text,
                logprob=chosen.logprob,
                bytes=_bytes(chosen.text),
                top_logprobs=top,
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Sequence[engine.TokenLogprobs], num_top: int, offset: int = 0
) -> CompletionLogprobs:
    """One element a token in each list; the first token begins at character ``offset``.

    Beside the ``num_top`` likeliest tokens stands the chosen one, as OpenAI has it.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.chosen.text)
    return CompletionLogprobs(
        tokens=[token.chosen.text for token in tokens],
        token_logprobs=[token.chosen.logprob for token in tokens],
        top_logprobs=[
            {one.text: one.logprob for one in (token.chosen, *token.top(num_top))}
            for token in tokens
        ],
        text_offset=offsets,
    )


def _bytes(text: str) -> list[int] | None:
    """The token's bytes; the engine tells half a character as U+FFFD, of which they are unknown."""
    return None if "\ufffd" in text else list(text.encode())
