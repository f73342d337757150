"""Log-probabilities of an answer's tokens, as OpenAI's APIs of chats name them."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_client import answer
from pydantic import BaseModel


class TopLogprob(BaseModel):
    """A likely token; ``token`` has U+FFFD for a part of a character, ``bytes`` has that part."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


def token_logprobs(tokens: Sequence[answer.TokenLogprobs], num_top: int) -> list[TokenLogprob]:
    """One element per token, with the ``num_top`` likeliest at its position."""
    return [
        TokenLogprob(
            token=token.chosen.text,
            logprob=token.chosen.logprob,
            bytes=_bytes(token.chosen),
            top_logprobs=[
                TopLogprob(token=one.text, logprob=one.logprob, bytes=_bytes(one))
                for one in token.top(num_top)
            ],
        )
        for token in tokens
    ]


def _bytes(token: answer.TokenLogprob) -> list[int] | None:
    return None if token.utf8 is None else list(token.utf8)
