"""The dialects in which each argument of a call stands between tags of its own, as plain text."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

from minisgl_gateway import tagged_calls
from minisgl_gateway.call_syntax import Syntax
from minisgl_gateway.dialects.base import Arguments, DialectName, Schema, Structure
from minisgl_gateway.dialects.own_form import OwnForm
from minisgl_gateway.tagged_schemas import Argument, arguments_of
from minisgl_gateway.tool_calls import CallReader
from minisgl_gateway.tools import Tool

_OF_DEFINITIONS: Final = re.compile(r"/(\$defs|definitions)(?![^/])")


class _Tagged(OwnForm):
    enforces_all = True
    _closing: ClassVar[str]
    """The tag behind the text of an argument."""
    _breaks: ClassVar[Sequence[str]] = ("\n",)
    """What may stand between the tags of a call."""
    _separators = ("\n", "")

    @abstractmethod
    def _syntax_for(self, tools: Sequence[Tool]) -> Syntax:
        """The syntax of calls of these tools, whose schemas say what their arguments are."""

    @abstractmethod
    def _around_call(self, name: str, line_break: str) -> tuple[str, str]:
        """The texts before and after the arguments of a call."""

    @abstractmethod
    def _around_argument(self, name: str, line_break: str) -> tuple[str, str]:
        """The texts before and after the text of an argument."""

    def reader(self, tools: Sequence[Tool] = (), *, calls_alone: bool = False) -> CallReader:
        return CallReader(self._syntax_for(tools), calls_alone=calls_alone)

    def _can_follow(self, parameters: Schema) -> bool:
        return arguments_of(parameters, self._closing) is not None

    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        texts = {
            name: arguments_of(of_tool.schema, self._closing) for name, of_tool in arguments.items()
        }
        structures = []
        for line_break in self._breaks:
            for name, found in texts.items():
                assert found is not None, "else another dialect is enforcing"
                begin, end = self._around_call(name, line_break)
                members = [self._member(argument, line_break) for argument in found]
                lenient = arguments[name].is_lenient
                structures.append(
                    {"begin": begin, "members": members, "end": end, "lenient": lenient}
                )
        return structures

    def _member(self, argument: Argument, line_break: str) -> dict[str, Any]:
        begin, end = self._around_argument(argument.name, line_break)
        member: dict[str, Any] = {"begin": begin, "end": end, "optional": argument.is_optional}
        if argument.schema is not None:
            return {**member, "schema": argument.schema}
        if argument.choices is not None:
            return {**member, "choices": argument.choices}
        # nothing but the tag ends a text for the reader, who drops a line break before it
        return {**member, "end": self._closing}

    def _place(self, names: Collection[str]) -> str:
        return r"#/structures/(?P<tool>\d+)/members/(?P<argument>\d+)/schema(?![^/, …])"

    def _told(self, place: re.Match[str], tool: Tool) -> str:
        whole = super()._told(place, tool)
        if _OF_DEFINITIONS.match(place.string, place.end()):
            return whole
        names = list((tool.parameters or {})["properties"])
        escaped = names[int(place["argument"])].replace("~", "~0").replace("/", "~1")
        return f"{whole}/properties/{escaped}"


class QwenXml(_Tagged):
    """Qwen3-Coder, Qwen3.5 and later."""

    name: ClassVar[DialectName] = "qwen_xml"
    syntax = tagged_calls.qwen()
    _closing = tagged_calls.END_OF_PARAMETER

    def _syntax_for(self, tools: Sequence[Tool]) -> Syntax:
        return tagged_calls.qwen(tools)

    def _around_call(self, name: str, line_break: str) -> tuple[str, str]:
        (opening,), closing = self.syntax.openings, self.syntax.closing
        begin = f"{opening}{line_break}{tagged_calls.FUNCTION}{name}>"
        return begin, f"{line_break}{tagged_calls.END_OF_FUNCTION}{line_break}{closing}"

    def _around_argument(self, name: str, line_break: str) -> tuple[str, str]:
        begin = f"{line_break}{tagged_calls.PARAMETER}{name}>{line_break}"
        return begin, f"{line_break}{tagged_calls.END_OF_PARAMETER}"


class Seed(QwenXml):
    """Seed-OSS: as Qwen's, between other tags and without line breaks around values."""

    name = "seed"
    syntax = tagged_calls.seed()
    keeps_special_tokens = True

    def _syntax_for(self, tools: Sequence[Tool]) -> Syntax:
        return tagged_calls.seed(tools)

    def _around_argument(self, name: str, line_break: str) -> tuple[str, str]:
        begin = f"{line_break}{tagged_calls.PARAMETER}{name}>"
        return begin, tagged_calls.END_OF_PARAMETER


class MiniMax(_Tagged):
    """MiniMax-M2. Its tags enclose one call or several; enforced calls have tags of their own."""

    name: ClassVar[DialectName] = "minimax"
    syntax = tagged_calls.minimax()
    keeps_special_tokens = True
    _closing = tagged_calls.END_OF_PARAMETER

    def _syntax_for(self, tools: Sequence[Tool]) -> Syntax:
        return tagged_calls.minimax(tools)

    def _around_call(self, name: str, line_break: str) -> tuple[str, str]:
        end = f"{line_break}{tagged_calls.END_OF_INVOKE}"
        opening, closing = tagged_calls.OPENING_OF_MINIMAX, tagged_calls.CLOSING_OF_MINIMAX
        invoke = f"{tagged_calls.INVOKE}{name}{tagged_calls.END_OF_NAME}"
        return f"{opening}{line_break}{invoke}", f"{end}{line_break}{closing}"

    def _around_argument(self, name: str, line_break: str) -> tuple[str, str]:
        begin = f"{tagged_calls.NAMED_PARAMETER}{name}{tagged_calls.END_OF_NAME}"
        return f"{line_break}{begin}", tagged_calls.END_OF_PARAMETER


class Glm(_Tagged):
    """GLM-4.5 and later; 4.7 and later write no line breaks between tags."""

    name: ClassVar[DialectName] = "glm"
    syntax = tagged_calls.glm()
    keeps_special_tokens = True
    _closing = tagged_calls.END_OF_VALUE
    _breaks = ("\n", "")

    def _syntax_for(self, tools: Sequence[Tool]) -> Syntax:
        return tagged_calls.glm(tools)

    def _around_call(self, name: str, line_break: str) -> tuple[str, str]:
        return f"{tagged_calls.OPENING}{name}", f"{line_break}{tagged_calls.CLOSING}"

    def _around_argument(self, name: str, line_break: str) -> tuple[str, str]:
        key = f"{tagged_calls.KEY}{name}{tagged_calls.END_OF_KEY}"
        return f"{line_break}{key}{line_break}{tagged_calls.VALUE}", tagged_calls.END_OF_VALUE
