"""Clients in their default modes, as their users have them.

Two servers are behind them. The engine of ``agent`` calls a tool and then answers, so an agent
takes two turns, and sends in the second what it got in the first; the grammars of strict tools and
reports overrule what it wants to say. Behind ``gateway`` is the demo model, which does not
understand questions, so its observations are valid only because its tokens are constrained. The
schema bounds all that it may write, and if it must call, it may do so once, since it would go on
forever. Whatever mentions a schema only in the prompt (langchain's JSON mode, pydantic-ai's
prompted output) is asked of the agent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum
from typing import Any, Literal

import agents
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

from tests.gateway.agent import ANSWER, REPORT, WORDS
from tests.gateway.conftest import Gateway
from tests.gateway.sdks.cases import MODEL, QUESTION, Report, weather

pytestmark = pytest.mark.server

ARGUMENTS = {"city": "Bogotá"}
TOLD = "rain in Bogotá"


class Sky(Enum):
    CLEAR = "clear"
    OVERCAST = "overcast"


class Wind(BaseModel):
    model_config = ConfigDict(extra="forbid")

    direction: Literal["north", "east", "south", "west"]
    knots: int = Field(ge=0, le=99)


class Observation(BaseModel):
    """What a station has seen."""

    model_config = ConfigDict(extra="forbid")

    station: str = Field(pattern="^[A-Z]{3}-[0-9]{2}$")
    sky: Sky
    degrees: int | None = Field(ge=-50, le=50)
    winds: list[Wind] = Field(max_length=2)
    note: str = Field(max_length=12)


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
def demo(gateway: Gateway) -> Iterator[OpenAI]:
    """A client of the demo model."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(agent: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{agent.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_demo(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    """A client of the demo model."""
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as made:
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
    """The text, the calls as their pieces add up, including ``index``, and the finish reason."""
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


def test_openai_parses_a_schema(demo: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    parse = demo.chat.completions.parse
    answer = parse(model=MODEL, messages=messages, response_format=Observation, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert all(isinstance(choice.message.parsed, Observation) for choice in answer.choices)


def test_openai_parses_a_schema_streamed(demo: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    stream = demo.chat.completions.stream
    with stream(model=MODEL, messages=messages, response_format=Observation) as events:
        kinds = {event.type for event in events}
        parsed = events.get_final_completion().choices[0].message.parsed
    assert kinds == {"chunk", "content.delta", "content.done"}
    assert isinstance(parsed, Observation)


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "Observation"}}],
    ids=["required", "named"],
)
def test_openai_parses_a_forced_call(demo: OpenAI, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message: Any = (
        demo.chat.completions.parse(
            model=MODEL,
            messages=messages,
            tools=[pydantic_function_tool(Report), pydantic_function_tool(Observation)],
            tool_choice=choice,
            parallel_tool_calls=False,
        )
        .choices[0]
        .message
    )
    (call,) = message.tool_calls
    kinds = (Observation, Report) if choice == "required" else Observation
    assert isinstance(call.function.parsed_arguments, kinds)
    assert type(call.function.parsed_arguments).__name__ == call.function.name
    assert not message.content


def test_openai_parses_strict_calls(client: OpenAI) -> None:
    class Weather(BaseModel):
        """The weather of a city."""

        city: str

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [pydantic_function_tool(Weather, name="weather")]
    parse = client.chat.completions.parse
    message: Any = parse(model=MODEL, messages=messages, tools=tools).choices[0].message
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Bogotá")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    assert parse(model=MODEL, messages=messages, tools=tools).choices[0].message.content == ANSWER


# --- langchain-openai --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def langchain(agent: Gateway) -> Iterator[ChatOpenAI]:
    made = _langchain(agent)
    yield made
    made.root_client.close()


@pytest.fixture(scope="module")
def langchain_demo(gateway: Gateway) -> Iterator[ChatOpenAI]:
    """The demo model."""
    made = _langchain(gateway)
    yield made
    made.root_client.close()


def _langchain(gateway: Gateway) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{gateway.url}/v1",
        api_key="any",  # type: ignore[arg-type]  # made a secret
        max_retries=0,
    )


async def test_langchain_answers(langchain: ChatOpenAI) -> None:
    assert langchain.invoke(QUESTION).text == ANSWER
    assert [one.text for one in langchain.batch([QUESTION, QUESTION])] == [ANSWER, ANSWER]
    assert "".join(piece.text for piece in langchain.stream(QUESTION)) == ANSWER
    assert (await langchain.ainvoke(QUESTION)).text == ANSWER
    assert "".join([piece.text async for piece in langchain.astream(QUESTION)]) == ANSWER
    await langchain.root_async_client.close()


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("streams", [False, True])
def test_langchain_uses_tools(langchain: ChatOpenAI, streams: bool, strict: bool | None) -> None:
    bound = langchain.bind_tools([tool(weather)], strict=strict)

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


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # langchain's own
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_has_structured_output(
    langchain_demo: ChatOpenAI, method: Any, streams: bool
) -> None:
    bound = langchain_demo.with_structured_output(Observation, method=method)
    found = list(bound.stream(QUESTION))[-1] if streams else bound.invoke(QUESTION)
    assert isinstance(found, Observation)


def test_langchain_has_json_mode(langchain: ChatOpenAI) -> None:
    bound = langchain.with_structured_output(Report, method="json_mode")
    assert bound.invoke(QUESTION) == Report(**REPORT)


def test_langchain_forces_a_tool(langchain_demo: ChatOpenAI) -> None:
    bound = langchain_demo.bind_tools(
        [Observation, Report], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    (call,) = bound.invoke(QUESTION).tool_calls
    {"Observation": Observation, "Report": Report}[call["name"]](**call["args"])


# --- pydantic-ai -------------------------------------------------------------------------------


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def pydantic_model(request: pytest.FixtureRequest) -> Callable[[AsyncOpenAI], Any]:
    """A function that makes a pydantic-ai model for a client; one for each API."""
    pytest.importorskip("pydantic_ai", reason="needs Python 3.11")
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = getattr(openai, request.param)
    return lambda client: kind(MODEL, provider=OpenAIProvider(openai_client=client))


async def test_pydantic_ai(
    async_client: AsyncOpenAI, pydantic_model: Callable[[AsyncOpenAI], Any]
) -> None:
    import pydantic_ai

    asked = pydantic_ai.Agent(pydantic_model(async_client), tools=[weather])
    run = await asked.run(QUESTION)
    assert (run.output, run.usage.tool_calls, run.usage.requests) == (ANSWER, 1, 2)
    assert run.usage.output_tokens > 0


async def test_pydantic_ai_streams(
    async_client: AsyncOpenAI, pydantic_model: Callable[[AsyncOpenAI], Any]
) -> None:
    import pydantic_ai

    asked = pydantic_ai.Agent(pydantic_model(async_client), tools=[weather])
    async with asked.run_stream_events(QUESTION) as events:
        seen = [event async for event in events]
    kinds = [event.event_kind for event in seen]
    assert kinds.count("function_tool_result") == 1
    assert kinds.count("part_delta") > 2
    last = seen[-1]
    assert last.event_kind == "agent_run_result" and last.result.output == ANSWER


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput", "PromptedOutput"])
async def test_pydantic_ai_uses_tools_for_a_report(
    async_client: AsyncOpenAI, pydantic_model: Callable[[AsyncOpenAI], Any], output: str
) -> None:
    import pydantic_ai

    output_type = getattr(pydantic_ai, output)(Report)
    model = pydantic_model(async_client)
    asked = pydantic_ai.Agent(model, tools=[weather], output_type=output_type, retries=0)
    run = await asked.run(QUESTION)
    assert (run.output, run.usage.requests) == (Report(**REPORT), 2)


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
async def test_pydantic_ai_observes(
    async_demo: AsyncOpenAI, pydantic_model: Callable[[AsyncOpenAI], Any], output: str
) -> None:
    import pydantic_ai

    output_type = getattr(pydantic_ai, output)(Observation)
    asked = pydantic_ai.Agent(
        pydantic_model(async_demo),
        output_type=output_type,
        model_settings={"parallel_tool_calls": False},
        retries=0,
    )
    assert isinstance((await asked.run(QUESTION)).output, Observation)


# --- openai-agents -----------------------------------------------------------------------------

_UNTRACED = agents.RunConfig(tracing_disabled=True)  # traces would go to OpenAI
_AGENTS_APIS = [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]


@pytest.fixture(params=_AGENTS_APIS)
def agents_model(request: pytest.FixtureRequest, async_client: AsyncOpenAI) -> agents.Model:
    model: agents.Model = request.param(MODEL, openai_client=async_client)
    return model


async def test_openai_agents(agents_model: agents.Model) -> None:
    asked = agents.Agent("weatherman", model=agents_model, tools=[agents.function_tool(weather)])
    run = await agents.Runner.run(asked, QUESTION, run_config=_UNTRACED)
    assert run.final_output == ANSWER
    assert len(run.raw_responses) == 2
    again: list[Any] = [*run.to_input_list(), {"role": "user", "content": QUESTION}]
    assert (await agents.Runner.run(asked, again, run_config=_UNTRACED)).final_output == ANSWER


async def test_openai_agents_stream(agents_model: agents.Model) -> None:
    asked = agents.Agent("weatherman", model=agents_model, tools=[agents.function_tool(weather)])
    run = agents.Runner.run_streamed(asked, QUESTION, run_config=_UNTRACED)
    kinds = [event.type async for event in run.stream_events()]
    assert "raw_response_event" in kinds
    assert run.final_output == ANSWER


async def test_openai_agents_report(agents_model: agents.Model) -> None:
    asked = agents.Agent(
        "weatherman",
        model=agents_model,
        tools=[agents.function_tool(weather)],
        output_type=Report,
    )
    run = await agents.Runner.run(asked, QUESTION, run_config=_UNTRACED)
    assert run.final_output == Report(**REPORT)
    assert len(run.raw_responses) == 2


@pytest.mark.parametrize("kind", _AGENTS_APIS)
async def test_openai_agents_observe(async_demo: AsyncOpenAI, kind: type[Any]) -> None:
    model = kind(MODEL, openai_client=async_demo)
    asked = agents.Agent("observer", model=model, output_type=Observation)
    run = await agents.Runner.run(asked, QUESTION, run_config=_UNTRACED)
    assert isinstance(run.final_output, Observation)


@pytest.mark.parametrize("kind", _AGENTS_APIS)
async def test_openai_agents_force_a_tool(async_demo: AsyncOpenAI, kind: type[Any]) -> None:
    def note(report: Report) -> str:
        """Take a note."""
        return report.city

    asked = agents.Agent(
        "noter",
        model=kind(MODEL, openai_client=async_demo),
        model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
        tools=[agents.function_tool(note)],
        tool_use_behavior="stop_on_first_tool",
    )
    run = await agents.Runner.run(asked, QUESTION, run_config=_UNTRACED)
    assert run.final_output in ("Bogotá", "Paris")
