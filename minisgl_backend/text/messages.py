"""The JSON of a chat -> checked messages, tools and variables, ready for a template.

Knows the shape that OpenAI's chat schema and the templates of language models share. Raises
``InvalidRequest``, or ``Unsupported`` for content that is not text, whatever comes in. Must not
know tokens, or any model's template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.limits import Limits
from minisgl_backend.wire.values import parse_json


def parse_messages(text: str, limits: Limits) -> list[dict[str, Any]]:
    """The messages of a JSON list; ``arguments`` of tool calls become objects."""
    messages = _parse_list("messages", text)
    for message in messages:
        if isinstance(message, dict):
            _read_arguments(message)
    _check_values("messages", messages, limits)
    if not messages:
        raise InvalidRequest("messages must not be empty")
    if len(messages) > limits.messages:
        raise InvalidRequest(f"messages must be at most {limits.messages}, got {len(messages)}")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    return messages


def parse_tools(text: str, limits: Limits) -> list[dict[str, Any]]:
    """The tools of a JSON list of objects."""
    tools = _parse_list("tools", text)
    _check_values("tools", tools, limits)
    if len(tools) > limits.tools:
        raise InvalidRequest(f"tools must be at most {limits.tools}, got {len(tools)}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidRequest(f"tools[{index}] must be an object")
    return tools


def parse_variables(text: str, limits: Limits) -> dict[str, Any]:
    """The variables of a JSON object (``chat_template_kwargs``)."""
    variables = parse_json("chat_template_kwargs", text)
    if not isinstance(variables, dict):
        raise InvalidRequest("chat_template_kwargs must be a JSON object")
    _check_values("chat_template_kwargs", variables, limits)
    return variables


def join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The same message, with the parts of its content joined to one text, one part per line."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return dict(message)


def _parse_list(name: str, text: str) -> list[Any]:
    value = parse_json(name, text)
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a JSON list")
    return value


def _check_values(name: str, value: Any, limits: Limits) -> None:
    """Refuse values that a template cannot render, or that are not valid Unicode."""
    if not _is_shallow(value, limits.message_depth):
        raise InvalidRequest(f"{name} must be at most {limits.message_depth} levels deep")
    try:
        # A lone surrogate can hide in an escape, where the check of the input's bytes misses it.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise InvalidRequest(f"{name} must be valid Unicode") from None


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    children = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(child, depth - 1) for child in children)


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{name} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{name}.role must be a string")
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(f"{name}.content[{index}]", part)
    elif not isinstance(content, str):
        raise InvalidRequest(f"{name}.content must be a string or a list of text parts")


def _check_part(name: str, part: Any) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{name} must be an object with a type")
    if part["type"] != "text":
        raise Unsupported(f"{name} must be of type text, got {part['type'][:40]!r}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{name}.text must be a string")


def _read_arguments(message: dict[str, Any]) -> None:
    """Parse the arguments of calls: clients send JSON in a string, but templates expect an object.
    Some clients send an empty string if there are none.

    Comes before ``_check_values``, which does not look into strings.
    """
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"].strip() or "{}")
            except (ValueError, RecursionError):
                continue
            if isinstance(arguments, dict):
                function["arguments"] = arguments
