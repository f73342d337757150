"""Schemas of tools, for templates that show neither references nor alternatives."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, Final

import pytest
from minisgl_gateway.dialects.bare import Gemma4
from minisgl_gateway.spelled_schema import spelled_out
from minisgl_gateway.tools import Tool

from minisgl_backend.limits import Limits
from minisgl_backend.text.messages import parse_tools

PLACE: Final = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/place"}},
    "required": ["name"],
}
WITHIN: Final = {"type": "object", "properties": {}}


def of_property(schema: Any, **defs: Any) -> Any:
    """A property's schema, spelled out."""
    whole = {"type": "object", "properties": {"x": schema}, "$defs": {"place": PLACE, **defs}}
    found = spelled_out(whole)
    assert found.keys() == {"type", "properties"}
    return found["properties"]["x"]


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        (True, True),
        ({"type": "string", "description": "d", "enum": ["a"]}, None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, None),
        ({"type": ["string", "integer"]}, None),
        ({"enum": ["a", 5]}, None),
        ({"type": "string", "title": "X", "default": "a"}, {"type": "string"}),
        ({"type": ["string", "null"]}, {"type": "string", "nullable": True}),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "d"},
            {"type": "string", "description": "d", "nullable": True},
        ),
        ({"oneOf": [{"type": "string"}]}, {"type": "string"}),
        ({"allOf": [{"$ref": "#/$defs/unit"}]}, {"type": "string", "enum": ["C", "F"]}),
        ({"enum": ["a", None]}, {"enum": ["a"], "type": "string", "nullable": True}),
        ({"const": 5}, {"const": 5, "enum": [5], "type": "integer"}),
        (
            {"$ref": "#/$defs/unit", "description": "d"},
            {"type": "string", "enum": ["C", "F"], "description": "d"},
        ),
        (
            {"$ref": "#/$defs/place"},
            {**PLACE, "properties": {"name": {"type": "string"}, "in": WITHIN}},
        ),
        (
            {"type": "array", "items": {"$ref": "#/$defs/unit"}},
            {"type": "array", "items": {"type": "string", "enum": ["C", "F"]}},
        ),
        ({"$ref": "#/$defs/none", "description": "d"}, {"description": "d"}),
        ({"$ref": "#/$defs/self"}, {"type": "object", "properties": {}}),
        ({"properties": {"title": {"type": "string"}}}, None),
    ],
)
def test_references_and_alternatives(schema: Any, shown: Any) -> None:
    unit = {"type": "string", "enum": ["C", "F"]}
    expected = schema if shown is None else shown
    assert of_property(schema, unit=unit, self={"$ref": "#/$defs/self"}) == expected


def test_references_that_multiply_are_spelled_out_a_bounded_number_of_times() -> None:
    names = [f"n{index}" for index in range(8)]
    defs = {
        name: {
            "type": "object",
            "properties": {f"p{at}": {"$ref": f"#/$defs/{behind}"} for at in range(20)},
        }
        for name, behind in pairwise(names)
    }
    found = of_property({"$ref": "#/$defs/n0"}, **defs, n7={"type": "string"})
    assert len(json.dumps(found)) < 200_000


def test_a_schema_that_would_become_too_deep_stays() -> None:
    names = [f"n{index}" for index in range(30)]
    defs = {
        name: {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{behind}"}}}
        for name, behind in pairwise(names)
    }
    whole = {"properties": {"x": {"$ref": "#/$defs/n0"}}, "$defs": {**defs, "n29": PLACE}}
    assert spelled_out(whole) is whole
    tool = Gemma4().tool(Tool("f", parameters=whole))
    assert parse_tools(json.dumps([tool]), Limits()) == [tool]


def test_tools_of_gemma_are_told_without_references() -> None:
    parameters = {"properties": {"at": {"$ref": "#/$defs/place"}}, "$defs": {"place": PLACE}}
    told = Gemma4().tool(Tool("f", parameters=parameters, description="d"))
    at = {**PLACE, "properties": {"name": {"type": "string"}, "in": WITHIN}}
    assert told["function"] == {
        "name": "f",
        "description": "d",
        "parameters": {"properties": {"at": at}},
    }
    assert Gemma4().tool(Tool("f"))["function"] == {"name": "f"}
