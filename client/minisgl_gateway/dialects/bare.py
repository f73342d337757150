"""The dialect of Gemma 4, whose calls are objects with bare keys (``bare_calls``)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minisgl_gateway import bare_calls
from minisgl_gateway.bare_schemas import ordered
from minisgl_gateway.content import text_of
from minisgl_gateway.dialects.base import (
    Arguments,
    Message,
    Schema,
    Structure,
    structure,
    with_text_as_thoughts,
)
from minisgl_gateway.dialects.own_form import OwnForm
from minisgl_gateway.spelled_schema import spelled_out
from minisgl_gateway.tools import Tool


class Gemma4(OwnForm):
    """Gemma 4. Not all templates know results as messages of their own, but all write those that
    are in the message with the calls.

    They write the text beside calls behind the results, and end the turn there, though the model is
    to go on with it. So such a text is told as thoughts in the last turn; in earlier ones, whose
    thoughts templates drop, it is told with the next text of the turn.
    """

    name = "gemma4"
    syntax = bare_calls.GEMMA
    keeps_special_tokens = True

    def _can_follow(self, parameters: Schema) -> bool:
        return ordered(parameters) is not None

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
        begin_of_last = max(asked, default=-1)
        told: list[Message] = []
        called: Mapping[Any, deque[str]] = {}
        for index, message in enumerate(messages):
            caller = told[-1] if told and told[-1].get("tool_calls") else None
            if caller is not None and message["role"] == "tool":
                if "tool_responses" not in caller:
                    called = _names(caller["tool_calls"])
                    caller = told[-1] = {**caller, "tool_responses": []}
                caller["tool_responses"].append(_result(message, called))
                continue
            if caller is not None and message["role"] == "assistant":
                said = text_of(caller.get("content")), text_of(message.get("content"))
                told[-1] = {**caller, "content": ""}
                message = {**message, "content": "\n\n".join(filter(None, said))}
            if message.get("tool_calls") and index > begin_of_last:
                message = with_text_as_thoughts(message)
            told.append(message)
        return told

    def tool(self, tool: Tool) -> dict[str, Any]:
        """Templates show neither references nor alternatives."""
        if tool.parameters is not None:
            tool = replace(tool, parameters=spelled_out(tool.parameters))
        return super().tool(tool)

    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        structures = []
        for name, of_tool in arguments.items():
            schema = ordered(of_tool.schema)
            assert schema is not None, "else another dialect is enforcing"
            begin = f"{bare_calls.OPENING}{bare_calls.CALL}{name}"
            call = structure(begin, schema, bare_calls.CLOSING, is_lenient=of_tool.is_lenient)
            structures.append({**call, "quote": bare_calls.QUOTE})
        return structures


def _result(message: Message, called: Mapping[Any, deque[str]]) -> dict[str, Any]:
    """A result in the form of templates, with the name of the function that was called, which
    ``called`` has by the call's id."""
    if names := called.get(message.get("tool_call_id")):
        name = names.popleft() if len(names) > 1 else names[0]
    else:
        name = message.get("name", "unknown")
    return {"name": name, "response": text_of(message.get("content"))}


def _names(calls: Sequence[Mapping[str, Any]]) -> dict[Any, deque[str]]:
    """The names of the called functions by the calls' ids, which several calls may share."""
    names: dict[Any, deque[str]] = defaultdict(deque)
    for call in calls:
        names[call.get("id")].append(call["function"]["name"])
    return names
