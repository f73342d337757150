"""Whatever body a caller sends to the gateway, it is understood or refused in one sentence.

A body that is understood also passes the client's own checks, so that only the server can refuse
it.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_client.errors import InvalidArgument
from minisgl_client.request import build
from minisgl_gateway.body import parse
from minisgl_gateway.chat import Chat
from minisgl_gateway.completions.schema import ChatCompletionRequest, CompletionRequest
from minisgl_gateway.completions.translation import chat_of, completion_generations
from minisgl_gateway.dialects.choice import dialect_of
from minisgl_gateway.errors import ApiError
from minisgl_gateway.generation import Policy
from minisgl_gateway.messages import translation as messages_api
from minisgl_gateway.messages.schema import MessagesRequest
from minisgl_gateway.responses import translation as responses_api
from minisgl_gateway.responses.schema import ResponsesRequest
from minisgl_gateway.template import Template

from tests.properties.corpus import kept

POLICY = Policy(timeout_s=10.0, chat_tokens=64)
TEMPLATE = Template(dialect_of(None, "hermes"))
KINDS: list[Any] = [
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
]
GOOD: dict[Any, dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    CompletionRequest: {"model": "m", "prompt": "Hi"},
    ResponsesRequest: {"model": "m", "input": "Hi"},
    MessagesRequest: {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
    },
}
WORDS = st.sampled_from(
    [
        *("user", "assistant", "tool", "text", "image_url", "function", "auto", ""),
        *("message", "input_text", "function_call", "reasoning", "tool_use", "tool_result"),
    ]
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 40), st.floats(), st.text(max_size=6)
)
KEYS = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "function", "tool_calls", "5"),
        *("id", "input", "output", "call_id", "summary", "format", "schema"),
    ]
)
JSON = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


NAMES = st.sampled_from(
    sorted({name for kind in KINDS for name in [*kind.model_fields, *kind.not_offered]})
) | st.text(max_size=8)


def _chat(request: Any) -> Chat:
    if isinstance(request, ResponsesRequest):
        messages = responses_api.messages_of(request.input, _no_item)
        return responses_api.chat_of(request, messages)
    if isinstance(request, MessagesRequest):
        return messages_api.chat_of(request)
    return chat_of(request)


def _no_item(id: str) -> NoReturn:
    raise ApiError(404, "no such item", code="not_found")


def check_refusal(error: ApiError) -> None:
    assert 400 <= error.status < 500
    assert 0 < len(error.message) < 400
    assert "\n" not in error.message and "Traceback" not in error.message
    error.message.encode()


@pytest.mark.parametrize("kind", KINDS)
@kept("given_fields")
@given(given_fields=st.dictionaries(NAMES, JSON, max_size=3))
def test_fields_of_any_value(kind: Any, given_fields: dict[str, Any]) -> None:
    fields = GOOD[kind] | given_fields
    try:
        request = parse(kind, json.dumps(fields).encode())
        if kind is CompletionRequest:
            generations = completion_generations(request, POLICY)
        else:
            generations = [_chat(request).generation(POLICY, TEMPLATE)]
    except ApiError as error:
        check_refusal(error)
        return
    assert generations
    for one in generations:
        prompt = {
            "text_input": one.prompt,
            "input_ids": one.input_ids,
            "messages": one.messages,
            "tools": one.tools,
        }
        try:
            build("minisgl", "", {**prompt, **one.parameters}).to_grpc(1000)
        except InvalidArgument as refusal:
            assert 0 < len(str(refusal)) < 400


@pytest.mark.parametrize("kind", KINDS)
@kept("cut", "junk")
@given(cut=st.integers(0, 200), junk=st.binary(max_size=12))
def test_broken_bodies(kind: Any, cut: int, junk: bytes) -> None:
    """A good body is cut anywhere, and random bytes are inserted."""
    good = json.dumps(GOOD[kind]).encode()
    try:
        parse(kind, good[:cut] + junk + good[cut:])
    except ApiError as error:
        check_refusal(error)
