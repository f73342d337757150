"""The Messages API with Anthropic's client: answers, streams, tools, prompt lengths, errors.

``agent`` is a model that calls a tool before it answers; ``gateway`` is the demo model; ``guarded``
has keys and says one thing forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from pydantic import BaseModel

from tests.gateway.agent import ANSWER, REPORT, WORDS
from tests.gateway.conftest import KEYS, Gateway

pytestmark = pytest.mark.server

QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}
COUNT: Any = {"role": "user", "content": "Count from 1 to 5."}
ASKED: Any = {"model": "minisgl", "max_tokens": 64, "messages": [QUESTION]}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
WEATHER: Any = {"role": "user", "content": "How is the weather in Bogotá?"}
GREEDY: Any = {"extra_body": {"temperature": 0}}


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Anthropic]:
    with Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def caller(agent: Gateway) -> Iterator[Anthropic]:
    with Anthropic(base_url=agent.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def owner(guarded: Gateway) -> Iterator[Anthropic]:
    with Anthropic(base_url=guarded.url, api_key=KEYS[0], max_retries=0) as made:
        yield made


def test_an_answer(client: Anthropic) -> None:
    message = client.messages.create(**ASKED, **GREEDY, system="Answer briefly.")
    (block,) = message.content
    assert block.type == "text" and block.text == "Paris"
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.id.startswith("msg_") and message._request_id == message.id
    assert message.usage.output_tokens > 0
    counted = client.messages.count_tokens(
        model="minisgl", messages=[QUESTION], system="Answer briefly."
    )
    of_cache = message.usage.cache_read_input_tokens
    assert of_cache is not None
    assert counted.input_tokens == message.usage.input_tokens + of_cache


def test_why_an_answer_ended(client: Anthropic) -> None:
    cut = client.messages.create(**{**ASKED, "messages": [COUNT], "max_tokens": 3}, **GREEDY)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    stopped = client.messages.create(
        **{**ASKED, "messages": [COUNT]}, **GREEDY, stop_sequences=["4", "3"]
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "3"
    (block,) = stopped.content
    assert block.type == "text" and block.text == "1, 2, "


def test_a_stream_tells_what_the_whole_answer_does(client: Anthropic) -> None:
    asked = {**ASKED, "messages": [COUNT]}
    whole = client.messages.create(**asked, **GREEDY)
    with client.messages.stream(**asked, **GREEDY) as stream:
        final = stream.get_final_message()
    (told,), (said,) = final.content, whole.content
    assert told.type == said.type == "text" and told.text == said.text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = list(client.messages.create(**asked, **GREEDY, stream=True))
    num_deltas = [event.type for event in events].count("content_block_delta")
    assert num_deltas > 1
    assert [event.type for event in events] == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * num_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    first = events[0]
    assert first.type == "message_start"
    assert first.message.usage.input_tokens + (
        first.message.usage.cache_read_input_tokens or 0
    ) == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_an_agent_with_a_second_turn(caller: Anthropic) -> None:
    asked: Any = {"model": "minisgl", "max_tokens": 256, "tools": [TOOL]}
    first = caller.messages.create(**asked, messages=[WEATHER])
    assert first.stop_reason == "tool_use"
    said, call = first.content
    assert said.type == "text" and said.text.strip() == WORDS
    assert call.type == "tool_use" and call.name == "weather" and call.input == {"city": "Bogotá"}
    told: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    second = caller.messages.create(
        **asked,
        messages=[
            WEATHER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [told]},
        ],
    )
    assert second.stop_reason == "end_turn"
    (answer,) = second.content
    assert answer.type == "text" and answer.text == ANSWER


def test_an_agent_that_streams(caller: Anthropic) -> None:
    asked: Any = {"model": "minisgl", "max_tokens": 256, "tools": [TOOL]}
    with caller.messages.stream(**asked, messages=[WEATHER]) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use" and call.input == {"city": "Bogotá"}
    content: Any = [
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "no such city"}],
            "is_error": True,
        },
        {"type": "text", "text": "Go on."},
    ]
    messages: list[Any] = [
        WEATHER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": content},
    ]
    with caller.messages.stream(**asked, messages=messages) as stream:
        assert stream.get_final_text() == ANSWER


def test_the_runner_of_tools_sends_whole_conversations(caller: Anthropic) -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        assert city == "Bogotá"
        return "It rains."

    asked: Any = {"model": "minisgl", "max_tokens": 256, "tools": [weather], "messages": [WEATHER]}
    last = caller.beta.messages.tool_runner(**asked).until_done()
    (block,) = last.content
    assert block.type == "text" and block.text == ANSWER
    streams = caller.beta.messages.tool_runner(**asked, stream=True)
    texts = ["".join(stream.text_stream).strip() for stream in streams]
    assert texts == [WORDS, ANSWER]


def test_tools_that_may_not_be_used(caller: Anthropic) -> None:
    message = caller.messages.create(
        model="minisgl",
        max_tokens=256,
        messages=[WEATHER],
        tools=[TOOL],
        tool_choice={"type": "none"},
    )
    (answer,) = message.content
    assert answer.type == "text" and answer.text == ANSWER


def test_lengths_of_prompts(client: Anthropic) -> None:
    def length(*messages: Any, **more: Any) -> int:
        counted = client.messages.count_tokens(model="minisgl", messages=messages, **more)
        return counted.input_tokens

    plain = length(QUESTION)
    assert plain < length(QUESTION, system="Be brief.") < length(QUESTION, system="Be brief. " * 9)
    assert length(QUESTION, tools=[TOOL]) > plain
    cached = {"cache_control": {"type": "ephemeral"}}
    parts: Any = [{"type": "text", "text": QUESTION["content"], **cached}]
    assert length({"role": "user", "content": parts}) == plain


@pytest.mark.parametrize(
    ("asked", "phrase"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"max_tokens": 20_000}, r"exceed context limit: \d+ \+ 20000 > 8192, decrease"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "Par"}]}, "last message"),
        ({"system": "a " * 20_000}, "prompt is too long: .* maximum context length"),
        ({"container": "c"}, "container is not supported"),
        ({"extra_body": {"max_token": 1}}, "did you mean"),
        ({"tool_choice": {"type": "tool", "name": "none"}}, "none of the tools"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    client: Anthropic, asked: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=phrase) as raised:
        client.messages.create(**{**ASKED, **asked})
    assert raised.value.type == "invalid_request_error"
    assert raised.value.request_id


def test_errors_have_the_classes_of_the_client(guarded: Gateway, owner: Anthropic) -> None:
    with Anthropic(base_url=guarded.url, api_key="unknown", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            other.messages.create(**ASKED)
        assert unknown.value.type == "authentication_error" and unknown.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        owner.messages.create(**{**ASKED, "model": "another"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.ContentTooLargeError) as large:
        owner.messages.create(**{**ASKED, "system": "x" * 200_000})
    assert large.value.body == {
        "type": "error",
        "error": {
            "type": "request_too_large",
            "message": "the body must be at most 100000 bytes",
        },
        "request_id": large.value.request_id,
    }
    with pytest.raises(anthropic.NotFoundError, match="is not offered"):
        owner.messages.batches.list()


@pytest.mark.parametrize("given", [{}, {"X-Request-Id": "mine"}])
def test_an_error_and_its_header_tell_the_same_id(client: Anthropic, given: dict[str, str]) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**{**ASKED, "messages": []}, extra_headers=given)
    error = raised.value
    assert isinstance(error.body, dict)
    assert error.body["request_id"] == error.response.headers["request-id"]
    assert error.body["request_id"] == given.get("X-Request-Id", error.request_id)


def test_too_many_answers_at_a_time(owner: Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 2000}
    streams = [owner.messages.create(**asked, stream=True) for _ in range(3)]
    try:
        for stream in streams:
            next(iter(stream))
        with pytest.raises(anthropic.RateLimitError) as raised:
            owner.messages.create(**asked)
        assert raised.value.type == "rate_limit_error"
        assert raised.value.response.headers["retry-after"]
    finally:
        for stream in streams:
            stream.close()


def test_a_key_comes_in_either_header(guarded: Gateway) -> None:
    body = {**ASKED, "max_tokens": 1}
    older = {"x-api-key": KEYS[0], "anthropic-version": "2023-06-01"}
    answered = guarded.post("/v1/messages", body, headers=older)
    assert answered.status_code == 200
    assert answered.headers["request-id"] == answered.headers["x-request-id"]
    bearer = {"Authorization": f"Bearer {KEYS[0]}", "anthropic-beta": "tools-2024-04-04"}
    assert guarded.post("/v1/messages?beta=true", body, headers=bearer).status_code == 200
    refused = guarded.post("/v1/messages", body)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert refused.json()["request_id"] == refused.headers["request-id"]


# --- forms of answers, calls that must be made, thoughts -----------------------------------------


class Report(BaseModel):
    city: str
    rains: bool
    degrees: int


def test_answers_are_parsed_into_a_model(caller: Anthropic) -> None:
    asked: Any = {"model": "minisgl", "max_tokens": 256, "messages": [WEATHER]}
    parsed = caller.messages.parse(**asked, output_format=Report)
    assert parsed.parsed_output == Report(**REPORT)
    with caller.messages.stream(**asked, output_format=Report) as stream:
        assert stream.get_final_message().parsed_output == Report(**REPORT)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_must_be_made_is_all_of_the_answer(caller: Anthropic, choice: Any) -> None:
    tools: Any = [
        {"name": "other", "input_schema": {"type": "object"}},
        {**TOOL, "strict": True},
    ]
    message = caller.messages.create(
        model="minisgl",
        max_tokens=256,
        messages=[WEATHER],
        tools=tools,
        tool_choice=choice,
    )
    (call,) = message.content
    assert call.type == "tool_use" and call.name == "weather"
    assert message.stop_reason == "tool_use"


def test_thoughts_are_told_if_they_are_asked_for(thinker: Gateway) -> None:
    with Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as client:
        question: Any = {"role": "user", "content": "What is 2 + 2?"}
        asked: Any = {"model": "minisgl", "max_tokens": 40, "messages": [question]}
        thinking: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = client.messages.create(**asked, **thinking)
        with client.messages.stream(**asked, **thinking) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            content: list[Any] = [*message.content]
            thoughts, text = content[:2]
            assert thoughts.type == "thinking" and thoughts.signature
            assert thoughts.thinking == "Two and two.\nThat is four."
            assert text.type == "text" and text.text.startswith("It is 4.")
            assert message.usage.output_tokens_details is not None
            of_thoughts = message.usage.output_tokens_details.thinking_tokens
            assert 0 < of_thoughts < message.usage.output_tokens
        back: Any = [question, {"role": "assistant", "content": streamed.content}, question]
        assert client.messages.create(**{**asked, "messages": back}, **thinking).content
        of_none: list[Any] = [{}, {"thinking": {"type": "disabled"}}]
        for unasked in of_none:
            blocks = client.messages.create(**{**asked, **unasked}).content
            assert [block.type for block in blocks] == ["text"]
        counted = client.messages.count_tokens(model="minisgl", messages=[question], **thinking)
        used = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert counted.input_tokens == used
