"""The Responses API with the official client: answers, streams, and continued conversations.

``agent`` is a model that calls a tool before it answers; ``gateway`` is the demo model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.gateway.agent import ANSWER, REPORT, WORDS
from tests.gateway.conftest import KEYS, Gateway

pytestmark = pytest.mark.server

QUESTION = "What is the capital of France?"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASKED: Any = {"model": "minisgl", "tools": [TOOL]}
WEATHER = "How is the weather in Bogotá?"


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def caller(agent: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{agent.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_an_answer(client: OpenAI) -> None:
    response = client.responses.create(
        model="minisgl",
        input=QUESTION,
        instructions="Answer briefly.",
        temperature=0,
        max_output_tokens=64,
        metadata={"of": "the test"},
    )
    assert response.output_text == "Paris"
    assert response.status == "completed" and response.completed_at
    assert response.id.startswith("resp_")
    assert response.instructions == "Answer briefly."
    assert response.metadata == {"of": "the test"}
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    (message,) = response.output
    assert message.type == "message" and message.status == "completed"
    chat = client.chat.completions.create(
        model="minisgl",
        messages=[
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": QUESTION},
        ],
        temperature=0,
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == response.usage.input_tokens
    assert chat.usage.completion_tokens == response.usage.output_tokens


def test_an_answer_that_is_cut_says_so(client: OpenAI) -> None:
    asked: Any = {"model": "minisgl", "input": "Count from 1 to 5.", "max_output_tokens": 3}
    response = client.responses.create(**asked)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (message,) = response.output
    assert message.type == "message" and message.status == "incomplete"
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details == response.incomplete_details


def test_a_stream_tells_what_the_whole_answer_does(client: OpenAI) -> None:
    asked: Any = {"model": "minisgl", "input": "Count from 1 to 5.", "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * num_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_the_client_adds_up_a_stream(client: OpenAI) -> None:
    with client.responses.stream(model="minisgl", input=QUESTION, temperature=0) as stream:
        final = stream.get_final_response()
    assert final.output_text == "Paris"


def test_logprobs(client: OpenAI) -> None:
    asked: Any = {
        "model": "minisgl",
        "input": QUESTION,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    (message,) = client.responses.create(**asked).output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text" and part.logprobs
    assert "".join(one.token for one in part.logprobs).startswith("Paris")
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    events = list(client.responses.create(**asked, stream=True))
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == [one.token for one in part.logprobs]


def test_a_conversation_goes_on_from_a_response(client: OpenAI) -> None:
    first = client.responses.create(
        model="minisgl", input=QUESTION, instructions="Be brief.", temperature=0
    )
    second = client.responses.create(
        model="minisgl", input="And of Spain?", previous_response_id=first.id, temperature=0
    )
    assert second.previous_response_id == first.id
    by_hand = client.responses.create(
        model="minisgl",
        input=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And of Spain?"},
        ],
        temperature=0,
    )
    assert second.output_text == by_hand.output_text
    assert second.usage is not None and by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    third = client.responses.create(
        model="minisgl", input="And of Italy?", previous_response_id=second.id, temperature=0
    )
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_lengths_of_prompts(client: OpenAI) -> None:
    """They are those of the same requests, also for one that continues another."""
    for asked in (
        {"input": QUESTION},
        {"input": [{"role": "user", "content": QUESTION}], "instructions": "Be brief. " * 9},
        {"input": QUESTION, "tools": [TOOL], "tool_choice": "required"},
        {"input": QUESTION, "reasoning": {"effort": "none"}, "text": {"format": {"type": "text"}}},
    ):
        counted = client.responses.input_tokens.count(model="minisgl", **asked)
        assert counted.object == "response.input_tokens"
        response = client.responses.create(model="minisgl", max_output_tokens=8, **asked)
        assert counted.input_tokens == response.usage.input_tokens
    first = client.responses.create(model="minisgl", input=QUESTION, max_output_tokens=8)
    so_far = client.responses.input_tokens.count(previous_response_id=first.id)
    more: Any = {"previous_response_id": first.id, "input": "And of Spain?"}
    counted = client.responses.input_tokens.count(**more)
    second = client.responses.create(model="minisgl", max_output_tokens=8, **more)
    assert first.usage is not None and second.usage is not None
    assert first.usage.input_tokens < so_far.input_tokens < counted.input_tokens
    assert counted.input_tokens == second.usage.input_tokens


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": QUESTION, "conversation": "conv_1"}, "conversation"),
        ({"input": QUESTION, "truncation": "auto"}, "truncation"),
        ({"input": QUESTION, "max_output_tokens": 4}, "max_output_tokens"),
    ],
)
def test_lengths_that_are_not_counted(client: OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.post("/responses/input_tokens", body=asked, cast_to=object)
    assert raised.value.param == param


def test_a_response_is_kept_until_it_is_deleted(client: OpenAI) -> None:
    *_, last = client.responses.create(model="minisgl", input=QUESTION, temperature=0, stream=True)
    assert last.type == "response.completed"
    made = last.response
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match=f"Response with id '{made.id}' not found"):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.create(model="minisgl", input="Hi", previous_response_id=made.id)
    assert raised.value.code == "previous_response_not_found"
    assert raised.value.param == "previous_response_id"


def test_what_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    response = client.responses.create(model="minisgl", input=QUESTION, store=False)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_response_is_found_by_its_own_key_only(guarded: Gateway) -> None:
    def of(key: str) -> OpenAI:
        return OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)

    with of(KEYS[0]) as owner, of(KEYS[1]) as other:
        made = owner.responses.create(model="minisgl", input="Hi", max_output_tokens=4)
        (item,) = made.output
        assert owner.responses.retrieve(made.id).id == made.id
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="minisgl", input="Hi", previous_response_id=made.id)
        with pytest.raises(openai.NotFoundError, match="Item with id"):
            reference: Any = {"type": "item_reference", "id": item.id}
            other.responses.create(model="minisgl", input=[reference])
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(made.id)
        assert owner.responses.retrieve(made.id).id == made.id


def test_an_agent_sends_back_the_items_that_it_got(caller: OpenAI) -> None:
    conversation: list[Any] = [{"role": "user", "content": WEATHER}]
    first = caller.responses.create(**ASKED, input=conversation)
    message, call = first.output
    assert message.type == "message" and first.output_text.strip() == WORDS
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Bogotá"}
    (tool,) = first.tools
    assert tool.type == "function" and tool.strict is True
    conversation += first.output
    told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    second = caller.responses.create(**ASKED, input=[*conversation, told])
    assert second.output_text == ANSWER


def test_an_agent_that_streams_goes_on_from_the_response(caller: OpenAI) -> None:
    with caller.responses.stream(**ASKED, input=WEATHER) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert kinds[-5:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    call = first.output[-1]
    assert call.type == "function_call"
    told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    with caller.responses.stream(**ASKED, input=[told], previous_response_id=first.id) as stream:
        assert stream.get_final_response().output_text == ANSWER


@pytest.mark.parametrize("kinds", [[{"type": "item_reference"}, {"type": None}], [{}, {}]])
def test_kept_items_are_referred_to_by_their_ids(
    caller: OpenAI, kinds: list[dict[str, str | None]]
) -> None:
    first = caller.responses.create(**ASKED, input=WEATHER)
    call = first.output[-1]
    assert call.type == "function_call"
    items: list[Any] = [
        {"role": "user", "content": WEATHER},
        *(dict(kind, id=item.id) for kind, item in zip(kinds, first.output, strict=True)),
        {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."},
    ]
    second = caller.responses.create(**ASKED, input=items)
    by_id = caller.responses.create(**ASKED, input=items[-1:], previous_response_id=first.id)
    assert second.output_text == by_id.output_text == ANSWER
    assert second.usage is not None and by_id.usage is not None
    assert second.usage.input_tokens == by_id.usage.input_tokens


def test_tools_that_are_not_offered_are_not_called(caller: OpenAI) -> None:
    response = caller.responses.create(**ASKED, input=WEATHER, tool_choice="none")
    assert response.output_text == ANSWER


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": []}, "input"),
        ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    client: OpenAI, asked: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**{"model": "minisgl", "input": "Hi", **asked})
    assert raised.value.param == (param or "input[0].content[0].type")


def test_a_kept_response_comes_whole_and_as_it_was_answered(client: OpenAI) -> None:
    response = client.responses.create(model="minisgl", input=QUESTION, temperature=0)
    with pytest.raises(openai.BadRequestError, match="stream is not supported"):
        list(client.responses.retrieve(response.id, stream=True))
    with pytest.raises(openai.BadRequestError, match="include is not supported"):
        client.responses.retrieve(response.id, include=["message.output_text.logprobs"])


# --- forms of answers, calls that must be made, thoughts -----------------------------------------


class Report(BaseModel):
    city: str
    rains: bool
    degrees: int


def test_answers_are_parsed_into_a_model(caller: OpenAI) -> None:
    parsed = caller.responses.parse(model="minisgl", input=WEATHER, text_format=Report)
    assert parsed.output_parsed == Report(**REPORT)
    with caller.responses.stream(model="minisgl", input=WEATHER, text_format=Report) as stream:
        assert stream.get_final_response().output_parsed == Report(**REPORT)
    with_tools = caller.responses.parse(**ASKED, input=WEATHER, text_format=Report)
    call = with_tools.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Bogotá"}


def test_the_demo_model_follows_a_schema(client: OpenAI) -> None:
    """The model would say something else."""
    form: Any = {"format": {"type": "json_schema", "name": "number", "schema": {"enum": [77]}}}
    response = client.responses.create(model="minisgl", input=QUESTION, text=form)
    assert json.loads(response.output_text) == 77
    broken: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "number_"}}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="minisgl", input=QUESTION, text=broken)
    assert raised.value.param == "text.format"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "weather"}],
        },
    ],
)
def test_a_call_that_must_be_made_is_all_of_the_answer(caller: OpenAI, choice: Any) -> None:
    other: Any = {"type": "function", "name": "other", "parameters": {"type": "object"}}
    response = caller.responses.create(
        model="minisgl", input=WEATHER, tools=[other, TOOL], tool_choice=choice
    )
    (call,) = response.output
    assert call.type == "function_call" and call.name == "weather"


def test_thoughts_are_an_item_of_their_own(thinker: Gateway) -> None:
    with OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "minisgl", "input": "What is 2 + 2?", "max_output_tokens": 40}
        whole = client.responses.create(**asked)
        *events, last = client.responses.create(**asked, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        for response in (whole, last.response):
            thoughts, message = response.output[:2]
            assert thoughts.type == "reasoning" and thoughts.content is not None
            assert thoughts.content[0].text == "Two and two.\nThat is four."
            assert message.type == "message" and response.output_text.startswith("It is 4.")
            assert response.usage is not None
            of_thoughts = response.usage.output_tokens_details.reasoning_tokens
            assert 0 < of_thoughts < response.usage.output_tokens
        deltas = [one.delta for one in events if one.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "Two and two.\nThat is four."
        told: Any = [*whole.output, {"role": "user", "content": "Sure?"}]
        assert client.responses.create(**{**asked, "input": told}).output
        short = client.responses.create(**asked, reasoning={"effort": "none"})
        assert [item.type for item in short.output] == ["message"]
