"""Every text that the masks allow follows its grammar, and what follows it is allowed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_backend.errors import InvalidRequest, RequestError
from minisgl_backend.grammar.matchers import AnswerState, Batch, Grammars
from minisgl_backend.text.tokenizer_files import load_definition
from tests.grammar.matching import EOS, FOLDER, VOCABULARY, allowed, compiled, follow, walk
from tests.grammar.schemas import SCHEMAS, closed


def test_without_an_end_token_a_special_one_ends_an_answer(tmp_path: Path) -> None:
    """The token 0 has a text, which must not follow the form."""
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_bytes())
    special, vocabulary = tokenizer["added_tokens"][0], tokenizer["model"]["vocab"]
    text = VOCABULARY.names[500]
    assert special["id"] == 0 and text is not None
    special["id"] = 500
    vocabulary |= {text: 0, special["content"]: 500}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    made = Grammars(lambda: load_definition(tmp_path), vocab_size=2048, eos_token_ids=())
    matcher = compiled(made, "regex", "a[bc]*")
    matcher.inner.consume_tokens([VOCABULARY.pieces.index(b"a")])
    found = allowed(made, matcher)
    made.close()
    assert 1 in found and 0 not in found


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_an_answer_that_ends_is_valid(
    grammars: Grammars, schema: dict[str, Any], seed: int
) -> None:
    matcher = compiled(grammars, "json_schema", schema)
    text = walk(grammars, matcher, random.Random(seed))
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "expression", ["[a-z]{3,8}@[a-z]+[.]com", r"\d+(,\d+)*", "(yes|no)( really)?", "[äöü]+|日本?"]
)
def test_expressions_match_as_a_whole(grammars: Grammars, expression: str) -> None:
    for seed in range(8):
        matcher = compiled(grammars, "regex", expression)
        text = walk(grammars, matcher, random.Random(seed))
        assert text is None or re.fullmatch(expression, text)


def test_a_choice_is_one_of_its_strings(grammars: Grammars) -> None:
    choices = ["Paris", "Par", 'a "quote"', "new\nline", "ünï", "back\\slash", "<|im_end|>\x7f"]
    seen = set()
    for seed in range(60):
        matcher = compiled(grammars, "choice", choices)
        seen.add(walk(grammars, matcher, random.Random(seed)))
    assert seen <= set(choices) and len(seen) > 3


def test_a_choice_may_have_thousands_of_strings(grammars: Grammars) -> None:
    choices = [f"number {number}" for number in range(5_000)]
    for wanted in ("number 7", "number 77", "number 4999"):
        assert follow(grammars, compiled(grammars, "choice", choices), wanted)
    assert not follow(grammars, compiled(grammars, "choice", choices), "number 5000")


@pytest.mark.parametrize("name", ["<|im_end|>", "<|im_start|>"])
def test_a_text_may_be_spelled_like_a_special_token(grammars: Grammars, name: str) -> None:
    for kind, source in (
        ("choice", [f"a{name}b"]),
        ("json_schema", {"const": f"a{name}b"}),
        ("regex", f"a{re.escape(name)}b"),
    ):
        text = walk(grammars, compiled(grammars, kind, source), random.Random(0))
        assert text is not None and text.strip('"') == f"a{name}b"


def test_grammars_of_both_dialects(grammars: Grammars) -> None:
    lark = 'start: item ("," item)*\nitem: /[0-9]/ | "x"'
    gbnf = 'root ::= item ("," item)*\nitem ::= [0-9] | "x"'
    for source in (lark, gbnf):
        for seed in range(5):
            matcher = compiled(grammars, "grammar", source)
            text = walk(grammars, matcher, random.Random(seed))
            assert text is None or re.fullmatch("[0-9x](,[0-9x])*", text)


@pytest.mark.parametrize(
    ("source", "right"),
    [
        (r'root ::= "\u00e4\\u00e4\U0001F600"', r"ä\u00e4😀"),
        (r'root ::= [^\u0000-\u0060]+ "\u000a" [\u0391-\u03C9]', "az\nβ"),
        (r'start: "\u00e4" /\u00e4/', "ää"),
    ],
)
def test_codes_of_characters(grammars: Grammars, source: str, right: str) -> None:
    assert follow(grammars, compiled(grammars, "grammar", source), right)
    assert not follow(grammars, compiled(grammars, "grammar", source), f"{right[:-1]}u")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (  # Rust's enums, by reference
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}],
                "$defs": {
                    "a": closed(a={"type": "array", "items": {"$ref": "#"}}),
                    "b": closed(b={"type": "integer"}),
                },
            },
            ['{"a": [{"b": 1}, null]}', "null"],
            ['{"a": 1}', '{"a": [], "b": 1}'],
        ),
        (  # pydantic's dict[Color, int]
            {
                "type": "object",
                "additionalProperties": {"type": "integer"},
                "propertyNames": {"$ref": "#/$defs/color"},
                "$defs": {"color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}},
            },
            ["{}", '{"blue": 2}', '{"red": 1, "blue": 2}'],
            ['{"green": 1}', '{"red": "x"}'],
        ),
        (  # zod's records
            {
                "type": "object",
                "propertyNames": {"type": "string", "pattern": "^[a-c]+$"},
                "additionalProperties": {"propertyNames": {"type": "string"}, "type": "object"},
            },
            ['{"ab": {"x": 1}}'],
            ['{"d": {}}', '{"a": 1}'],
        ),
        (
            {"type": "array", "items": {"format": "path", "type": "string"}, "uniqueItems": False},
            ['["a", "a"]'],
            ["[1]"],
        ),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.25", "0.001"], ["0"]),
        ({"type": "number", "exclusiveMinimum": 99, "maximum": 99.5}, ["99.25"], ["99"]),
        ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 1}, ["0.9", "0.5"], ["1"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5"], ["0", "-0"]),
        ({"type": "string", "pattern": '^[^"]*$'}, ['"a"', r'"\\"', '""'], [r'"a\"b"']),
        ({"type": "string", "pattern": r"^[^/\\]+$"}, [r'"a\"b"'], ['"/"', r'"a\\b"']),
        ({"enum": [2**53, 2**60]}, [str(2**53), str(2**60)], []),
    ],
)
def test_schemas_in_words_that_are_enforced(
    grammars: Grammars, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    for text in (*right, *wrong):
        matcher = compiled(grammars, "json_schema", schema)
        assert follow(grammars, matcher, text) == (text in right), text


TAG = {
    "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
    "at_least_one": True,
}


@pytest.mark.parametrize(
    ("kind", "source", "around"),
    [
        ("json_schema", {"type": "object"}, ("", "")),
        ("json_object", "", ("", "")),
        ("structural_tag", TAG, ("<a>", "</a>")),
    ],
)
def test_white_space_in_json_is_bounded(
    grammars: Grammars, kind: str, source: Any, around: tuple[str, str]
) -> None:
    before, after = around
    value = {"a": [1, {"b": "x  y"}], "c": None}
    for style in ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 8}):
        text = json.dumps(value, **style)
        assert follow(grammars, compiled(grammars, kind, source), before + text + after)
    for text in ('{"a":  1}', '{"a": 1\n\n}', "{\n" + " " * 41 + '"a": 1}'):
        assert not follow(grammars, compiled(grammars, kind, source), before + text + after)


def test_a_schema_may_say_what_white_space_it_has(grammars: Grammars) -> None:
    for guidance, fits in (
        ({"whitespace_flexible": False}, ['{"a":1}']),
        ({"whitespace_pattern": "[ ]{0,2}"}, ['{"a":1}', '{"a": 1}', '{"a":  1}']),
    ):
        schema = {"type": "object", "x-guidance": guidance}
        texts = ['{"a":1}', '{"a": 1}', '{"a":  1}', '{"a":\n1}']
        found = [t for t in texts if follow(grammars, compiled(grammars, "json_schema", schema), t)]
        assert found == fits


def test_a_structural_tag_binds_what_follows_its_trigger(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tag = {
        "structures": [
            {"begin": "<call=weather>", "schema": schema, "end": "</call>"},
            {"begin": "<call=time>", "schema": {"type": "integer"}, "end": "</call>"},
        ],
        "triggers": ["<call="],
    }

    def is_allowed(text: str) -> bool:
        return follow(grammars, compiled(grammars, "structural_tag", tag), text)

    assert is_allowed("no call at all")
    assert is_allowed('well <call=weather>{"city":"Paris"}</call> and <call=time>12</call>.')
    assert not is_allowed('<call=weather>{"city":"Berlin"}</call>')
    assert not is_allowed("<call=news>")
    assert not is_allowed("<call=time>12")


_CALL: Final = {"begin": "<call=f>", "schema": {"enum": [1, 2]}, "end": "</call>"}
_TURN: Final = {"begin": "<call=g>", "schema": {"type": "null"}, "end": "</call>"}
_BOTH: Final = {"structures": [_CALL, _TURN], "triggers": ["<call="]}
_F, _G = "<call=f>1</call>", "<call=g>null</call>"
_SHAPES: Final[dict[str, tuple[dict[str, Any], list[str], list[str]]]] = {
    "free text": ({}, [f"a{_F}b{_G}", "a", _F], ["<call=f>3</call>"]),
    "at least one": (
        {"at_least_one": True},
        [_F, _F + _G],
        ["", "a", f"a{_F}", f"{_F}a", f"{_F} {_G}"],
    ),
    "separated": (
        {"at_least_one": True, "separator": ",\n"},
        [_F, f"{_F},\n{_G},\n{_F}"],
        [_F + _G, f"{_F},\n", f"{_F}, {_F}"],
    ),
    "separated in one of several ways": (
        {"at_least_one": True, "separator": ["\n", "", ", "]},
        [_F, f"{_F}{_G}\n{_F}, {_G}"],
        [f"{_F}\n", f"{_F}\n\n{_G}", f"{_F},{_G}"],
    ),
    "the first alone": (
        {"stop_after_first": True},
        ["a", f"a{_F}", _G],
        [f"{_F}a", _F + _G, "<call=f>3</call>"],
    ),
    "exactly one": (
        {"at_least_one": True, "stop_after_first": True},
        [_F, _G],
        ["", "a", _F + _G, f"a{_F}"],
    ),
}


@pytest.mark.parametrize("name", _SHAPES)
def test_shapes_of_structural_tags(grammars: Grammars, name: str) -> None:
    flags, right, wrong = _SHAPES[name]
    tag = {**_BOTH, **flags}

    def is_allowed(text: str) -> bool:
        return follow(grammars, compiled(grammars, "structural_tag", tag), text)

    assert [text for text in right if not is_allowed(text)] == []
    assert [text for text in wrong if is_allowed(text)] == []


def test_structures_alone_need_no_trigger(grammars: Grammars) -> None:
    alone = {"structures": [_CALL], "at_least_one": True}
    assert follow(grammars, compiled(grammars, "structural_tag", alone), _F)


_MEMBERS: Final = {
    "begin": "<call>",
    "members": [
        {"begin": "<name>", "end": "</name>"},
        {"begin": "<days>", "schema": {"enum": [1, 2]}, "end": "</days>", "optional": True},
        {"begin": "<unit>", "choices": ["C", 'say "F"'], "end": "</unit>"},
        {"begin": "<note>", "end": "</name>", "optional": True},
    ],
    "end": "</call>",
}


@pytest.mark.parametrize("triggers", [[], ["<call"]])
def test_members_of_a_structure(grammars: Grammars, triggers: list[str]) -> None:
    tag = {"structures": [_MEMBERS], "at_least_one": not triggers, "triggers": triggers}
    right = [
        "<name>x</name><unit>C</unit>",
        '<name>two\nlines, </call>, <name> and "é"</name><days>2</days><unit>say "F"</unit>',
        "<name></name><unit>C</unit><note>a note</name>",
    ]
    wrong = [
        "<name>x<unit>C</unit>",  # the name does not end
        "<unit>C</unit>",
        "<name>x</name><days>3</days><unit>C</unit>",
        "<name>x</name><unit>K</unit>",
        "<name>x</name> <unit>C</unit>",
        "<name>x</name></name><unit>C</unit>",  # a text ends with its first end
        "<name>x</name><unit>C</unit><days>1</days>",
    ]
    around = "%s" if not triggers else "Well, %s."
    for texts, is_right in ((right, True), (wrong, False)):
        for text in texts:
            matcher = compiled(grammars, "structural_tag", tag)
            assert follow(grammars, matcher, around % f"<call>{text}</call>") == is_right, text


def test_a_lenient_structure_leaves_out_what_cannot_be_enforced(grammars: Grammars) -> None:
    schema = {"type": "integer", "not": {"const": 1}}
    structure = {"begin": "<", "schema": schema, "end": ">", "lenient": True}
    tag = {"structures": [structure], "at_least_one": True}
    for text, is_right in (("<1>", True), ("<x>", False)):
        matcher = compiled(grammars, "structural_tag", tag)
        assert follow(grammars, matcher, text) == is_right
    structure["schema"] = {"type": "integer", "enum": [2**53 + 1]}
    assert follow(grammars, compiled(grammars, "structural_tag", tag), f"<{2**53 + 1}>")


@pytest.mark.parametrize(
    ("pattern", "is_kept"),
    [
        (r"^(?!\.)(?!.*\.\.)[a-z.]+$", False),  # as in what zod writes for addresses of mail
        (r"^(?=a)[a-z]+$", False),
        (r"^(a)\1$", False),
        (r"^(?:b)(?P<x>c)$", True),
        (r"^b[(?=)]$", True),
        (r"^b\\(?:1)?$", True),
    ],
)
def test_a_lenient_structure_leaves_out_patterns_that_look_around(
    pattern: str, is_kept: bool, grammars: Grammars
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "pattern": {"$ref": "#/$defs/pattern"},
            "of": {"const": {"pattern": "(?=)"}},
        },
        "patternProperties": {"^(?=x)": {"type": "integer"}},
        "required": ["pattern", "of"],
        "$defs": {"pattern": {"type": "string", "pattern": pattern}},
    }
    structure = {"begin": "<", "schema": schema, "end": ">", "lenient": True}
    tag = {"structures": [structure], "at_least_one": True}
    for said, is_right in (('"a@b.c"', not is_kept), ("1", False)):
        matcher = compiled(grammars, "structural_tag", tag)
        text = f'<{{"pattern": {said}, "of": {{"pattern": "(?=)"}}}}>'
        assert follow(grammars, matcher, text) == is_right
    structure["lenient"] = False
    with pytest.raises(InvalidRequest, match="look-around"):
        compiled(grammars, "structural_tag", tag)


@pytest.mark.parametrize(
    ("kind", "source", "around"),
    [
        ("json_schema", True, ("", "")),
        ("structural_tag", {"structures": [{"begin": "<", "schema": True}]}, ("<", "")),
        (
            "structural_tag",
            {"structures": [{"begin": "<", "schema": True, "end": ">"}]},
            ("<", ">"),
        ),
        ("structural_tag", {"structures": [_CALL], "otherwise": True}, ("", "")),
    ],
)
def test_the_schema_true_takes_any_value(
    grammars: Grammars, kind: str, source: Any, around: tuple[str, str]
) -> None:
    if kind == "structural_tag":
        source = {**source, "at_least_one": True, "stop_after_first": True}
    before, after = around
    for text, is_right in (('{"a": [1, null]}', True), ("true", True), ("[1,", False)):
        matcher = compiled(grammars, kind, source)
        assert follow(grammars, matcher, before + text + after) == is_right


def test_a_trigger_may_be_a_special_token(grammars: Grammars) -> None:
    tag = {
        "structures": [{"begin": "<|im_start|>f", "schema": {"type": "null"}, "end": "<|im_end|>"}],
        "triggers": ["<|im_start|>"],
    }
    matcher = compiled(grammars, "structural_tag", tag)
    start, end = (VOCABULARY.names.index(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert start in allowed(grammars, matcher)
    for token in (start, VOCABULARY.pieces.index(b"f")):
        grammars.advance(Batch([matcher]), [token])
    while end not in (options := allowed(grammars, matcher)):
        token = max(options, key=lambda option: len(VOCABULARY.pieces[option]))
        assert VOCABULARY.pieces[token] and b"null".find(VOCABULARY.pieces[token]) >= 0
        grammars.advance(Batch([matcher]), [token])
    assert options == [end]


def test_before_the_grammar_all_but_the_end_is_allowed(grammars: Grammars) -> None:
    marker = VOCABULARY.names.index("<|im_start|>")
    matcher = compiled(grammars, "choice", ["x"], begins_after=marker)
    everything = set(range(len(VOCABULARY))) - {EOS}
    for token in (500, 700):
        masks = np.empty((1, grammars.num_words), np.int32)
        grammars.fill(Batch([matcher]), masks).result()
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        assert everything <= set(np.flatnonzero(bits)) and not bits[EOS]
        assert grammars.advance(Batch([matcher]), [token]) == {}
    assert grammars.advance(Batch([matcher]), [marker]) == {}
    assert [VOCABULARY.pieces[token] for token in allowed(grammars, matcher)] == [b"x"]


def test_stop_tokens_are_held_back_before_the_grammar_too(grammars: Grammars) -> None:
    matcher = compiled(
        grammars, "choice", ["x"], begins_after=500, min_tokens=2, stop_token_ids=(700,)
    )
    masks = np.empty((1, grammars.num_words), np.int32)
    for is_held in (True, True, False):
        grammars.fill(Batch([matcher]), masks).result()
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        assert bits[700] == (not is_held) and bits[701]
        assert grammars.advance(Batch([matcher]), [701]) == {}


def test_a_section_before_the_grammar_must_be_opened_by_the_first_token(
    grammars: Grammars,
) -> None:
    begin, end = 500, 700
    section = {"begins_after": end, "opened_by": begin}
    (x,) = allowed(grammars, compiled(grammars, "choice", ["x"]))
    without, with_one = (compiled(grammars, "choice", ["x"], **section) for _ in range(2))
    assert allowed(grammars, without) == sorted([x, begin])
    assert grammars.advance(Batch([without, with_one]), [x, begin]) == {0: AnswerState.COMPLETE}
    assert with_one.is_free
    for token in (begin, 3, end):
        assert grammars.advance(Batch([with_one]), [token]) == {}
    assert allowed(grammars, with_one) == [x]
    with_one.start_anew([])
    assert allowed(grammars, with_one) == sorted([x, begin])
    with_one.start_anew([begin, 3])
    assert with_one.is_free
    assert grammars.advance(Batch([with_one]), [end]) == {}
    assert grammars.advance(Batch([with_one]), [x]) == {0: AnswerState.COMPLETE}


@pytest.mark.parametrize("section", [{"begins_after": 10**6}, {"begins_after": 5, "opened_by": -1}])
def test_a_section_of_tokens_that_there_are_not(grammars: Grammars, section: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot begin after"):
        compiled(grammars, "choice", ["x"], **section)


@pytest.mark.parametrize(
    ("kind", "source", "complaint"),
    [
        ("json_schema", {"type": "object", "not": {}}, r"not.*at #/not"),
        (
            "json_schema",
            {"properties": {"a": {"items": {"uniqueItems": True}}}},
            "uniqueItems.*at #/properties/a/items/uniqueItems",
        ),
        (
            "json_schema",
            {"items": {"uniqueItems": True, "propertyNames": {}}, "uniqueItems": False},
            "^json_schema: uniqueItems is not supported, at #/items/uniqueItems$",
        ),
        ("json_schema", {"if": {}, "then": {}}, "^json_schema: if and then are not supported"),
        ("json_schema", "{", "must be JSON"),
        ("json_schema", [1], "must be an object"),
        ("json_schema", {"$ref": "#/$defs/none"}, r"'/\$defs/none' does not exist, at #/\$ref"),
        (
            "json_schema",
            {"properties": {"not": {"if": {}}}},
            "^json_schema: if .*at #/properties/not/if$",
        ),
        ("json_schema", {"items": {"type": "what"}}, "what, at #/items/type"),
        (
            "json_schema",
            {"properties": {"a": {"format": "x"}}},
            "format: x, at #/properties/a/format",
        ),
        ("json_schema", {"anyOf": [{"pattern": "(("}]}, "unclosed group, at #/anyOf/0/pattern"),
        ("json_schema", {"pattern": "[^a](?=b)"}, r"\[\^a\]\(\?=b\).*, at #/pattern"),
        (
            "json_schema",
            {"items": {"oneOf": [{}, {"const": 1}]}},
            "oneOf is supported only if its alternatives exclude each other, at #/items/oneOf$",
        ),
        (
            "json_schema",
            {"oneOf": [{"$ref": "#/$defs/a"}, {"type": [["a"]]}], "$defs": {"a": {}}},
            "type must be a string, at #/oneOf/1/type$",
        ),
        (
            "json_schema",
            {"items": {"properties": {"a": {}}, "minProperties": 1}},
            "only if all properties are required, at #/items/minProperties$",
        ),
        (
            "json_schema",
            {"type": "object", "properties": {"a": {}}, "required": ["a"]}
            | {"additionalProperties": False, "minProperties": 2},
            "Unsatisfiable schema: minProperties is greater than the number of properties$",
        ),
        (
            "json_schema",
            {"properties": {"a": {"minLength": -1}, "b": {"minLength": 0}}},
            "integer for 'minLength', got -1, at #/properties/a/minLength$",
        ),
        (
            "json_schema",
            {"items": {"minimum": "1"}, "minimum": 2},
            "Expected number for 'minimum', got \"1\", at #/items/minimum$",
        ),
        ("json_schema", {"items": {"required": ["b", 1]}}, "got 1, at #/items/required$"),
        ("json_schema", {"items": {"enum": 1}}, "enum must be an array, at #/items/enum$"),
        ("json_schema", {"items": {"type": ["null", 1]}}, "be a string, at #/items/type$"),
        ("json_schema", {"items": {"$ref": 1}}, r"must be a string, got 1, at #/items/\$ref$"),
        (
            "json_schema",
            {"properties": {"a": {"properties": {"b": 1}}, "c": {}}},
            "schema must be an object or boolean, at #/properties/a/properties/b$",
        ),
        (
            "json_schema",
            {"items": {"patternProperties": {"((": {}, "b": {"pattern": "c"}}}},
            "unclosed group, at #/items/patternProperties$",
        ),
        ("json_schema", {"items": {"multipleOf": 0}}, "multiple of, at #/items/multipleOf$"),
        ("json_schema", {"anyOf": [{"items": None}, {}]}, "or boolean, at #/anyOf/0/items$"),
        ("json_schema", {"$ref": "#"}, "allows no answer"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "nested too deeply"),
        ("json_schema", False, "one that some value follows, got false"),
        (
            "json_schema",
            {"type": "object", "properties": {"a": False, "b": False}, "required": ["a"]},
            "'a' is unsatisfiable, at #/properties/a, #/properties/b$",
        ),
        ("json_schema", {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": False}}, "at #/.defs/a"),
        (
            "json_schema",
            {"type": "array", "prefixItems": [{}, False], "minItems": 2},
            "at #/prefixItems/1",
        ),
        (
            "json_schema",
            {"type": "array", "items": {"allOf": [{}, False]}, "minItems": 1},
            "at #/items/allOf/1",
        ),
        (
            "structural_tag",
            {"structures": [{"begin": "<", "schema": False}], "triggers": ["<"]},
            r"structures\[0\].schema must be a JSON schema that some value follows, got false",
        ),
        (
            "structural_tag",
            {"structures": [_CALL], "at_least_one": True, "otherwise": False},
            "otherwise must be a JSON schema that some value follows, got false",
        ),
        (
            "structural_tag",
            {
                "structures": [
                    {"begin": "<", "schema": {"type": "array", "items": False, "minItems": 1}}
                ],
                "triggers": ["<"],
            },
            "at #/structures/0/schema/items",
        ),
        (
            "json_schema",
            {"properties": {"id": {"enum": [1, {"a": [2**53 + 1]}]}}},
            "integers beyond 2.*not supported, at #/properties/id/enum$",
        ),
        (
            "structural_tag",
            {"structures": [{"begin": "<", "schema": {"const": 10**400}}], "triggers": ["<"]},
            "at #/structures/0/schema/const$",
        ),
        ("json_schema", '{"enum": [0, {"a": [1e400]}]}', "1.8e308 are not supported, at #/enum$"),
        (
            "json_schema",
            '{"properties": {"a": {"default": -1E+400}}}',
            "1.8e308 are not supported, at #/properties/a/default$",
        ),
        ("json_schema", {"type": "integer", "maximum": 10**400}, "1.8e308 .* at #/maximum$"),
        (
            "structural_tag",
            '{"structures": [{"begin": "<", "schema": {"minimum": 1e309}, "lenient": true}], '
            '"triggers": ["<"]}',
            "1.8e308 are not supported, at #/structures/0/schema/minimum$",
        ),
        (
            "json_schema",
            f'{{"minimum": 1{"0" * 5000}}}',
            "JSON: an integer has thousands of digits$",
        ),
        ("json_schema", '{"enum": [-Infinity]}', "must be JSON: -Infinity is not a number of JSON"),
        (
            "json_schema",
            '{"items": {"type": "string", "type": "integer"}}',
            "^json_schema: a JSON schema has the key 'type' twice$",
        ),
        (
            "structural_tag",
            '{"structures": [], "structures": [], "triggers": []}',
            "a structural tag has the key 'structures' twice$",
        ),
        ("choice", '["\\ud800"]', "surrogate|utf-8"),
        ("regex", "\ud800", "surrogate|UTF-8"),
        ("json_schema", {"$ref": "https://example.org/schema"}, "example.org"),
        ("regex", "((", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", [], "at least one string"),
        ("choice", ["a", 1], "at least one string"),
        ("choice", "yes", "must be JSON"),
        ("grammar", "start: missing", 'unknown name: "missing"'),
        ("grammar", "root ::= (", "grammar is wrong|Expected|Failed"),
        ("structural_tag", {"structures": []}, "structures must be"),
        (
            "structural_tag",
            {"structures": [{"begin": "x"}], "triggers": ["<"]},
            r"structures\[0\].begin must be begun by a trigger",
        ),
        ("structural_tag", {**_BOTH, "at_least_one": 1}, "at_least_one must be true or false"),
        ("structural_tag", {**_BOTH, "separator": 1}, "separator must be a string"),
        ("structural_tag", {**_BOTH, "separator": []}, "or a list of strings, not empty"),
        ("structural_tag", {**_BOTH, "separator": ["", 1]}, "or a list of strings, not empty"),
        ("structural_tag", {**_BOTH, "separator": ","}, "separator must be given with at_least_on"),
        ("structural_tag", {**_BOTH, "stop": True}, "stop of a structural tag is not supported"),
        ("structural_tag", {"type": "text", **_BOTH}, "type must be structural_tag"),
        (
            "structural_tag",
            {"structures": [{"begin": "<", "schema": {"not": {}}}], "triggers": ["<"]},
            "not supported, at #/structures/0/schema/not",
        ),
        (
            "json_schema",
            {"x-guidance": {"lenient": True}, "not": {}},
            r"x-guidance\.lenient is not supported",
        ),
        ("json_schema", {"x-guidance": 1}, "x-guidance must be an object"),
        (
            "structural_tag",
            {
                "structures": [{"begin": "<", "schema": {"x-guidance": {"coerce_one_of": True}}}],
                "triggers": ["<"],
            },
            r"x-guidance\.coerce_one_of is not supported",
        ),
        (
            "structural_tag",
            {"structures": [{"begin": "<", "content": {}}], "triggers": ["<"]},
            r"structures\[0\].content of a structural tag is not supported",
        ),
        *(
            ("structural_tag", {"structures": [{"begin": "<", **given}], "triggers": ["<"]}, told)
            for given, told in (
                ({"members": 1}, r"structures\[0\].members must be a list"),
                ({"members": [], "schema": {}}, r"structures\[0\] must be given a schema or mem"),
                ({"members": [1]}, r"structures\[0\].members\[0\] must be an object"),
                ({"members": [{"begin": "x"}]}, r"members\[0\].end must be a string, not empty"),
                ({"members": [{"end": "x"}]}, r"members\[0\].begin must be a string"),
                ({"members": [{"begin": "x", "choices": []}]}, r"choices must be a list of str"),
                (
                    {"members": [{"begin": "x", "choices": ["y"], "schema": {}}]},
                    r"members\[0\] must be given a schema or choices, not both",
                ),
                (
                    {"members": [{"begin": "x", "regex": "y"}]},
                    r"members\[0\].regex of a structural tag is not supported",
                ),
                (
                    {"members": [{"begin": "x", "schema": {"not": {}}}]},
                    "not supported, at #/structures/0/members/0/schema/not",
                ),
            )
        ),
        (
            "structural_tag",
            {"structures": [{"begin": "<"}], "triggers": ["<", ">"]},
            r"triggers\[1\] must be the beginning of a structure",
        ),
        ("regex", "x" * 300_000, "at most 262144 bytes"),
    ],
)
def test_a_wrong_grammar_is_refused_with_its_place(
    grammars: Grammars, kind: str, source: Any, complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        compiled(grammars, kind, source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


HOSTILE: Final = {
    "rules that overflow a stack": (
        "grammar",
        "start: r0\n" + "\n".join(f'r{n}: "x" r{n + 1}' for n in range(9000)) + '\nr9000: "y"',
    ),
    "thousands of properties": (
        "json_schema",
        {"type": "object", "properties": {f"f{n}": {"type": "string"} for n in range(5000)}},
    ),
    "choices of everything": (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for a in "abc"]} for b in range(14)]},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_fails_alone(grammars: Grammars, name: str) -> None:
    kind, source = HOSTILE[name]
    with pytest.raises(InvalidRequest, match=r"too large|longer than"):
        compiled(grammars, kind, source)
    assert walk(grammars, compiled(grammars, "choice", ["ok"]), random.Random(0)) == "ok"


def test_a_state_that_explodes_fails_alone(grammars: Grammars) -> None:
    """Its mask would take too much work. The next answer with its grammar starts afresh."""
    for _ in range(2):
        heavy = compiled(grammars, "regex", "(.*a.{1,30}){20}")
        fine = compiled(grammars, "regex", "[ab]+")
        masks = np.empty((2, grammars.num_words), np.int32)
        a = VOCABULARY.pieces.index(b"a")
        for num_tokens in range(400):
            failed = grammars.fill(Batch([heavy, fine]), masks).result()
            assert 1 not in failed
            if failed:
                assert "too complex" in str(failed[0]) and num_tokens > 10
                break
            assert grammars.advance(Batch([heavy, fine]), [a, a]) == {}
        else:
            pytest.fail("the limits of a step were not reached")


def test_a_token_that_takes_too_much_work_is_told_from_a_wrong_one(grammars: Grammars) -> None:
    names = [f"{index}" for index in range(1100)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    heavy, fine = compiled(grammars, "json_schema", schema), compiled(grammars, "choice", ["a"])
    brace = VOCABULARY.pieces.index(b"{")
    states = grammars.advance(Batch([heavy, fine]), [brace, brace])
    assert states == {0: AnswerState.TOO_COMPLEX, 1: AnswerState.BROKEN}
