"""Rewritten schemas: which ones are, that they mean the same, and that the engine takes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from minisgl_backend.grammar.schemas import plain
from tests.grammar.schemas import closed

TEXT = {"type": "string"}
NUMBER = {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"items": {"uniqueItems": False}}, {"items": {}}),
        ({"items": [{"uniqueItems": False}]}, {"items": [{}]}),
        ({"unevaluatedProperties": True, "unevaluatedItems": {}}, {}),
        ({"format": "binary", **TEXT}, TEXT),
        ({"propertyNames": {"type": "string", "description": "words"}}, {}),  # as zod writes it
        ({"properties": {"uniqueItems": False}}, {"properties": {"uniqueItems": False}}),
        ({"const": {"uniqueItems": False}}, {"const": {"uniqueItems": False}}),
        ({"default": {"uniqueItems": False}}, {"default": {"uniqueItems": False}}),
        (
            {"$defs": {"a": {"uniqueItems": False}}, "anyOf": [{"uniqueItems": False}, TEXT]},
            {"$defs": {"a": {}}, "anyOf": [{}, TEXT]},
        ),
    ],
)
def test_what_says_nothing_is_left_out(schema: dict[str, Any], same: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    assert plain(schema) == same
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"unevaluatedProperties": False},
        {"format": "color"},
        {"propertyNames": {"maxLength": 3}},
        {"propertyNames": {"enum": ["a"]}, "patternProperties": {"b": TEXT}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"b": TEXT}},
        {"propertyNames": {"$ref": "other.json"}},
        {"propertyNames": {"pattern": 5}},
        {"properties": {"a": {"$id": "a", "uniqueItems": False}}},
        {
            "propertyNames": {"$ref": "#/$defs/name", "enum": ["b", "c"]},
            "$defs": {"name": {"enum": ["a", "b"]}},
        },
        {"exclusiveMinimum": 0, "maximum": 1},
        {"minimum": 0.5, "exclusiveMaximum": 1},
        {"exclusiveMinimum": -1, "maximum": -0.5},
        {"exclusiveMinimum": 0, "minimum": 0.5},
        {"exclusiveMinimum": 0.25, "exclusiveMaximum": 0.75},
        {"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 10**400, "maximum": 10**400},
    ],
)
def test_what_cannot_be_said_otherwise_stays(schema: dict[str, Any]) -> None:
    assert plain(schema) == schema


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, {"minimum": 1e-15, "maximum": 0.5}),
        ({"exclusiveMinimum": 0, "minimum": 0.1, "maximum": 0.5}, {"minimum": 0.1, "maximum": 0.5}),
        (
            {"exclusiveMaximum": -1, "exclusiveMinimum": -1.5},
            {"maximum": -1 - 1e-13, "exclusiveMinimum": -1.5},
        ),
    ],
)
def test_bounds_that_are_near(schema: dict[str, Any], same: dict[str, Any]) -> None:
    assert plain({"items": schema}) == {"items": same}


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        (r'^[^"]*$', r'^[^\x00"]*$'),
        (r"[^-a][^--/]", r"[^\x00\-a][^\x00\--/]"),
        (r"\[^a]|\\[^\]]", r"\[^a]|\\[^\x00\]]"),
        (r"[^]a]", r"[^]a]"),
    ],
)
def test_negated_classes_are_without_nul(pattern: str, same: str) -> None:
    assert plain({"items": {"pattern": pattern}}) == {"items": {"pattern": same}}
    assert plain({"patternProperties": {pattern: TEXT}}) == {"patternProperties": {same: TEXT}}
    named = {"propertyNames": {"pattern": pattern}}
    assert plain(named)["patternProperties"] == {same: True}


def test_names_are_properties() -> None:
    listed = {"$ref": "#/$defs/name"}
    schema = {
        "propertyNames": listed,
        "properties": {"b": TEXT, "z": TEXT},
        "additionalProperties": NUMBER,
        "$defs": {"name": {"enum": ["a", "b", 3], "title": "Name"}},
    }
    assert plain(schema) == {
        "properties": {"b": TEXT, "a": NUMBER},
        "additionalProperties": False,
        "$defs": schema["$defs"],
    }
    assert plain({"propertyNames": {"pattern": "^x"}}) == {
        "patternProperties": {"^x": True},
        "additionalProperties": False,
    }


REFS: dict[str, Any] = {
    "cat": closed(kind={"const": "cat"}, name=TEXT),
    "dog": closed(kind={"enum": ["dog", "wolf"]}, name=TEXT),
    "fish": closed(kind={"$ref": "#/$defs/fish_kind"}, name=TEXT),
    "fish_kind": {"const": "fish"},
    "some": closed(kind=TEXT, name=TEXT),
    "bare": {"properties": {"kind": {"const": "bare"}}, "required": ["kind"]},
    "open": {"type": "object", "properties": {"kind": {"const": "open"}}},
    "square": closed(square=NUMBER),
    "disc": closed(disc=NUMBER),
    "list": {"type": "array"},
    "one": {"const": 1},
    "pair": {"enum": [{"b": [2], "a": 1}]},
    "me": {"$ref": "#/$defs/me"},
    "a/b": TEXT,
}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def tagged(tag: str) -> dict[str, Any]:
    """The schema ``open`` with a tag in addition to its own properties."""
    return {**ref("open"), "properties": {"tag": {"const": tag}}, "required": ["tag"]}


@pytest.mark.parametrize(
    ("alternatives", "is_plain"),
    [
        ([ref("cat"), ref("dog"), ref("fish")], True),
        ([ref("cat"), {"type": "null"}], True),
        ([ref("a~1b"), ref("list")], True),
        ([ref("a%7E1b"), ref("list")], True),
        ([ref("square"), ref("disc")], True),
        ([ref("one"), {"const": True}, {"enum": ["1", None, {"a": 1}]}], True),
        ([ref("one"), {"enum": [1.0]}], False),
        ([ref("one"), {"type": "integer"}], False),
        ([{"const": {"a": 1, "b": [2]}}, ref("pair")], False),
        ([ref("list"), {"type": ["array", "null"]}], False),
        ([{"const": 1}, {"const": 2}], False),  # which llguidance sees
        ([ref("cat"), ref("some")], False),
        ([ref("cat"), ref("bare")], False),  # a number follows the latter
        ([ref("cat"), ref("open")], True),  # the latter need not have a kind, but then has no name
        ([ref("open"), ref("open")], False),
        ([ref("me"), ref("list")], False),
        ([ref("none"), ref("list")], False),
        ([{"$ref": "other.json"}, ref("list")], False),
        ([True, ref("list")], False),
        ([tagged("a"), tagged("b")], True),  # as from serde
        ([{**ref("cat"), "properties": {"z": TEXT}}, ref("cat")], False),
        ([{**ref("one"), "const": 2}, ref("one")], False),
        ([{**ref("one"), "const": 1}, ref("list")], True),
        ([{**ref("square"), "required": ["disc"]}, ref("disc")], True),
    ],
)
def test_alternatives_that_exclude_each_other(alternatives: list[Any], is_plain: bool) -> None:
    schema = {"properties": {"it": {"oneOf": alternatives}}, "$defs": REFS}
    (keyword,) = plain(schema)["properties"]["it"]
    assert keyword == ("anyOf" if is_plain else "oneOf")


NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 1.0, 2.5, "a", "b", "cc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
LEAVES = st.sampled_from(
    [
        True,
        {},
        TEXT,
        NUMBER,
        {"type": ["integer", "null"]},
        {"type": "array"},
        {"enum": ["a", 1]},
        {"enum": ["a", "b"]},
        {"const": "cc"},
        {"const": True},
        {"pattern": "b", "type": "string"},
    ]
)
REFERENCES = st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}])


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = {
        "type": st.sampled_from(["object", "object", "array", ["object", "string"]]),
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": st.lists(NAMES, unique=True, max_size=2),
        "additionalProperties": inner | st.just(False),
        "propertyNames": inner,
        "items": inner,
        "uniqueItems": st.booleans(),
        "oneOf": st.lists(inner, min_size=1, max_size=3),
        "allOf": st.lists(inner, min_size=1, max_size=2),
    }
    return st.fixed_dictionaries({}, optional=fields)


@given(
    st.recursive(LEAVES | REFERENCES, around, max_leaves=8),
    st.tuples(*[st.recursive(LEAVES, around, max_leaves=8)] * 2),
    st.lists(VALUES, min_size=5, max_size=20),
)
def test_the_same_values_follow_it(
    schema: Any, definitions: tuple[Any, Any], values: list[Any]
) -> None:
    schema = {**(schema if isinstance(schema, dict) else {"allOf": [schema]})}
    schema["$defs"] = dict(zip(("one", "other"), definitions, strict=True))
    theirs, ours = Draft202012Validator(schema), Draft202012Validator(plain(schema))
    for value in values:
        assert ours.is_valid(value) == theirs.is_valid(value), value
