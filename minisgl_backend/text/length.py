"""Finds out whether a text is too long for a request, without tokenizing all of it.

Tokenizing megabytes takes seconds, only to find hundreds of times too many tokens. Two lower bounds
of the number of tokens are quicker, and never refuse a text that would fit: the number of bytes
divided by those of the longest token; and the number of tokens in the beginning of the text,
without its last few words, whose tokens depend on the following text. Must not know chats, or how
many tokens an answer may have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CHARS_PER_TOKEN: Final = 8
"""Determines how much of the beginning to tokenize first; common text has fewer."""
_LOOSE_WORDS: Final = 16
"""Words at the end of a beginning that are not counted."""
_NFC_SHRINKS: Final = 4
"""Composing characters makes a text at most this many times shorter, in bytes of UTF-8."""


@dataclass(frozen=True, slots=True)
class Room:
    """The most tokens that a prompt may have; ``told`` is how an error names this limit."""

    num_tokens: int
    told: str

    @classmethod
    def of(cls, context: int, most_tokens: int | None) -> Room:
        """The room in a model's context or, if that is less, the ``most_tokens`` of a request."""
        if most_tokens is None or most_tokens >= context:
            return cls(context, f"the context of {context}")
        return cls(most_tokens, f"the KV cache, which has room for {most_tokens}")


class LengthCheck:
    """Knows a tokenizer's longest token."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._longest = longest_token_bytes(tokenizer, vocabulary)

    def check(self, tokenizer: Tokenizer, text: str, num_bytes: int, room: Room) -> None:
        """Raise ``InvalidRequest`` if the text certainly has more tokens than there is room for.

        ``tokenizer`` is the one that would tokenize the text, which has ``num_bytes``.
        """
        if self._longest is not None and num_bytes > room.num_tokens * self._longest:
            raise InvalidRequest(
                f"prompt of {num_bytes} bytes does not fit {room.told} tokens, "
                f"of at most {self._longest} bytes each"
            )
        num_chars = _CHARS_PER_TOKEN * room.num_tokens
        while len(text) > 2 * num_chars:
            num_tokens = _least_tokens(tokenizer, text[:num_chars])
            if num_tokens > room.num_tokens:
                raise InvalidRequest(
                    f"prompt of more than {num_tokens} tokens does not fit {room.told}"
                )
            num_chars *= 4


def _least_tokens(tokenizer: Tokenizer, beginning: str) -> int:
    """The least number of tokens of any text that begins with ``beginning``."""
    (encoding,) = tokenizer.encode_batch([beginning], add_special_tokens=False)
    words = [word for word in encoding.word_ids if word is not None]
    sure = max(words, default=0) - _LOOSE_WORDS
    return sum(word < sure for word in words)


def longest_token_bytes(tokenizer: Tokenizer, vocabulary: Vocabulary) -> int | None:
    """The most bytes of a text that one token can stand for; None if there may be no bound.

    There is a bound if every byte has a token, so that none is lost, and all steps of the tokenizer
    are known to keep bytes.
    """
    spec = json.loads(tokenizer.to_str())
    pieces = set(vocabulary.pieces)
    bytes_are_tokens = all(bytes([byte]) in pieces for byte in range(256))
    if spec["model"]["type"] != "BPE" or not bytes_are_tokens:
        return None
    if any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"]):
        return None  # such a token swallows all blanks next to it
    factor = 1
    for step in (*_steps(spec["normalizer"]), *_steps(spec["pre_tokenizer"])):
        if step["type"] == "NFC":
            factor = _NFC_SHRINKS
        elif not _keeps_bytes(step):
            return None
    names = (vocabulary.names[token_id] or "" for token_id in vocabulary.special)
    return factor * max(map(len, (*pieces, *(name.encode() for name in names))))


def _steps(spec: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if spec is not None and spec["type"] == "Sequence":
        for part in spec.get("normalizers") or spec.get("pretokenizers") or ():
            yield from _steps(part)
    elif spec is not None:
        yield spec


def _keeps_bytes(step: dict[str, Any]) -> bool:
    kind: str = step["type"]
    if kind == "Split":
        return bool(step["behavior"] != "Removed")
    if kind == "Replace":  # of spaces by marks, which stand for spaces in tokens too
        return (step["pattern"], step["content"]) == ({"String": " "}, "▁")
    return kind in ("ByteLevel", "Digits", "Metaspace", "Prepend")
