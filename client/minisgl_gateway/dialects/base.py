"""What dialects have in common: the reader of calls, and the structural tag of an answer.

Must not know any family of models.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias

from minisgl_client.answer import ToolDialect

from minisgl_gateway.call_syntax import Syntax
from minisgl_gateway.content import text_of
from minisgl_gateway.tool_calls import CallReader
from minisgl_gateway.tools import Calls, Tool, function_of

DialectName: TypeAlias = Literal[ToolDialect, "plain"]
Message: TypeAlias = Mapping[str, Any]
Schema: TypeAlias = dict[str, Any]
Structure: TypeAlias = dict[str, Any]
"""A beginning, the schema of the value after it or members, and an end, as in structural tags. If
it is ``lenient``, keywords that cannot be enforced are ignored."""


class Dialect(ABC):
    """One way to call tools.

    With ``keeps_special_tokens`` special tokens mark the calls, so the answer's text must include
    them. ``is_of_template`` says whether the chat template takes tools, calls and their results.
    With ``has_channels`` each answer is messages in channels (``channels``), with tools or without.
    With ``enforces_all`` the arguments of all tools follow their schemas if those of one must.
    """

    name: ClassVar[DialectName]
    syntax: ClassVar[Syntax]
    keeps_special_tokens: ClassVar[bool] = False
    is_of_template: ClassVar[bool] = True
    has_channels: ClassVar[bool] = False
    enforces_all: ClassVar[bool] = False

    def enforcing(self, tools: Sequence[Tool], calls: Calls) -> Dialect:
        """The dialect of an answer whose calls of these tools are enforced."""
        return self

    def reader(self, tools: Sequence[Tool] = (), *, calls_alone: bool = False) -> CallReader:
        """A reader of one answer without channels, which may call ``tools``; with ``calls_alone``
        of one that is constrained to calls."""
        return CallReader(self.syntax, calls_alone=calls_alone)

    def text_reader(self) -> CallReader | None:
        """A reader of one answer that has no calls, if marks stand around its text."""
        return None

    @property
    def stop(self) -> str | None:
        """The stop string that ends an answer after its first call, if there is one."""
        return self.syntax.closing or None

    @property
    def _triggers(self) -> Iterable[str]:
        """How calls begin in free text."""
        return self.syntax.openings

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The chat as the template is given it; ``tools`` are those that the model may call."""
        return list(messages)

    def tool(self, tool: Tool) -> dict[str, Any]:
        """A tool as the template is given it."""
        return {"type": "function", "function": function_of(tool)}

    def enforced_tools(self, tools: Sequence[Tool], calls: Calls) -> Sequence[Tool]:
        """The tools that may be called and whose arguments then follow their schemas."""
        tools = callable_tools(tools, calls)
        strict = [tool for tool in tools if tool.strict]
        return tools if calls.required or (self.enforces_all and strict) else strict

    def constraint(self, tools: Sequence[Tool], calls: Calls) -> dict[str, Any] | None:
        """The structural tag that an answer must follow; None if there is nothing to enforce.

        The text around calls is free, the arguments of strict tools follow their schemas, and those
        of the others are any JSON object. If calls are required, the answer consists of calls
        alone, and all arguments follow their schemas. If at most one call is allowed, it ends the
        answer; if that is the only constraint, ``stop`` enforces it without a tag.
        """
        required, parallel = calls.required, calls.parallel
        enforced = self.enforced_tools(tools, calls)
        if not enforced and (parallel or self.stop is not None):
            return None
        arguments = _arguments(callable_tools(tools, calls), enforced)
        tag: dict[str, Any] = {
            "structures": self._structures(arguments, required, parallel),
            "stop_after_first": not parallel,
        }
        if required:
            return {**tag, "at_least_one": True, "separator": [*self._separators]}
        return {**tag, "triggers": list(self._triggers)}

    def complaint(self, message: str, tools: Sequence[Tool], calls: Calls) -> str | None:
        """An error of the engine about the constraint, with its places in the schemas of tools, as
        in ``weather#/properties/city``; None if it is about none of them."""
        named = callable_tools(tools, calls)
        place = re.compile(self._place([tool.name for tool in named]))
        told, num_places = place.subn(
            lambda found: self._told(found, named[int(found["tool"]) % len(named)]), message
        )
        if not num_places:
            return None
        what, at, places = told.partition(", at ")
        what = re.sub(f"'{self._inside}/", "'/", what)  # in a reference
        whole = [one for one in places.split(", ") if not one.startswith("#")]
        return what + at + ", ".join(dict.fromkeys(whole))

    _separators: ClassVar[Sequence[str]] = ("",)
    """What may stand between two calls."""
    _inside: ClassVar[str] = ""
    """A regular expression for the place of a tool's schema in a structure's, if it is a part."""

    @abstractmethod
    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        """All calls that an answer may have: for each way to write one, the tools in the order of
        ``arguments``."""

    def _place(self, names: Collection[str]) -> str:
        """A regular expression for the place of a tool's schema in the constraint."""
        return r"#/structures/(?P<tool>\d+)/schema(?![^/, …])"

    def _told(self, place: re.Match[str], tool: Tool) -> str:
        """How an error names such a place, which is in the schema of this tool."""
        return f"{tool.name}#"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the arguments of a tool must follow. Keywords of the schema that cannot be enforced are
    ignored if it ``is_lenient``, and errors otherwise."""

    schema: Schema
    is_lenient: bool

    def between(self, begin: str, end: str = "") -> Structure:
        """The arguments, as they appear in a call."""
        return structure(begin, self.schema, end, is_lenient=self.is_lenient)


def structure(begin: str, schema: Schema, end: str, *, is_lenient: bool) -> Structure:
    """A structure of a structural tag."""
    structure: Structure = {"begin": begin, "schema": schema, "end": end}
    return {**structure, "lenient": True} if is_lenient else structure


def callable_tools(tools: Sequence[Tool], calls: Calls) -> Sequence[Tool]:
    """The tools that may be called."""
    return [tool for tool in tools if calls.name in (None, tool.name)]


_NO_PARAMETERS: Final[Mapping[str, Any]] = {"properties": {}, "additionalProperties": False}


def parameters_of(tool: Tool) -> Schema:
    """The schema of a tool's arguments. A tool that was given without parameters has none, as
    OpenAI's API says."""
    schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    return {**schema, "type": "object"}


def _arguments(tools: Iterable[Tool], enforced: Iterable[Tool]) -> dict[str, Arguments]:
    """What the arguments must follow, by tool: those of ``enforced`` tools their schema, the others
    are any object."""
    names = {tool.name for tool in enforced}
    return {
        tool.name: Arguments(
            parameters_of(tool) if tool.name in names else {"type": "object"}, not tool.strict
        )
        for tool in tools
    }


def with_text_as_thoughts(message: Message) -> Message:
    """The message with its text behind its thoughts, as one of them."""
    parts = [message.get("reasoning_content"), text_of(message.get("content"))]
    thoughts = "\n\n".join(filter(None, parts)) or None
    return {**message, "content": "", "reasoning_content": thoughts}
