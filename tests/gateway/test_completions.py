"""What a request of OpenAI's API asks the engine for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from minisgl_client.answer import ChatFormat
from minisgl_client.errors import InvalidArgument
from minisgl_gateway.body import parse
from minisgl_gateway.chat import Chat
from minisgl_gateway.completions.rendering import ChatRenderer
from minisgl_gateway.completions.schema import MAX_CHOICES, TokenizeRequest
from minisgl_gateway.completions.translation import chat_of, completion_generations, lookup_of
from minisgl_gateway.engine_errors import api_error
from minisgl_gateway.errors import ApiError
from minisgl_gateway.generation import Generation, Policy

from tests.gateway.test_body import chat, completion

POLICY = Policy(timeout_s=30, chat_tokens=512)
HERMES = ChatFormat(
    tool_dialect="hermes",
    tool_marks=frozenset(),
    thinking=None,
    begins_thinking=False,
    variables=frozenset({"messages", "tools", "enable_thinking"}),
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def of_chat(policy: Policy = POLICY, /, **fields: Any) -> Generation:
    return told_chat(HERMES, policy, **fields)


def told_chat(shown: ChatFormat, policy: Policy = POLICY, /, **fields: Any) -> Generation:
    """The generation for a chat with a model whose template shows this."""
    asked = chat_of(chat(**fields))
    return asked.generation(policy, asked.template(shown))


def form_of(shown: ChatFormat = HERMES, **fields: Any) -> Any:
    """The form that a chat's answer must have."""
    generation = told_chat(shown, **fields)
    return generation.parameters.get("structured_outputs")


def of_completion(policy: Policy = POLICY, /, **fields: Any) -> Generation:
    (generation,) = completion_generations(completion(**fields), policy)
    return generation


def test_what_is_not_said_is_left_to_the_engine() -> None:
    generation = of_completion()
    assert generation.prompt == "Hi"
    assert generation.parameters == {
        "max_tokens": 16,
        "fit_max_tokens": True,
        "cache_salt": None,
        "timeout_ms": 30_000,
        "return_stop_reason": False,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_num_cached_tokens": True,
    }


def test_parameters_of_one_meaning_go_on_as_they_are() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 3,
        "stop_token_ids": [5],
        "skip_special_tokens": False,
        "logit_bias": {"17": -100.0},
        "max_tokens": 40,
    }
    parameters = of_completion(**given).parameters
    assert {name: value for name, value in parameters.items() if name in given} == given


def test_top_p_of_zero_is_the_likeliest_token() -> None:
    """As in OpenAI's API; to the engine 0 is off."""
    for parameters in (of_completion(top_p=0).parameters, of_chat(top_p=0).parameters):
        assert parameters["top_p"] == pytest.approx(1e-9)
    assert of_chat(top_p=1).parameters["top_p"] == 1
    assert "top_p" not in of_chat().parameters


def test_parameters_of_another_name_or_sense() -> None:
    parameters = of_completion(stop="x", seed=-1, priority=3, logprobs=2).parameters
    assert parameters["stop"] == ["x"]
    assert parameters["seed"] == 2**64 - 1
    assert parameters["priority_level"] == -3
    assert parameters["num_logprobs"] == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 512),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 9, "max_completion_tokens": 9}, 9),
    ],
)
def test_most_tokens_of_a_chat(fields: dict[str, Any], expected: int) -> None:
    parameters = of_chat(**fields).parameters
    assert parameters["max_tokens"] == expected
    assert parameters["fit_max_tokens"] is (not fields)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_limit_is_the_room_that_there_is(name: str) -> None:
    parameters = of_chat(**{name: -1}).parameters
    assert parameters["max_tokens"] == 2**31 - 1
    assert parameters["fit_max_tokens"]


def test_max_tokens_beyond_the_room_are_shortened_if_the_operator_says_so() -> None:
    policy = Policy(timeout_s=30, chat_tokens=512, shortens=True)
    parameters = of_chat(policy, max_tokens=16384).parameters
    assert (parameters["max_tokens"], parameters["fit_max_tokens"]) == (16384, True)


def test_functions_are_tools_of_an_older_form() -> None:
    function = TOOLS[0]["function"]
    generation = of_chat(functions=[function])
    assert generation.tools == [{"type": "function", "function": function}]
    assert generation.parameters["stop"] == ["</tool_call>"]
    assert of_chat(functions=[function], function_call="none").tools is None
    said = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    told = {"role": "function", "name": "f", "content": "5"}
    messages = of_chat(messages=[{"role": "user", "content": "Hi"}, said, told]).messages
    assert messages is not None
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages[1:] == [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "5"},
    ]


def test_variables_of_the_chat_template() -> None:
    assert "chat_template_kwargs" not in of_chat().parameters
    variables = {"enable_thinking": False}
    assert of_chat(chat_template_kwargs=variables).parameters["chat_template_kwargs"] == variables
    assert of_chat(enable_thinking=False).parameters["chat_template_kwargs"] == variables


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 7, "max_completion_tokens": 8}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        ({"functions": [{"name": "f"}], "tool_choice": "none"}, "tool_choice"),
        ({"function_call": "none", "tools": TOOLS}, "function_call"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        of_chat(**fields)
    assert caught.value.param == param


def test_the_choices_of_a_prompt_are_samples_of_one_generation() -> None:
    (generation,) = completion_generations(completion(n=3, best_of=5, seed=7), POLICY)
    asked = {name: generation.parameters.get(name) for name in ("n", "best_of", "seed")}
    assert asked == {"n": 3, "best_of": 5, "seed": 7}
    assert of_chat(n=3).parameters["n"] == 3
    assert not of_chat().parameters.keys() & {"n", "best_of"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"n": 3, "best_of": 2}, None),
        ({"n": 3, "best_of": 4, "stream": True}, "unsupported_parameter"),
        ({"prompt": ["a", "b"], "best_of": 40}, None),
    ],
)
def test_best_of_is_at_least_n_and_not_streamed(fields: dict[str, Any], code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        completion_generations(completion(**fields), POLICY)
    assert caught.value.param == "best_of"
    assert code in (None, caught.value.code)


def test_what_sdks_add_to_an_answer_does_not_reach_the_model() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "c", "type": "function", "function": function}
    added = {"parsed": {"a": 1}, "provider_specific_fields": {"refusal": None}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], **added}
    generation = of_chat(messages=[said, {"role": "user", "content": "Hi"}])
    assert generation.messages is not None
    plain = {**call, "function": {"name": "f", "arguments": "{}"}}
    assert generation.messages[0] == {"role": "assistant", "tool_calls": [plain]}


@pytest.mark.parametrize(
    "added",
    [
        {"role": "assistant", "refusal": None, "reasoning_content": "Hm."},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        {"annotations": []},
    ],
)
def test_what_a_part_repeats_of_its_message_does_not_reach_the_model(added: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "Hello.", **added}]}
    generation = of_chat(messages=[said, {"role": "user", "content": "Hi"}])
    assert generation.messages is not None
    assert generation.messages[0]["content"] == [{"type": "text", "text": "Hello."}]
    with pytest.raises(ApiError, match="unknown parameter"):
        of_chat(messages=[{**said, "role": "user"}])


def test_refusals_of_another_model_are_texts() -> None:
    user = {"role": "user", "content": "Hi"}
    refused = {"type": "refusal", "refusal": "No."}
    for said, content in (
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "", "refusal": "No."}, "No."),
        ({"content": [refused]}, [{"type": "text", "text": "No."}]),
        (
            {"content": "Hm.", "refusal": "No."},
            [{"type": "text", "text": t} for t in ("Hm.", "No.")],
        ),
    ):
        messages = of_chat(messages=[user, {"role": "assistant", **said}, user]).messages
        assert messages == [user, {"role": "assistant", "content": content}, user]
    with pytest.raises(ApiError, match="must be 'text'"):
        of_chat(messages=[{"role": "user", "content": [refused]}])


def test_a_function_may_answer_null() -> None:
    called = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    messages = of_chat(
        messages=[called, {"role": "function", "name": "f", "content": None}]
    ).messages
    assert messages is not None
    assert messages[1] == {"role": "tool", "name": "f", "content": ""}


def test_marks_of_other_caches_do_not_reach_the_model() -> None:
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"ttl": "30m"}}
    cached = of_chat(
        messages=[{"role": "user", "content": [{**part, "cache_control": {"type": "ephemeral"}}]}],
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
    )
    assert cached.messages == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def test_the_end_of_a_tool_call_is_a_stop_string() -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    stops = [str(number) for number in range(16)]
    assert of_chat(stop=stops[:15], **fields).parameters["stop"] == [*stops[:15], "</tool_call>"]
    with pytest.raises(ApiError, match="stop must have fewer than 16 entries") as refused:
        of_chat(stop=stops, **fields)
    assert refused.value.param == "stop"
    assert of_chat(stop=stops, tools=TOOLS).parameters["stop"] == stops


def test_several_prompts_make_choices_in_order() -> None:
    generations = completion_generations(completion(prompt=["a", "b"], n=2), POLICY)
    assert [generation.prompt for generation in generations] == ["a", "b"]
    assert [generation.parameters.get("n") for generation in generations] == [2, 2]
    generations = completion_generations(completion(prompt=[[1, 2], [3]]), POLICY)
    assert [generation.input_ids for generation in generations] == [[1, 2], [3]]
    assert of_completion(prompt=[1, 2]).input_ids == [1, 2]


def test_a_request_may_have_one_choice_of_many_prompts() -> None:
    """langchain sends 20 prompts at a time, however many there are."""
    prompts = [f"{number}" for number in range(MAX_CHOICES)]
    assert len(completion_generations(completion(prompt=prompts), POLICY)) == MAX_CHOICES


def test_too_many_choices() -> None:
    with pytest.raises(ApiError) as caught:
        completion_generations(completion(prompt=["a", "b", "c"], n=22), POLICY)
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 5),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 0}, 3),
        ({"prompt_logprobs": 0}, 0),
        ({"echo": True, "max_tokens": 0}, 0),
        ({"prompt_logprobs": 2, "max_tokens": 0}, 2),
    ],
)
def test_when_the_prompt_is_scored(fields: dict[str, Any], asked: int | None) -> None:
    assert of_completion(**fields).parameters.get("num_prompt_logprobs") == asked
    assert of_completion(**fields).parameters["max_tokens"] == fields.get("max_tokens", 16)


def test_no_tokens_at_all_are_asked_for_with_the_prompts_logprobs_alone() -> None:
    asking = {of_completion: "echo or prompt_logprobs", of_chat: "prompt_logprobs"}
    for ask, names in asking.items():
        with pytest.raises(ApiError, match=f"must be >= 1 without {names}, got 0") as caught:
            ask(max_tokens=0)
        assert caught.value.param == "max_tokens"
        with pytest.raises(ApiError) as caught:
            ask(prompt_logprobs=1, stream=True)
        assert caught.value.code == "unsupported_parameter"
        assert ask(prompt_logprobs=1, max_tokens=0).parameters["max_tokens"] == 0


def test_errors_name_max_tokens_as_the_caller_does() -> None:
    with pytest.raises(ApiError, match="max_completion_tokens must be >= 1") as caught:
        of_chat(max_completion_tokens=0)
    assert caught.value.param == "max_completion_tokens"
    fields: dict[str, Any] = {"min_tokens": 9, "max_completion_tokens": 3}
    renderer = ChatRenderer(chat(**fields))
    error = InvalidArgument("min_tokens must be <= max_tokens 3, got 9")
    told = api_error(error, renderer.fields, renderer.names)
    assert told.message == "min_tokens must be <= max_completion_tokens 3, got 9"


def test_counts_are_asked_for_where_they_are_told() -> None:
    assert not of_chat(stream=True).parameters["return_num_output_tokens"]
    usage = {"include_usage": True}
    assert of_chat(stream=True, stream_options=usage).parameters["return_num_output_tokens"]


def test_messages_and_tools_go_to_the_template() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None},
    ]
    generation = of_chat(messages=messages, tools=TOOLS)
    assert generation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    assert generation.tools == TOOLS


def test_instructions_in_several_messages_are_one() -> None:
    """opencode sends two system messages, and templates such as Qwen3.5's refuse the second."""
    user, later = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Now."}
    part = {"type": "text", "text": "Be kind."}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [part]},
        user,
        later,
        user,
    ]
    joined = {"role": "system", "content": "Be brief.\n\nBe kind."}
    assert of_chat(messages=messages).messages == [joined, user, later, user]
    assert of_chat(messages=[user, user]).messages == [user, user]
    named = {"role": "system", "content": [part], "name": "a"}
    assert of_chat(messages=[named]).messages == [named]
    body = json.dumps({"messages": messages}).encode()
    asked = lookup_of(parse(TokenizeRequest, body))
    assert isinstance(asked, Chat) and asked.messages[0] == joined


def test_a_model_that_must_not_call_is_not_told_of_tools() -> None:
    assert of_chat(tools=TOOLS, tool_choice="none").tools is None


def test_one_call_at_most_ends_the_answer_with_it() -> None:
    parameters = of_chat(tools=TOOLS, parallel_tool_calls=False, stop="x").parameters
    assert parameters["stop"] == ["x", "</tool_call>"]
    assert parameters["return_stop_reason"]
    assert "stop" not in of_chat(tools=TOOLS).parameters


def test_salts_of_keys_and_of_requests_both_count() -> None:
    keyed = Policy(timeout_s=30, chat_tokens=512, salt="key")
    salts = [
        of_chat().parameters["cache_salt"],
        of_chat(cache_salt="mine").parameters["cache_salt"],
        of_chat(keyed).parameters["cache_salt"],
        of_chat(keyed, cache_salt="mine").parameters["cache_salt"],
        of_chat(keyed, cache_salt="other").parameters["cache_salt"],
    ]
    assert salts[:3] == [None, "mine", "key"]
    assert len(set(salts)) == 5


def test_a_salt_may_be_any_text() -> None:
    """vLLM tells callers to make 32 random bytes, in base64."""
    given = ("4sKzrKfwW8zRi/1mq+aHxMBBBh9RPdVqcLCvRWAPe2Q=", "x" * 65, "line\n", "\u0661", " ", "@")
    salts = {of_chat(cache_salt=salt).parameters["cache_salt"] for salt in given}
    assert len(salts) == len(given)
    assert all(re.fullmatch("[0-9a-f]{64}", salt or "") for salt in salts)


# --- the form of the answer ----------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"structures": [{"begin": "<", "schema": SCHEMA, "end": ">"}], "triggers": ["<"]}
NEWER = {"type": "triggered_tags", "triggers": ["<"], "tags": []}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        *(
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict},
                    }
                },
                {"json": SCHEMA},
            )
            for strict in (True, False, None)
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            {"structural_tag": {"type": "structural_tag", **TAG}},
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG, "separator": ["\n", ""]}},
            {"structural_tag": {"type": "structural_tag", **TAG, "separator": ["\n", ""]}},
        ),
        (
            {"response_format": {"type": "structural_tag", "format": NEWER}},
            {"structural_tag": {"type": "structural_tag", "format": NEWER}},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a", "backend": "auto"}}, {"regex": "a"}),
        ({"structured_outputs": {"json": False, "json_object": False}}, {"json": False}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": "{}", "guided_regex": None}, {"json": "{}"}),
        ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    ],
)
def test_forms_in_the_engines_words(fields: dict[str, Any], form: Any) -> None:
    assert form_of(**fields) == form
    assert of_completion(**fields).parameters.get("structured_outputs") == form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": False}}, "structured_outputs"),
    ],
)
def test_one_form_at_most(fields: dict[str, Any], param: str) -> None:
    for asked in (of_chat, of_completion):
        with pytest.raises(ApiError) as caught:
            asked(**fields)
        assert (caught.value.code, caught.value.param) == ("invalid_value", param)


# --- calls that must be made ---------------------------------------------------------------------

TWO: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]
NAMED: Any = {"type": "function", "function": {"name": "g"}}


def begun_by(form: Any) -> list[str]:
    """The names of the tools that a form's tag can call."""
    names = [one["begin"] for one in form["structural_tag"]["structures"]]
    return [name for name in ("f", "g") if any(f'"{name}"' in begin for begin in names)]


def test_a_call_of_any_tool_or_of_one_is_enforced() -> None:
    form = form_of(tools=TWO, tool_choice="required")
    assert begun_by(form) == ["f", "g"]
    assert form["structural_tag"]["at_least_one"]
    assert not form["structural_tag"]["stop_after_first"]
    form = form_of(tools=TWO, tool_choice="required", parallel_tool_calls=False)
    assert form["structural_tag"]["stop_after_first"]
    functions = [tool["function"] for tool in TWO]
    for fields in (
        {"tools": TWO, "tool_choice": NAMED},
        {"functions": functions, "function_call": {"name": "g"}},
    ):
        form = form_of(**fields)
        assert begun_by(form) == ["g"]
        assert form["structural_tag"]["at_least_one"]
        assert form["structural_tag"]["stop_after_first"]


def test_tools_that_are_not_allowed_are_not_told() -> None:
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [NAMED]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        fields: Any = {"tools": TWO, "tool_choice": choice}
        generation = told_chat(HERMES, **fields)
        assert generation.tools is not None
        assert [tool["function"]["name"] for tool in generation.tools] == ["g"]
        form = generation.parameters.get("structured_outputs")
        assert (form is not None) is (mode == "required")


def test_strict_tools_follow_their_schemas_and_the_template_does_not_know() -> None:
    strict = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
    generation = told_chat(HERMES, tools=strict)
    assert generation.tools == TWO[:1]
    tag: Any = generation.parameters["structured_outputs"]
    assert tag["structural_tag"]["triggers"] == ["<tool_call>"]
    assert SCHEMA.items() <= tag["structural_tag"]["structures"][0]["schema"].items()
    assert "stop" not in generation.parameters
    assert form_of(tools=TWO) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TWO[:1], "tool_choice": NAMED}, "tool_choice"),
        (
            {
                "tools": TWO[:1],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [NAMED]},
                },
            },
            "tool_choice",
        ),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"tools": TWO, "guided_regex": "a"}, "guided_regex"),
        ({"tools": TWO, "guided_json": "{"}, "guided_json"),
        ({"tools": TWO, "guided_json": '{"type": "object", "type": "array"}'}, "guided_json"),
    ],
)
def test_choices_that_cannot_be_kept(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        of_chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_form_is_that_of_an_answer_without_calls() -> None:
    schema = {"name": "x", "schema": {}}
    form: Any = {"response_format": {"type": "json_schema", "json_schema": schema}}
    tag = form_of(tools=TWO, **form)["structural_tag"]
    assert tag["at_least_one"] and tag["otherwise"] == {}
    assert form_of(tools=TWO, response_format={"type": "json_object"})["structural_tag"][
        "otherwise"
    ] == {"type": "object"}
    assert "otherwise" not in form_of(tools=TWO, tool_choice="required", **form)["structural_tag"]
    assert form_of(tools=TWO, tool_choice="none", **form) == {"json": {}}


# --- thinking ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "fields", "told", "unfulfilled"),
    [
        ({"enable_thinking"}, {"enable_thinking": False}, {"enable_thinking": False}, []),
        ({"thinking"}, {"enable_thinking": True}, {"thinking": True}, []),
        ({"enable_thinking"}, {"reasoning_effort": "none"}, {"enable_thinking": False}, []),
        ({"enable_thinking"}, {"reasoning_effort": "low"}, {"enable_thinking": True}, []),
        ({"reasoning_effort"}, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, []),
        (set(), {"reasoning_effort": "high"}, {}, ["reasoning_effort"]),
        (set(), {"enable_thinking": True}, {}, ["enable_thinking"]),
        (set(), {"enable_thinking": False}, {}, []),
        (
            {"enable_thinking"},
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
            [],
        ),
    ],
)
def test_wishes_about_thinking_go_to_templates_that_know_them(
    known: set[str], fields: dict[str, Any], told: dict[str, Any], unfulfilled: list[str]
) -> None:
    asked = chat_of(chat(**fields))
    shown = replace(HERMES, variables=frozenset(known))
    template = asked.template(shown)
    generation = asked.generation(POLICY, template)
    assert generation.parameters.get("chat_template_kwargs", {}) == told
    assert template.unfulfilled == unfulfilled


def test_a_model_that_always_thinks_fulfils_that_wish_only() -> None:
    shown = replace(HERMES, thinking=("<think>", "</think>"), variables=frozenset())
    for thinks in (True, False):
        asked = chat_of(chat(enable_thinking=thinks))
        assert asked.template(shown).unfulfilled == ([] if thinks else ["enable_thinking"])


def test_marks_that_are_special_tokens_stay_in_the_text_that_is_read() -> None:
    mistral = replace(HERMES, tool_dialect="mistral")
    thinking = replace(HERMES, thinking=("[THINK]", "[/THINK]"))
    for shown, fields, keeps in (
        (HERMES, {"tools": TOOLS}, False),
        (mistral, {}, False),
        (mistral, {"tools": TOOLS}, True),
        (thinking, {}, True),
        (thinking, {"separate_reasoning": False}, False),
    ):
        generation = told_chat(shown, **fields)
        assert generation.parameters.get("skip_special_tokens", True) is not keeps


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"tool_calls": []}])
def test_an_answer_that_was_cut_off_in_its_thoughts_may_be_sent_back(empty: dict[str, Any]) -> None:
    said = {"role": "assistant", "reasoning_content": "2 +", **empty}
    (message,) = of_chat(messages=[said]).messages or ()
    thought = {"role": "assistant", "reasoning_content": "2 +"}
    assert message == {**thought, "content": ""}


def test_answers_in_a_row_are_joined_though_they_are_sent_back_with_empty_fields() -> None:
    shown = replace(HERMES, tool_dialect="mistral")
    empty = {"tool_calls": [], "annotations": [], "reasoning_content": "", "reasoning": ""}
    answers = [{"role": "assistant", "content": text, **empty} for text in "ab"]
    user = {"role": "user", "content": "Hi"}
    messages = told_chat(shown, messages=[user, *answers, user]).messages
    assert messages == [user, {"role": "assistant", "content": "a\n\nb"}, user]


def test_thoughts_that_come_back_go_to_the_template() -> None:
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "4", name: "2 + 2"}
        messages = of_chat(messages=[said, {"role": "user", "content": "Hi"}]).messages
        assert messages is not None
        assert messages[0] == {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    said = {"role": "assistant", "content": "4", "reasoning": "2 + 2", "reasoning_content": ""}
    (message,) = of_chat(messages=[said]).messages or ()
    assert message["reasoning_content"] == "2 + 2"
