"""Structured outputs, required calls, and thoughts, from real engines.

The demo model is asked at temperature 1, so that nothing but the form keeps it to the form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from tests.gateway.agent import REPORT
from tests.gateway.conftest import Gateway

pytestmark = pytest.mark.server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["city", "country"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 3}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
NUMBER = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
LABELLED = {
    "type": "sequence",
    "elements": [
        {
            "type": "tag",
            "begin": "<t>",
            "content": {"type": "any_text", "max_chars": 5, "excludes": ["x"]},
            "end": "</t>",
        },
        {"type": "regex", "pattern": "(ab|cd){2}"},
        {
            "type": "or",
            "elements": [
                {"type": "const_string", "value": "."},
                {
                    "type": "tag",
                    "begin": ": ",
                    "content": {
                        "type": "tags_with_separator",
                        "tags": [{"begin": "", "content": NUMBER, "end": ""}],
                        "separator": ", ",
                        "at_least_one": True,
                    },
                    "end": ".",
                },
            ],
        },
    ],
}
CALLED = {"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}


def follows_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": ({"response_format": FORMAT}, follows_schema),
    "object": (
        {
            "response_format": {
                "type": "json_object",
                "schema": {"additionalProperties": {"type": "boolean"}},
            }
        },
        is_object,
    ),
    "array": (
        {
            "response_format": {
                "type": "json_object",
                "schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
            }
        },
        matches(r"\[\s*([12]\s*(,\s*[12]\s*){0,2})?\]"),
    ),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, follows_schema),
    "regex": ({"structured_outputs": {"regex": "(ab|cd){3,5}"}}, matches("(ab|cd){3,5}")),
    "choice": ({"guided_choice": ["Paris", "Rome"]}, matches("Paris|Rome")),
    "ebnf": ({"ebnf": 'root ::= [0-9]+ "."'}, matches(r"[0-9]+\.")),
    "tags": (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [CALLED],
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        matches("<f>[12]</f>"),
    ),
    "format": (
        {"response_format": {"type": "structural_tag", "format": LABELLED}},
        matches(r"<t>[^x]{0,5}</t>(ab|cd){2}(: [12](, [12])*)?\."),
    ),
    "tag": (
        {"structured_outputs": {"structural_tag": json.dumps({"format": LABELLED})}},
        matches(r"<t>[^x]{0,5}</t>(ab|cd){2}(: [12](, [12])*)?\."),
    ),
}
ASKED: dict[str, Any] = {"model": "minisgl", "max_tokens": 400, "temperature": 1.0}
MESSAGES: Any = [{"role": "user", "content": "Give me France and its capital as JSON."}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_has_its_form(gateway: Gateway, name: str, path: str, stream: bool) -> None:
    fields, is_right = FORMS[name]
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hello"}
    body = {**ASKED, **prompt, **fields, "seed": 7, "n": 2, "stream": stream}
    answer = gateway.post(path, body)
    assert answer.status_code == 200, answer.text
    found = [("", "")] * 2
    for choice in _choices(answer.text, stream):
        text, _ = found[choice["index"]]
        said = choice.get("message") or choice.get("delta") or choice
        text += said.get("content") or said.get("text") or ""
        found[choice["index"]] = text, choice["finish_reason"]
    for text, finish_reason in found:
        assert finish_reason == "stop"
        assert is_right(text), text


def _choices(body: str, stream: bool) -> Iterator[dict[str, Any]]:
    if not stream:
        yield from json.loads(body)["choices"]
        return
    for event in body.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        yield from json.loads(event.removeprefix("data: "))["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_says_so(gateway: Gateway, stream: bool) -> None:
    body = {**ASKED, "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 5}
    answer = gateway.post("/v1/chat/completions", {**body, "stream": stream})
    *_, last = _choices(answer.text, stream)
    assert last["finish_reason"] == "length"


UNSUPPORTED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object", "schema": UNSUPPORTED}}, "response_format"),
        ({"guided_json": UNSUPPORTED}, "guided_json"),
        ({"structured_outputs": {"json": UNSUPPORTED}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(
    gateway: Gateway, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = gateway.post(
        "/v1/chat/completions", {**ASKED, "messages": MESSAGES, **fields, "stream": stream}
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert "uniqueItems" in error["message"]


# --- tools ---------------------------------------------------------------------------------------


def tool(name: str, parameters: dict[str, Any] | None, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


COUNT = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [tool("place", SCHEMA), tool("count", COUNT)]
BY_NAME = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
NAMED = {"type": "function", "function": {"name": "count"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"place", "count"}),
        ({"tool_choice": NAMED}, {"count"}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [NAMED]},
                },
                "parallel_tool_calls": False,
            },
            {"count"},
        ),
    ],
)
def test_a_call_that_must_be_made(
    gateway: Gateway, fields: dict[str, Any], names: set[str], stream: bool
) -> None:
    body = {**ASKED, "messages": MESSAGES, "tools": TOOLS, **fields, "n": 3, "stream": stream}
    answer = gateway.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    calls: dict[int, list[Any]] = {}
    for choice in _choices(answer.text, stream):
        said = choice.get("message") or choice["delta"]
        assert not said.get("content")
        calls.setdefault(choice["index"], []).extend(said.get("tool_calls") or ())
        assert choice["finish_reason"] in (None, "tool_calls")
    for (call,) in calls.values():
        assert call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, BY_NAME[call["function"]["name"]])


def test_calls_that_must_be_made_may_be_several(gateway: Gateway) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            **{**ASKED, "max_tokens": 1000},
            messages=MESSAGES,
            tools=[tool("count", COUNT)],
            tool_choice="required",
            n=2,
            extra_body={"min_tokens": 250},  # more than a single call has, including white space
        )
    calls = [choice.message.tool_calls or [] for choice in answer.choices]
    for call in [one for several in calls for one in several]:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), BY_NAME[call.function.name])
    assert min(map(len, calls)) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_of_the_older_form_that_must_be_called(gateway: Gateway, stream: bool) -> None:
    functions = [one["function"] for one in TOOLS]
    body = {**ASKED, "messages": MESSAGES, "functions": functions, "stream": stream}
    answer = gateway.post("/v1/chat/completions", {**body, "function_call": {"name": "count"}})
    *choices, last = _choices(answer.text, stream)
    assert last["finish_reason"] == "function_call"
    said = [one.get("message") or one["delta"] for one in (*choices, last)]
    (call,) = [one["function_call"] for one in said if one.get("function_call")]
    assert call["name"] == "count"
    jsonschema.validate(json.loads(call["arguments"]), BY_NAME["count"])


def test_arguments_of_strict_tools_follow_their_schemas(agent: Gateway) -> None:
    """The engine would like to ask for the weather in Bogotá, which only a loose tool allows."""
    cities = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    for strict, city in ((True, "Rome"), (False, "Bogotá"), (None, "Bogotá")):
        tools = [tool("weather", cities, strict=strict)]
        answer = agent.chat("How is the weather?", tools=tools, max_tokens=200)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls", answer.text
        assert choice["message"]["content"].startswith("I will look it up.")
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": city}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_made_and_is_cut_is_no_text(gateway: Gateway, stream: bool) -> None:
    body = {**ASKED, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    answer = gateway.post("/v1/chat/completions", {**body, "max_tokens": 8, "stream": stream})
    choices = list(_choices(answer.text, stream))
    told = [choice.get("message") or choice["delta"] for choice in choices]
    assert not any(one.get("content") or one.get("tool_calls") for one in told)
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("form", "param", "message"),
    [
        (UNSUPPORTED, "response_format", "uniqueItems is not supported, at #/properties/a/"),
        (COUNT, "tools", "uniqueItems is not supported, at f#/properties/a/"),
    ],
)
def test_what_is_wrong_with_a_form_or_with_a_tool_beside_it(
    gateway: Gateway, form: Any, param: str, message: str
) -> None:
    strict = tool("f", UNSUPPORTED if param == "tools" else COUNT, strict=True)
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": form}}
    body = {**ASKED, "messages": MESSAGES, "tools": [strict], "response_format": asked}
    error = gateway.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == param
    assert error["message"] == f"{param}: {message}uniqueItems"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_of_a_tool_that_cannot_be_enforced(gateway: Gateway, stream: bool) -> None:
    body = {**ASKED, "messages": MESSAGES, "tools": [tool("f", UNSUPPORTED, strict=True)]}
    answer = gateway.post("/v1/chat/completions", {**body, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tools"
    what = "uniqueItems is not supported, at f#/properties/a/uniqueItems"
    assert error["message"] == f"tools: {what}"
    body["tools"] = [tool("f", UNSUPPORTED)]
    assert gateway.post("/v1/chat/completions", body).status_code == 200


def test_tools_of_the_same_name(gateway: Gateway) -> None:
    tools = [tool("g", COUNT), tool("f", COUNT, strict=True), tool("f", {})]
    error = refused(gateway, "chat/completions", {"messages": MESSAGES, "tools": tools})
    assert error["param"] == "tools[2]"
    assert error["message"] == 'tools[2] has the name of another tool, "f"'


ARRAY = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("parameters", "strict", "got"),
    [
        (ARRAY, False, '"array"'),
        ({"type": "string"}, False, '"string"'),
        ({"type": ["array", "null"]}, False, '["array", "null"]'),
        ({"type": None}, False, "null"),
        ({"type": "integer"}, True, '"integer"'),
        ({"type": ["object", "null"]}, True, '["object", "null"]'),
    ],
)
def test_enforced_arguments_are_an_object(
    gateway: Gateway, parameters: dict[str, Any], strict: bool, got: str
) -> None:
    tools = [tool("g", COUNT), tool("f", parameters, strict=strict)]
    body = {"messages": MESSAGES, "tools": tools}
    error = refused(gateway, "chat/completions", {**body, "tool_choice": "required"})
    assert error["param"] == "tools[1]"
    assert error["message"] == f"tools: type must be 'object', got {got}, at f#/type"
    assert refused(gateway, "chat/completions", {**body, "response_format": FORMAT}) == error


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("keyword", "value", "got"),
    [
        ("const", "a", '"a"'),
        ("enum", ["a", 1], '["a", 1]'),
        ("$ref", "#/$defs/day", '"#/$defs/day"'),
        ("anyOf", [{"$ref": "#/$defs/day"}], '[{"$ref": "#/$defs/day"}]'),
    ],
)
def test_a_tool_whose_enforced_arguments_can_be_no_object(
    gateway: Gateway, keyword: str, value: Any, got: str, strict: bool
) -> None:
    parameters = {"type": "object", "$defs": {"day": {"type": "string"}}, keyword: value}
    tools = [tool("g", COUNT), tool("f", parameters, strict=strict)]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    error = refused(gateway, "chat/completions", body)
    assert error["param"] == "tools[1]"
    assert error["message"] == f"tools: {keyword} must allow an object, got {got}, at f#/{keyword}"


def test_enforced_arguments_are_an_object_in_every_api(gateway: Gateway) -> None:
    asked = {"messages": MESSAGES, "function_call": {"name": "f"}}
    older = {**asked, "functions": [{"name": "f", "parameters": ARRAY}]}
    message = "functions: type must be 'object', got \"array\", at f#/type"
    assert refused(gateway, "chat/completions", older)["message"] == message
    message = message.replace("functions", "tools")
    flat = {"type": "function", "name": "f", "parameters": ARRAY}
    responses = {"input": "Hi", "tools": [flat], "tool_choice": "required"}
    assert refused(gateway, "responses", responses)["message"] == message
    tools = [{"name": "f", "input_schema": ARRAY}]
    messages = {"messages": MESSAGES, "tools": tools, "tool_choice": {"type": "any"}}
    assert refused(gateway, "messages", messages)["message"] == message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool("f", ARRAY)]},
        {"tools": [tool("f", ARRAY), tool("count", COUNT)], "tool_choice": NAMED},
        {"tools": [tool("f", {"type": ["object", "null"]})], "tool_choice": "required"},
        {"tools": [tool("f", None)], "tool_choice": "required"},
    ],
)
def test_arguments_of_other_tools_are_any_object(gateway: Gateway, fields: dict[str, Any]) -> None:
    body = {**ASKED, "messages": MESSAGES, "max_tokens": 1, **fields}
    assert gateway.post("/v1/chat/completions", body).status_code == 200


def refused(gateway: Gateway, route: str, fields: dict[str, Any]) -> Any:
    body = {"model": "minisgl", "max_tokens": 1, **fields}
    if route == "responses":
        del body["max_tokens"]
    answer = gateway.post(f"/v1/{route}", body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


REPORT_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "rains": {"type": "boolean"},
        "degrees": {"type": "integer"},
    },
    "required": ["city", "rains", "degrees"],
    "additionalProperties": False,
}


def test_an_answer_with_a_form_and_tools_is_calls_or_has_the_form(agent: Gateway) -> None:
    city = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT_SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Bogotá?"}]
    body = {
        "model": "minisgl",
        "max_tokens": 200,
        "tools": [tool("weather", city)],
        "response_format": form,
    }
    first = agent.post("/v1/chat/completions", {**body, "messages": messages}).json()["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] is None
    (call,) = first["message"]["tool_calls"]
    told = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
    messages += [first["message"], told]
    second = agent.post("/v1/chat/completions", {**body, "messages": messages}).json()["choices"][0]
    assert second["finish_reason"] == "stop"
    assert json.loads(second["message"]["content"]) == REPORT


# --- thoughts ------------------------------------------------------------------------------------


def think(thinker: Gateway, **fields: Any) -> tuple[Any, Any, Any]:
    """The thoughts and text of an answer, and its headers; a stream must give the same."""
    asked: dict[str, Any] = {"max_tokens": 400, "stop": ["4."], **fields}
    whole = thinker.chat("What is 2 + 2?", **asked)
    (choice,) = whole.json()["choices"]
    message = choice["message"]
    streamed = thinker.chat("What is 2 + 2?", **asked, stream=True)
    deltas = [one["delta"] for one in _choices(streamed.text, True)]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    assert streamed.headers.get("x-minisgl-without-effect") == whole.headers.get(
        "x-minisgl-without-effect"
    )
    return (
        message.get("reasoning_content"),
        message["content"],
        whole.headers.get("x-minisgl-without-effect"),
    )


def test_thoughts_are_split_off(thinker: Gateway) -> None:
    thoughts, text, _ = think(thinker)
    assert thoughts == "Two and two.\nThat is four."
    assert text == "It is "


def test_thoughts_are_left_in_the_text_or_out_of_the_answer_if_that_is_asked(
    thinker: Gateway,
) -> None:
    thoughts, text, _ = think(thinker, separate_reasoning=False)
    assert thoughts is None
    assert text == "<think>\nTwo and two.\nThat is four.\n</think>\n\nIt is "
    thoughts, text, _ = think(thinker, include_reasoning=False)
    assert (thoughts, text) == (None, "It is ")


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_a_model_that_shall_not_think_has_no_thoughts(
    thinker: Gateway, fields: dict[str, Any]
) -> None:
    """This one thinks anyway, after its prompt has closed the section: that is text."""
    thoughts, text, without_effect = think(thinker, **fields)
    assert thoughts is None
    assert text.startswith("<think>")
    assert without_effect is None


def test_wishes_that_a_template_does_not_know_are_named(gateway: Gateway) -> None:
    answer = gateway.chat("Hi", reasoning_effort="high", enable_thinking=True, user="me")
    assert answer.status_code == 200
    named = answer.headers["x-minisgl-without-effect"]
    assert named == "enable_thinking, reasoning_effort, user"
    assert "x-minisgl-without-effect" not in gateway.chat("Hi", enable_thinking=False).headers
