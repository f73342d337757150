"""Clients in their default ways, as their users have them.

The engine calls a tool and then answers: see ``agent``. So an agent takes two turns, and sends in
the second what it got in the first.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import agents
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI

from tests.gateway.agent import ANSWER, WORDS
from tests.gateway.conftest import Gateway

if TYPE_CHECKING:
    import pydantic_ai

pytestmark = pytest.mark.server

MODEL = "minisgl"
QUESTION = "How is the weather in Bogotá?"
ARGUMENTS = {"city": "Bogotá"}
TOLD = "rain in Bogotá"


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


# --- openai ------------------------------------------------------------------------------------

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


@pytest.fixture
def client(agent: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{agent.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(agent: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{agent.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_openai_sends_back_what_was_streamed(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    said: list[str] = []
    while not said or said[-1] != ANSWER:
        text, calls, reason = _streamed(client, messages)
        said.append(text)
        messages.append({"role": "assistant", "content": text, "tool_calls": calls or None})
        for call in calls:
            assert reason == "tool_calls" and call["index"] == 0
            told = weather(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
    assert said == [WORDS, ANSWER]
    assert reason == "stop"


def _streamed(client: OpenAI, messages: list[Any]) -> tuple[str, list[Any], str | None]:
    """The text, the calls as their pieces add up, ``index`` and all, and the finish reason."""
    text, calls, reason = "", [], None
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, stream=True
    )
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        calls += [call.model_dump() for call in choice.delta.tool_calls or ()]
        reason = choice.finish_reason
    return text, calls, reason


def test_openai_sends_back_its_own_objects(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    message: Any = first.choices[0].message
    told: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": TOLD}
    second = client.chat.completions.create(
        model=MODEL, messages=[*messages, message, told], tools=TOOLS
    )
    assert second.choices[0].message.content == ANSWER


# --- langchain-openai --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def langchain(agent: Gateway) -> Iterator[ChatOpenAI]:
    made = ChatOpenAI(
        model=MODEL,
        base_url=f"{agent.url}/v1",
        api_key="any",  # type: ignore[arg-type]  # made a secret
        max_retries=0,
    )
    yield made
    made.root_client.close()


async def test_langchain_answers(langchain: ChatOpenAI) -> None:
    assert langchain.invoke(QUESTION).text == ANSWER
    assert [one.text for one in langchain.batch([QUESTION, QUESTION])] == [ANSWER, ANSWER]
    assert "".join(piece.text for piece in langchain.stream(QUESTION)) == ANSWER
    assert (await langchain.ainvoke(QUESTION)).text == ANSWER
    assert "".join([piece.text async for piece in langchain.astream(QUESTION)]) == ANSWER
    await langchain.root_async_client.close()


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_uses_tools(langchain: ChatOpenAI, streams: bool) -> None:
    bound = langchain.bind_tools([tool(weather)])

    def asked(messages: list[Any]) -> Any:
        if not streams:
            return bound.invoke(messages)
        whole = AIMessageChunk(content="")
        for piece in bound.stream(messages):
            whole += piece  # type: ignore[assignment]  # adds up to its own kind
        return whole

    first = asked([HumanMessage(QUESTION)])
    assert first.text == WORDS
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", ARGUMENTS)
    told = ToolMessage(TOLD, tool_call_id=call["id"])
    second = asked([HumanMessage(QUESTION), first, told])
    assert (second.text, second.tool_calls) == (ANSWER, [])


# --- pydantic-ai -------------------------------------------------------------------------------


@pytest.fixture
def pydantic_agent(async_client: AsyncOpenAI) -> pydantic_ai.Agent:
    pytest.importorskip("pydantic_ai", reason="needs Python 3.11")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=async_client)
    made = Agent(OpenAIChatModel(MODEL, provider=provider))
    made.tool_plain(strict=False)(weather)
    return made


async def test_pydantic_ai(pydantic_agent: pydantic_ai.Agent) -> None:
    run = await pydantic_agent.run(QUESTION)
    assert (run.output, run.usage.tool_calls, run.usage.requests) == (ANSWER, 1, 2)
    assert run.usage.output_tokens > 0


async def test_pydantic_ai_streams(pydantic_agent: pydantic_ai.Agent) -> None:
    async with pydantic_agent.run_stream_events(QUESTION) as events:
        seen = [event async for event in events]
    kinds = [event.event_kind for event in seen]
    assert kinds.count("function_tool_result") == 1
    assert kinds.count("part_delta") > 2
    last = seen[-1]
    assert last.event_kind == "agent_run_result" and last.result.output == ANSWER


# --- openai-agents -----------------------------------------------------------------------------


@pytest.fixture
def openai_agent(async_client: AsyncOpenAI) -> agents.Agent[None]:
    return agents.Agent(
        name="weatherman",
        model=agents.OpenAIChatCompletionsModel(MODEL, openai_client=async_client),
        tools=[agents.function_tool(weather, strict_mode=False)],
    )


_UNTRACED = agents.RunConfig(tracing_disabled=True)  # traces would go to OpenAI


async def test_openai_agents(openai_agent: agents.Agent[None]) -> None:
    run = await agents.Runner.run(openai_agent, QUESTION, run_config=_UNTRACED)
    assert run.final_output == ANSWER
    assert len(run.raw_responses) == 2


async def test_openai_agents_stream(openai_agent: agents.Agent[None]) -> None:
    run = agents.Runner.run_streamed(openai_agent, QUESTION, run_config=_UNTRACED)
    kinds = [event.type async for event in run.stream_events()]
    assert "raw_response_event" in kinds
    assert run.final_output == ANSWER
