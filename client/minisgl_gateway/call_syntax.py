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

Calls are read character by character, since they come in pieces of any size; so JSON, too, is read
by generators to which characters are sent. Must not know the text around calls (``tool_calls``).
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

PYTHON_TAG: Final = "<|python_tag|>"
CALL_ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"
RESPONSES: Final = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)
"""The marks around a text of Command's, by its version."""

BLANKS: Final = " \t\n\r"
MOST_DEPTH: Final = 200
"""The limit on nested arrays and objects; pydantic writes some 250, also those around arguments."""
MOST_NAME_CHARS: Final = 256
_MOST_WORD_CHARS: Final = 1024
"""The limit on a number's length; Python reads integers of up to 4,300 digits."""
_NAME_CHARS: Final = frozenset(string.ascii_letters + string.digits + "_.-")
PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""What templates write for these values, since they are programs in Python."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """One call; ``arguments`` is a JSON object as a string, as the model wrote it."""

    name: str
    arguments: str


class NotACall(Exception):
    """The character just read shows that the text is not a call. The ``num_read`` characters before
    it, taken for a mark that did not continue, may be the beginning of another call."""

    def __init__(self, num_read: int = 0) -> None:
        super().__init__()
        self.num_read = num_read


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
    yield from _value(char, written)
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


_ESCAPE: Final = re.compile(
    r"(?P<pair>\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|(?P<lone>\\u[dD][89a-fA-F]..)|\\.", re.DOTALL
)


def as_json(value: Any) -> str:
    """A value as templates and models write JSON."""
    return json.dumps(value, ensure_ascii=False)


def sendable(arguments: str) -> str:
    """JSON without halves of surrogate pairs: strings that hold one cannot be encoded."""
    return _ESCAPE.sub(lambda found: r"\ufffd" if found["lone"] else found[0], arguments)


def _without_surrogates(text: str) -> str:
    return text.encode(errors="replace").decode()


# --- JSON, character by character ----------------------------------------------------------------

_Reading: TypeAlias = Generator[None, str, str]
_FIRSTS: Final = {"arguments": "{", "parameters": "{", "type": '"'}
"""What the values of a call's members begin with, beside its name."""
_WORD: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null", re.A)
WORD_CHARS: Final = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")


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
        yield from _string(written)
        key = json.loads("".join(written))
        if key in members or not (others or key in firsts):
            raise NotACall
        if (yield from blanks()) != ":":
            raise NotACall
        char = yield from blanks()
        if char != firsts.get(key, char):
            raise NotACall
        written = []
        behind = yield from _value(char, written)
        members[key] = "".join(written)
        char = yield from blanks(first=behind)
        if char == ",":
            char = yield from blanks()
            if char == "}":
                raise NotACall
        elif char != "}":
            raise NotACall
    return members


def _value(first: str, written: list[str]) -> _Reading:
    """Append a value to what is written. Returns the character after it if that was read, since
    nothing else ends a number, else ""."""
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
            yield from _string(written)
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


def _key(first: str, written: list[str]) -> _Reading:
    """Append a key and its colon; returns the first character of the value."""
    if first != '"':
        raise NotACall
    written.append(first)
    yield from _string(written)
    if (yield from blanks(written)) != ":":
        raise NotACall
    written.append(":")
    return (yield from blanks(written))


def _string(written: list[str]) -> Generator[None, str, None]:
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


def _word(first: str, written: list[str]) -> _Reading:
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


def blanks(written: list[str] | None = None, first: str = "") -> _Reading:
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
    reading, num_read = _value(text[0], []), 1
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


# --- marks ---------------------------------------------------------------------------------------


def mark(*marks: str, first: str = "") -> _Reading:
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
