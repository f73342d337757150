"""LFM2's calls: a list as in a program in Python.

    <|tool_call_start|>[weather(city="Oslo", days=3), now()]<|tool_call_end|>

In place of it the list may be JSON, as other models write it, if the prompt asks for that. Strings
stand between quotes of either kind. Templates write them as they are: so a quote ends a string only
if what must follow it does, and a bracket a call only before a comma or the end of the list. Must
not know the text around calls (``tool_calls``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from minisgl_gateway.call_syntax import (
    CalledTool,
    Following,
    Syntax,
    listed,
    mark,
    name_before,
    plain_name,
)
from minisgl_gateway.json_reading import BLANKS, NotACall, as_json, blanks
from minisgl_gateway.written_objects import Notation, Text, object_in

OPENING: Final = "<|tool_call_start|>"
CLOSING: Final = "<|tool_call_end|>"

_NEVER_IN_NAMES: Final = "()[]},:'"
"""Beside what no name holds. Schemas name arguments more freely than Python, as in ``a/b``."""
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[\\'\"/bfnrt])")
_ESCAPED: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def spelled(functions: Iterable[Mapping[str, Any]]) -> str:
    """Calls as the models write them. The arguments of a function are an object, or the text of
    one; other texts stay as they are."""
    return f"{OPENING}[{', '.join(map(_call, functions))}]{CLOSING}"


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if isinstance(arguments, Mapping):
        arguments = ", ".join(
            f"{name}={as_json(value) if isinstance(value, str) else repr(value)}"
            for name, value in arguments.items()
        )
    return f"{function['name']}({arguments})"


def _follow() -> Following:
    yield from mark(OPENING)
    if (yield from blanks()) != "[":
        raise NotACall
    char = yield from blanks()
    if char == "{":
        return (yield from listed(char, CLOSING))
    while True:
        name, char = yield from plain_name(char)
        if char != "(":
            raise NotACall
        arguments = yield from object_in(_NOTATION, ")")
        behind = yield from blanks()
        if behind not in ",]":  # a quote in a string was taken for its end
            raise NotACall
        char = yield from blanks(first=(yield CalledTool(name, arguments)))
        if behind == "," and char == "]":
            behind, char = char, (yield from blanks())
        if behind == "]":
            break
    yield from mark(CLOSING, first=char)
    return None


LFM: Final = Syntax((OPENING,), _follow)


def _key(first: str, closing: str) -> Generator[None, str, str]:
    """The name of an argument, and the sign behind it, or the key of an object in one, and the
    colon."""
    if closing == "}":
        if first not in _QUOTES:
            raise NotACall
        key, _ = yield from _text(first, ":")
        return key
    key, char = yield from name_before(first, f"={BLANKS}", _NEVER_IN_NAMES)
    if (yield from blanks(first=char)) != "=":
        raise NotACall
    return key


def _text(first: str, followers: str) -> Text:
    """The text up to a quote like the ``first`` that one of the followers comes behind."""
    written: list[str] = []
    is_escaped = False
    while True:
        char = yield
        while char == first and not is_escaped:
            behind = [(yield)]
            while behind[-1] in BLANKS:
                behind.append((yield))
            char = behind.pop()
            if char in followers:
                return _unescaped("".join(written)), char
            written += [first, *behind]
        written.append(char)
        is_escaped = char == "\\" and not is_escaped


def _unescaped(text: str) -> str:
    """A string as it is meant; halves of surrogate pairs, which cannot be encoded, are replaced."""

    def meant(found: re.Match[str]) -> str:
        escape = found[1]
        if len(escape) > 1:
            return chr(int(escape[1:], 16))
        return _ESCAPED.get(escape, escape)

    pairs = _ESCAPE.sub(meant, text).encode("utf-16", "surrogatepass")
    return pairs.decode("utf-16", "replace")


_QUOTES: Final = "\"'"
_NOTATION: Final = Notation(_QUOTES, _text, _key, trailing_commas=True)
