"""Structures whose values have other quotes than JSON's."""

from __future__ import annotations

from typing import Any, Final

import pytest

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.grammar.matchers import Grammars
from tests.grammar.matching import compiled, follow

NODE: Final = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "boolean"}},
    "required": ["v"],
}


def tag(schema: Any, **more: Any) -> dict[str, Any]:
    """A tag of one structure, in which ~ is the quote."""
    structure = {"begin": "<", "schema": schema, "quote": "~", "end": ">", **more}
    return {"structures": [structure], "at_least_one": True}


def named(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object."""
    return {"type": "object", "properties": properties, "required": [*required]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["~~", '~"a"\n{b:[1]},é~'], ["~", "a", '"a"', "~a~b~"]),
        ({"type": "string", "maxLength": 3}, ["~~", "~a\né~", '~"},~'], ["~abcd~", "~a~b~"]),
        ({"type": "string", "minLength": 2}, ["~ab~", "~abc abc abc~"], ["~~", "~a~", "~a~b~"]),
        ({"items": {"minLength": 1, "maxLength": 2}, "type": "array"},
         ["[~a~,~😀b~]"], ["[~~]", "[~abc~]", "[~a~b~]"]),
        ({"type": "integer", "minimum": 1, "maximum": 9}, ["1", "9"], ["0", "10", "1.5", "~1~"]),
        ({"type": "number", "exclusiveMaximum": 1}, ["0.5", "-1000"], ["1", "two"]),
        ({"type": ["boolean", "null"], "minimum": 5}, ["true", "null"], ["0", "~true~"]),
        ({"enum": ["a", "", 5, None, [1, "b"], {"c": "d", "e:": 1}]},
         ["~a~", "~~", "5", "null", "[1,~b~]", "{c:~d~,~e:~:1}"], ["a", "~b~", "6", "[1, ~b~]"]),
        ({"enum": ["a", 5, 2.0, True, None], "type": ["string", "integer"]},
         ["~a~", "5", "2.0"], ["true", "null"]),
        ({"const": []}, ["[]"], ["[1]"]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["1", "~1~"], ["true"]),
        ({"type": "array", "items": {"type": "integer"}},
         ["[]", "[1,2]"], ["[1, 2]", "[1,]", "[~~]"]),
        ({"type": "array", "items": True, "minItems": 2, "maxItems": 3},
         ["[1,~~]", "[1,[],{}]"], ["[]", "[1]", "[1,2,3,4]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        (
            named("b", a={"type": "integer"}, b={"type": "integer"}, c={"type": "string"}),
            ["{b:1}", "{a:1,b:2}", "{b:1,c:~x~}", "{a:1,b:2,c:~~}"],
            ["{}", "{a:1}", "{b:1,a:2}", "{,b:1}", "{b:1,}", "{b:1,d:1}", "{~b~:1}", "{b: 1}"],
        ),
        (named(a=True, b=True), ["{}", "{a:1}", "{b:1}", "{a:1,b:2}"], ["{a:1,}", "{c:1}"]),
        (named(**{"a b": True, "c:": True, "": True}), ["{a b:1,~c:~:2,~~:3}"], ["{c::1}"]),
        ({"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ["{a:1}"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}},
         ["{}", "{a:1,b c:2,é-$.:3}"], ["{a:~1~}", "{a b :1}", "{ a:1}", "{:1}", "{~a~:1}"]),
        ({"type": "object"}, ["{}", "{a:{b:[~x~,null]}}"], ["[]", "{a}"]),
        ({}, ["1", "~x~", "[[],{}]", "{a:{b:-1.5}}", "false"], ["a", "[,]"]),
        ({"properties": {"a": True}}, ["{a:1}"], ["1", "{b:1}"]),
        ({"$ref": "#/$defs/node", "$defs": {"node": NODE}},
         ["{v:true}", "{next:{next:{v:true},v:false},v:true}"], ["{next:{},v:true}", "{v:1}"]),
        ({"title": "t", "type": "string", "description": "d", "default": "x"}, ["~~"], ["x"]),
    ],
)  # fmt: skip
def test_values_follow_their_schema(
    grammars: Grammars, schema: Any, right: list[str], wrong: list[str]
) -> None:
    for texts, is_right in ((right, True), (wrong, False)):
        for text in texts:
            matcher = compiled(grammars, "structural_tag", tag(schema))
            assert follow(grammars, matcher, f"<{text}>") == is_right, text


def test_values_in_free_text_and_beside_others(grammars: Grammars) -> None:
    """Each structure has its own quote."""
    structures = [
        {"begin": "<a=", "schema": {"type": "string"}, "quote": "~", "end": ">"},
        {"begin": "<b=", "schema": {"type": "string"}, "quote": "''", "end": ">"},
        {"begin": "<c=", "schema": {"type": "string"}, "end": ">"},
    ]
    both: dict[str, Any] = {"structures": structures, "triggers": ["<a", "<b", "<c"]}
    for text, is_right in (
        ("So: <a=~it's~>, <b=''it's~''> and <c=\"~\">.", True),
        ("<a=''x''>", False),
        ("<b=~x~>", False),
        ("<c=~x~>", False),
    ):
        assert follow(grammars, compiled(grammars, "structural_tag", both), text) == is_right


def test_a_lenient_structure_leaves_out_what_is_not_supported(grammars: Grammars) -> None:
    schema = named("a", "b", a={"type": "string", "format": "date", "pattern": "x"})
    for text, is_right in (("<{a:~yy~}>", True), ("<{a:1}>", False)):
        matcher = compiled(grammars, "structural_tag", tag(schema, lenient=True))
        assert follow(grammars, matcher, text) == is_right


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "string", "pattern": "x"}, "pattern is not supported, at #/structures/0/schema/"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "Unsatisfiable .*schema/maxLength"),
        (named(a={"type": "array", "uniqueItems": True}), "schema/properties/a/uniqueItems$"),
        (named(**{"a/b": {"items": {"not": {}}}}), "schema/properties/a~1b/items/not|a~1b/not"),
        ({"anyOf": [{"format": "date"}]}, "format is not supported, at .*schema/anyOf/0/format"),
        ({"$ref": "#/$defs/x"}, "Pointer '/\\$defs/x' does not exist, at #/structures/0/schema/"),
        ({"$ref": 5}, "Pointer '5' does not exist"),
        ({"type": "text"}, "Invalid type: text, at #/structures/0/schema/type"),
        ({"type": []}, "Invalid type"),
        ({"type": [["string"]]}, "Invalid type"),
        (named(a=5), "schema must be an object or boolean, at .*properties/a"),
        (named("a", a=False), "Unsatisfiable schema, at .*properties/a"),
        ({"anyOf": []}, "Unsatisfiable schema, at #/structures/0/schema/anyOf"),
        (named("b", a=True), "required lists b, which is .*, at #/structures/0/schema/required"),
        ({"required": [["a"]]}, r"required lists \['a'\], which is not .*, at .*/required"),
        ({"type": "object", "properties": []}, "properties must be an object"),
        ({"type": "object", "required": "a"}, "required must be an array"),
        ({"enum": [1], "type": "string"}, "Unsatisfiable schema, at #/structures/0/schema"),
        ({"enum": ["a~"]}, "a text with ~ is not supported"),
        (named(**{"~": True}), "a text with ~ is not supported, at .*/properties/~0"),
        ({"type": "array", "minItems": -1}, "minItems must be an integer from 0 .*, at .*minItems"),
        ({"type": "array", "maxItems": 10**30}, "maxItems must be .* to 2147483647, at .*ma"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "Unsatisfiable schema, at .*maxItems"),
        ({"type": "integer", "minimum": "a"}, "Expected number for 'minimum'"),
    ],
)  # fmt: skip
def test_errors_have_their_place(grammars: Grammars, schema: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        compiled(grammars, "structural_tag", tag(schema))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"quote": 1}, r"structures\[0\].quote must be a string, not empty"),
        ({"quote": ""}, r"structures\[0\].quote must be a string, not empty"),
        ({"quote": "~", "members": []}, r"structures\[0\] must be given a quote or members"),
    ],
)
def test_quotes_are_texts_of_structures_with_a_schema(
    grammars: Grammars, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        compiled(grammars, "structural_tag", {"structures": [{"begin": "<", **given}]})
