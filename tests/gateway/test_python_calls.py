"""Calls as in a program in Python."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.json_reading import MOST_DEPTH
from minisgl_gateway.python_calls import LFM, spelled
from minisgl_gateway.tool_calls import CallReader

from tests.gateway.test_tool_calls import pieces_of, read

WEATHER: Final = CalledTool("weather", '{"city": "Bogotá"}')
NOW: Final = CalledTool("now", "{}")
CALL: Final = '<|tool_call_start|>[weather(city="Bogotá")]<|tool_call_end|>'
BOTH: Final = "<|tool_call_start|>[weather(city='Bogotá'), now()]<|tool_call_end|>"
JSON: Final = '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Bogotá"}}'


def test_texts_and_calls_in_order() -> None:
    for text, parts in [
        ("Hello.", ["Hello."]),
        (CALL, [WEATHER]),
        (BOTH, [WEATHER, NOW]),
        (f"{CALL}I look.", [WEATHER, "I look."]),
        (CALL.replace(")]", "), ]"), [WEATHER]),
        (f"I look.\n{BOTH}\n", ["I look.", WEATHER, NOW]),
        (f"{CALL}{BOTH}", [WEATHER, WEATHER, NOW]),
        (f"{JSON}]<|tool_call_end|>", [WEATHER]),
        (f'{JSON}, {{"name": "now"}}]<|tool_call_end|>', [WEATHER, NOW]),
        (f"<|tool_call_start|>{CALL}", ["<|tool_call_start|>", WEATHER]),
        (
            f"<|tool_call_start|>[weather(city={CALL}",
            ["<|tool_call_start|>[weather(city=", WEATHER],
        ),
        ("a < b, and <|tool", ["a < b, and <|tool"]),
        (f"So: {CALL[:-1]}", ["So:", WEATHER, "<|tool_call_end|"]),
    ]:
        assert read(LFM, text) == parts
        assert read(LFM, *text) == parts


def test_a_call_that_is_cut_is_no_text_if_calls_are_all_that_there_can_be() -> None:
    for end in range(len(CALL)):
        reader = CallReader(LFM, calls_alone=True)
        found = reader.push(BOTH + CALL[:end]) + reader.finish()
        assert found in ([WEATHER, NOW], [WEATHER, NOW, WEATHER])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("a='', b=\"\"", {"a": "", "b": ""}),
        (
            "a=5, b=-0.5e-07,c = 12345678901234567890",
            {"a": 5, "b": -5e-8, "c": 12345678901234567890},
        ),
        ("a=True, b=False, c=None", {"a": True, "b": False, "c": None}),
        ("a=true, b=false, c=null", {"a": True, "b": False, "c": None}),
        ("a=[], b={}, c=[1, 'x', {\"d\": [[]]}]", {"a": [], "b": {}, "c": [1, "x", {"d": [[]]}]}),
        ("a={'b': {\"c\": None}}", {"a": {"b": {"c": None}}}),
        (
            r"""a='it\'s "so"', b="\\n\n\t\u00e9\x41\q\"" """,
            {"a": 'it\'s "so"', "b": '\\n\n\téA\\q"'},
        ),
        ("a='it's so', b='1'", {"a": "it's so", "b": "1"}),
        ("a='two\nlines, [f(x)]'", {"a": "two\nlines, [f(x)]"}),
        (r"a='\ud83c\udf27 \ud83d'", {"a": "🌧 \ufffd"}),
        ("$a-b.c=1", {"$a-b.c": 1}),
        ("größe=1, 城市 = '東京', a/b=2", {"größe": 1, "城市": "東京", "a/b": 2}),
        ("a=1,", {"a": 1}),
        ("a=[1, ], b=['x',], c={'d': [[],],},\n", {"a": [1], "b": ["x"], "c": {"d": [[]]}}),
    ],
)
def test_arguments(written: str, arguments: dict[str, Any]) -> None:
    text = f"<|tool_call_start|>[f({written})]<|tool_call_end|>"
    (called,) = read(LFM, text)
    assert isinstance(called, CalledTool)
    assert json.loads(called.arguments) == arguments
    assert read(LFM, *text) == [called]


@pytest.mark.parametrize(
    "written",
    [
        *("", "f", "f(", "f(1)", "f(a)", "f(a=)", "f(a=1", "f(a=1 b=2)", "f(=1)", "()", "f(,)"),
        *("f(a='x)", "f(a=x)", "f(a=01)", "f(a={b: 1})", "f(a={1: 2})", "f(a=(1))", "f(a=1,,)"),
        *("f();", "f(),,", "f g()", '{"arguments": {}}', "f(a={'b'= 1})", "f('a': 1)"),
        *(",", "f(a=[,])", "f(a={,})"),
    ],
)
def test_what_is_no_call_stays_text(written: str) -> None:
    text = f"So: <|tool_call_start|>[{written}]<|tool_call_end|> or not"
    rest = [part for part in read(LFM, text) if not isinstance(part, CalledTool)]
    assert "".join(map(str, rest)).startswith("So:")
    assert len(rest[-1]) > len(" or not")
    assert read(LFM, *text) == read(LFM, text)


@pytest.mark.parametrize(
    "argument", ['"say "yes")"', '"he said "hi", then left"', '["he said "hi", then left"]']
)
def test_a_call_whose_argument_would_be_cut_stays_text(argument: str) -> None:
    text = f"<|tool_call_start|>[f(a={argument})]<|tool_call_end|>"
    assert read(LFM, text) == [text]
    assert read(LFM, *text) == [text]


def test_a_call_nested_too_deeply_stays_text() -> None:
    for depth, is_call in ((MOST_DEPTH - 1, True), (MOST_DEPTH, False), (100_000, False)):
        nested = "[" * depth + "1" + "]" * depth
        text = f"<|tool_call_start|>[f(x={nested})]<|tool_call_end|>"
        assert (read(LFM, text) != [text]) == is_call


VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab:", max_size=3), inner),
    max_leaves=6,
) | st.text("ab\\\n'\"é,)=🌧")


@given(
    arguments=st.dictionaries(st.text("abc_éß城/", min_size=1), VALUES, max_size=4),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_calls_are_read_as_they_are_spelled(arguments: dict[str, Any], cuts: list[int]) -> None:
    functions = [{"name": "f", "arguments": json.dumps(arguments)}, {"name": "g"}]
    text = spelled(functions)
    f, g = read(LFM, *pieces_of(text, cuts))
    assert isinstance(f, CalledTool) and g == CalledTool("g", "{}")
    assert (f.name, json.loads(f.arguments)) == ("f", arguments)


def test_arguments_that_are_no_object_are_told_as_they_are() -> None:
    assert "[f(oh), g([1])]" in spelled(
        [{"name": "f", "arguments": "oh"}, {"name": "g", "arguments": "[1]"}]
    )


@pytest.mark.parametrize("size", [3, 10_000_000])
def test_hostile_texts_are_read_in_bounded_steps(size: int) -> None:
    begun = "<|tool_call_start|>[f(x="
    for text in (begun * 4_000, begun + "[" * 40_000, begun + "'" * 40_000, begun + '"\\' * 20_000):
        reader = CallReader(LFM)
        parts = [
            part
            for begin in range(0, len(text), size)
            for part in reader.push(text[begin : begin + size])
        ]
        parts += reader.finish()
        assert "".join(map(str, parts)) == text
