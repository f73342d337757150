"""Which tokens of an answer a text is made of: those whose log-probabilities come with it.

Thoughts, calls and the marks around them are tokens of the answer, too, and a piece of it may have
all of these. Tokens and texts are compared by their bytes. Must not know how answers are parsed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from minisgl_gateway.logprobs import TokenLogprob


class TextTokens:
    """The tokens of an answer whose text has not come yet, in order."""

    def __init__(self) -> None:
        self._tokens: list[TokenLogprob] = []
        self._begun = b""
        """What is left of a token in the middle of which the last text ended."""

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        """The answer goes on with these."""
        self._tokens += tokens

    def take(self, text: str) -> list[TokenLogprob]:
        """The tokens of the next text, without those before it; all tokens if it is in none, as a
        text that ends inside a character."""
        found = self._through(text)
        return self.take_rest() if found is None else found

    def skip(self, text: str) -> None:
        """Pass over a text, if it is found."""
        self._through(text)

    def take_rest(self) -> list[TokenLogprob]:
        """All tokens that are left."""
        rest, self._tokens, self._begun = self._tokens, [], b""
        return rest

    def _through(self, text: str) -> list[TokenLogprob] | None:
        """Forget all up to the end of the text; returns its tokens, or None if it is not found."""
        if not self._tokens:
            return None
        parts = [_utf8(token) for token in self._tokens]
        bounds = [*accumulate(map(len, parts), initial=len(self._begun))]
        whole, wanted = self._begun + b"".join(parts), text.encode()
        begin = _find(wanted, whole, {0, *bounds})
        if begin < 0:
            return None
        end = begin + len(wanted)
        first, behind = max(0, bisect_right(bounds, begin) - 1), bisect_left(bounds[:-1], end)
        found, self._tokens = self._tokens[first:behind], self._tokens[behind:]
        self._begun = whole[end : bounds[behind]]
        return found


def _find(wanted: bytes, whole: bytes, bounds: set[int]) -> int:
    """Where it is: at the beginning of a token if possible, as ``t`` is not in ``</think>``; -1 if
    it is nowhere."""
    at = first = whole.find(wanted)
    while at >= 0 and at not in bounds:
        at = whole.find(wanted, at + 1)
    return first if at < 0 else at


def _utf8(token: TokenLogprob) -> bytes:
    return token.token.encode() if token.bytes is None else bytes(token.bytes)
