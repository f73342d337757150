"""Dialects of calls and thoughts end to end: the template shows them, the engine follows them, the
gateway reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
from openai import OpenAI

from tests.fakes import chat_templates
from tests.gateway import magistral as said
from tests.gateway.conftest import PACED, Gateway, gateway_to

pytestmark = pytest.mark.server

CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bogotá", 'say "hi"']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 12}},
    "required": ["text"],
    "additionalProperties": False,
}
GEMMA: Final = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
COMMAND: Final = (
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>"),
)
END: Final = "2"
"""The id of the token that ends an answer."""
CLOSING: Final = "63"
"""That of a closing bracket."""
SCHEMAS: Final = {"weather": CITY, "note": NOTE}


def tools(*names: str, strict: bool) -> list[Any]:
    """The tools with these names, or all. Qwen3-Coder's dialect enforces calls of ``weather``; with
    ``note``, whose text has a longest length, it is that of PLAIN."""
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": SCHEMAS[name], "strict": strict},
        }
        for name in names or SCHEMAS
    ]


@dataclass(frozen=True)
class Served:
    """A gateway in front of the demo model with another template; ``mark`` is the token that opens
    a call, None if there is no such token."""

    client: OpenAI
    mark: int | None

    def ask(self, **fields: Any) -> Any:
        asked = {"model": "minisgl", "messages": [{"role": "user", "content": "Weather?"}]}
        return self.client.chat.completions.create(**{"max_tokens": 150, **asked, **fields})


def by_night(family: str, *marks: str) -> Any:
    return pytest.param((family, marks), marks=pytest.mark.nightly)


@pytest.fixture(
    scope="module",
    params=[
        ("QWEN2_5", ("<tool_call>", "</tool_call>")),
        ("QWEN3_CODER", ("<tool_call>", "</tool_call>")),
        by_night("LLAMA_3_1", "<|python_tag|>"),
        ("MISTRAL_V13", ("[TOOL_CALLS]", "[ARGS]")),
        ("GEMMA_4", GEMMA),
        by_night("LFM_2", "<|tool_call_start|>", "<|tool_call_end|>"),
        by_night("COMMAND_R7B", *COMMAND),
        None,
    ],
    ids=lambda param: param[0] if param else "PLAIN",
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each with a server of its own; ``test_dialects`` tries all of them without one."""
    if request.param is None:  # the demo model's own template takes no tools
        gateway: Gateway = request.getfixturevalue("gateway")
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            yield Served(client, None)
        return
    family, marks = request.param
    folder = tmp_path_factory.mktemp(family)
    model = chat_templates.demo_model(
        folder / "model",
        getattr(chat_templates, family),
        marks,
        special=not family.startswith("QWEN"),
    )
    with (
        gateway_to(model, folder) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(client, 2047)


def check(choice: Any) -> None:
    """Complete calls follow their schemas, and nothing else is said."""
    assert not choice.message.content
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("names", [(), ("weather",)], ids=["all", "weather"])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls(served: Served, parallel: bool, names: tuple[str, ...]) -> None:
    """At temperature 1 the demo model says anything allowed; it is made to end wherever it may, and
    to end a list of calls there."""
    answer = served.ask(
        tools=tools(*names, strict=False),
        tool_choice="required",
        parallel_tool_calls=parallel,
        logit_bias={END: 100, CLOSING: 90} if parallel else None,
        n=4,
        seed=1,
    )
    ended = [choice for choice in answer.choices if choice.finish_reason != "length"]
    assert ended
    for choice in ended:
        assert choice.finish_reason == "tool_calls"
        assert parallel or len(choice.message.tool_calls) == 1
        check(choice)


def test_a_named_tool(served: Served) -> None:
    named = {"type": "function", "function": {"name": "note"}}
    chunks = list(
        served.ask(tools=tools(strict=True), tool_choice=named, seed=2, stream=True, max_tokens=300)
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    (call,) = calls
    assert call.function.name == "note"
    jsonschema.validate(json.loads(call.function.arguments), NOTE)
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


@pytest.mark.parametrize("names", [(), ("weather",)], ids=["all", "weather"])
def test_a_strict_tool_among_free_text(served: Served, names: tuple[str, ...]) -> None:
    strict = tools(*names, strict=True)
    free = served.ask(tools=strict, temperature=0, max_tokens=8).choices[0].message
    assert free.content and not free.tool_calls
    if served.mark is None:  # no token makes this model call
        return
    called = served.ask(
        tools=strict,
        parallel_tool_calls=False,
        logit_bias={str(served.mark): 100},
        n=4,
        seed=3,
    )
    ended = [choice for choice in called.choices if choice.finish_reason != "length"]
    assert ended
    for choice in ended:
        check(choice)


def test_a_second_turn(served: Served) -> None:
    called = served.ask(
        tools=tools(strict=True), tool_choice="required", parallel_tool_calls=False, n=4, seed=4
    )
    message = next(c.message for c in called.choices if c.finish_reason == "tool_calls")
    (call,) = message.tool_calls
    messages = [
        {"role": "user", "content": "Weather?"},
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    told = served.ask(messages=messages, tools=tools(strict=True), max_tokens=4)
    assert told.usage.prompt_tokens > served.ask(max_tokens=1).usage.prompt_tokens


def test_a_call_whose_arguments_stand_between_tags(tmp_path: Path) -> None:
    """The template gets the tools, and later the call with its result; the schema of the tool says
    that the days are a number."""
    said = "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBogotá\n</parameter>\n"
    said += "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    model = chat_templates.demo_model(tmp_path / "model", chat_templates.QWEN3_CODER, ())
    with (
        gateway_to(model, tmp_path, PACED.format(said)) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        served = Served(client, None)
        asked: Any = {"tools": tools(strict=False), "parallel_tool_calls": False}
        choice = served.ask(**asked).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Bogotá", "days": 3}
        deltas = [chunk.choices[0].delta for chunk in served.ask(**asked, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        (streamed,) = (call for delta in deltas for call in delta.tool_calls or ())
        assert streamed.function.arguments == call.function.arguments
        messages = [
            {"role": "user", "content": "Weather?"},
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
        ]
        assert served.ask(messages=messages, **asked).choices[0].message.content == "I look."


SCRIPTED: Final = """\
from tests.gateway.magistral import scripted_model

TritonPythonModel = scripted_model({!r}, end="<|im_end|>")
"""


def test_a_call_whose_strings_stand_between_marks(tmp_path: Path) -> None:
    """The marks are special tokens. Behind its calls the model begins a result."""
    said = 'I look.<|tool_call>call:weather{city:<|"|>Bogotá, "the city"<|"|>,days:3}<tool_call|>'
    said += "<|tool_call>call:now{}<tool_call|><|tool_response><|im_end|>"
    model = chat_templates.demo_model(
        tmp_path / "model", chat_templates.GEMMA_4, GEMMA, special=True
    )
    with (
        gateway_to(model, tmp_path, SCRIPTED.format(said)) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        served = Served(client, None)
        asked: Any = {"tools": tools(strict=False)}
        choice = served.ask(**asked).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        call, now = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": 'Bogotá, "the city"', "days": 3}
        assert (now.function.name, now.function.arguments) == ("now", "{}")
        deltas = [chunk.choices[0].delta for chunk in served.ask(**asked, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        streamed, _ = (call for delta in deltas for call in delta.tool_calls or ())
        assert streamed.function.arguments == call.function.arguments
        (alone,) = served.ask(**asked, parallel_tool_calls=False).choices[0].message.tool_calls
        assert alone.function.arguments == call.function.arguments
        messages = [
            {"role": "user", "content": "Weather?"},
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
            {"role": "tool", "tool_call_id": now.id, "content": "Noon."},
        ]
        assert served.ask(messages=messages, **asked).choices[0].message.content == "I look."


def test_thoughts_text_and_call_of_an_answer(magistral: Gateway) -> None:
    with OpenAI(base_url=f"{magistral.url}/v1", api_key="none", max_retries=0) as client:
        served = Served(client, None)
        choice = served.ask(tools=tools(strict=False)).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == said.THOUGHT
        assert choice.message.content == said.WORDS
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", said.ARGUMENTS)
        deltas = [
            chunk.choices[0].delta for chunk in served.ask(tools=tools(strict=False), stream=True)
        ]
        thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(thoughts) == said.THOUGHT
        assert "".join(delta.content or "" for delta in deltas) == said.WORDS
        (streamed,) = (call for delta in deltas for call in delta.tool_calls or ())
        assert streamed.function.arguments == said.ARGUMENTS
