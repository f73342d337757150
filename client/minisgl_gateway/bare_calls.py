"""Gemma 4's calls: the arguments are an object without quotes around keys, and with marks of their
own around strings, which are any text without that mark.

    <|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:[1,2]}<tool_call|>, again and again

Behind the last call the model begins a result, which the answer leaves out. Must not know the text
around calls (``tool_calls``).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from minisgl_gateway.call_syntax import CalledTool, Following, Syntax, mark, name_before
from minisgl_gateway.json_reading import NotACall, blanks
from minisgl_gateway.written_objects import Notation, Text, object_in

OPENING: Final = "<|tool_call>"
CALL: Final = "call:"
CLOSING: Final = "<tool_call|>"
QUOTE: Final = '<|"|>'
RESULT: Final = "<|tool_response>"


def _follow() -> Following:
    yield from mark(OPENING)
    while True:
        yield from mark(CALL, first=(yield from blanks()))
        name, _ = yield from name_before((yield from blanks()), "{")
        arguments = yield from object_in(_NOTATION, "}")
        yield from mark(CLOSING, first=(yield from blanks()))
        char = yield from blanks(first=(yield CalledTool(name, arguments)))
        if (yield from mark(OPENING, RESULT, first=char)) == RESULT:
            return None


GEMMA: Final = Syntax((OPENING,), _follow, closing=CLOSING)


def _key(first: str, closing: str) -> Generator[None, str, str]:
    """A key, with marks around it or without, and the colon behind it."""
    if first != QUOTE[0]:
        key, _ = yield from name_before(first, ":", "[]},")
        return key
    key, _ = yield from _text(first, ":")
    if (yield from blanks()) != ":":
        raise NotACall
    return key


def _text(first: str, followers: str) -> Text:
    """The text between two marks, of which the first character is read."""
    yield from mark(QUOTE, first=first)
    written: list[str] = []
    end = ""  # of what is written, as long as the mark
    while end != QUOTE:
        written.append((yield))
        end = (end + written[-1])[-len(QUOTE) :]
    return "".join(written)[: -len(QUOTE)], ""


_NOTATION: Final = Notation(QUOTE[0], _text, _key)
