"""System messages anywhere in a conversation -> one, at the beginning.

OpenAI's Responses API and Anthropic's Messages API allow them anywhere, and coding agents send
several. Chat templates know one, at the beginning: another is refused, or left out without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

_REMINDER: Final = "<system-reminder>\n{}\n</system-reminder>"
"""As the coding agents mark what the user did not write; models were trained on it."""


def with_system_first(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation for a chat template, with at most one system message, the first.

    System messages at the beginning are joined. What a later one says is a part of what the user
    says, marked, so that the turns of user and assistant alternate as before.
    """
    system = [*takewhile(_is_system, messages)]
    first = [{"role": "system", "content": _joined(system)}] if len(system) > 1 else system
    found: list[Mapping[str, Any]] = []
    has_reminder = False
    """Whether the last message has one, so that the user's next one belongs to it."""
    for message in messages[len(system) :]:
        is_reminder = _is_system(message)
        if is_reminder:
            message = {"role": "user", "content": _REMINDER.format(_joined([message]))}
        belongs = (is_reminder or has_reminder) and _is_user(message)
        if belongs and found and _is_user(found[-1]):
            message = {"role": "user", "content": _joined([found.pop(), message])}
        has_reminder = belongs
        found.append(message)
    return [*first, *found]


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _is_user(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "user")


def _joined(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts of messages as one."""
    texts: list[str] = []
    for message in messages:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    return "\n\n".join(texts)
