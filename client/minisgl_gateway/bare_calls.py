"""Gemma 4's calls: the arguments are an object without quotes around keys, and with marks of their
own around strings, which are any text without that mark.

    <|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:[1,2]}<tool_call|>, again and again

Behind the last call the model begins a result, which the answer leaves out. Must not know the text
around calls (``tool_calls``).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from minisgl_gateway.call_syntax import (
    MOST_DEPTH,
    PYTHON_WORDS,
    WORD_CHARS,
    CalledTool,
    Following,
    NotACall,
    Syntax,
    as_json,
    blanks,
    kind_of_json,
    mark,
    name_before,
    word_of,
)

OPENING: Final = "<|tool_call>"
CALL: Final = "call:"
CLOSING: Final = "<tool_call|>"
QUOTE: Final = '<|"|>'
RESULT: Final = "<|tool_response>"

_WORD_CHARS: Final = WORD_CHARS | frozenset("".join(PYTHON_WORDS))


def _follow() -> Following:
    yield from mark(OPENING)
    while True:
        yield from mark(CALL, first=(yield from blanks()))
        name, _ = yield from name_before((yield from blanks()), "{")
        arguments = yield from _object()
        yield from mark(CLOSING, first=(yield from blanks()))
        char = yield from blanks(first=(yield CalledTool(name, arguments)))
        if (yield from mark(OPENING, RESULT, first=char)) == RESULT:
            return None


GEMMA: Final = Syntax((OPENING,), _follow, closing=CLOSING)


def _object() -> Generator[None, str, str]:
    """An object as JSON, after its opening bracket."""
    written = ["{"]
    opened = ["}"]
    """The closing bracket of each object and list that is open."""
    is_empty = True
    char = yield from blanks()
    while True:
        if char == opened[-1]:
            written.append(opened.pop())
            if not opened:
                return "".join(written)
            is_empty = False
            char = yield from blanks()
            continue
        if not is_empty:
            if char != ",":
                raise NotACall
            written.append(", ")
            char = yield from blanks()
        if opened[-1] == "}":
            key = yield from _key(char)
            written.append(f"{as_json(key)}: ")
            char = yield from blanks()
        is_empty = char in "{["
        if is_empty:
            if len(opened) == MOST_DEPTH:
                raise NotACall
            opened.append("}" if char == "{" else "]")
            written.append(char)
            char = yield from blanks()
        elif char == QUOTE[0]:
            written.append(as_json((yield from _text(char))))
            char = yield from blanks()
        else:
            word, char = yield from _word(char)
            written.append(word)
            char = yield from blanks(first=char)


def _key(first: str) -> Generator[None, str, str]:
    """A key, with marks around it or without, and the colon behind it."""
    if first != QUOTE[0]:
        key, _ = yield from name_before(first, ":", "[]},")
        return key
    key = yield from _text(first)
    if (yield from blanks()) != ":":
        raise NotACall
    return key


def _text(first: str) -> Generator[None, str, str]:
    """The text between two marks, of which the first character is read."""
    yield from mark(QUOTE, first=first)
    written: list[str] = []
    end = ""  # of what is written, as long as the mark
    while end != QUOTE:
        written.append((yield))
        end = (end + written[-1])[-len(QUOTE) :]
    return "".join(written)[: -len(QUOTE)]


def _word(first: str) -> Generator[None, str, tuple[str, str]]:
    """A number or a literal as JSON, and the character after it."""
    word, char = yield from word_of(first, _WORD_CHARS)
    written = PYTHON_WORDS.get(word, word)
    if kind_of_json(written) is None:
        raise NotACall
    return written, char
