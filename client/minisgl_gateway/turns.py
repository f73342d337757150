"""A conversation of agents -> the turns that chat templates know.

OpenAI's Responses API and Anthropic's Messages API allow system messages anywhere, and several
messages of the user in a row; coding agents send both. Many chat templates refuse a system message
that is not the first, or leave it out without a word, and some want user and assistant to
alternate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

_REMINDER: Final = "<system-reminder>\n{}\n</system-reminder>"
"""As coding agents mark what the user did not write."""


def in_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with at most one system message, the first, and no two messages of the user
    in a row.

    System messages at the beginning are joined. What a later one says is part of what the user
    says, marked.
    """
    is_beginning = True
    marked: list[Mapping[str, Any]] = []
    for message in messages:
        is_system = message["role"] == "system"
        is_beginning = is_beginning and is_system
        if is_system and not is_beginning:
            message = {"role": "user", "content": _REMINDER.format(_text([message]))}
        marked.append(message)
    turns: list[Mapping[str, Any]] = []
    for role, run in groupby(marked, itemgetter("role")):
        same = [*run]
        turns += [_joined(same)] if role in ("system", "user") else same
    return turns


def _joined(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One message that says what ``messages`` of one role do; one alone stays as it is."""
    first = messages[0]
    return {"role": first["role"], "content": _text(messages)} if len(messages) > 1 else first


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    texts: list[str] = []
    for message in messages:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    return "\n\n".join(texts)
