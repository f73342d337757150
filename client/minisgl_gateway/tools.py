"""The tools of a request, and which calls of them an answer may have.

Must not know how a model is told about tools or calls them (``dialects``), or through which API a
request came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_gateway.errors import invalid, shown


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    ``parameters`` is a JSON schema of an object, None for none given. The arguments of a ``strict``
    tool follow it.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """Which calls an answer may have, or must.

    If they are ``required``, the answer consists of calls alone; with ``name`` it is one call, of
    that tool. Without ``parallel`` there is at most one. Unless ``is_offered``, the model is not
    told about the tools.
    """

    is_offered: bool = True
    required: bool = False
    parallel: bool = True
    name: str | None = None

    @classmethod
    def of(cls, name: str) -> Calls:
        """One call of the tool with this name."""
        return cls(required=True, parallel=False, name=name)


def call_of(name: str, tools: Iterable[Tool], param: str) -> Calls:
    """One call of the tool with this name; raises ``ApiError`` as ``allowed`` does."""
    _check([name], tools, param)
    return Calls.of(name)


def allowed(names: Collection[str], tools: Collection[Tool], param: str) -> list[Tool]:
    """The tools with these names; raises ``ApiError`` if ``param``, which has the names, has one of
    no tool."""
    _check(names, tools, param)
    return [tool for tool in tools if tool.name in names]


def _check(names: Iterable[str], tools: Iterable[Tool], param: str) -> None:
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise invalid(f"{param} names {shown(name)}, which is none of the tools", param)


def function_of(tool: Tool) -> dict[str, Any]:
    """A tool's name, description and parameters, without those that were not given."""
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {key: value for key, value in given.items() if value is not None}
