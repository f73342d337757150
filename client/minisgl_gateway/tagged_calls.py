"""Calls whose arguments are written one by one between tags, as plain text.

    QWEN  <tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>
    GLM   <tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>

Line breaks stand between the tags, and one on each side of a value of Qwen's is not part of it.
What the texts mean is for ``tagged_values`` to say. Must not know the text around calls
(``tool_calls``).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Final

from minisgl_gateway.call_syntax import (
    BLANKS,
    CalledTool,
    Following,
    NotACall,
    Syntax,
    blanks,
    mark,
    name_before,
)
from minisgl_gateway.tagged_values import ArgumentKinds, JsonStrings
from minisgl_gateway.tools import Tool

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
FUNCTION: Final = "<function="
END_OF_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_OF_PARAMETER: Final = "</parameter>"
KEY: Final = "<arg_key>"
END_OF_KEY: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
END_OF_VALUE: Final = "</arg_value>"


def qwen(tools: Iterable[Tool] = ()) -> Syntax:
    """Qwen's syntax for calls of the tools."""
    kinds = ArgumentKinds(tools)
    return Syntax((OPENING,), lambda: _follow_qwen(kinds), closing=CLOSING)


def glm(tools: Iterable[Tool] = ()) -> Syntax:
    """GLM's syntax for calls of the tools."""
    kinds = ArgumentKinds(tools)
    return Syntax((OPENING,), lambda: _follow_glm(kinds), closing=CLOSING)


def _follow_qwen(kinds: ArgumentKinds) -> Following:
    yield from mark(OPENING)
    yield from mark(FUNCTION, first=(yield from blanks()))
    name, _ = yield from name_before((yield None), ">")
    texts: dict[str, str] = {}
    tag = yield from mark(PARAMETER, END_OF_FUNCTION, first=(yield from blanks()))
    while tag == PARAMETER:
        key, _ = yield from name_before((yield None), ">")
        strings = JsonStrings() if kinds.are_json(name, key) else None
        text, tag = yield from _text(strings, END_OF_PARAMETER, PARAMETER, END_OF_FUNCTION)
        _add(texts, key, text.removeprefix("\n").removesuffix("\n"))
    yield from mark(CLOSING, first=(yield from blanks()))
    return CalledTool(name, kinds.as_json(name, texts))


def _follow_glm(kinds: ArgumentKinds) -> Following:
    yield from mark(OPENING)
    name, char = yield from name_before((yield from blanks()), "\n<")
    texts: dict[str, str] = {}
    tag = yield from mark(KEY, CLOSING, first=(yield from blanks(first=char)))
    while tag == KEY:
        key, _ = yield from _text(None, END_OF_KEY, VALUE)
        strings = JsonStrings() if kinds.are_json(name, key) else None
        text, tag = yield from _text(strings, END_OF_VALUE, KEY, CLOSING)
        _add(texts, key, text)
    return CalledTool(name, kinds.as_json(name, texts))


def _add(texts: dict[str, str], key: str, text: str) -> None:
    if key in texts:
        raise NotACall
    texts[key] = text


def _text(
    strings: JsonStrings | None, closing: str, *followers: str
) -> Generator[None, str, tuple[str, str]]:
    """The text up to ``closing``, and which of the ``followers`` comes behind it, perhaps after
    blanks. A closing with anything else behind it belongs to the text, and so does one in the
    ``strings`` of JSON, if the text is that."""
    written: list[str] = []
    end = ""  # of what is written, as long as a closing
    while True:
        while end != closing or (strings is not None and strings.is_open):
            written.append((yield))
            end = (end + written[-1])[-len(closing) :]
            if strings is not None:
                strings.push(written[-1])
        behind: list[str] = []
        follower = ""
        while any(one.startswith(follower) for one in followers):
            if follower in followers:
                return "".join(written[: -len(closing)]), follower
            behind.append((yield))
            if follower or behind[-1] not in BLANKS:
                follower += behind[-1]
            if strings is not None:
                strings.push(behind[-1])
        written += behind
        end = "".join(behind)[-len(closing) :]
