"""The dialects in which all calls of an answer are one JSON list."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from minisgl_gateway import call_syntax, python_calls
from minisgl_gateway.content import text_of
from minisgl_gateway.dialects.base import (
    Arguments,
    Dialect,
    DialectName,
    Message,
    Schema,
    Structure,
    parameters_of,
    structure,
    with_text_as_thoughts,
)
from minisgl_gateway.tool_calls import CallReader
from minisgl_gateway.tools import Calls, Tool

_OF_ROOTS: Final = ("$id", "$schema", "x-guidance")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_VALUES: Final = ("const", "enum", "default", "examples")


class Listed(Dialect):
    """A JSON list of calls after the syntax's first opening. It may have several, so the number of
    calls is for the list's schema to limit, not for a stop string."""

    stop = None
    _closing: ClassVar[str] = ""
    """What comes behind the list."""
    _breaks: ClassVar[Sequence[str]] = ("",)
    """What may stand before the list."""
    _ids: ClassVar[Mapping[str, Schema]] = {}
    """The members of a call before the function's name, all of them required."""
    _keys: ClassVar[tuple[str, str]] = ("name", "arguments")
    """The members of a call with the function's name and with its arguments."""
    _inside = r"/items/anyOf/(?P<tool>\d+)/properties/(?:arguments|parameters)"

    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        of_name, of_arguments = self._keys
        calls = [
            {
                "type": "object",
                "properties": {
                    **self._ids,
                    of_name: {"const": name},
                    of_arguments: _moved(
                        of_tool.schema, f"#/items/anyOf/{index}/properties/{of_arguments}"
                    ),
                },
                "required": [*self._ids, of_name, of_arguments],
                "additionalProperties": False,
            }
            for index, (name, of_tool) in enumerate(arguments.items())
        ]
        found: Schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if not parallel:
            found["maxItems"] = 1
        is_lenient = all(of_tool.is_lenient for of_tool in arguments.values())
        opening = self.syntax.openings[0]
        return [
            structure(opening + line_break, found, self._closing, is_lenient=is_lenient)
            for line_break in self._breaks
        ]

    def _place(self, names: Collection[str]) -> str:
        return rf"#/structures/\d+/schema{self._inside}"


class Nemotron(Listed):
    """Nemotron Nano 2, and the Llama Nemotrons that write calls in the same way. Those of Nemotron
    3 are Qwen3-Coder's."""

    name = "nemotron"
    syntax = call_syntax.NEMOTRON
    keeps_special_tokens = True
    _closing = "</TOOLCALL>"


class Lfm(Listed):
    """LFM2, which writes calls as in Python, or as JSON. Calls that are enforced are JSON, which
    can follow any schema. Unless ``writes_calls``, the template drops earlier calls, which are
    then told in the text of their message."""

    name = "lfm2"
    syntax = python_calls.LFM
    keeps_special_tokens = True
    _closing = python_calls.CLOSING

    def __init__(self, *, writes_calls: bool) -> None:
        self._writes_calls = writes_calls

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        if self._writes_calls:
            return [*messages]
        told: list[Message] = []
        for message in messages:
            if calls := message.get("tool_calls"):
                kept = {key: message[key] for key in message if key != "tool_calls"}
                written = python_calls.spelled(call["function"] for call in calls)
                message = {**kept, "content": written + text_of(message.get("content"))}
            told.append(message)
        return told


class Command(Listed):
    """Command R7B, Command A and later models of Cohere's. Thoughts, calls and texts stand each
    between marks. Templates write no text beside calls, so it is told as thoughts, and they fail on
    a tool without parameters."""

    name: ClassVar[DialectName] = "command"
    syntax = call_syntax.COMMAND
    keeps_special_tokens = True
    _closing = "<|END_ACTION|>"
    _breaks = ("", "\n")
    _ids: ClassVar[Mapping[str, Schema]] = {
        "tool_call_id": {"type": "string", "pattern": "^[0-9]{1,4}$"}
    }
    _keys = ("tool_name", "parameters")

    def text_reader(self) -> CallReader:
        return CallReader(call_syntax.RESPONSE)

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        return [
            _with_plan(message) if message.get("tool_calls") else message for message in messages
        ]

    def tool(self, tool: Tool) -> dict[str, Any]:
        told = replace(tool, description=tool.description or "", parameters=parameters_of(tool))
        return super().tool(told)

    def constraint(self, tools: Sequence[Tool], calls: Calls) -> dict[str, Any] | None:
        """A text between its marks is a structure, too, as the marks are not text."""
        tag = super().constraint(tools, calls)
        if tag is None or calls.required:
            return tag
        texts = [
            {"begin": begin, "members": [{"begin": "", "end": end}], "end": ""}
            for begin, end in call_syntax.RESPONSES
        ]
        return {**tag, "structures": [*tag["structures"], *texts]}

    @property
    def _triggers(self) -> list[str]:
        return [self.syntax.openings[0], *(begin for begin, _ in call_syntax.RESPONSES)]


def _with_plan(message: Message) -> Message:
    """A message with calls, whose text and thoughts templates know as the plan or the thoughts."""
    plan = with_text_as_thoughts(message)["reasoning_content"] or ""
    return {**message, "content": "", "tool_plan": plan, "reasoning_content": plan}


def _moved(root: Mapping[str, Any], place: str) -> Schema:
    """A schema moved to a place in another one: its references to itself are changed."""

    def moved(schema: Any) -> Any:
        if isinstance(schema, list):
            return [moved(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        found: Schema = {}
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                found[key] = {name: moved(inner) for name, inner in value.items()}
            elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
                found[key] = place + value[1:]
            else:
                found[key] = value if key in _VALUES else moved(value)
        return found

    return {key: value for key, value in moved(dict(root)).items() if key not in _OF_ROOTS}
