"""The dialect of gpt-oss, whose answers are messages in channels (``minisgl_gateway.channels``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from minisgl_gateway.channels import FUNCTIONS
from minisgl_gateway.dialects.base import (
    Arguments,
    Dialect,
    Message,
    Structure,
    with_text_as_thoughts,
)
from minisgl_gateway.dialects.single_calls import with_single_calls
from minisgl_gateway.tools import Calls, Tool
from minisgl_gateway.turns import reminder

_HEADERS: Final[Mapping[str, str]] = {
    f"<|channel|>commentary to={FUNCTIONS}": " <|constrain|>json<|message|>",
    f" to={FUNCTIONS}": "<|channel|>commentary <|constrain|>json<|message|>",
}
"""What comes before and after the name of the function that a message calls."""


class Harmony(Dialect):
    """gpt-oss: answers in channels, whose last message may be a call, at most one. It ends with an
    end token, so no stop string is needed.

    Templates take one call per message, and with a call either thoughts or a text, which they
    present as thoughts. They drop system messages that are not the first, and fail on a tool
    without a description.
    """

    name = "harmony"
    keeps_special_tokens = True
    has_channels = True
    stop = None
    _triggers = _HEADERS

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        told: list[Message] = []
        for index, message in enumerate(with_single_calls(messages)):
            if message["role"] == "system" and index > 0:
                told.append(reminder(message))
                continue
            if message.get("tool_calls"):
                message = with_text_as_thoughts(message)
            told.append(message)
        return told

    def tool(self, tool: Tool) -> dict[str, Any]:
        return super().tool(replace(tool, description=tool.description or ""))

    def constraint(self, tools: Sequence[Tool], calls: Calls) -> dict[str, Any] | None:
        """The structures are messages of their own: the engine knows that such a message ends the
        answer, and that thoughts may come before it."""
        tag = super().constraint(tools, replace(calls, parallel=True))
        return None if tag is None else {**tag, "stop_after_first": True}

    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        return [
            of_tool.between(f"{header}{name}{rest}")
            for header, rest in _HEADERS.items()
            for name, of_tool in arguments.items()
        ]
