"""Bodies are read strictly, and one sentence says what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from minisgl_gateway.body import parse
from minisgl_gateway.completions.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from minisgl_gateway.completions.translation import chat_of
from minisgl_gateway.dialects.choice import dialect_of
from minisgl_gateway.errors import ApiError
from minisgl_gateway.generation import Policy
from minisgl_gateway.messages.schema import MessagesRequest
from minisgl_gateway.responses.schema import ResponsesRequest
from minisgl_gateway.strict_schema import Body
from minisgl_gateway.template import Template
from pydantic import ValidationError

TEMPLATE = Template(dialect_of(None, "hermes"))
MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": MESSAGES, **fields}
    return parse(ChatCompletionRequest, json.dumps(body).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "Hi", **fields}).encode())


def refused(body: bytes, kind: type[Body] = CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, body)
    error = caught.value
    assert error.status == 400
    assert len(error.message) < 300
    assert "\n" not in error.message
    return error


def told(kind: type[GenerationRequest], **fields: Any) -> ApiError:
    required = {"messages": MESSAGES} if kind is ChatCompletionRequest else {"prompt": "Hi"}
    return refused(json.dumps({"model": "m", **required, **fields}).encode(), kind)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "valid JSON"),
        (b"{", "valid JSON"),
        (b'{"model": "m", "prompt": "x"} {}', "valid JSON"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b'{"model": "m", "prompt": "\\ud800"}', r"\ud800 is half of a surrogate pair"),
        (b"[" * 100_000, "valid JSON"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "levels deep"),
        (b'{"model": "m", "prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"model": "m", "prompt": "x", "top_p": -Infinity}', "-Infinity"),
        (b'{"model": "m", "prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "thousands of digits"),
        (b'{"model": "m", "prompt": "x", "prompt": "y"}', "'prompt' is given twice"),
        (b'{"model": "m", "prompt": "x", "logit_bias": {"1": 1, "1": 2}}', "'1' is given twice"),
        (b'{"prompt": "x"}', "model is missing"),
        (b'{"model": "m"}', "prompt is missing"),
    ],
)
def test_bodies_that_are_no_request(body: bytes, words: str) -> None:
    assert words in refused(body).message


def test_a_byte_order_mark_is_not_part_of_a_body() -> None:
    body = json.dumps({"model": "m", "prompt": "\ufeffHi"}, ensure_ascii=False)
    assert parse(CompletionRequest, body.encode("utf-8-sig")).prompt == "\ufeffHi"


WRONG: dict[str, list[Any]] = {
    "prompt": [7, True, [], [1.5], ["a", 1], [True], [["a"]], [[]], {}, [-1]],
    "max_tokens": [-2, 1.5, True, "16", 2**31, 2**63, 1e308],
    "temperature": [-1, "hot", True, [1]],
    "top_p": [-0.1, 1.0001],
    "top_k": [-2, 1.5, 2**31],
    "min_p": [-1, 2],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [1e308, "x"],
    "repetition_penalty": [0, -3],
    "seed": [2**63, -(2**63) - 1, "x", 1.0],
    "n": [0, -1, 10**9, True],
    "logprobs": [-1, 10**6, True],
    "stop": [7, [7], ["x"] * 17, {}],
    "stop_token_ids": [[-1], [1.0], 5, [2**31]],
    "stream": ["yes", 1],
    "stream_options": [True, {"include_usage": 1}, {"nope": True}],
    "priority": [2**70, "high"],
    "cache_salt": ["", 7],
    "logit_bias": [[], {"1": "x"}, {"1": True}],
    "metadata": [{"a": 1}, "x"],
    "user": [7],
    "model": [7],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    error = told(CompletionRequest, **{name: value})
    assert (error.param or "").startswith(name)
    assert name in error.message


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "Hi"}], "messages[0]"),
        ([{"role": "wizard", "content": "Hi"}], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": "Hi", "mood": "good"}], "messages[0].mood"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text"}]}],
            "messages[0].content[1].text",
        ),
        ([*MESSAGES, {"role": "tool"}], "messages[1].content"),
        (MESSAGES * 8193, "messages"),
    ],
)
def test_wrong_messages_are_named(messages: Any, place: str) -> None:
    error = told(ChatCompletionRequest, messages=messages)
    assert (error.param or "").startswith(place)


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prompt", 7, "prompt must be a string or an array, got 7"),
        ("prompt", {"a": 1}, 'prompt must be a string or an array, got {"a": 1}'),
        ("prompt", [], "prompt must not be empty, got []"),
        ("prompt", ["a" * 200, 1, "b"], "prompt[1] must be a string, got 1"),
        ("prompt", [1, 2, "a"], 'prompt[2] must be an integer, got "a"'),
        ("prompt", [1, -1], "prompt[1] must be >= 0, got -1"),
        ("prompt", [[1], [1, "a"]], 'prompt[1][1] must be an integer, got "a"'),
        ("prompt", ["letters"] * 65, "prompt must have at most 64 items, got an array of 65 items"),
        ("stop", 7, "stop must be a string or an array, got 7"),
        ("stop", ["a", 7], "stop[1] must be a string, got 7"),
        ("n", 65, "n must be <= 64, got 65"),
        ("top_p", -0.5, "top_p must be >= 0, got -0.5"),
        ("user", ["x"] * 100, "user must be a string, got an array of 100 items"),
        ("user", {"a": True}, 'user must be a string, got {"a": true}'),
        ("user", {"a": "x" * 100}, "user must be a string, got an object of 1 item"),
        ("user", [chr(7)], 'user must be a string, got ["\\u0007"]'),
        ("n", "x" * 100, "n must be an integer, got a string of 100 characters"),
        ("n", 10**99, "n must be <= 64, got a number of 100 digits"),
        ("temperature", -0.5, "temperature must be >= 0, got -0.5"),
        ("seed", 2**63, "seed must be < 9223372036854775808, got 9223372036854775808"),
        ("stream", "yes", 'stream must be a boolean, got "yes"'),
        ("logit_bias", [], "logit_bias must be an object, got []"),
        ("stop", ["letters"] * 17, "stop must have at most 16 items, got an array of 17 items"),
        (
            "messages",
            [{"role": "user", "content": 7}],
            "messages[0].content must be a string or an array, got 7",
        ),
        (
            "messages",
            [*MESSAGES, {"role": "user", "content": [IMAGE]}],
            "messages[1].content[0].type must be 'text', got \"image_url\"",
        ),
        ("messages", [{"content": "Hi"}], "messages[0].role is missing"),
        ("messages", [{"role": None, "content": "Hi"}], "messages[0].role is missing"),
        (
            "messages",
            [{"role": ["user"], "content": "Hi"}],
            "messages[0].role must be one of 'system', 'developer', 'user', 'assistant', 'tool', "
            "'function', got [\"user\"]",
        ),
        ("messages", ["Hi"], 'messages[0] must be an object, got "Hi"'),
        (
            "messages",
            [{"role": "wizard", "content": "Hi"}],
            "messages[0].role must be one of 'system', 'developer', 'user', 'assistant', 'tool', "
            "'function', got \"wizard\"",
        ),
    ],
)
def test_what_is_wrong_is_said(name: str, value: Any, message: str) -> None:
    """If a value may have several forms, the message is about the one that it nearly has."""
    kind = ChatCompletionRequest if name == "messages" else CompletionRequest
    assert told(kind, **{name: value}).message.startswith(message)


TEXT = {"type": "text", "text": "Hi"}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (MessagesRequest, {"system": [{**TEXT, "mood": 1}]}, "system[0].mood"),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{**TEXT, "mood": 1}]}]},
            "messages[0].content[0].mood",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{**TEXT, "mood": "Hi"}]}]},
            "messages[0].content[0].mood",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{**TEXT, "citations": [1]}]}]},
            "messages[0].content[0].citations",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
            "messages[0].content[0].text",
        ),
        (
            ResponsesRequest,
            {"tools": [{"type": "function", "function": {"name": "f"}, "strict": None}]},
            "tools[0].name",
        ),
        (
            ResponsesRequest,
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.name",
        ),
        (  # "tools" is also a name at the top, where there are none
            ResponsesRequest,
            {
                "tools": [],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": 7}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        (
            ResponsesRequest,
            {"text": {"format": {"type": "json_schema", "json_schema": {"name": "f"}}}},
            "text.format.name",
        ),
        (
            ChatCompletionRequest,
            {"tools": [{"type": "function", "function": {"strict": True}}]},
            "tools[0].function.name",
        ),
        (
            ChatCompletionRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
    ],
)
def test_a_place_has_names_alone_though_types_are_called_alike(
    kind: type[Body], fields: dict[str, Any], param: str
) -> None:
    required = {"model": "m", "max_tokens": 1, "messages": MESSAGES}
    if kind is ResponsesRequest:
        required = {"model": "m", "input": "Hi"}
    error = refused(json.dumps({**required, **fields}).encode(), kind)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": 7}, "invalid_type", "prompt"),
        ({"prompt": [1, 1.5]}, "invalid_type", "prompt[1]"),
        ({"prompt": None}, "missing_required_parameter", "prompt"),
        ({"max_tokens": -2}, "invalid_value", "max_tokens"),
        ({"prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
        ({"stream_options": {"x": 1}}, "unknown_parameter", "stream_options.x"),
        ({"repeat_penalty": 2}, "unsupported_parameter", "repeat_penalty"),
    ],
)
def test_codes_are_those_of_openai(fields: dict[str, Any], code: str, param: str) -> None:
    error = told(CompletionRequest, **fields)
    assert (error.code, error.param) == (code, param)


def test_no_complaint_is_without_words() -> None:
    """The table of complaints.py knows every complaint that the schema can make."""
    for name, values in WRONG.items():
        for value in values:
            assert "must be valid" not in told(CompletionRequest, **{name: value}).message


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 1000},
        {"messages": [{"role": "user", "content": [{}] * 1000}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 1000}]},
        {"messages": MESSAGES, "tools": [{}] * 100},
        {"messages": MESSAGES, "stop_token_ids": ["x"] * 1000},
        {"prompt": [1.5] * 1000},
        {"prompt": [[1.5] * 1000]},
    ],
)
def test_of_a_long_list_only_the_first_wrong_item_is_looked_at(fields: dict[str, Any]) -> None:
    kind = CompletionRequest if "prompt" in fields else ChatCompletionRequest
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "m", **fields})
    assert caught.value.error_count() < 10


@pytest.mark.timeout(60)  # it would take minutes if each key met all others
def test_a_key_given_twice_among_very_many() -> None:
    members = [f'"{number}": 1' for number in range(100_000)]
    error = refused(("{" + ", ".join([*members, members[-1]]) + "}").encode())
    assert "the key '99999' is given twice" in error.message


@pytest.mark.parametrize("name", ["temprature", "max_token", "strem"])
def test_unknown_names_get_the_nearest_one(name: str) -> None:
    error = told(CompletionRequest, **{name: 1})
    assert error.code == "unknown_parameter"
    assert "did you mean" in error.message


def test_no_name_is_suggested_that_is_not_offered_either() -> None:
    for name in ("lora_name", "mirostatt"):
        assert "did you mean" not in told(ChatCompletionRequest, **{name: "x"}).message


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_what_is_not_offered_is_refused_but_for_neutral_values(
    kind: type[GenerationRequest],
) -> None:
    required = {"messages": MESSAGES} if kind is ChatCompletionRequest else {"prompt": "Hi"}
    for name, values in kind.not_offered.items():
        error = told(kind, **{name: "something else"})
        assert (error.code, error.param) == ("unsupported_parameter", name)
        for neutral in (*values, None):
            parse(kind, json.dumps({"model": "m", **required, name: neutral}).encode())


def test_a_flag_is_not_a_neutral_number() -> None:
    assert told(CompletionRequest, mirostat=False).code == "unsupported_parameter"


def test_null_is_absent_whether_the_name_is_known_or_not() -> None:
    request = completion(temperature=None, stop=None, seed=None, n=None, regex=None, nonsense=None)
    assert request == completion()
    assert "temperature" not in request.model_fields_set
    part = {"type": "text", "text": "Hi", "annotations": None}
    nested = chat(messages=[{"role": "user", "content": [part], "name": None, "thread": None}])
    assert nested == chat(messages=[{"role": "user", "content": [part]}])
    assert "name" not in nested.messages[0].model_fields_set


def test_null_that_goes_to_the_template_stays() -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"default": None}}}}
    request = chat(
        tools=[{"type": "function", "function": function}], chat_template_kwargs={"a": None}
    )
    assert request.tools is not None and request.chat_template_kwargs == {"a": None}
    assert request.tools[0].function.parameters == function["parameters"]


HARMLESS: list[dict[str, Any]] = [
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"function_call": "auto"},
    {"tools": []},
    {"stop": []},
    {"logit_bias": {}},
    {"top_logprobs": 0},
    {"parallel_tool_calls": False},
    {"verbosity": "low"},
    {"reasoning_effort": "minimal"},
    {"separate_reasoning": True},
    {"return_token_ids": False},
    {"request_id": "mine"},
    {"cache_prompt": True},
    {"add_special_tokens": False},
    {"repeat_penalty": 1.0},
    {"mirostat": 0},
    {"typical_p": 1},
    {"no_stop_trim": False},
    {"store": True},
    *({"service_tier": tier} for tier in ("auto", "flex", "priority")),
    {"prediction": {"type": "content", "content": "x"}},
    {"documents": []},
    {"kv_transfer_params": {}},
    {"include_stop_str_in_output": False, "skip_special_tokens": True},
    {"max_tokens": -1},
    *({name: None} for name in ("regex", "ebnf", "lora_path", "kv_transfer_params")),
    *({name: None} for name in ("vllm_xargs", "mm_processor_kwargs", "never_heard_of")),
]
"""What clients send by default."""


@pytest.mark.parametrize("fields", HARMLESS)
def test_neutral_values_are_accepted(fields: dict[str, Any]) -> None:
    chat_of(chat(**fields)).generation(Policy(timeout_s=1.0, chat_tokens=5), TEMPLATE)


def test_what_is_taken_without_effect_is_a_field_that_says_so() -> None:
    for kind in (ChatCompletionRequest, CompletionRequest):
        for name, field in kind.model_fields.items():
            has_none = (field.description or "").endswith("no effect")
            assert has_none is (name in kind.without_effect)
        assert kind.model_fields.keys() >= kind.without_effect


def test_a_tier_of_service_that_is_not_known() -> None:
    assert told(ChatCompletionRequest, service_tier="turbo").param == "service_tier"


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("sometimes", "tool_choice must be 'none', 'auto' or 'required', got \"sometimes\""),
        (7, "tool_choice must be an object, got 7"),
        ({"type": "custom"}, "tool_choice.type must be one of 'function', 'allowed_tools'"),
        ({"type": "function"}, "tool_choice.function is missing"),
        ({"type": "function", "function": {}}, "tool_choice.function.name is missing"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}},
            "tool_choice.allowed_tools.mode must be 'auto' or 'required', got \"none\"",
        ),
    ],
)
def test_invalid_tool_choices(choice: Any, words: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = told(ChatCompletionRequest, tools=tools, tool_choice=choice)
    assert words in error.message
    assert (error.param or "").startswith("tool_choice")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {}}, "response_format.type is missing"),
        ({"response_format": "json"}, "response_format must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be one of 'text', "),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name is missing",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [1]}},
            "response_format.structures[0] must be an object, got 1",
        ),
        ({"guided_json": 7}, "guided_json must be a string or an object or a boolean, got 7"),
        ({"guided_choice": []}, "guided_choice must not be empty"),
        ({"guided_regex": ["a"]}, "guided_regex must be a string"),
        ({"structured_outputs": "json"}, "structured_outputs must be an object"),
        ({"structured_outputs": {"yaml": "x"}}, 'unknown parameter "structured_outputs.yaml"'),
        (
            {"structured_outputs": {"regex": "a", "disable_fallback": True}},
            "structured_outputs.disable_fallback must be false, got true",
        ),
    ],
)
@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_invalid_forms(kind: type[GenerationRequest], fields: dict[str, Any], words: str) -> None:
    assert words in told(kind, **fields).message


def test_messages_of_the_official_client_are_taken_back() -> None:
    """It dumps an answer including all empty fields."""
    answer = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert len(chat(messages=[*MESSAGES, answer, *MESSAGES]).messages) == 3


def test_calls_as_a_stream_has_told_them_are_taken_back() -> None:
    """Clients add up the chunks, including the index."""
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "content": "5", "tool_call_id": "c"}
    messages = chat_of(chat(messages=[*MESSAGES, answer, result])).messages
    del call["index"]
    assert messages[1]["tool_calls"] == [call]


def test_a_tool_may_have_answered_nothing() -> None:
    """Results of MCP tools are lists of parts, which may be empty."""
    for result in (
        {"role": "tool", "content": [], "tool_call_id": "c"},
        {"role": "function", "content": [], "name": "f"},
    ):
        messages = chat_of(chat(messages=[*MESSAGES, result])).messages
        assert messages[-1]["content"] == []


def test_hints_to_a_cache_do_not_reach_the_template() -> None:
    hint = {"type": "ephemeral"}
    part = {"type": "text", "text": "Hi", "cache_control": hint}
    message = {"role": "user", "content": [part], "cache_control": hint}
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": hint}
    asked = chat_of(chat(messages=[message], tools=[tool]))
    generation = asked.generation(Policy(timeout_s=1.0, chat_tokens=5), TEMPLATE)
    assert generation.messages == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert generation.tools == [{"type": "function", "function": {"name": "f"}}]
