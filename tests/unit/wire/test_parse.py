"""Requests on the wire -> generations, and the sentences that refuse them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from minisgl_backend.errors import InvalidRequest, RequestError, Unsupported
from minisgl_backend.limits import Limits
from minisgl_backend.request import SamplingParams
from minisgl_backend.wire.defaults import Defaults
from minisgl_backend.wire.generation import (
    Generation,
    MessagesPrompt,
    StopRequest,
    TextPrompt,
    TokenPrompt,
    Wanted,
)
from minisgl_backend.wire.parse import (
    parse_generation,
    parse_token_generation,
    parse_values,
)

LIMITS = Limits()
MANY_KEYS = "{" + "".join(f'"key {i}": 1, ' for i in range(300_000)) + '"key 299999": 1}'
"""Parsing this must not take quadratic time."""


def strings(*items: bytes) -> npt.NDArray[Any]:
    return np.array(items, dtype=np.object_)


def parse(
    parameters: dict[str, Any] | None = None, *, timeout_us: int = 0, **inputs: Any
) -> Generation:
    """A request with a prompt and tensors given as plain values."""
    tensors = {"text_input": strings(b"hi")} if not set(inputs) & {"messages", "input_ids"} else {}
    for name, value in inputs.items():
        tensors[name] = strings(value.encode()) if isinstance(value, str) else np.array(value)
    request = parse_generation(
        tensors, parameters or {}, timeout_us=timeout_us, arrival_time_ns=0, limits=LIMITS
    )
    assert isinstance(request, Generation)
    return request


def refusal(parameters: dict[str, Any] | None = None, **inputs: Any) -> str:
    """The wire message of the error that a request raises."""
    with pytest.raises(RequestError) as caught:
        parse(parameters, **inputs)
    return f"{caught.value.code}: {caught.value}"


def test_defaults_are_the_tables_not_a_models() -> None:
    generation = parse()
    assert generation.prompt == TextPrompt("hi")
    assert generation.sampling == SamplingParams()
    assert generation.seed is None
    assert generation.stop_strings == ()
    assert not generation.stream
    assert generation.exclude_input_in_output
    assert generation.timeout_ms is None
    assert generation.min_chunk_interval_ms is None
    assert generation.wanted == Wanted()


EVERYTHING: dict[str, Any] = {
    "stream": True,
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 3,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 2.0,
    "seed": 2**64 - 1,
    "stop": ["x", "\n\n"],
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "num_logprobs": 20,
    "logit_bias": {"3": 1.5, "1": -100},
    "priority_level": -4,
    "timeout_ms": 900,
    "cache_salt": "tenant",
    "min_chunk_interval_ms": 40,
    "return_finish_reason": True,
    "return_stop_reason": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_log_probs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_num_cached_tokens": True,
    "return_perf_metrics": True,
}


def check_everything(generation: Generation, *, log_probs: bool = True) -> None:
    assert generation.sampling == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        seed=2**64 - 1,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        logit_bias=((1, -100.0), (3, 1.5)),
        num_logprobs=20,
    )
    assert generation.seed == 2**64 - 1
    assert generation.stop_strings == ("x", "\n\n")
    assert generation.stream
    assert generation.priority == -4
    assert generation.timeout_ms == 900
    assert generation.cache_salt == "tenant"
    assert generation.min_chunk_interval_ms == 40
    assert generation.wanted == Wanted(
        finish_reason=True,
        stop_reason=True,
        cumulative_logprob=True,
        num_input_tokens=True,
        num_output_tokens=True,
        num_cached_tokens=True,
        perf_metrics=True,
        log_probs=log_probs,
        logprobs=True,
    )


def test_everything_as_values_in_process() -> None:
    ids = np.array([[3, 4]])
    generation = parse_values(
        {**EVERYTHING, "input_ids": ids, "tools": None}, arrival_time_ns=7, limits=LIMITS
    )
    assert isinstance(generation, Generation)
    check_everything(generation, log_probs=False)  # in process logprobs have one output
    assert isinstance(generation.prompt, TokenPrompt)
    assert generation.prompt.ids.tolist() == [3, 4]
    assert not generation.fit_max_tokens
    chat = parse_values(
        {"messages": "[]", "tools": "[]", "max_tokens": None}, arrival_time_ns=7, limits=LIMITS
    )
    assert isinstance(chat, Generation)
    assert chat.prompt == MessagesPrompt("[]", "[]")
    assert chat.fit_max_tokens
    with pytest.raises(InvalidRequest, match="unknown parameter 'priority'"):
        parse_values(
            {"text_input": "x", "priority": 3}, arrival_time_ns=7, limits=LIMITS
        )  # Triton's own


def test_everything_as_tensors() -> None:
    types = {int: np.int32, float: np.float32, bool: np.bool_}
    tensors = {
        name: np.array([value], dtype=types[type(value)])
        for name, value in EVERYTHING.items()
        if type(value) in types and name != "seed"
    }
    tensors |= {
        "text_input": strings(b"hi"),
        "seed": np.array([2**64 - 1], dtype=np.uint64),
        "stop": strings(b"x", b"\n\n"),
        "stop_token_ids": np.array([5, 6], dtype=np.int32),
        "logit_bias": strings(b'{"3": 1.5, "1": -100}'),
        "cache_salt": strings(b"tenant"),
    }
    generation = parse_generation(tensors, {}, arrival_time_ns=0, limits=LIMITS)
    assert isinstance(generation, Generation)
    check_everything(generation)


def test_everything_as_request_parameters() -> None:
    lists = {
        "stop": '["x", "\\n\\n"]',
        "stop_token_ids": "[5, 6]",
        "logit_bias": '{"3": 1.5, "1": -100}',
    }
    check_everything(parse({**EVERYTHING, **lists}))


def test_everything_in_sampling_parameters() -> None:
    check_everything(parse(sampling_parameters=json.dumps(EVERYTHING)))


def test_strings_in_sampling_parameters_are_cast() -> None:
    words = {
        name: value if name in ("stop", "stop_token_ids", "logit_bias") else str(value)
        for name, value in EVERYTHING.items()
    }
    check_everything(parse({"sampling_parameters": json.dumps(words)}))


@pytest.mark.parametrize(
    ("synonym", "value", "field", "expected"),
    [
        ("max_new_tokens", 5, "max_tokens", 5),
        ("min_length", 3, "min_tokens", 3),
        ("random_seed", 9, "seed", 9),
        ("end_id", 4, "stop_token_ids", (4,)),
    ],
)
def test_synonyms(synonym: str, value: Any, field: str, expected: Any) -> None:
    assert getattr(parse({synonym: value}).sampling, field) == expected


@pytest.mark.parametrize(
    ("given", "wanted", "num_logprobs"),
    [
        ({"num_logprobs": 2}, Wanted(), None),
        ({"logprobs": 2}, Wanted(), None),
        ({"logprobs": 2, "return_logprobs": False}, Wanted(), None),
        ({"return_logprobs": True}, Wanted(null_logprobs=True), None),
        ({"return_logprobs": True, "num_logprobs": 0}, Wanted(logprobs=True), 0),
        ({"return_logprobs": True, "logprobs": 2}, Wanted(logprobs=True), 2),
        ({"return_logprobs": True, "top_logprobs": 2}, Wanted(logprobs=True), 2),
        ({"logprobs": True}, Wanted(logprobs=True), 0),
        ({"logprobs": "true", "top_logprobs": 3}, Wanted(logprobs=True), 3),
        ({"logprobs": False}, Wanted(), None),
        ({"return_log_probs": True}, Wanted(log_probs=True), 0),
        ({"return_log_probs": True, "logprobs": 2}, Wanted(log_probs=True), 0),
        ({"return_cumulative_logprob": True}, Wanted(cumulative_logprob=True), 0),
    ],
)
def test_which_logprobs_are_asked_for(
    given: dict[str, Any], wanted: Wanted, num_logprobs: int | None
) -> None:
    for generation in (parse(given), parse(sampling_parameters=json.dumps(given))):
        assert generation.wanted == wanted
        assert generation.sampling.num_logprobs == num_logprobs


def test_integers_may_be_written_as_floats() -> None:
    assert parse(sampling_parameters='{"max_tokens": 5.0}').sampling.max_tokens == 5


def test_flags_may_be_bytes() -> None:
    assert parse(stream=strings(b"true")).stream


def test_a_list_may_be_one_item() -> None:
    generation = parse(sampling_parameters='{"stop": "x", "stop_token_ids": 5}')
    assert generation.stop_strings == ("x",)
    assert generation.sampling.stop_token_ids == (5,)


def test_stop_words_may_be_empty() -> None:
    """Clients of tensorrtllm_backend send an empty string if they have none."""
    assert parse({"stop_words": "", "bad_words": ""}).stop_strings == ()
    assert parse(stop=strings(b"", b"a", b"a")).stop_strings == ("a",)


def test_a_stop_parameter_is_one_string_or_a_json_list() -> None:
    assert parse({"stop": "[not json"}).stop_strings == ("[not json",)
    assert parse({"stop": "[1]"}).stop_strings == ("[1]",)
    assert parse({"stop": '["a", "b"]'}).stop_strings == ("a", "b")


def test_a_value_given_twice_must_be_equal() -> None:
    generation = parse({"max_new_tokens": 5, "temperature": 0.95}, max_tokens=np.int32(5))
    assert generation.sampling.max_tokens == 5
    parse({"temperature": 0.95}, temperature=np.float32(0.95))
    parse({"stop_words": "a"}, stop=strings(b"a"))
    assert refusal({"max_new_tokens": 6}, max_tokens=np.int32(5)) == (
        "INVALID_ARG: max_new_tokens is given twice (also as max_tokens), with different values"
    )
    assert refusal({"temperature": 0.9}, temperature=np.float32(0.95)) == (
        "INVALID_ARG: temperature is given twice, with different values"
    )
    assert "given twice" in refusal({"input_ids": "[2]"}, input_ids=np.array([1], np.int32))


def test_an_embedding_needs_no_max_tokens() -> None:
    for said in ({"embed": True}, {"embed": True, "max_tokens": 0}):
        generation = parse(said)
        assert generation.sampling.embed and generation.sampling.max_tokens == 0
        assert generation.wanted.embedding
    plain = parse({"embed": False})
    assert plain.sampling.max_tokens == 16 and not plain.wanted.embedding


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": math.nan}, "temperature must be finite and >= 0, got nan"),
        ({"temperature": math.inf}, "temperature must be finite and >= 0, got inf"),
        ({"temperature": -1}, "temperature must be finite and >= 0, got -1"),
        ({"temperature": "1e999"}, "temperature must be finite and >= 0, got inf"),
        ({"temperature": 1e39}, "temperature must be finite and >= 0, got 1e+39"),
        (
            {"temperature": 10**400},
            "temperature must be finite and >= 0, got a number of 401 digits",
        ),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"top_p": -0.1}, "top_p must be finite, >= 0 and <= 1, got -0.1"),
        ({"top_p": 1.0001}, "top_p must be finite, >= 0 and <= 1, got 1.0001"),
        ({"top_p": 1.0000001}, "top_p must be finite, >= 0 and <= 1, got 1.0000001"),
        ({"top_p": 1e300}, "top_p must be finite, >= 0 and <= 1, got 1e+300"),
        ({"min_p": 2}, "min_p must be finite, >= 0 and <= 1, got 2"),
        ({"top_k": -2}, "top_k must be >= -1, got -2"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"top_k": 2**31}, "top_k must be in -1 .. 2147483647, got 2147483648"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite and > 0, got 0"),
        ({"presence_penalty": 3}, "presence_penalty must be finite, >= -2 and <= 2, got 3"),
        ({"embed": True, "max_tokens": 1}, "max_tokens must be 0 with embed, got 1"),
        (
            {"embed": True, "guided_choice": ["a"]},
            "a form of the answer does not go with embed, which generates nothing",
        ),
        ({"max_tokens": 0}, "max_tokens must be >= 1 without num_prompt_logprobs or embed, got 0"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be >= 0, got -1"),
        ({"prompt_logprobs": 21}, "num_prompt_logprobs must be <= 20, got 21"),
        ({"max_tokens": True}, "max_tokens must be an integer, got True"),
        ({"max_tokens": "1_0"}, "max_tokens must be an integer, got '1_0'"),
        ({"max_tokens": 10**5000}, "max_tokens must be in 0 .. 2147483647, got a number of thous"),
        ({"stream": []}, "stream must be true or false, got []"),
        ({"max_tokens": None}, "max_tokens must be an integer, got None"),
        ({"max_tokens": 2**63}, "max_tokens must be in 0 .. 2147483647, got 9223372036854775808"),
        ({"min_tokens": 17}, "min_tokens must be <= max_tokens 16, got 17"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"seed": 2**64}, f"seed must be in 0 .. {2**64 - 1}, got {2**64}"),
        ({"priority_level": 2**70}, f"priority_level must be in {-(2**31)} .. {2**31 - 1}, got "),
        ({"stream": "yes"}, "stream must be true or false, got 'yes'"),
        ({"stream": 2}, "stream must be true or false, got 2"),
        ({"num_logprobs": -1}, "num_logprobs must be >= 0, got -1"),
        ({"num_logprobs": 21}, "num_logprobs must be <= 20, got 21"),
        ({"stop": 5}, "stop must be a string, got 5"),
        ({"stop": "x" * 1025}, "stop must be strings of at most 1024 bytes, got 1025"),
        ({"stop_token_ids": "[-1]"}, "stop_token_ids must be >= 0, got -1"),
        ({"logit_bias": "[]"}, "logit_bias must be a JSON object, got []"),
        ({"logit_bias": '{"x": 1}'}, "logit_bias: a token id must be an integer, got 'x'"),
        ({"logit_bias": '{"1": NaN}'}, "logit_bias: a bias must be finite, >= -100 and <= 100, "),
        ({"logit_bias": '{"1": 1, "01": 1}'}, "logit_bias has a token id twice"),
        ({"logit_bias": '{"1": 1, "1": 2}'}, "logit_bias has the key '1' twice"),
        ({"logit_bias": "{"}, "logit_bias must be valid JSON"),
        ({"cache_salt": "x" * 65}, "cache_salt must be at most 64 of the characters A-Z, a-z, "),
        ({"cache_salt": "../x"}, "cache_salt must be at most 64 of the characters A-Z, "),
        ({"cache_salt": "line\n"}, "cache_salt must be "),
        ({"cache_salt": "\u0661"}, "cache_salt must be "),
        ({"cache_salt": "\ud800"}, "cache_salt must be valid UTF-8"),
        ({"timeout_ms": 0}, "timeout_ms must be >= 1, got 0"),
        ({"max_token": 1}, "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
        ({"x" * 99: 1}, "unknown parameter of 99 characters"),
        ({"tools": "[]"}, "tools goes with messages"),
        ({"chat_template_kwargs": "{}"}, "chat_template_kwargs goes with messages"),
        ({"sampling_parameters": "[]"}, "sampling_parameters must be a JSON object, got []"),
        ({"sampling_parameters": "{"}, "sampling_parameters must be valid JSON"),
        ({"sampling_parameters": "[" * 10**5}, "sampling_parameters must be valid JSON"),
        ({"sampling_parameters": '{"seed": 1, "seed": 1}'}, "sampling_parameters has the key "),
        ({"sampling_parameters": '{"text_input": "x"}'}, "text_input may not stand in "),
        ({"sampling_parameters": '{"seed": ' + "1" * 5000 + "}"}, "sampling_parameters must be "),
        ({"sampling_parameters": MANY_KEYS}, "sampling_parameters has the key 'key 299999' twice"),
    ],
)
def test_what_is_wrong_is_named(parameters: dict[str, Any], message: str) -> None:
    refused = refusal(parameters)
    assert refused.startswith(f"INVALID_ARG: {message}")
    assert len(refused) < 200


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("beam_width", 1, 4),
        ("beam_width", "1", "2"),
        ("beam_width", 1, True),
        ("length_penalty", 1.0, 1.1),
        ("use_beam_search", False, True),
        ("use_beam_search", "False", "true"),
        ("use_beam_search", "false", "maybe"),
        ("echo", False, 0),
        ("suffix", "", "x"),
        ("image", [], "iVBORw0KGgo"),
        ("include_stop_str_in_output", False, True),
        ("return_kv_cache_reuse_stats", False, True),
        ("embedding_bias_words", "", "yes"),
    ],
)
def test_what_is_not_offered_is_refused_unless_neutral(name: str, neutral: Any, other: Any) -> None:
    assert parse({name: neutral}).sampling == SamplingParams()
    assert parse(sampling_parameters=json.dumps({name: neutral})).sampling == SamplingParams()
    assert refusal({name: other}) == f"UNSUPPORTED: {name} is not supported, got {other!r}"


def test_beam_width_and_pad_id_as_tensors() -> None:
    parse(beam_width=[1], pad_id=[3])
    assert refusal(beam_width=[2]) == "UNSUPPORTED: beam_width is not supported, got 2"


def test_null_in_sampling_parameters_is_not_given() -> None:
    generation = parse(sampling_parameters='{"stop": null, "seed": null, "prompt_logprobs": null}')
    assert generation.sampling == SamplingParams()


def test_tritons_own_parameters_pass() -> None:
    parse({"priority": 3, "timeout": 5, "sequence_id": 1, "triton_grpc_error": True, "id": "x"})


def test_the_timeout_of_generate_is_a_deadline() -> None:
    assert parse({"timeout": 5_000_000}).timeout_ms == 5000
    assert parse({"timeout": 5_000_000, "timeout_ms": 7}).timeout_ms == 7
    assert parse({"timeout": 0}).timeout_ms is None
    assert refusal({"timeout": "soon"}) == "INVALID_ARG: timeout must be an integer, got 'soon'"
    assert refusal({"timeout": -1}) == "INVALID_ARG: timeout must be >= 0, got -1"


def test_other_defaults_stand_in_place_of_those_of_the_wire() -> None:
    defaults, ids = Defaults({"temperature": 0.25, "top_k": 7}), np.array([1, 2], np.int32)
    for given in ({}, {"top_k": 3}):
        for request in (
            parse_token_generation(
                {"input_ids": ids}, given, arrival_time_ns=0, defaults=defaults, limits=LIMITS
            ),
            parse_generation(
                {"input_ids": ids}, given, arrival_time_ns=0, defaults=defaults, limits=LIMITS
            ),
            parse_values(
                {"input_ids": ids, **given}, arrival_time_ns=0, defaults=defaults, limits=LIMITS
            ),
        ):
            assert isinstance(request, Generation)
            assert request.sampling.temperature == 0.25
            assert request.sampling.top_k == given.get("top_k", 7)


@pytest.mark.parametrize("temperature", [-0.0, 1e-320, "-0", 1e-6])
def test_greedy(temperature: Any) -> None:
    assert parse({"temperature": temperature}).sampling.is_greedy


def test_top_k_of_minus_one_is_off() -> None:
    assert parse({"top_k": -1}).sampling.top_k == 0


def test_top_p_of_zero_is_off() -> None:
    """As in the TensorRT-LLM backend."""
    assert parse({"top_p": 0}).sampling.top_p == 1
    assert parse(top_p=[0.0]).sampling.top_p == 1


@pytest.mark.parametrize(
    ("timeout_ms", "timeout_us", "expected"),
    [
        (None, 0, None),
        (None, 1, 1),
        (None, 1500, 2),
        (3, 1500, 2),
        (1, 1500, 1),
        (None, 2**64 - 1, 2**31 - 1),
        (5, 2**64 - 1, 5),
    ],
)
def test_the_earlier_deadline_counts(
    timeout_ms: int | None, timeout_us: int, expected: int | None
) -> None:
    parameters = {} if timeout_ms is None else {"timeout_ms": timeout_ms}
    assert parse(parameters, timeout_us=timeout_us).timeout_ms == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, True),
        ({"max_tokens": 16}, False),
        ({"max_new_tokens": 5}, False),
        ({"sampling_parameters": '{"max_tokens": 5}'}, False),
        ({"max_tokens": 5, "fit_max_tokens": True}, True),
        ({"fit_max_tokens": False}, False),
    ],
)
def test_max_tokens_is_lowered_only_if_it_may_be(
    parameters: dict[str, Any], expected: bool
) -> None:
    assert parse(parameters).fit_max_tokens is expected


def test_prompts() -> None:
    assert parse({"parse_special_tokens": True}).prompt == TextPrompt("hi", True)
    assert parse(messages="[]").prompt == MessagesPrompt("[]")
    assert parse(messages="[]", tools="[1]").prompt == MessagesPrompt("[]", "[1]")
    with_variables = parse(messages="[]", chat_template_kwargs="{}").prompt
    assert with_variables == MessagesPrompt("[]", None, "{}")
    prompt = parse(input_ids=np.array([[4, 5]], dtype=np.int64)).prompt
    assert isinstance(prompt, TokenPrompt)
    assert prompt.ids.dtype == np.int32
    assert prompt.ids.tolist() == [4, 5]


def test_special_tokens_are_parsed_if_the_operator_says_so() -> None:
    """The prompt may come as a tensor or as a parameter, and the request may say otherwise."""

    def prompt(tensors: dict[str, Any], parameters: dict[str, Any]) -> Any:
        request = parse_generation(
            tensors,
            parameters,
            arrival_time_ns=0,
            defaults=Defaults(parse_special_tokens=True),
            limits=LIMITS,
        )
        assert isinstance(request, Generation)
        return request.prompt

    assert prompt({"text_input": strings(b"hi")}, {}) == TextPrompt("hi", True)
    assert prompt({}, {"text_input": "hi"}) == TextPrompt("hi", True)
    assert prompt({}, {"text_input": "hi", "parse_special_tokens": False}) == TextPrompt("hi")
    assert prompt({"messages": strings(b"[]")}, {}) == MessagesPrompt("[]")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": np.array([1], np.int32), "text_input": "x"}, "give one of text_input"),
        ({"input_ids": np.array([], np.int32)}, "input_ids must not be empty"),
        ({"input_ids": np.array([-1], np.int64)}, "input_ids must be in 0 .. 2147483647"),
        ({"input_ids": np.array([2**31], np.int64)}, "input_ids must be in 0 .. 2147483647"),
        ({"input_ids": np.array([1.5])}, "input_ids must be integers, got float64"),
        ({"messages": "[]", "parse_special_tokens": True}, "parse_special_tokens goes with "),
        ({"text_input": strings(b"\xff")}, "text_input must be valid UTF-8"),
        ({"text_input": strings(b"a", b"b")}, "text_input must be one value, got 2"),
        ({"text_input": strings()}, "text_input must be one value, got 0"),
        ({"max_tokens": [1, 2]}, "max_tokens must be one value, got 2"),
    ],
)
def test_wrong_prompts(inputs: dict[str, Any], message: str) -> None:
    assert refusal(**inputs).startswith(f"INVALID_ARG: {message}")


def test_no_prompt() -> None:
    with pytest.raises(InvalidRequest, match="give one of text_input, messages and input_ids"):
        parse_generation({}, {}, arrival_time_ns=0, limits=LIMITS)


def test_the_prompt_is_shown_only_where_that_can_be_done() -> None:
    assert not parse(exclude_input_in_output=[False]).exclude_input_in_output
    assert refusal(exclude_input_in_output=[False], stream=[True]).startswith("UNSUPPORTED: ")
    assert refusal(exclude_input_in_output=[False], messages="[]").startswith("UNSUPPORTED: ")


def test_limits() -> None:
    small = replace(
        LIMITS, prompt_bytes=3, stop_strings=1, stop_token_ids=1, logit_bias_entries=1, logprobs=1
    )
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"text_input": "ééé"}, "text_input must be at most 3 bytes, got 6"),
        ({"text_input": "", "sampling_parameters": '{"n":1}'}, "sampling_parameters must be at mo"),
        ({"text_input": "", "stop": '["a", "b"]'}, "stop must have at most 1 entries, got 2"),
        ({"text_input": "", "stop_token_ids": "[1, 2]"}, "stop_token_ids must have at most 1 "),
        ({"text_input": "", "logit_bias": '{"1": 1, "2": 2}'}, "logit_bias must have at most 1 "),
        ({"text_input": "", "logprobs": 2}, "num_logprobs must be <= 1, got 2"),
    ]
    for parameters, message in wrong:
        with pytest.raises(InvalidRequest) as caught:
            parse_generation({}, parameters, arrival_time_ns=0, limits=small)
        assert str(caught.value).startswith(message)


def test_a_stop_request() -> None:
    request = parse_generation(
        {"stop_request": np.array([True])},
        {"return_finish_reason": True},
        arrival_time_ns=0,
        limits=LIMITS,
    )
    assert request == StopRequest(wanted=Wanted(finish_reason=True))
    assert isinstance(parse(stop_request=[False]), Generation)
    assert refusal(stop_request=[True]) == "INVALID_ARG: stop_request takes no text_input"


def test_token_generations_refuse_text() -> None:
    ids = {"input_ids": np.array([1, 2], dtype=np.int32)}
    generation = parse_token_generation(
        ids, {"stop": "", "max_tokens": 3}, arrival_time_ns=0, limits=LIMITS
    )
    assert isinstance(generation, Generation)
    assert generation.sampling.max_tokens == 3
    for name, value in (("stop", "x"), ("text_input", "x"), ("messages", "[]"), ("tools", "[]")):
        with pytest.raises(Unsupported, match=f"^{name} needs the text models"):
            parse_token_generation(ids, {name: value}, arrival_time_ns=0, limits=LIMITS)
