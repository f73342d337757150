"""Answers in channels: thoughts, text and calls are told apart, however the text is cut, and are
kept to a form after the header of their last message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_client.answer import ChatFormat
from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.channels import ChannelReader
from minisgl_gateway.chat import Chat
from minisgl_gateway.dialects.choice import dialect_of
from minisgl_gateway.generation import Policy
from minisgl_gateway.json_reading import MOST_DEPTH
from minisgl_gateway.template import Wishes
from minisgl_gateway.thinking import Thought
from minisgl_gateway.tools import Calls, Tool
from openai import OpenAI

from minisgl_backend.text.template import ChatTemplate
from tests.fakes import chat_templates
from tests.gateway import gpt_oss as said
from tests.gateway.conftest import Gateway, gateway_to

THINKS: Final = "<|channel|>analysis<|message|>"
NEXT: Final = "<|end|><|start|>assistant"
FINAL: Final = "<|channel|>final<|message|>"
CALL: Final = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
SHOWN: Final = ChatFormat(
    tool_dialect="harmony",
    tool_marks=frozenset(),
    thinking=(THINKS, "<|end|>"),
    begins_thinking=False,
    variables=frozenset({"messages", "tools", "reasoning_effort"}),
)


def read(*pieces: str, **options: Any) -> tuple[str, str, list[CalledTool]]:
    """Thoughts, text and calls."""
    reader = ChannelReader(**{"has_calls": True, **options})
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert all(part.text if isinstance(part, Thought) else part for part in parts)
    return (
        "".join(part.text for part in parts if isinstance(part, Thought)),
        "".join(part for part in parts if isinstance(part, str)),
        [part for part in parts if isinstance(part, CalledTool)],
    )


LOOK: Final = CalledTool("look", '{"at": 1}')
ANSWERS: Final = [
    (f"{FINAL}Hello.", ("", "Hello.", [])),
    (f"{THINKS}Hm.\n{NEXT}{FINAL}Hello.<|return|>", ("Hm.\n", "Hello.", [])),
    (f"{THINKS}One.{NEXT}{THINKS}Two.{NEXT}{FINAL}3", ("One.Two.", "3", [])),
    (f'{THINKS}Hm.{NEXT}{CALL}{{"at": 1}}', ("Hm.", "", [LOOK])),
    (f'{CALL}{{"at": 1}}<|call|>', ("", "", [LOOK])),
    (f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}{{}}", ("", "I look.", [("look", "{}")])),
    (" to=functions.look<|channel|>commentary json<|message|>{}", ("", "", [("look", "{}")])),
    (
        f"{THINKS}Hm.{NEXT} to=functions.a b<|channel|>commentary <|constrain|>json<|message|>{{}}",
        ("Hm.", "", [("a b", "{}")]),
    ),
    (f"{THINKS}A <b> is no <|mark|>{NEXT}", ("A <b> is no <|mark|>", "", [])),
    (f"{THINKS}Cut", ("Cut", "", [])),
    (f"{THINKS}Cut{NEXT}<|channel|>fin", ("Cut", "", [])),
    (f"{THINKS}Cut{NEXT} to=functions.lo", ("Cut", "", [])),
    (" to=functions.look<|chan", ("", "", [])),
    (f"{FINAL}{CALL}", ("", CALL, [])),
    (f'{CALL}{{"at": ', ("", '{"at": ', [])),
    (f"{CALL}[1]", ("", "[1]", [])),
    (f'{CALL}{{"at": NaN}}', ("", '{"at": NaN}', [])),
    ("<|channel|>commentary to=browser.open<|message|>{}", ("", "{}", [])),
    ("No header.", ("", "No header.", [])),
    ("", ("", "", [])),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_messages_of_an_answer(text: str, expected: tuple[str, str, list[Any]]) -> None:
    thoughts, words, calls = expected
    wanted = (thoughts, words, [CalledTool(*c) if isinstance(c, tuple) else c for c in calls])
    assert read(text) == wanted
    assert read(*text) == wanted


@given(
    text=st.lists(
        st.sampled_from([THINKS, NEXT, FINAL, CALL, "<|call|>", "<|message|>", "a<", "{}", "|>"])
    ).map("".join),
    cuts=st.sets(st.integers(0, 300)),
)
def test_pieces_of_any_size_say_the_same(text: str, cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    assert read(*pieces) == read(text)


def test_a_call_nested_too_deeply_stays_text() -> None:
    for depth, is_call in ((MOST_DEPTH, True), (MOST_DEPTH + 1, False), (100_000, False)):
        nested = '{"at": ' * depth + "1" + "}" * depth
        thoughts, text, calls = read(CALL + nested)
        assert (thoughts, text, len(calls)) == ("", "" if is_call else nested, int(is_call))


def test_parts_that_the_caller_wants_unseparated() -> None:
    answer = f'{THINKS}Hm.{NEXT}{CALL}{{"at": 1}}'
    assert read(answer, has_calls=False) == ("Hm.", '{"at": 1}', [])
    assert read(answer, separates_thoughts=False) == ("", f"{THINKS}Hm.<|end|>", [LOOK])
    for cut in (f'{CALL}{{"at"', " to=functions.look", " t", "<|chan"):
        assert read(cut, calls_alone=True) == ("", "", [])


def test_wishes_that_such_models_can_be_told() -> None:
    def told(**wished: Any) -> tuple[Any, Any]:
        wishes = Wishes(**wished)
        return wishes.variables_for(SHOWN).get("reasoning_effort"), wishes.unfulfilled(SHOWN)

    assert told() == (None, [])
    for effort in ("low", "medium", "high"):
        assert told(effort=effort) == (effort, [])
    assert told(effort="minimal") == ("low", [])
    assert told(effort="max") == ("high", [])
    assert told(effort="none") == (None, ["reasoning_effort"])
    assert told(thinks=True) == (None, [])
    assert told(thinks=False) == (None, ["enable_thinking"])


def test_special_tokens_are_asked_for_in_any_case() -> None:
    policy = Policy(timeout_s=30, chat_tokens=512)
    for separates in (True, False):
        chat = Chat(messages=[], separates_thoughts=separates)
        template = chat.template(SHOWN)
        assert chat.generation(policy, template).parameters["skip_special_tokens"] is False


def test_earlier_calls_are_told_one_by_one() -> None:
    """As the template takes them: each followed by its result, and thoughts before the first."""
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {"x": name}}}
        for name in "ab"
    ]
    asked = {"role": "user", "content": "Look."}
    messages: list[Any] = [
        asked,
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": name, "content": f"is {name}"} for name in "ba"),
        {"role": "assistant", "content": "Both.", "reasoning_content": "So."},
        asked,
    ]
    told = dialect_of(SHOWN).messages(messages, ())
    template = ChatTemplate(chat_templates.GPT_OSS, {}, max_chars=10**6)
    text = template.render([dict(one) for one in told], None, None, add_generation_prompt=True)
    _, _, behind = text.partition("<|start|>user<|message|>Look.<|end|>")
    assert behind == (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nWell.<|end|>"
        "<|start|>assistant to=functions.a<|channel|>commentary json<|message|>"
        '{"x": "a"}<|call|>'
        '<|start|>functions.a to=assistant<|channel|>commentary<|message|>"is a"<|end|>'
        "<|start|>assistant to=functions.b<|channel|>commentary json<|message|>"
        '{"x": "b"}<|call|>'
        '<|start|>functions.b to=assistant<|channel|>commentary<|message|>"is b"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Both.<|end|>"
        "<|start|>user<|message|>Look.<|end|><|start|>assistant"
    )


def test_a_tool_needs_neither_description_nor_parameters() -> None:
    """The template joins the description to other text, whether there is one or not."""
    tools = [Tool("look"), Tool("see", "All of it.", {"type": "object", "properties": {"x": {}}})]
    told = [dialect_of(SHOWN).tool(tool) for tool in tools]
    template = ChatTemplate(chat_templates.GPT_OSS, {}, max_chars=10**6)
    asked = [{"role": "user", "content": "Look."}]
    text = template.render(asked, told, None, add_generation_prompt=True)
    assert "// \ntype look = () => any;\n// All of it.\ntype see = (_: {" in text


def test_results_stay_in_their_turn_if_later_calls_have_the_same_ids() -> None:
    """Some agents number the calls of each turn anew."""

    def turn(*results: str) -> list[dict[str, Any]]:
        function = {"name": "look", "arguments": "{}"}
        ids = [f"call_{index}" for index in range(len(results))]
        calls = [{"id": each, "type": "function", "function": function} for each in ids]
        told = [
            {"role": "tool", "tool_call_id": each, "content": result}
            for each, result in zip(ids, results, strict=True)
        ]
        return [{"role": "assistant", "tool_calls": calls}, *told]

    chat = [*turn("a", "b"), {"role": "user", "content": "Again."}, *turn("c", "d"), *turn("e")]
    told = dialect_of(SHOWN).messages(chat, ())
    assert [message["content"] for message in told if message["role"] == "tool"] == [*"abcde"]


def test_a_later_system_message_is_not_dropped() -> None:
    """As the template would, without an error."""
    first, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    parts = [{"type": "text", "text": "Now."}]
    told = dialect_of(SHOWN).messages([first, asked, {"role": "system", "content": parts}], ())
    reminded = "<system-reminder>\nNow.\n</system-reminder>"
    assert told == [first, asked, {"role": "user", "content": reminded}]


def test_one_call_at_most_needs_nothing() -> None:
    dialect = dialect_of(None, "harmony")
    assert dialect.constraint([Tool("look")], Calls(parallel=False)) is None
    assert dialect.stop is None


# --- from end to end -----------------------------------------------------------------------------

CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bogotá", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OFFERED: Final[dict[str, Any]] = {"name": "weather", "parameters": CITY}
TOOLS: Final[list[Any]] = [{"type": "function", "function": {**OFFERED, "strict": True}}]
NOT_STRICT: Final[list[Any]] = [{"type": "function", "function": OFFERED}]
ASKED: Final[dict[str, Any]] = {
    "model": "minisgl",
    "messages": [{"role": "user", "content": "Weather?"}],
}


def model_in(folder: Path) -> tuple[Path, dict[str, int]]:
    """The demo model with gpt-oss's template and tokens, and the ids of these; calls end its
    answers, as generation_config.json says."""
    marks = chat_templates.GPT_OSS_MARKS
    model = chat_templates.demo_model(folder, chat_templates.GPT_OSS, marks, special=True)
    tokens = json.loads((model / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    config = json.loads((model / "generation_config.json").read_text("utf-8"))
    config["eos_token_id"] = [ids["<|return|>"], ids["<|call|>"], *config["eos_token_id"]]
    (model / "generation_config.json").write_text(json.dumps(config))
    return model, ids


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a model that says what ``gpt_oss`` says."""
    folder = tmp_path_factory.mktemp("speaking")
    script = "from tests.gateway.gpt_oss import TritonPythonModel\n"
    model, _ = model_in(folder / "model")
    with gateway_to(model, folder, script) as gateway, client_of(gateway) as client:
        yield client


def client_of(gateway: Gateway) -> OpenAI:
    return OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


@pytest.mark.server
def test_thoughts_text_and_call_of_an_answer(speaking: OpenAI) -> None:
    whole = speaking.chat.completions.create(**ASKED, tools=NOT_STRICT)
    choice: Any = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == said.THOUGHT
    assert choice.message.content == said.WORDS
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    of_thoughts = whole.usage.completion_tokens_details.reasoning_tokens
    assert of_thoughts is not None and 0 < of_thoughts < whole.usage.completion_tokens
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", said.ARGUMENTS)
    chunks = list(speaking.chat.completions.create(**ASKED, tools=NOT_STRICT, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == said.THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == said.WORDS
    (streamed,) = (call for delta in deltas for call in delta.tool_calls or ())
    assert streamed.function is not None
    assert streamed.function.arguments == said.ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.server
def test_thoughts_that_are_left_out_or_with_the_text(speaking: OpenAI) -> None:
    hidden = speaking.chat.completions.create(
        **ASKED, tools=NOT_STRICT, extra_body={"include_reasoning": False}
    )
    assert getattr(hidden.choices[0].message, "reasoning_content", None) is None
    assert hidden.choices[0].message.content == said.WORDS
    together = speaking.chat.completions.create(
        **ASKED, tools=NOT_STRICT, extra_body={"separate_reasoning": False}
    )
    whole = f"{THINKS}{said.THOUGHT}<|end|>{said.WORDS}"
    assert together.choices[0].message.content == whole


@dataclass(frozen=True)
class Served:
    """The demo model behind gpt-oss's template; ``ids`` are those of its tokens."""

    gateway: Gateway
    client: OpenAI
    ids: dict[str, int]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model, ids = model_in(folder / "model")
    with gateway_to(model, folder) as gateway, client_of(gateway) as client:
        yield Served(gateway, client, ids)


@pytest.mark.server
@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_that_must_be_made(served: Served, choice: str) -> None:
    """The demo model says anything allowed; it is made to end its thoughts."""
    named: Any = {"type": "function", "function": {"name": "weather"}}
    answer = served.client.chat.completions.create(
        **ASKED,
        tools=TOOLS,
        tool_choice="required" if choice == "required" else named,
        logit_bias={str(served.ids["<|end|>"]): 100},
        max_tokens=200,
        n=4,
        seed=1,
    )
    ended = [one for one in answer.choices if one.finish_reason != "length"]
    assert ended
    for one in ended:
        assert one.finish_reason == "tool_calls" and not one.message.content
        assert one.message.tool_calls
        (call,) = one.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), CITY)


@pytest.mark.server
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["form alone", "form or call"])
def test_the_form_is_that_of_the_final_message(served: Served, tools: list[Any] | None) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    asked: dict[str, Any] = {**ASKED, "response_format": form}
    if tools is not None:
        asked["tools"] = tools
    answer = served.client.chat.completions.create(
        **asked,
        logit_bias={str(served.ids["<|end|>"]): 100},
        max_tokens=200,
        n=6,
        seed=2,
    )
    ended = [one for one in answer.choices if one.finish_reason != "length"]
    assert ended
    for one in ended:
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.message.content or ""), CITY)
        else:
            assert tools is not None and one.message.tool_calls


@pytest.mark.server
def test_a_strict_tool_among_free_messages(served: Served) -> None:
    answer = served.client.chat.completions.create(
        **ASKED,
        tools=TOOLS,
        logit_bias={str(served.ids["<|end|>"]): 100, "2": 100},
        max_tokens=200,
        n=8,
        seed=3,
    )
    ended = [one for one in answer.choices if one.finish_reason != "length"]
    assert any(one.finish_reason == "tool_calls" for one in ended)
    for one in ended:
        for call in one.message.tool_calls or ():
            assert call.type == "function" and call.function.name == "weather"
            jsonschema.validate(json.loads(call.function.arguments), CITY)


@pytest.mark.server
def test_wishes_and_tools_reach_the_template(served: Served) -> None:
    def prompt(**more: Any) -> str:
        asked = served.gateway.post("/tokenize", {**ASKED, **more}).json()
        told = served.gateway.post("/detokenize", {"model": "minisgl", "tokens": asked["tokens"]})
        text: str = told.json()["prompt"]
        return text

    assert "Reasoning: medium" in prompt()
    with_tools = prompt(chat_template_kwargs={"reasoning_effort": "low"}, tools=TOOLS)
    assert "Reasoning: low" in with_tools and "type weather = (_: {" in with_tools
    assert with_tools.endswith("<|start|>assistant")
    for effort, is_told in (("low", True), ("xhigh", True), ("none", False)):
        asked = {**ASKED, "reasoning_effort": effort, "max_tokens": 1}
        answer = served.gateway.post("/v1/chat/completions", asked)
        named = answer.headers.get("X-Minisgl-Without-Effect", "")
        assert answer.status_code == 200 and ("reasoning_effort" in named) is not is_told
