"""A conversation of agents -> the turns that chat templates know.

OpenAI's Responses API and Anthropic's Messages API allow system messages anywhere, and several user
messages in a row; coding agents send both. Many chat templates refuse a system message that is not
the first, or drop it silently, and some require user and assistant to alternate. Of OpenAI's Chat
Completions only the beginning is changed, as callers write these for their model's template. What
the templates of a dialect of tool calls demand, the dialect knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, Final

from minisgl_gateway.content import texts_of

_REMINDER: Final = "<system-reminder>\n{}\n</system-reminder>"
"""How coding agents mark what the user did not write."""


def in_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with at most one system message, the first, and no two user messages in a
    row.

    System messages at the beginning are joined. A later one becomes part of a user message, marked.
    """
    is_beginning = True
    marked: list[Mapping[str, Any]] = []
    for message in messages:
        is_system = message["role"] == "system"
        is_beginning = is_beginning and is_system
        if is_system and not is_beginning:
            message = reminder(message)
        marked.append(message)
    turns: list[Mapping[str, Any]] = []
    for role, run in groupby(marked, itemgetter("role")):
        same = [*run]
        turns += [joined(same)] if role in ("system", "user") else same
    return turns


def reminder(message: Mapping[str, Any]) -> dict[str, str]:
    """A system message as a user message, marked."""
    return {"role": "user", "content": _REMINDER.format(_text([message]))}


def with_one_beginning(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with the system messages at its beginning joined."""
    beginning = [*takewhile(lambda message: message["role"] == "system", messages)]
    rest = messages[len(beginning) :]
    return [joined(beginning), *rest] if beginning else [*rest]


def joined(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One message that says what ``messages``, all of one role, say. A single one is unchanged."""
    first = messages[0]
    return {"role": first["role"], "content": _text(messages)} if len(messages) > 1 else first


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(text for message in messages for text in texts_of(message["content"]))
