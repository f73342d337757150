"""The dialects in which each argument of a call stands between tags of its own, as plain text.

No schema can be enforced on such text. So an answer whose calls are enforced is in the dialect
``plain``, whose system message describes the tools in place of the template.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from minisgl_gateway import tagged_calls
from minisgl_gateway.call_syntax import Syntax
from minisgl_gateway.dialects.base import Arguments, Dialect, DialectName, Structure
from minisgl_gateway.dialects.hermes import Plain
from minisgl_gateway.tool_calls import CallReader
from minisgl_gateway.tools import Tool


class _Tagged(Dialect):
    enforcing = Plain()

    @abstractmethod
    def _syntax_for(self, tools: Sequence[Tool]) -> Syntax:
        """The syntax of calls of these tools, whose schemas say what their arguments are."""

    def reader(self, tools: Sequence[Tool] = (), *, calls_alone: bool = False) -> CallReader:
        return CallReader(self._syntax_for(tools), calls_alone=calls_alone)

    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        raise AssertionError("calls are enforced in another dialect")


class QwenXml(_Tagged):
    """Qwen3-Coder, Qwen3.5 and later."""

    name: ClassVar[DialectName] = "qwen_xml"
    syntax = tagged_calls.qwen()

    def _syntax_for(self, tools: Sequence[Tool]) -> Syntax:
        return tagged_calls.qwen(tools)


class Glm(_Tagged):
    """GLM-4.5 and later."""

    name: ClassVar[DialectName] = "glm"
    syntax = tagged_calls.glm()
    keeps_special_tokens = True

    def _syntax_for(self, tools: Sequence[Tool]) -> Syntax:
        return tagged_calls.glm(tools)
