"""A request of the Messages API -> a ``Chat``, and its blocks -> messages of a chat template.

Knows Anthropic's blocks and what ``Chat`` needs. Must not know the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from minisgl_gateway.chat import Chat
from minisgl_gateway.content import content_of
from minisgl_gateway.errors import invalid
from minisgl_gateway.generation import sampling_parameters
from minisgl_gateway.messages.schema import (
    AssistantTurn,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from minisgl_gateway.template import Wishes
from minisgl_gateway.tools import Calls, Tool, call_of
from minisgl_gateway.turns import in_turns


def counted_chat(request: CountTokensRequest) -> Chat:
    """The chat whose tokens are counted; raises ``ApiError``."""
    messages: list[dict[str, Any]] = []
    if instructions := _instructions(request.system or ""):
        messages.append({"role": "system", "content": content_of(instructions)})
    for turn in request.messages:
        if isinstance(turn, UserTurn):
            messages += _of_user(turn)
        elif isinstance(turn, AssistantTurn):
            messages.append(_of_assistant(turn))
        else:
            messages.append({"role": "system", "content": _content(turn.content)})
    tools = [
        Tool(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in request.tools or ()
    ]
    return Chat(
        messages=in_turns(messages),
        tools=tools,
        calls=_calls(request, tools),
        form=_form(request),
        form_param="output_format" if request.output_format else "output_config.format",
        wishes=Wishes(
            thinks=request.thinking is not None and request.thinking.type != "disabled",
            effort=request.output_config.effort if request.output_config else None,
        ),
    )


def chat_of(request: MessagesRequest) -> Chat:
    """The chat that is to be continued; raises ``ApiError``."""
    chat = counted_chat(request)
    if isinstance(request.messages[-1], AssistantTurn):
        raise invalid("the last message must not be the assistant's: none is continued", "messages")
    return replace(
        chat,
        parameters=sampling_parameters(request.given("temperature", "top_p", "top_k")),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or (),
        stop_param="stop_sequences",
        tells_stop=True,
        stream=request.stream,
    )


def tells_thoughts(request: MessagesRequest) -> bool:
    """Whether thoughts are part of the answer: only if they are asked for and not omitted."""
    thinking = request.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


# --- messages ------------------------------------------------------------------------------------

_BILLING: Final = re.compile(r"\Ax-anthropic-billing-header:.*\n*")
"""What Claude Code tells Anthropic's accounting before its instructions. It is another text in each
request, so nothing after it could come from the prefix cache."""


def _instructions(system: str | Sequence[TextBlock]) -> list[str]:
    """The texts of the system message that are for the model."""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    return [rest for text in texts if (rest := _BILLING.sub("", text))]


def _of_user(turn: UserTurn) -> list[dict[str, Any]]:
    """What the user says, and what tools answered, each as a message of its own."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    messages: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            if texts:
                messages.append({"role": "user", "content": _content(texts)})
                texts = []
            messages.append(_of_tool(block))
        else:
            texts.append(block)
    if texts:
        messages.append({"role": "user", "content": _content(texts)})
    return messages


def _of_tool(block: ToolResultBlock) -> dict[str, Any]:
    content = _content(block.content or "")
    if block.is_error:
        error = {"type": "text", "text": "Error:"}
        content = f"Error: {content}" if isinstance(content, str) else [error, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _of_assistant(turn: AssistantTurn) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    calls = [block for block in turn.content if isinstance(block, ToolUseBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": _content(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.input, ensure_ascii=False),
                },
            }
            for call in calls
        ]
    return message


def _content(blocks: str | Sequence[TextBlock]) -> str | list[Any]:
    if isinstance(blocks, str):
        return blocks
    return content_of([block.text for block in blocks])


# --- tools, thinking, and the form of the answer -------------------------------------------------


def _calls(request: CountTokensRequest, tools: Sequence[Tool]) -> Calls:
    choice = request.tool_choice
    if choice is None:
        return Calls()
    if (choice.name is None) is (choice.type == "tool"):
        raise invalid("tool_choice.name goes with the type 'tool'", "tool_choice.name")
    if choice.name is not None:
        return call_of(choice.name, tools, "tool_choice")
    if choice.type == "any" and not tools:
        raise invalid("tool_choice of the type 'any' goes with tools", "tool_choice")
    return Calls(
        is_offered=choice.type != "none",
        required=choice.type == "any",
        parallel=not choice.disable_parallel_tool_use,
    )


def _form(request: CountTokensRequest) -> dict[str, Any] | None:
    form = request.output_format
    if request.output_config and request.output_config.format:
        if form is not None:
            raise invalid("output_format does not go with output_config.format", "output_format")
        form = request.output_config.format
    return None if form is None else {"json": form.json_schema}
