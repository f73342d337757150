"""Calls whose arguments are written one by one between tags, as plain text.

    QWEN  <tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>
    GLM   <tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>

Line breaks stand between the tags, and one on each side of a value of Qwen's is not part of it.
Text does not tell the number 5 from the string "5": the schema of the tool's parameters does
(``ArgumentKinds``). Must not know the text around calls (``tool_calls``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any, Final

from minisgl_gateway.call_syntax import (
    BLANKS,
    MOST_NAME_CHARS,
    CalledTool,
    Following,
    NotACall,
    Syntax,
    blanks,
    kind_of_json,
    mark,
    sendable,
)
from minisgl_gateway.tools import Tool

_OPENING: Final = "<tool_call>"
_CLOSING: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_END_OF_FUNCTION: Final = "</function>"
_PARAMETER: Final = "<parameter="
_END_OF_PARAMETER: Final = "</parameter>"
_KEY: Final = "<arg_key>"
_END_OF_KEY: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_END_OF_VALUE: Final = "</arg_value>"

_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""What templates write for these values, since they are programs in Python."""
_ANY: Final = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


class ArgumentKinds:
    """The types that the arguments of tools may have, by their schemas."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._schemas = {tool.name: tool.parameters or {} for tool in tools}

    def as_json(self, tool: str, texts: Mapping[str, str]) -> str:
        """The arguments of a call, as a JSON object. A value is a string if its schema says so, or
        if what is written is no JSON of a type that the schema allows."""
        root = self._schemas.get(tool, {})
        schemas = root.get("properties")
        members = []
        for name, text in texts.items():
            schema = schemas.get(name) if isinstance(schemas, Mapping) else None
            kinds = _kinds(schema, root, set()) or _ANY
            members.append(f"{_quoted(name)}: {_value_of(text, kinds)}")
        return sendable("{" + ", ".join(members) + "}")


def _value_of(text: str, kinds: Collection[str]) -> str:
    """A value in JSON."""
    written = text.strip()
    written = _PYTHON_WORDS.get(written, written)
    kind = kind_of_json(written)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return written if fits and kind != "string" else _quoted(text)


def _kinds(schema: Any, root: Mapping[str, Any], followed: set[str]) -> Collection[str]:
    """The types of the values that a schema allows, as far as it shows them. Of references that are
    ``followed`` already, the types are known."""
    if not isinstance(schema, Mapping):
        return _ANY
    if isinstance(reference := schema.get("$ref"), str):
        if reference in followed:
            return frozenset()
        followed.add(reference)
        return _kinds(_referred(reference, root), root, followed)
    if isinstance(kinds := schema.get("type"), str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {kind_of_json(json.dumps(value)) or "" for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            return {kind for part in parts for kind in _kinds(part, root, followed)}
    if isinstance(parts := schema.get("allOf"), list):
        of_parts = [_kinds(part, root, followed) for part in parts]
        return next((kinds for kinds in of_parts if kinds is not _ANY), _ANY)
    return _ANY


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema points to; None if to nothing."""
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found if reference.startswith("#") else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- how calls go on -----------------------------------------------------------------------------


def qwen(tools: Iterable[Tool] = ()) -> Syntax:
    """Qwen's syntax for calls of the tools."""
    kinds = ArgumentKinds(tools)
    return Syntax((_OPENING,), lambda: _follow_qwen(kinds), closing=_CLOSING)


def glm(tools: Iterable[Tool] = ()) -> Syntax:
    """GLM's syntax for calls of the tools."""
    kinds = ArgumentKinds(tools)
    return Syntax((_OPENING,), lambda: _follow_glm(kinds), closing=_CLOSING)


def _follow_qwen(kinds: ArgumentKinds) -> Following:
    yield from mark(_OPENING)
    yield from mark(_FUNCTION, first=(yield from blanks()))
    name, _ = yield from _name((yield None), ">")
    texts: dict[str, str] = {}
    tag = yield from mark(_PARAMETER, _END_OF_FUNCTION, first=(yield from blanks()))
    while tag == _PARAMETER:
        key, _ = yield from _name((yield None), ">")
        text, tag = yield from _text(_END_OF_PARAMETER, _PARAMETER, _END_OF_FUNCTION)
        _add(texts, key, text.removeprefix("\n").removesuffix("\n"))
    yield from mark(_CLOSING, first=(yield from blanks()))
    return CalledTool(name, kinds.as_json(name, texts))


def _follow_glm(kinds: ArgumentKinds) -> Following:
    yield from mark(_OPENING)
    name, char = yield from _name((yield from blanks()), "\n<")
    texts: dict[str, str] = {}
    tag = yield from mark(_KEY, _CLOSING, first=(yield from blanks(first=char)))
    while tag == _KEY:
        key, _ = yield from _text(_END_OF_KEY, _VALUE)
        text, tag = yield from _text(_END_OF_VALUE, _KEY, _CLOSING)
        _add(texts, key, text)
    return CalledTool(name, kinds.as_json(name, texts))


def _add(texts: dict[str, str], key: str, text: str) -> None:
    if key in texts:
        raise NotACall
    texts[key] = text


def _name(first: str, ends: str) -> Generator[None, str, tuple[str, str]]:
    """A name on one line, and the one of ``ends`` that comes after it."""
    name: list[str] = []
    char = first
    while char not in ends:
        name.append(char)
        if char in '<{"\n' or len(name) > MOST_NAME_CHARS:
            raise NotACall
        char = yield
    if not name:
        raise NotACall
    return "".join(name).rstrip(), char


def _text(closing: str, *followers: str) -> Generator[None, str, tuple[str, str]]:
    """The text up to ``closing``, and which of the ``followers`` comes behind it, perhaps after
    blanks. A closing with anything else behind it belongs to the text."""
    written: list[str] = []
    end = ""  # of what is written, as long as a closing
    while True:
        while end != closing:
            written.append((yield))
            end = (end + written[-1])[-len(closing) :]
        behind: list[str] = []
        follower = ""
        while any(one.startswith(follower) for one in followers):
            if follower in followers:
                return "".join(written[: -len(closing)]), follower
            behind.append((yield))
            if follower or behind[-1] not in BLANKS:
                follower += behind[-1]
        written += behind
        end = "".join(behind)[-len(closing) :]
