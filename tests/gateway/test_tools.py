"""Tools: the template tells the model about them, and calls are read out of what it says.

The engine is paced and says a sentence and a call, again and again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.gateway.conftest import KEYS, SCRIPT, Gateway

pytestmark = pytest.mark.server

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASKED: dict[str, Any] = {
    "model": "minisgl",
    "messages": [{"role": "user", "content": "How is the weather in Bogotá?"}],
    "tools": TOOLS,
    "max_tokens": 200,
}


@pytest.fixture
def client(guarded: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{guarded.url}/v1", api_key=KEYS[0], max_retries=0) as made:
        yield made


def test_one_call_ends_the_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, parallel_tool_calls=False)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I will look it up."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Bogotá 🌧"}


def test_calls_of_a_stream(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED).choices[0]
    assert whole.finish_reason == "length"
    assert whole.message.tool_calls is not None and len(whole.message.tool_calls) >= 2
    chunks = list(client.chat.completions.create(**ASKED, stream=True))
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.index for call in calls] == list(range(len(whole.message.tool_calls)))
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.function is not None
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments or "") == {"city": "Bogotá 🌧"}


def test_a_stream_that_ends_with_its_call(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(**ASKED, stream=True, parallel_tool_calls=False))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) == 1


FUNCTIONS: dict[str, Any] = {
    **{name: value for name, value in ASKED.items() if name != "tools"},
    "functions": [tool["function"] for tool in TOOLS],
}


def test_a_function_of_the_older_form(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(**FUNCTIONS).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.content == "I will look it up."
    assert choice.message.tool_calls is None
    called = choice.message.function_call
    assert called is not None and called.name == "weather"
    assert json.loads(called.arguments) == {"city": "Bogotá 🌧"}
    chunks = list(client.chat.completions.create(**FUNCTIONS, stream=True))
    told = [it for chunk in chunks if (it := chunk.choices[0].delta.function_call) is not None]
    assert [(it.name, it.arguments) for it in told] == [(called.name, called.arguments)]
    assert chunks[-1].choices[0].finish_reason == "function_call"
    messages = [
        *ASKED["messages"],
        choice.message.model_dump(),
        {"role": "function", "name": "weather", "content": "It rains."},
    ]
    assert client.chat.completions.create(**{**FUNCTIONS, "messages": messages}).choices


def test_an_agent_that_streams_sends_its_calls_back_as_they_came(client: OpenAI) -> None:
    """The chunks are added up, including the index, as the official client's helper does."""
    with client.chat.completions.stream(**ASKED, parallel_tool_calls=False) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    said = message.model_dump()
    assert said["tool_calls"][0]["index"] == 0
    told = [
        {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
        for call in message.tool_calls
    ]
    again = {**ASKED, "messages": [*ASKED["messages"], said, *told]}
    chunks = list(client.chat.completions.create(**again, stream=True))
    assert any(chunk.choices[0].delta.tool_calls for chunk in chunks)


@pytest.mark.parametrize("without", [{"tool_choice": "none"}, {"tools": None}])
def test_without_tools_a_call_is_text(client: OpenAI, without: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**{**ASKED, **without})
    message = answer.choices[0].message
    assert message.tool_calls is None
    assert message.content is not None and message.content.startswith(SCRIPT)


def test_the_template_gets_the_tools_and_their_answers(client: OpenAI) -> None:
    def prompt_tokens(**fields: Any) -> int:
        answer = client.chat.completions.create(**{**ASKED, "max_tokens": 1, **fields})
        found: int = answer.usage.prompt_tokens
        return found

    told = prompt_tokens()
    assert told > prompt_tokens(tool_choice="none") == prompt_tokens(tools=None)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It rains a lot today."},
    ]
    assert prompt_tokens(messages=messages) > told
