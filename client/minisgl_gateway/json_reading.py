"""The JSON in calls that a model writes, character by character.

It comes in pieces of any size, so it is read by generators to which characters are sent. Must not
know what stands around it (``call_syntax``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from typing import Any, Final, TypeAlias

BLANKS: Final = " \t\n\r"
MOST_DEPTH: Final = 200
"""The limit on nested arrays and objects; pydantic writes some 250, also those around arguments."""
_MOST_WORD_CHARS: Final = 1024
"""The limit on a number's length; Python reads integers of up to 4,300 digits."""
PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""What templates write for these values, since they are programs in Python."""
Reading: TypeAlias = Generator[None, str, str]
_WORD: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null", re.A)
WORD_CHARS: Final = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_ESCAPE: Final = re.compile(
    r"(?P<pair>\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|(?P<lone>\\u[dD][89a-fA-F]..)|\\.", re.DOTALL
)


class NotACall(Exception):
    """The character just read shows that the text is not a call, or not the JSON of one. The
    ``num_read`` characters before it, taken for a mark that did not continue, may be the beginning
    of another call."""

    def __init__(self, num_read: int = 0) -> None:
        super().__init__()
        self.num_read = num_read


def as_json(value: Any) -> str:
    """A value as templates and models write JSON."""
    return json.dumps(value, ensure_ascii=False)


def sendable(arguments: str) -> str:
    """JSON without halves of surrogate pairs: strings that hold one cannot be encoded."""
    return _ESCAPE.sub(lambda found: r"\ufffd" if found["lone"] else found[0], arguments)


def read_value(first: str, written: list[str]) -> Reading:
    """Append the value that begins with ``first`` to what is written. Returns the character after
    it if that was read, since nothing else ends a number, else ""."""
    char = first
    closings: list[str] = []
    while True:
        written.append(char)
        behind = ""
        if char in "{[":
            if len(closings) == MOST_DEPTH:
                raise NotACall
            closings.append("}" if char == "{" else "]")
            char = yield from blanks(written)
            if char != closings[-1]:
                if closings[-1] == "}":
                    char = yield from _key(char, written)
                continue
            written.append(closings.pop())
        elif char == '"':
            yield from read_string(written)
        else:
            behind = yield from _word(char, written)
        while True:
            if not closings:
                return behind
            char = yield from blanks(written, behind)
            behind = ""
            if char != closings[-1]:
                break
            written.append(closings.pop())
        if char != ",":
            raise NotACall
        written.append(char)
        char = yield from blanks(written)
        if closings[-1] == "}":
            char = yield from _key(char, written)


def _key(first: str, written: list[str]) -> Reading:
    """Append a key and its colon; returns the first character of the value."""
    if first != '"':
        raise NotACall
    written.append(first)
    yield from read_string(written)
    if (yield from blanks(written)) != ":":
        raise NotACall
    written.append(":")
    return (yield from blanks(written))


def read_string(written: list[str]) -> Generator[None, str, None]:
    """Append a string whose first quote is read."""
    while True:
        char = yield
        written.append(char)
        if char == '"':
            return
        if char < " ":
            raise NotACall
        if char == "\\":
            char = yield
            written.append(char)
            if char == "u":
                for _ in range(4):
                    char = yield
                    if char not in "0123456789abcdefABCDEF":
                        raise NotACall
                    written.append(char)
            elif char not in '"\\/bfnrt':
                raise NotACall


def _word(first: str, written: list[str]) -> Reading:
    """Append the rest of a number or a literal; returns the character after it."""
    word, char = yield from word_of(first, WORD_CHARS)
    if not _WORD.fullmatch(word):
        raise NotACall
    written += word[1:]
    return char


def word_of(
    first: str, chars: Collection[str], *, most: int = _MOST_WORD_CHARS
) -> Generator[None, str, tuple[str, str]]:
    """A word of at most ``most`` of the ``chars``, which may be empty, and the character after
    it."""
    word: list[str] = []
    char = first
    while char in chars:
        word.append(char)
        if len(word) > most:
            raise NotACall
        char = yield
    return "".join(word), char


def blanks(written: list[str] | None = None, first: str = "") -> Reading:
    """The first character that is not blank, after ``first`` if that was read; blanks are
    appended."""
    char = first or (yield)
    while char in BLANKS:
        if written is not None:
            written.append(char)
        char = yield
    return char


def kind_of_json(text: str) -> str | None:
    """The type, as schemas name it, of the JSON value that a text is; None if it is none, or nested
    too deeply."""
    if not text:
        return None
    reading, num_read = read_value(text[0], []), 1
    try:
        next(reading)
        for char in f"{text[1:]} ":  # the blank ends a number or a literal
            num_read += 1
            reading.send(char)
    except NotACall:
        return None
    except StopIteration:
        if num_read == len(text) + (text[0] not in '{["'):
            return _KINDS.get(text[0]) or ("number" if set(".eE") & set(text) else "integer")
    return None


_KINDS: Final = {
    "{": "object",
    "[": "array",
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}
