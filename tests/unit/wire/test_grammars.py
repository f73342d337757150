"""Structured outputs on the wire: every dialect asks for the same grammars, or is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.limits import Limits
from minisgl_backend.request import Grammar, GrammarKind
from minisgl_backend.wire.generation import Generation
from minisgl_backend.wire.grammars import grammar_of
from minisgl_backend.wire.parse import parse_token_generation, parse_values
from tests.unit.wire.test_parse import parse, refusal, strings

SCHEMA = {"type": "object", "properties": {"日": {"type": "integer"}}}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, ensure_ascii=False))
OBJECT = Grammar(GrammarKind.JSON_OBJECT, "")
REGEX = Grammar(GrammarKind.REGEX, "[a-z]+")
CHOICE = Grammar(GrammarKind.CHOICE, '["yes", "日"]')
RULES = Grammar(GrammarKind.GRAMMAR, 'root ::= "x"')
TAGS = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
TAG = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAGS))
FRONTEND: dict[str, Any] = {
    **dict.fromkeys(("json", "regex", "choice", "grammar", "json_object", "structural_tag")),
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
}
"""The fields that Triton's OpenAI frontend sends; one from the first line is set."""

FORMS: list[tuple[dict[str, Any], Grammar]] = [
    ({"json": SCHEMA}, JSON),
    ({"json": JSON.source}, JSON),
    ({"json": True}, Grammar(GrammarKind.JSON_SCHEMA, "true")),
    ({"json": False, "json_object": False}, Grammar(GrammarKind.JSON_SCHEMA, "false")),
    ({"json_object": True}, OBJECT),
    ({"regex": "[a-z]+"}, REGEX),
    ({"choice": ["yes", "日"]}, CHOICE),
    ({"choice": CHOICE.source}, CHOICE),
    ({"grammar": RULES.source}, RULES),
    ({"structural_tag": TAGS}, TAG),
    ({"structural_tag": TAG.source}, TAG),
    ({"regex": "[a-z]+", "json_object": False, "json": None}, REGEX),
    ({**FRONTEND, "json": JSON.source, "disable_fallback": False}, JSON),
    ({**FRONTEND, "json": SCHEMA, "_backend": None, "_backend_was_auto": False}, JSON),
    ({**FRONTEND, "json": SCHEMA, "backend": "auto", "backend_was_auto": True}, JSON),
]


@pytest.mark.parametrize(("form", "expected"), FORMS)
def test_structured_outputs(form: dict[str, Any], expected: Grammar) -> None:
    """As a tensor, as a request parameter, in ``sampling_parameters`` and in process."""
    text = json.dumps(form)
    assert parse(structured_outputs=text).sampling.grammar == expected
    assert parse({"structured_outputs": text}).sampling.grammar == expected
    assert parse({"guided_decoding": text}).sampling.grammar == expected
    for value in (form, text):
        for name in ("structured_outputs", "guided_decoding"):
            given = json.dumps({name: value})
            assert parse(sampling_parameters=given).sampling.grammar == expected
    in_process = parse_values(
        {"text_input": "hi", "structured_outputs": form}, arrival_time_ns=0, limits=Limits()
    )
    assert isinstance(in_process, Generation)
    assert in_process.sampling.grammar == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("guided_json", SCHEMA, JSON),
        ("guided_json", JSON.source, JSON),
        ("guided_regex", "[a-z]+", REGEX),
        ("guided_choice", ["yes", "日"], CHOICE),
        ("guided_choice", CHOICE.source, CHOICE),
        ("guided_grammar", RULES.source, RULES),
    ],
)
def test_guided_parameters(name: str, value: Any, expected: Grammar) -> None:
    assert parse(sampling_parameters=json.dumps({name: value})).sampling.grammar == expected
    if isinstance(value, str):
        assert parse({name: value}).sampling.grammar == expected
    assert parse(sampling_parameters=json.dumps({name: None})).sampling.grammar is None


@pytest.mark.parametrize(
    ("guide_type", "guide", "expected"),
    [
        ("json_schema", JSON.source, JSON),
        ("regex", "[a-z]+", REGEX),
        ("ebnf_grammar", RULES.source, RULES),
        ("json", None, Grammar(GrammarKind.JSON_SCHEMA, '{"type": ["object", "array"]}')),
        ("json", "", Grammar(GrammarKind.JSON_SCHEMA, '{"type": ["object", "array"]}')),
    ],
)
def test_guides(guide_type: str, guide: str | None, expected: Grammar) -> None:
    given: dict[str, Any] = {"guided_decoding_guide_type": guide_type}
    if guide is not None:
        given["guided_decoding_guide"] = guide
    assert parse(**given).sampling.grammar == expected
    assert parse(dict(given)).sampling.grammar == expected
    assert parse(sampling_parameters=json.dumps(given)).sampling.grammar == expected


FIELDS = "json, json_object, regex, choice, grammar, structural_tag"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, f"INVALID_ARG: structured_outputs must hold one of {FIELDS}, got none of them"),
        (FRONTEND, f"INVALID_ARG: structured_outputs must hold one of {FIELDS}, got none of them"),
        (
            {"regex": "a", "choice": ["a"]},
            f"INVALID_ARG: structured_outputs must hold one of {FIELDS}, got regex and choice",
        ),
        (
            {"regexp": "a"},
            f"INVALID_ARG: structured_outputs has an unknown field 'regexp': give one of {FIELDS}",
        ),
        ({"json": 5}, "INVALID_ARG: structured_outputs.json must be a JSON schema, got 5"),
        ({"json_object": 1}, "INVALID_ARG: structured_outputs.json_object must be true, got 1"),
        ({"regex": 5}, "INVALID_ARG: structured_outputs.regex must be a string, got 5"),
        (
            {"choice": {"a": 1}},
            "INVALID_ARG: structured_outputs.choice must be a list of strings, got {'a': 1}",
        ),
        ({"choice": "yes"}, "INVALID_ARG: structured_outputs.choice must be valid JSON"),
        ({"regex": "\ud800"}, "INVALID_ARG: structured_outputs.regex must be valid UTF-8"),
        ({"choice": ["\ud800"]}, "INVALID_ARG: structured_outputs.choice must be valid UTF-8"),
        ({"json": {"a": "\ud800"}}, "INVALID_ARG: structured_outputs.json must be valid UTF-8"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "UNSUPPORTED: structured_outputs.whitespace_pattern is not supported, got ' '",
        ),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "UNSUPPORTED: structured_outputs.disable_any_whitespace is not supported, got True",
        ),
        (
            {"regex": "a", "_backend": "outlines"},
            "UNSUPPORTED: structured_outputs._backend is not supported, got 'outlines'",
        ),
    ],
)
def test_forms_that_are_wrong(form: dict[str, Any], message: str) -> None:
    assert refusal(structured_outputs=json.dumps(form)) == message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"structured_outputs": "["}, "INVALID_ARG: structured_outputs must be valid JSON"),
        ({"structured_outputs": "7"}, "INVALID_ARG: structured_outputs must be a JSON object"),
        (
            {"structured_outputs": '{"regex": "a", "regex": "b"}'},
            "INVALID_ARG: structured_outputs has the key 'regex' twice",
        ),
        (
            {"structured_outputs": '{"regex": "a"}', "guided_decoding_guide_type": "json"},
            "INVALID_ARG: give one of structured_outputs and guided_decoding_guide_type",
        ),
        (
            {"structured_outputs": '{"regex": "a"}', "guided_regex": "b"},
            "INVALID_ARG: structured_outputs is given twice, with different values",
        ),
        (
            {"guided_decoding_guide": "a"},
            "INVALID_ARG: guided_decoding_guide goes with guided_decoding_guide_type",
        ),
        (
            {"guided_decoding_guide_type": "regex"},
            "INVALID_ARG: guided_decoding_guide_type regex goes with guided_decoding_guide",
        ),
        (
            {"guided_decoding_guide_type": "json", "guided_decoding_guide": "{}"},
            "INVALID_ARG: guided_decoding_guide_type json takes no guided_decoding_guide",
        ),
        (
            {"guided_decoding_guide_type": "xml", "guided_decoding_guide": "a"},
            "UNSUPPORTED: guided_decoding_guide_type must be one of json, json_schema, regex, "
            "ebnf_grammar, got 'xml'",
        ),
        ({"guided_whitespace_pattern": " "}, "UNSUPPORTED: guided_whitespace_pattern"),
        ({"guided_decoding_backend": "outlines"}, "UNSUPPORTED: guided_decoding_backend"),
        (
            {"guided_jsn": "{}"},
            "INVALID_ARG: unknown parameter 'guided_jsn'; did you mean 'guided_",
        ),
    ],
)
def test_parameters_that_are_wrong(parameters: dict[str, Any], message: str) -> None:
    assert refusal(parameters).startswith(message)


def test_the_engine_alone_takes_them_too() -> None:
    """A grammar concerns tokens, so the text models are not needed."""
    tensors = {"input_ids": np.array([1]), "structured_outputs": strings(b'{"regex": "[a-z]+"}')}
    request = parse_token_generation(tensors, {}, arrival_time_ns=0, limits=Limits())
    assert isinstance(request, Generation)
    assert request.sampling.grammar == REGEX


def test_values_of_a_record_go_through_the_same_checks() -> None:
    given = {"structured_outputs": None, "guided_decoding_guide_type": None}
    assert grammar_of({**given, "guided_decoding_guide": None}) is None
    with pytest.raises(InvalidRequest):
        grammar_of({**given, "guided_decoding_guide": "x"})
