"""A request of the Responses API -> a ``Chat``, and its items -> messages of a chat template.

Knows OpenAI's items and what ``Chat`` needs. Must not know the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter

from minisgl_gateway.chat import Chat
from minisgl_gateway.content import content_of
from minisgl_gateway.errors import invalid, shown
from minisgl_gateway.generation import sampling_parameters
from minisgl_gateway.responses.schema import (
    AllowedTools,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionChoice,
    FunctionTool,
    InputText,
    InputTokensRequest,
    Item,
    ItemReference,
    JsonObjectConfig,
    JsonSchemaConfig,
    MessageItem,
    NamespaceTool,
    OutputItem,
    OutputText,
    ResponsesRequest,
)
from minisgl_gateway.responses.strictness import is_strict
from minisgl_gateway.shared_fields import MAX_TOOLS, RefusalPart
from minisgl_gateway.template import Wishes
from minisgl_gateway.tools import Calls, Tool, allowed, call_of
from minisgl_gateway.turns import in_turns

Referred = Callable[[str], Mapping[str, Any]]
"""Finds the item of a kept response by its id; raises ``ApiError``."""
_Part: TypeAlias = InputText | OutputText | RefusalPart
_OUTPUT_ITEM: Final = TypeAdapter[OutputItem](OutputItem)
LOGPROBS: Final = "message.output_text.logprobs"


def counted_chat(request: InputTokensRequest, messages: Sequence[Mapping[str, Any]]) -> Chat:
    """The chat of ``messages`` whose tokens are counted; raises ``ApiError``."""
    if request.instructions is not None:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    if not messages:
        raise invalid("input must not be empty", "input")
    tools, calls = _tools(request)
    return Chat(
        messages=in_turns(messages),
        tools=tools,
        calls=calls,
        form=_form(request),
        form_param="text.format",
        wishes=Wishes(effort=request.reasoning.effort if request.reasoning else None),
    )


def chat_of(request: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> Chat:
    """The chat that continues ``messages`` as the request asks; raises ``ApiError``."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options goes with stream", "stream_options")
    chat = counted_chat(request, messages)
    parameters = sampling_parameters(request.given("temperature", "top_p"))
    if (num_logprobs := logprobs_of(request)) is not None:
        parameters["num_logprobs"] = num_logprobs
    return replace(
        chat,
        parameters=parameters,
        max_tokens=request.max_output_tokens,
        stream=request.stream,
    )


def logprobs_of(request: ResponsesRequest) -> int | None:
    """How many likely tokens to give at each position of the answer; None for no logprobs."""
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid(f"top_logprobs goes with include [{LOGPROBS!r}]", "top_logprobs")
    return None


def messages_of(items: str | Sequence[Item], referred: Referred) -> list[dict[str, Any]]:
    """The messages that items stand for.

    What an assistant thinks, says and calls in successive items is one message, as models were
    trained.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, ItemReference):
            item = _OUTPUT_ITEM.validate_python(referred(item.id))
        if isinstance(item, FunctionCallOutputItem):
            _end_answer(messages)
            output = item.output if isinstance(item.output, str) else _content(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            _end_answer(messages)
            role = "user" if item.role == "user" else "system"
            messages.append({"role": role, "content": _content(item.content)})
        else:
            _add_to_answer(messages, item)
    _end_answer(messages)
    return messages


def messages_of_output(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages that the items of a response stand for."""
    messages: list[dict[str, Any]] = []
    for item in items:
        _add_to_answer(messages, _OUTPUT_ITEM.validate_python(item))
    _end_answer(messages)
    return messages


def _add_to_answer(messages: list[dict[str, Any]], item: OutputItem) -> None:
    """Add what an assistant thought, said or called to the message that it belongs to."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant"
    if not isinstance(item, FunctionCallItem) and last.get("content") and "tool_calls" not in last:
        is_open = False  # two texts in a row are two answers, the second with the thoughts between
    if not is_open:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if isinstance(item, FunctionCallItem):
        last = _end_answer(messages)
        name = item.name if item.namespace is None else _name_in(item.namespace, item.name)
        function = {"name": name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, MessageItem):
        before, texts = last["content"], _texts(item.content)
        if isinstance(before, str):  # of the same answer, before its calls
            last["content"] = content_of([*filter(None, [before]), *texts])
        else:
            before += [{"type": "text", "text": text} for text in texts]
    else:
        texts = [part.text for part in item.content or item.summary or ()]
        thought = "".join([last.get("reasoning_content", ""), *texts])
        if thought:
            last["reasoning_content"] = thought


def _end_answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Close the last answer, and return the last message.

    An assistant's message with nothing but thoughts, right behind another of the assistant, is
    removed, and its thoughts move to that one: calls followed them, or they were cut off.
    """
    last = messages[-1] if messages else {}
    before = messages[-2] if len(messages) > 1 else {}
    answers = before.get("role") == last.get("role") == "assistant"
    if not answers or last["content"] or "tool_calls" in last:
        return last
    messages.pop()
    thoughts = "".join(it.get("reasoning_content", "") for it in (before, last))
    if thoughts:
        before["reasoning_content"] = thoughts
    return before


def _content(parts: str | Sequence[_Part]) -> str | list[Any]:
    return content_of(_texts(parts))


def _texts(parts: str | Sequence[_Part]) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    return [part.refusal if isinstance(part, RefusalPart) else part.text for part in parts]


# --- tools, and the form of the answer -----------------------------------------------------------


def _tools(request: InputTokensRequest) -> tuple[Sequence[Tool], Calls]:
    functions = [*_functions(request)]
    if len(functions) > MAX_TOOLS:
        raise invalid(f"tools must be at most {MAX_TOOLS}, got {len(functions)}", "tools")
    tools = [
        Tool(
            tool.name if namespace is None else _name_in(namespace.name, tool.name),
            _description(namespace, tool),
            tool.parameters,
            is_strict(tool),
        )
        for namespace, tool in functions
    ]
    num_by_name = Counter(tool.name for tool in tools)
    for name in namespaced(request):
        if num_by_name[name] > 1:
            raise invalid(f"tools has {shown(name)} twice", "tools")
    choice = request.tool_choice
    parallel = request.parallel_tool_calls
    if isinstance(choice, AllowedTools):
        names = [tool.name for tool in choice.tools]
        is_required = choice.mode == "required"
        return allowed(names, tools, "tool_choice"), Calls(required=is_required, parallel=parallel)
    if isinstance(choice, FunctionChoice):
        return tools, call_of(choice.name, tools, "tool_choice")
    if choice == "required" and not tools:
        raise invalid("tool_choice 'required' goes with tools", "tool_choice")
    offered = choice != "none"
    return tools, Calls(offered, required=choice == "required", parallel=parallel)


def namespaced(request: InputTokensRequest) -> dict[str, tuple[str, str]]:
    """Namespace and name of each function that has a namespace, by its name for the model."""
    return {
        _name_in(namespace.name, tool.name): (namespace.name, tool.name)
        for namespace, tool in _functions(request)
        if namespace is not None
    }


def _functions(
    request: InputTokensRequest,
) -> Iterator[tuple[NamespaceTool | None, FunctionTool]]:
    """Each function, with its namespace if it has one."""
    for tool in request.tools or ():
        if isinstance(tool, NamespaceTool):
            yield from ((tool, function) for function in tool.tools)
        else:
            yield None, tool


def _name_in(namespace: str, name: str) -> str:
    """The function's name for the model, which knows no namespaces."""
    return f"{namespace}__{name}"


def _description(namespace: NamespaceTool | None, tool: FunctionTool) -> str | None:
    """The function's description for the model, after that of its namespace."""
    given = (namespace and namespace.description, tool.description)
    return "\n".join(text for text in given if text) or tool.description


def _form(request: InputTokensRequest) -> dict[str, Any] | None:
    form = request.text.format if request.text else None
    if isinstance(form, JsonObjectConfig):
        return {"json_object": True}
    if isinstance(form, JsonSchemaConfig):
        return {"json": form.json_schema}
    return None
