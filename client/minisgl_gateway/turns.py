"""A conversation of agents -> the turns that chat templates know.

OpenAI's Responses API and Anthropic's Messages API allow system messages anywhere, and several user
messages in a row; coding agents send both. Many chat templates refuse a system message that is not
the first, or drop it silently, and some require user and assistant to alternate. Of OpenAI's Chat
Completions only the beginning is changed, as callers write these for their model's template, and
what all templates of a dialect of tool calls demand.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, Final

_REMINDER: Final = "<system-reminder>\n{}\n</system-reminder>"
"""How coding agents mark what the user did not write."""
_ACKNOWLEDGED: Final = {"role": "assistant", "content": "OK."}


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
        turns += [_joined(same)] if role in ("system", "user") else same
    return turns


def alternating(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation in turns of user and assistant, between which there are only calls and their
    results.

    If the user speaks after a result, the assistant is made to say a word before. Texts of the
    assistant in a row are joined.
    """
    turns: list[Mapping[str, Any]] = []
    for message in in_turns(messages):
        before: Mapping[str, Any] = turns[-1] if turns else {}
        if message["role"] == "user" and before.get("role") == "tool":
            turns.append(_ACKNOWLEDGED)
        if _is_said(message) and _is_said(before):
            message = _joined([turns.pop(), message])
        turns.append(message)
    return turns


def _is_said(message: Mapping[str, Any]) -> bool:
    """Whether it is a text of the assistant, and nothing else."""
    return message.keys() == {"role", "content"} and message["role"] == "assistant"


def reminder(message: Mapping[str, Any]) -> dict[str, str]:
    """A system message as a user message, marked."""
    return {"role": "user", "content": _REMINDER.format(_text([message]))}


def with_one_beginning(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with the system messages at its beginning joined."""
    beginning = [*takewhile(lambda message: message["role"] == "system", messages)]
    rest = messages[len(beginning) :]
    return [_joined(beginning), *rest] if beginning else [*rest]


def with_single_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with at most one call in each message. Several calls of a message become as
    many messages, each with its result behind it; what else the message says comes with the
    first."""
    told: list[Mapping[str, Any]] = []
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


def with_text_as_thoughts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its text behind its thoughts, as one of them."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    thoughts = "\n\n".join(filter(None, [message.get("reasoning_content"), text])) or None
    return {**message, "content": "", "reasoning_content": thoughts}


def _results(
    messages: Sequence[Mapping[str, Any]], begin: int
) -> dict[str, deque[Mapping[str, Any]]]:
    """The results that stand at ``begin``, by call: some callers give several calls one id."""
    rest = (messages[at] for at in range(begin, len(messages)))
    results: dict[str, deque[Mapping[str, Any]]] = defaultdict(deque)
    for result in takewhile(lambda message: message["role"] == "tool", rest):
        if "tool_call_id" in result:
            results[result["tool_call_id"]].append(result)
    return results


def _joined(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One message that says what ``messages``, all of one role, say. A single one is unchanged."""
    first = messages[0]
    return {"role": first["role"], "content": _text(messages)} if len(messages) > 1 else first


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    texts: list[str] = []
    for message in messages:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    return "\n\n".join(texts)
