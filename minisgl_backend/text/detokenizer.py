"""Token ids -> text, incrementally: never half a character, and nothing from a stop string on.

Pure and single-threaded: one ``TextStream`` for each stream. However the tokens are split over
calls of ``push``, the deltas add up to the text of all tokens decoded at once, cut off before the
stop match. The cost of a call is proportional to its new tokens.

A stop match counts only if the token that completes it has an index of at least ``min_tokens``. The
match whose last character comes first wins; of several that end together, the longest. Must not
know requests, packets or who reads the text.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from minisgl_backend.request import TokenId
from minisgl_backend.text.stop import StopMatcher
from minisgl_backend.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that some tokens add.

    ``num_tokens`` of them count: all, or those up to the one that completed ``stop``, the stop
    string that matched.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class TextStream:
    """The text of one stream of tokens.

    ``silent_ids`` are tokens without text (those that end the request). ``continues``: the text
    directly follows that of the prompt, so a space at its beginning stays. Without
    ``skip_special_tokens`` the text of special tokens is their names.
    """

    __slots__ = ("_decoder", "_held", "_matcher", "_min_tokens", "_num_tokens", "_state", "stop")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
        silent_ids: Collection[TokenId] = (),
        continues: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stop: str | None = None
        """The stop string that matched; no more tokens may be pushed then."""
        self._decoder = _Decoder(vocabulary, frozenset(silent_ids), continues, skip_special_tokens)
        self._matcher = StopMatcher(stop_strings) if stop_strings else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._state = 0
        self._held = ""  # decoded, but it may be the beginning of a stop string

    def fork(self) -> TextStream:
        """An independent copy of the stream."""
        other = copy(self)
        other._decoder = copy(self._decoder)
        return other

    def push(self, token_ids: Sequence[TokenId], *, final: bool = False) -> TextDelta:
        """The text that the next tokens add. With ``final`` they are the last ones: all text that
        was held back is included."""
        assert self.stop is None, "the stream has stopped"
        count = len(token_ids)
        matcher = self._matcher
        if matcher is None:
            text = self._decoder.decode(token_ids)
            return TextDelta(text + self._decoder.flush() if final else text, count)
        # Tokens with an index below min_tokens may begin a match, but not complete one.
        num_exempt = min(max(0, self._min_tokens - self._num_tokens), count)
        self._num_tokens += count
        if num_exempt:
            text = self._decoder.decode(token_ids[:num_exempt])
            self._state = matcher.advance(self._state, text)
            self._held += text
            token_ids = token_ids[num_exempt:]
        if token_ids:
            before = self._decoder.position
            text = self._decoder.decode(token_ids)
            if (end := self._search(matcher, text)) is not None:
                index = self._completing_token(token_ids, before, end)
                return TextDelta(self._cut(), num_exempt + index + 1, self.stop)
        if not final:
            return TextDelta(self._release(matcher.held[self._state]), count)
        # The rest of a broken character belongs to the last token.
        text = self._decoder.flush()
        if self._num_tokens <= self._min_tokens:
            self._held += text
        elif self._search(matcher, text) is not None:
            return TextDelta(self._cut(), count, self.stop)
        return TextDelta(self._release(0), count)

    def _search(self, matcher: StopMatcher, text: str) -> int | None:
        """Take decoded text. On a match, set ``stop`` and return the number of characters read."""
        self._state, read = matcher.search(self._state, text)
        self._held += text[:read]
        self.stop = matcher.matched[self._state] if read else None
        return read if self.stop is not None else None

    def _cut(self) -> str:
        """The held text before the stop match, with which it ends."""
        assert self.stop is not None
        return self._release(len(self.stop))

    def _release(self, keep: int) -> str:
        """Release all held text except the last ``keep`` characters."""
        split = len(self._held) - keep
        released, self._held = self._held[:split], self._held[split:]
        return released

    def _completing_token(self, token_ids: Sequence[TokenId], before: _Position, end: int) -> int:
        """The index of the token with which the decoded text reaches ``end`` characters."""
        self._decoder.position = before
        lengths = accumulate(len(self._decoder.decode((token_id,))) for token_id in token_ids)
        return next(index for index, length in enumerate(lengths) if length >= end)


_Position: TypeAlias = tuple[bytes, int, bool]
"""Bytes of an incomplete character; number of spaces still to drop; whether the first token with
text is still to come."""


class _Decoder:
    """Token ids -> text, without stop strings; ``position`` is all of its state."""

    __slots__ = ("_pieces", "_silent_ids", "_vocabulary", "position")

    def __init__(
        self,
        vocabulary: Vocabulary,
        silent_ids: frozenset[TokenId],
        continues: bool,
        skip_special_tokens: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces if skip_special_tokens else vocabulary.spelled_pieces
        self._silent_ids = silent_ids
        self.position: _Position = (
            (b"", 0, False)
            if continues
            else (b"", vocabulary.leading_spaces, vocabulary.first_pieces is not None)
        )

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        """The characters that these tokens complete."""
        pending, spaces, first_due = self.position
        pieces, silent = self._pieces, self._silent_ids
        try:
            added = [pieces[i] for i in token_ids]
        except IndexError:  # ids beyond the vocabulary have no text
            added = [pieces[i] if 0 <= i < len(pieces) else b"" for i in token_ids]
        if silent:
            added = [
                b"" if i in silent else piece for i, piece in zip(token_ids, added, strict=True)
            ]
        if first_due:
            first_due = self._replace_first(token_ids, added)
        data = pending + b"".join(added)
        text, read = utf_8_decode(data, "replace", False)
        if spaces and text:
            kept = text.lstrip(" ")
            dropped = min(spaces, len(text) - len(kept))
            text = text[dropped:]
            spaces = spaces - dropped if not text else 0
        self.position = (data[read:], spaces, first_due)
        return text

    def _replace_first(self, token_ids: Sequence[TokenId], added: list[bytes]) -> bool:
        """Give the first token with text its own piece. Returns whether it is still to come."""
        vocabulary = self._vocabulary
        assert vocabulary.first_pieces is not None
        for index, token_id in enumerate(token_ids):
            if vocabulary.has_text(token_id) and token_id not in self._silent_ids:
                added[index] = vocabulary.first_pieces[token_id]
                return False
            if added[index]:  # a special token, spelled out
                return False
        return True

    def flush(self) -> str:
        """An incomplete character at the end, as U+FFFD."""
        pending, _, _ = self.position
        self.position = (b"", 0, False)
        return pending.decode("utf-8", "replace")
