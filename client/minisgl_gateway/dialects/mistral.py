"""The dialect of Mistral's models."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from minisgl_gateway import call_syntax
from minisgl_gateway.dialects.base import Arguments, Dialect, Message, Structure
from minisgl_gateway.dialects.listed import Listed
from minisgl_gateway.tools import Tool
from minisgl_gateway.turns import in_turns, joined

_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_ACKNOWLEDGED: Final = {"role": "assistant", "content": "OK."}


class Mistral(Listed):
    """Mistral. Calls are a JSON list; with ``is_spelled``, and if their names allow it, they come
    one by one, each after its name, as models since the middle of 2025 write them. Templates accept
    only calls and results with ids, of nine letters and digits, and user and assistant in turn. The
    older form of calls has no ids: there it is made of the function's name."""

    name = "mistral"
    syntax = call_syntax.MISTRAL
    keeps_special_tokens = True
    _breaks = (" ", "")

    def __init__(self, *, is_spelled: bool) -> None:
        self._is_spelled = is_spelled

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        told: list[Message] = []
        for message in alternating(messages):
            if calls := message.get("tool_calls"):
                calls = [
                    {**call, "id": _short_id(call.get("id", call["function"]["name"]))}
                    for call in calls
                ]
                message = {**message, "tool_calls": calls}
            elif message["role"] == "tool":
                answered = message.get("tool_call_id", message.get("name", ""))
                message = {**message, "tool_call_id": _short_id(answered)}
            told.append(message)
        return told

    def _structures(
        self, arguments: Mapping[str, Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        if not self._are_spelled(arguments):
            return super()._structures(arguments, required, parallel)
        (opening,) = self.syntax.openings
        return [
            of_tool.between(f"{opening}{name}{call_syntax.ARGUMENTS}")
            for name, of_tool in arguments.items()
        ]

    def _place(self, names: Collection[str]) -> str:
        return Dialect._place(self, names) if self._are_spelled(names) else super()._place(names)

    def _are_spelled(self, names: Iterable[str]) -> bool:
        return self._is_spelled and all(map(call_syntax.is_plain_name, names))


def alternating(messages: Sequence[Message]) -> list[Message]:
    """The conversation in turns of user and assistant, between which there are only calls and their
    results.

    If the user speaks after a result, the assistant is made to say a word before. Texts of the
    assistant in a row are joined.
    """
    turns: list[Message] = []
    for message in in_turns(messages):
        before: Message = turns[-1] if turns else {}
        if message["role"] == "user" and before.get("role") == "tool":
            turns.append(_ACKNOWLEDGED)
        if _is_said(message) and _is_said(before):
            message = joined([turns.pop(), message])
        turns.append(message)
    return turns


def _is_said(message: Message) -> bool:
    """Whether it is a text of the assistant, and nothing else."""
    return message.keys() == {"role", "content"} and message["role"] == "assistant"


def _short_id(call_id: str) -> str:
    """Nine letters and digits for an id, always the same for the same id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
