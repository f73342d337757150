"""The dialects in which a call is a JSON object between tags: Hermes', and that of models whose
templates know no tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from minisgl_gateway import call_syntax
from minisgl_gateway.content import text_of
from minisgl_gateway.dialects.base import (
    Arguments,
    Dialect,
    DialectName,
    Message,
    Structure,
)
from minisgl_gateway.json_reading import as_json
from minisgl_gateway.tools import Tool, function_of


class Hermes(Dialect):
    """Hermes, Qwen 2.5, Qwen 3 and others."""

    name: ClassVar[DialectName] = "hermes"
    syntax = call_syntax.HERMES
    _separators: ClassVar[Sequence[str]] = ("\n",)

    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        (opening,), closing = self.syntax.openings, self.syntax.closing
        return [
            of_tool.between(
                f'{opening}\n{{"name": {as_json(name)}, "arguments": ', f"}}\n{closing}"
            )
            for name, of_tool in arguments.items()
        ]


class Plain(Hermes):
    """For templates that know no tools: a system message describes them and asks for calls in
    Hermes' form; earlier calls and their results are texts."""

    name = "plain"
    is_of_template = False
    _separators = ("",)
    """Otherwise a token such as ``>\\n`` at a call's end would force the next call."""

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        plain: list[Message] = []
        results: list[str] = []
        """Of the calls of one message: templates want the roles to take turns."""
        for message in messages:
            text = text_of(message.get("content"))
            if message["role"] == "tool":
                results.append(f"<tool_response>\n{text}\n</tool_response>")
                continue
            if results:
                told = "\n".join(results)
                results.clear()
                if message["role"] == "user":
                    plain.append({**message, "content": f"{told}\n\n{text}"})
                    continue
                plain.append({"role": "user", "content": told})
            if calls := message.get("tool_calls"):
                parts = [text] if text else []
                content = "\n".join([*parts, *(_spelled(call["function"]) for call in calls)])
                kept = {key: message[key] for key in message if key != "tool_calls"}
                plain.append({**kept, "content": content})
            else:
                plain.append(message)
        if results:
            plain.append({"role": "user", "content": "\n".join(results)})
        if not tools:
            return plain
        system = [self.instructions(tools)]
        if plain and plain[0]["role"] == "system":
            system.insert(0, text_of(plain.pop(0).get("content")))
        return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *plain]

    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system message says about the tools."""
        return "\n".join(
            [
                "# Tools",
                "",
                "You may call these functions:",
                "<tools>",
                *(as_json(function_of(tool)) for tool in tools),
                "</tools>",
                "",
                "To call one, write its name and its arguments as JSON between these tags, for "
                "each call anew:",
                _spelled({"name": "name of the function", "arguments": '{"argument": "value"}'}),
                "Then end your answer: the results will be told between <tool_response> and "
                "</tool_response>.",
            ]
        )


def _spelled(function: Mapping[str, Any]) -> str:
    """A call as Hermes writes it."""
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = as_json(arguments)
    call = f'{{"name": {as_json(function["name"])}, "arguments": {arguments}}}'
    return f"{call_syntax.HERMES.openings[0]}\n{call}\n{call_syntax.HERMES.closing}"
