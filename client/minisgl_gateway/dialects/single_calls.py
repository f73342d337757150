"""Conversations for templates that take one call per message.

Must not know how a template writes calls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import takewhile

from minisgl_gateway.dialects.base import Message


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """The conversation with at most one call in each message. Several calls of a message become as
    many messages, each with its result behind it; what else the message says comes with the
    first."""
    told: list[Message] = []
    placed: set[int] = set()
    """By ``id``: results that came right after their calls, before their turn."""
    for index, message in enumerate(messages):
        if id(message) in placed:
            continue
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            told.append(message)
            continue
        results = _results(messages, index + 1)
        for call in calls:
            told.append({**message, "tool_calls": [call]})
            message = {"role": message["role"], "content": ""}
            if answers := results.get(call.get("id")):
                told.append(answers.popleft())
                placed.add(id(told[-1]))
    return told


def _results(messages: Sequence[Message], begin: int) -> dict[str, deque[Message]]:
    """The results that stand at ``begin``, by call: some callers give several calls one id."""
    rest = (messages[at] for at in range(begin, len(messages)))
    results: dict[str, deque[Message]] = defaultdict(deque)
    for result in takewhile(lambda message: message["role"] == "tool", rest):
        if "tool_call_id" in result:
            results[result["tool_call_id"]].append(result)
    return results
