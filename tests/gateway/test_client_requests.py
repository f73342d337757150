"""Requests of clients that are too heavy to install for tests, byte for byte as they sent them.

``client_requests.json`` has them, with what the engine of ``agent`` says to each. In the bodies,
only ids of calls were replaced and the long texts of Codex and Claude Code were cut.
docs/clients.md has the commands that run these clients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from tests.gateway.agent import ANSWER, WORDS
from tests.gateway.conftest import Gateway

pytestmark = pytest.mark.server

RECORDED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("client_requests.json").read_text("utf-8")
)
SAID = {
    "answer": (ANSWER, []),
    "8 tokens": (ANSWER.removesuffix("."), []),
    "call": (WORDS, [("weather", {"city": "Bogotá"})]),
}
CASES = [pytest.param(one, id=f"{one['client']}-{n}") for n, one in enumerate(RECORDED)]


@pytest.mark.parametrize("recorded", CASES)
def test_a_recorded_request(agent: Gateway, recorded: dict[str, Any]) -> None:
    headers = recorded["headers"]
    answer = agent.post(recorded["path"], recorded["body"].encode(), headers=headers)
    if request_id := headers.get("X-Request-ID"):
        assert answer.headers["x-request-id"] == request_id
    if recorded["says"] == "too long":
        assert answer.status_code == 400
        # litellm knows by this phrase that the context is exceeded
        assert "This model's maximum context length is 8192 tokens" in answer.text
        return
    assert answer.status_code == 200, answer.text
    asked = json.loads(recorded["body"])
    if recorded["path"] == "/v1/responses":
        found = _response(answer)
    elif recorded["path"].startswith("/v1/messages"):
        found = _message(answer)
    elif asked.get("stream"):
        found = _streamed(answer, asked.get("stream_options") or {})
    else:
        found = _whole(answer)
    assert found == SAID[recorded["says"]]


def _whole(answer: httpx.Response) -> tuple[str, list[Any]]:
    """The text and the calls of an answer, which must be as in OpenAI's client."""
    if answer.json()["object"] == "text_completion":
        return Completion.model_validate(answer.json(), strict=True).choices[0].text, []
    message = ChatCompletion.model_validate(answer.json(), strict=True).choices[0].message
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    return message.content or "", [_called(call.function) for call in calls]


def _streamed(answer: httpx.Response, options: dict[str, Any]) -> tuple[str, list[Any]]:
    """The same for a stream, which must report the usage as requested."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    with_usage = [bool(chunk.get("usage")) for chunk in chunks]
    if options.get("include_usage"):
        assert chunks.pop()["choices"] == []
        assert with_usage.pop()
    assert set(with_usage) == {bool(options.get("continuous_usage_stats"))}
    if chunks[0]["object"] == "text_completion":
        return "".join(chunk["choices"][0]["text"] for chunk in chunks), []
    deltas = [ChatCompletionChunk.model_validate(chunk).choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == list(range(len(calls)))
    return "".join(delta.content or "" for delta in deltas), [
        _called(call.function) for call in calls
    ]


def _response(answer: httpx.Response) -> tuple[str, list[Any]]:
    """The same for a stream of the Responses API, whose last event has the whole response."""
    last = _events(answer)[-1]
    assert last["type"] == "response.completed"
    response = Response.model_validate(last["response"])
    calls = [item for item in response.output if item.type == "function_call"]
    return response.output_text, [_called(call) for call in calls]


def _message(answer: httpx.Response) -> tuple[str, list[Any]]:
    """The same for a stream of the Messages API."""
    events = _events(answer)
    assert events[-1] == {"type": "message_stop"}
    blocks = [event["content_block"] for event in events if "content_block" in event]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    inputs = [json.loads(delta["partial_json"]) for delta in deltas if "partial_json" in delta]
    names = [block["name"] for block in blocks if block["type"] == "tool_use"]
    text = "".join(delta.get("text", "") for delta in deltas)
    return text, list(zip(names, inputs, strict=True))


def _events(answer: httpx.Response) -> list[Any]:
    """The data of named events."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]


def _called(function: Any) -> tuple[str, Any]:
    return function.name, json.loads(function.arguments)
