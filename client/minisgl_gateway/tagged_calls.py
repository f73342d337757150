"""Calls whose arguments are written one by one between tags, as plain text.

    QWEN     <tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>
    SEED     the same between <seed:tool_call> and </seed:tool_call>
    GLM      <tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>
    MINIMAX  <minimax:tool_call><invoke name="weather"><parameter name="city">Oslo</parameter>
             </invoke></minimax:tool_call>, with one <invoke> or several

Line breaks stand between the tags, and one on each side of a value of Qwen's is not part of it.
Values of the others are all that stands between their tags.
What the texts mean is for ``tagged_values`` to say. Must not know the text around calls
(``tool_calls``).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import partial
from typing import Final

from minisgl_gateway.call_syntax import CalledTool, Following, Syntax, mark, name_before
from minisgl_gateway.json_reading import BLANKS, NotACall, blanks
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
OPENING_OF_SEED: Final = "<seed:tool_call>"
CLOSING_OF_SEED: Final = "</seed:tool_call>"
OPENING_OF_MINIMAX: Final = "<minimax:tool_call>"
CLOSING_OF_MINIMAX: Final = "</minimax:tool_call>"
INVOKE: Final = '<invoke name="'
END_OF_INVOKE: Final = "</invoke>"
NAMED_PARAMETER: Final = '<parameter name="'
END_OF_NAME: Final = '">'


def qwen(tools: Iterable[Tool] = ()) -> Syntax:
    """Qwen's syntax for calls of the tools."""
    kinds = ArgumentKinds(tools)
    follow = partial(_follow_functions, kinds, OPENING, CLOSING, line_break="\n")
    return Syntax((OPENING,), follow, closing=CLOSING)


def seed(tools: Iterable[Tool] = ()) -> Syntax:
    """Seed's syntax for calls of the tools."""
    kinds, opening, closing = ArgumentKinds(tools), OPENING_OF_SEED, CLOSING_OF_SEED
    follow = partial(_follow_functions, kinds, opening, closing, line_break="")
    return Syntax((opening,), follow, closing=closing)


def minimax(tools: Iterable[Tool] = ()) -> Syntax:
    """MiniMax's syntax for calls of the tools. Each of several calls has an end of its own."""
    kinds = ArgumentKinds(tools)
    return Syntax((OPENING_OF_MINIMAX,), partial(_follow_minimax, kinds), closing=END_OF_INVOKE)


def glm(tools: Iterable[Tool] = ()) -> Syntax:
    """GLM's syntax for calls of the tools."""
    kinds = ArgumentKinds(tools)
    return Syntax((OPENING,), lambda: _follow_glm(kinds), closing=CLOSING)


def _follow_functions(
    kinds: ArgumentKinds, opening: str, closing: str, *, line_break: str
) -> Following:
    """The form of Qwen and Seed; ``line_break`` stands on each side of a value."""
    yield from mark(opening)
    yield from mark(FUNCTION, first=(yield from blanks()))
    name, _ = yield from name_before((yield None), ">")
    texts: dict[str, str] = {}
    tag = yield from mark(PARAMETER, END_OF_FUNCTION, first=(yield from blanks()))
    while tag == PARAMETER:
        key, _ = yield from name_before((yield None), ">")
        strings = JsonStrings() if kinds.are_json(name, key) else None
        text, tag = yield from _text(strings, END_OF_PARAMETER, PARAMETER, END_OF_FUNCTION)
        _add(texts, key, text.removeprefix(line_break).removesuffix(line_break))
    yield from mark(closing, first=(yield from blanks()))
    return CalledTool(name, kinds.as_json(name, texts))


def _follow_minimax(kinds: ArgumentKinds) -> Following:
    yield from mark(OPENING_OF_MINIMAX)
    tag = yield from mark(INVOKE, first=(yield from blanks()))
    while tag == INVOKE:
        name = yield from _quoted_name()
        texts: dict[str, str] = {}
        tag = yield from mark(NAMED_PARAMETER, END_OF_INVOKE, first=(yield from blanks()))
        while tag == NAMED_PARAMETER:
            key = yield from _quoted_name()
            strings = JsonStrings() if kinds.are_json(name, key) else None
            text, tag = yield from _text(strings, END_OF_PARAMETER, NAMED_PARAMETER, END_OF_INVOKE)
            _add(texts, key, text)
        char = yield CalledTool(name, kinds.as_json(name, texts))
        char = yield from blanks(first=char)
        tag = yield from mark(INVOKE, CLOSING_OF_MINIMAX, first=char)
    return None


def _quoted_name() -> Generator[None, str, str]:
    """A name up to the end of the tag in which it is quoted."""
    name, char = yield from name_before((yield), END_OF_NAME[0])
    yield from mark(END_OF_NAME, first=char)
    return name


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
