"""Objects in notations other than JSON's, read character by character, as JSON.

A ``Notation`` knows how keys and strings are written; brackets, commas, numbers and literals are
those of JSON or of Python. Must not know what stands around an object.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, TypeAlias

from minisgl_gateway.json_reading import (
    MOST_DEPTH,
    PYTHON_WORDS,
    WORD_CHARS,
    NotACall,
    as_json,
    blanks,
    kind_of_json,
    word_of,
)

Text: TypeAlias = Generator[None, str, tuple[str, str]]
"""Returns the text of a string, and the character behind it if that was read, else ""."""
_WORD_CHARS: Final = WORD_CHARS | frozenset("".join(PYTHON_WORDS))


@dataclass(frozen=True, slots=True)
class Notation:
    """``quotes`` are the characters with which strings begin. ``text`` reads one of them from its
    first character on, before one of the characters that may follow it. ``key`` reads a key and
    what separates it from its value, from its first character on, in an object that the other
    character closes. ``trailing_commas`` may come behind the last member."""

    quotes: str
    text: Callable[[str, str], Text]
    key: Callable[[str, str], Generator[None, str, str]]
    trailing_commas: bool = False


def object_in(notation: Notation, closing: str) -> Generator[None, str, str]:
    """An object as JSON, after its opening bracket; ``closing`` is the bracket that closes it.
    Raises ``NotACall``."""
    written = ["{"]
    opened = [closing]
    """The closing bracket of each object and list that is open."""
    is_empty = True
    char = yield from blanks()
    while True:
        if char == opened[-1]:
            written.append("]" if opened.pop() == "]" else "}")
            if not opened:
                return "".join(written)
            is_empty = False
            char = yield from blanks()
            continue
        if not is_empty:
            if char != ",":
                raise NotACall
            char = yield from blanks()
            if notation.trailing_commas and char == opened[-1]:
                continue
            written.append(", ")
        if opened[-1] != "]":
            key = yield from notation.key(char, opened[-1])
            written.append(f"{as_json(key)}: ")
            char = yield from blanks()
        is_empty = char in "{["
        if is_empty:
            if len(opened) == MOST_DEPTH:
                raise NotACall
            opened.append("}" if char == "{" else "]")
            written.append(char)
            char = yield from blanks()
        elif char in notation.quotes:
            text, behind = yield from notation.text(char, f",{opened[-1]}")
            written.append(as_json(text))
            char = yield from blanks(first=behind)
        else:
            word, char = yield from _word(char)
            written.append(word)
            char = yield from blanks(first=char)


def _word(first: str) -> Generator[None, str, tuple[str, str]]:
    """A number or a literal as JSON, and the character after it."""
    word, char = yield from word_of(first, _WORD_CHARS)
    written = PYTHON_WORDS.get(word, word)
    if kind_of_json(written) is None:
        raise NotACall
    return written, char
