"""How models write tool calls: a ``Syntax`` for each family of models.

    HERMES   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, again and again
    LLAMA    {"name": ..., "parameters": {...}}, also after <|python_tag|>, with ; between two
    MISTRAL  [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or, in its newer form,
             [TOOL_CALLS]name[ARGS]{...}, again and again
    NEMOTRON <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>
    COMMAND  <|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}, ...]
             <|END_ACTION|>; texts stand between <|START_RESPONSE|> and <|END_RESPONSE|>

``tagged_calls``, ``bare_calls`` and ``python_calls`` have those whose arguments are not one JSON
object.

Calls are read character by character, since they come in pieces of any size. Must not know the text
around calls (``tool_calls``).
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeAlias

from minisgl_gateway.json_reading import (
    NotACall,
    Reading,
    blanks,
    read_string,
    read_value,
    sendable,
    word_of,
)

PYTHON_TAG: Final = "<|python_tag|>"
CALL_ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"
RESPONSES: Final = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)
"""The marks around a text of Command's, by its version."""

MOST_NAME_CHARS: Final = 256
_NAME_CHARS: Final = frozenset(string.ascii_letters + string.digits + "_.-")


@dataclass(frozen=True, slots=True)
class CalledTool:
    """One call; ``arguments`` is a JSON object as a string, as the model wrote it."""

    name: str
    arguments: str


Following: TypeAlias = Generator[CalledTool | None, str, CalledTool | None]
"""Gets calls character by character, after their opening. It yields each call but the last as soon
as it is complete, and returns the last; raises ``NotACall``."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """How calls are written: what they may open with, how they go on, what each ends with, and
    what may separate two of them."""

    openings: tuple[str, ...]
    follow: Callable[[], Following]
    closing: str = ""
    separator: str = ""


# --- how calls go on, by dialect -----------------------------------------------------------------


def _follow_hermes() -> Following:
    yield from mark(HERMES.openings[0])
    called = _called((yield from _members((yield from blanks()))))
    yield from mark(HERMES.closing, first=(yield from blanks()))
    return called


def _follow_llama() -> Following:
    char = yield None
    if char == PYTHON_TAG[0]:
        yield from mark(PYTHON_TAG, first=char)
        char = yield from blanks()
    members = yield from _members(char, others=False)
    if members.get("type", '"function"') != '"function"':
        raise NotACall
    if "arguments" not in members and "parameters" not in members:
        raise NotACall
    return _called(members)


def _follow_mistral() -> Following:
    yield from mark(MISTRAL.openings[0])
    char = yield from blanks()
    if char == "[":
        return (yield from listed((yield from blanks())))
    name, char = yield from plain_name(char)
    if char == ARGUMENTS[0]:
        if (yield from mark(ARGUMENTS, CALL_ID, first=char)) == CALL_ID:
            _, char = yield from plain_name((yield None))
            yield from mark(ARGUMENTS, first=char)
        char = yield from blanks()
    if char != "{":
        raise NotACall
    written: list[str] = []
    yield from read_value(char, written)
    return CalledTool(name, sendable("".join(written)))


def _follow_nemotron() -> Following:
    yield from mark(NEMOTRON.openings[0])
    if (yield from blanks()) != "[":
        raise NotACall
    return (yield from listed((yield from blanks()), "</TOOLCALL>"))


def _follow_command() -> Following:
    action, *frames = COMMAND.openings
    if (yield from mark(action, *frames)) != action:
        return None
    if (yield from blanks()) != "[":
        raise NotACall
    return (yield from listed((yield from blanks()), "<|END_ACTION|>", name="tool_name"))


def _follow_response() -> Following:
    yield from mark(*RESPONSE.openings)
    return None


def listed(first: str, closing: str = "", *, name: str = "name") -> Following:
    """The calls of a JSON list, of which the bracket and the ``first`` character behind it are
    read, and the ``closing`` behind the list. The functions' names are members with ``name``."""
    char = first
    while True:
        called = _called((yield from _members(char, name)), name)
        char = yield from blanks(first=(yield called))
        if char == "]":
            break
        if char != ",":
            raise NotACall
        char = yield from blanks()
    if closing:
        yield from mark(closing, first=(yield from blanks()))
    return None


HERMES: Final = Syntax(("<tool_call>",), _follow_hermes, closing="</tool_call>")
LLAMA: Final = Syntax((PYTHON_TAG, '{"name"', '{"type": "function"'), _follow_llama, separator=";")
"""Other JSON in the middle of text is not a call, even if it looks like one."""
MISTRAL: Final = Syntax(("[TOOL_CALLS]",), _follow_mistral)
NEMOTRON: Final = Syntax(("<TOOLCALL>",), _follow_nemotron)
RESPONSE: Final = Syntax(tuple(chain(*RESPONSES)), _follow_response)
"""Answers of Command's without calls."""
COMMAND: Final = Syntax(("<|START_ACTION|>", *RESPONSE.openings), _follow_command)


def _called(members: Mapping[str, str], key: str = "name") -> CalledTool:
    """The call that an object describes; ``key`` is that of the function's name."""
    if key not in members or ("arguments" in members and "parameters" in members):
        raise NotACall
    name = json.loads(members[key])
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if not name or name != _without_surrogates(name):
        raise NotACall
    return CalledTool(name, sendable(arguments))


def _without_surrogates(text: str) -> str:
    return text.encode(errors="replace").decode()


_FIRSTS: Final = {"arguments": "{", "parameters": "{", "type": '"'}
"""What the values of a call's members begin with, beside its name."""


def _members(
    first: str, name: str = "name", *, others: bool = True
) -> Generator[None, str, dict[str, str]]:
    """The object that begins with ``first``: its members' values as written, by key; ``name`` is
    the key of the function's name. Unless ``others``, it has only members that a call has."""
    firsts = {name: '"', **_FIRSTS}
    members: dict[str, str] = {}
    if first != "{":
        raise NotACall
    char = yield from blanks()
    while char != "}":
        if char != '"':
            raise NotACall
        written = [char]
        yield from read_string(written)
        key = json.loads("".join(written))
        if key in members or not (others or key in firsts):
            raise NotACall
        if (yield from blanks()) != ":":
            raise NotACall
        char = yield from blanks()
        if char != firsts.get(key, char):
            raise NotACall
        written = []
        behind = yield from read_value(char, written)
        members[key] = "".join(written)
        char = yield from blanks(first=behind)
        if char == ",":
            char = yield from blanks()
            if char == "}":
                raise NotACall
        elif char != "}":
            raise NotACall
    return members


# --- marks and names -----------------------------------------------------------------------------


def mark(*marks: str, first: str = "") -> Reading:
    """Whichever of the marks comes; ``first`` is its first character if that was read."""
    read = ""
    while read not in marks:
        char = first if first and not read else (yield)
        marks = tuple(mark for mark in marks if mark.startswith(read + char))
        if not marks:
            raise NotACall(len(read))
        read += char
    return read


def plain_name(first: str) -> Generator[None, str, tuple[str, str]]:
    """A plain name (``is_plain_name``), and the character after it."""
    name, char = yield from word_of(first, _NAME_CHARS, most=MOST_NAME_CHARS)
    if not name:
        raise NotACall
    return name, char


def name_before(first: str, ends: str, others: str = "") -> Generator[None, str, tuple[str, str]]:
    """A name on one line without any of ``others``, and the one of ``ends`` that comes after it."""
    name: list[str] = []
    char = first
    while char not in ends:
        name.append(char)
        if char in '<{"\n' or char in others or len(name) > MOST_NAME_CHARS:
            raise NotACall
        char = yield
    if not name:
        raise NotACall
    return "".join(name).rstrip(), char


def is_plain_name(name: str) -> bool:
    """Whether a name can be written between marks as it is."""
    return 0 < len(name) <= MOST_NAME_CHARS and _NAME_CHARS.issuperset(name)
