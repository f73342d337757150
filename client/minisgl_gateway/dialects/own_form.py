"""Dialects whose form of a call can be kept to some schemas only.

If the arguments of a tool that may be called cannot be kept to theirs, an answer whose calls are
enforced is in the dialect ``plain``, whose system message describes the tools in place of the
template.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from minisgl_gateway.call_syntax import is_plain_name
from minisgl_gateway.dialects.base import Dialect, Schema, callable_tools, parameters_of
from minisgl_gateway.dialects.hermes import Plain
from minisgl_gateway.tools import Calls, Tool


class OwnForm(Dialect):
    @abstractmethod
    def _can_follow(self, parameters: Schema) -> bool:
        """Whether calls in this form can be kept to a schema of arguments."""

    def enforcing(self, tools: Sequence[Tool], calls: Calls) -> Dialect:
        can_enforce = all(
            is_plain_name(tool.name) and self._can_follow(parameters_of(tool))
            for tool in callable_tools(tools, calls)
        )
        return self if can_enforce else Plain()
