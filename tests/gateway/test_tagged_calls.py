"""Calls whose arguments are written one by one between tags, as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_gateway import tagged_calls
from minisgl_gateway.call_syntax import CalledTool, Syntax
from minisgl_gateway.json_reading import MOST_DEPTH
from minisgl_gateway.tool_calls import CallReader
from minisgl_gateway.tools import Tool

from minisgl_backend.text.template import ChatTemplate
from tests.fakes import chat_templates
from tests.gateway.test_tool_calls import pieces_of, read

SyntaxOf = Callable[[Iterable[Tool]], Syntax]
WEATHER: Final = CalledTool("weather", '{"city": "Bogotá"}')
NOW: Final = CalledTool("now", "{}")
SYNTAXES: Final[dict[str, SyntaxOf]] = {
    "qwen": tagged_calls.qwen,
    "glm": tagged_calls.glm,
    "minimax": tagged_calls.minimax,
    "seed": tagged_calls.seed,
}
CALLS: Final = {
    "qwen": "<tool_call>\n<function=weather>\n<parameter=city>\nBogotá\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bogotá</arg_value>\n"
    "</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bogotá'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "seed": "<seed:tool_call>\n<function=weather>\n<parameter=city>Bogotá</parameter>\n"
    "</function>\n</seed:tool_call>",
}
SHORT: Final = {
    "qwen": "<tool_call><function=weather><parameter=city>Bogotá</parameter></function>"
    "</tool_call>",
    "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>Bogotá</arg_value></tool_call>",
    "minimax": '<minimax:tool_call><invoke name="weather"><parameter name="city">Bogotá'
    "</parameter></invoke></minimax:tool_call>",
    "seed": "<seed:tool_call><function=weather><parameter=city>Bogotá</parameter></function>"
    "</seed:tool_call>",
}
EMPTY: Final = {
    "qwen": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>now\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "seed": "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
}


@pytest.mark.parametrize("name", SYNTAXES)
def test_texts_and_calls_in_order(name: str) -> None:
    syntax, call = SYNTAXES[name](()), CALLS[name]
    (opening,), closing = syntax.openings, syntax.closing
    cut = call[: call.rindex(closing) + 3]
    for text, parts in [
        ("Hello.", ["Hello."]),
        (call, [WEATHER]),
        (SHORT[name], [WEATHER]),
        (EMPTY[name], [NOW]),
        (f"I look.\n\n{call}", ["I look.", WEATHER]),
        (f"{call} Done.", [WEATHER, " Done."]),
        (f"{call}\n{EMPTY[name]}\n", [WEATHER, NOW]),
        (f"{opening}{call}", [opening, WEATHER]),
        (f"a < b, and {opening[:5]}", [f"a < b, and {opening[:5]}"]),
        (f"So: {cut}", [f"So: {cut}"]),
    ]:
        assert read(syntax, text) == parts
        assert read(syntax, *text) == parts
    assert read(syntax, call[: call.rindex(closing)], closed=True) == [WEATHER]
    for end in range(len(call)):
        begun = call[:end]
        reader = CallReader(syntax, calls_alone=True)
        found = reader.push(f"{call}\n{begun}") + reader.finish()
        assert found == [WEATHER] * (1 + begun.count(closing))


def test_several_calls_between_the_same_tags() -> None:
    opening, closing = "<minimax:tool_call>", "</minimax:tool_call>"
    weather, now = (
        of["minimax"].removeprefix(opening).removesuffix(closing) for of in (CALLS, EMPTY)
    )
    for text, parts in [
        (f"{opening}{weather}{now}{closing} Done.", [WEATHER, NOW, " Done."]),
        (f"{opening}{weather}{weather[:20]}", [WEATHER, f"\n{weather[:20]}"]),
        (f"{opening}{weather} So {now}{closing}", [WEATHER, f"\n So {now}{closing}"]),
    ]:
        for pieces in ([text], text):
            assert read(tagged_calls.minimax(), *pieces) == parts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("minimax", "<minimax:tool_call></minimax:tool_call>"),
        ("minimax", "<minimax:tool_call><invoke name=now></invoke></minimax:tool_call>"),
        ("minimax", '<minimax:tool_call><invoke name=""></invoke></minimax:tool_call>'),
        ("minimax", '<minimax:tool_call><invoke name="now">So</invoke></minimax:tool_call>'),
        ("seed", "<seed:tool_call><function=now></function></tool_call>"),
        ("qwen", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        ("qwen", "<tool_call><function=></function></tool_call>"),
        ("qwen", "<tool_call><function=a\nb></function></tool_call>"),
        ("qwen", f"<tool_call><function={'a' * 300}></function></tool_call>"),
        ("qwen", "<tool_call><function=now></tool_call>"),
        ("qwen", "<tool_call><function=now>So</function></tool_call>"),
        ("qwen", "<tool_call><function=now></function>So</tool_call>"),
        ("qwen", CALLS["qwen"].replace("<parameter=city>\nBogotá\n</parameter>\n", "x")),
        ("qwen", CALLS["qwen"].replace("</function>", "<parameter=city>a</parameter></function>")),
        ("glm", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        ("glm", "<tool_call></tool_call>"),
        ("glm", "<tool_call>now\nSo</tool_call>"),
        ("glm", CALLS["glm"].replace("</tool_call>", CALLS["glm"][19:])),
    ],
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert read(SYNTAXES[name](()), f"So: {text} or not") == [f"So: {text} or not"]


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_value_may_hold_tags(name: str) -> None:
    """Unless what comes behind them is what comes behind a value."""
    for value in (
        "<tool_call>",
        "</tool_call> </parameter> </arg_value>",
        "</parameter></parameter> </arg_value></arg_value>",
        "if a < b:\n    print('<tool_call><function=f><parameter=x><arg_key>')\n\n",
        "a</parameter></functio</arg_value></tool_cal",
        "\n",
        "",
        " x ",
    ):
        text = CALLS[name].replace("Bogotá", value)
        (called,) = read(SYNTAXES[name](()), text)
        assert isinstance(called, CalledTool)
        assert json.loads(called.arguments) == {"city": value}
        assert read(SYNTAXES[name](()), *text) == [called]


PROPERTIES: Final = {
    "text": {"type": "string"},
    "maybe": {"type": ["string", "null"]},
    "other": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "word": {"enum": ["1", "2"]},
    "constant": {"const": "7"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "choice": {"enum": [1, "two"]},
    "list": {"type": "array"},
    "tree": {"$ref": "#/$defs/tree~1s"},
    "both": {"allOf": [{"minimum": 1}, {"type": "integer"}]},
    "loop": {"$ref": "#/properties/loop"},
    "spaced": {"$ref": "#/$defs/My%20Type"},
    "listed": {"$ref": "#/properties/choices/anyOf/1"},
    "choices": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "lost": {"$ref": "#/nowhere"},
    "beyond": {"$ref": "#/properties/choices/anyOf/2"},
    "far beyond": {"$ref": f"#/properties/choices/anyOf/{'9' * 9999}"},
    "anchor": {"$ref": "#anchor"},
    "foreign": {"$ref": "https://example.org/schema"},
    "any": True,
}
DEFINITIONS: Final = {"tree/s": {"type": "object"}, "My Type": {"type": "string"}}
TYPED: Final = Tool("typed", parameters={"properties": PROPERTIES, "$defs": DEFINITIONS})


_ENDS: Final = "</parameter></function> </arg_value></tool_call>"
"""What would end a value and the call, if it were not in a string of a list."""


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "true", "true"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", '"quoted"', '"quoted"'),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "5", "5"),
        ("other", "null", None),
        ("other", "nullify", "nullify"),
        ("word", "1", "1"),
        ("constant", "7", "7"),
        ("count", "5", 5),
        ("count", " 5\n", 5),
        ("count", "-12345678901234567890", -12345678901234567890),
        ("count", "5.5", "5.5"),
        ("count", "five", "five"),
        ("share", "5", 5),
        ("share", "5.5e1", 55.0),
        ("share", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("choice", "1", 1),
        ("choice", "two", "two"),
        ("list", '[1, "a", null]', [1, "a", None]),
        ("list", "[1,", "[1,"),
        ("list", f'["{_ENDS}", 1]', [_ENDS, 1]),
        ("list", f' ["a \\\\", "\\"{_ENDS}"]', ["a \\", f'"{_ENDS}']),
        ("list", '["no end\n', '["no end\n'),
        ("count", '"', '"'),
        ("list", "[1] [2]", "[1] [2]"),
        ("list", "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), None),
        ("tree", '{"a": {"b": []}}', {"a": {"b": []}}),
        ("tree", '"a"', '"a"'),
        ("both", "7", 7),
        ("loop", "7", 7),
        ("spaced", "7", "7"),
        ("listed", "7", "7"),
        ("lost", "7", 7),
        ("beyond", "7", 7),
        ("far beyond", "7", 7),
        ("anchor", "7", 7),
        ("foreign", "7", 7),
        ("any", "7", 7),
        ("any", "seven", "seven"),
        ("any", "", ""),
        ("unknown", "07", "07"),
        ("unknown", "7", 7),
    ],
)
def test_schemas_tell_numbers_from_strings(name: str, text: str, value: Any) -> None:
    """What is none of the schema's types is a string: the caller will see that it does not fit."""
    wants_text = value is None and text.startswith("[")
    for call in (
        f"<tool_call><function=typed><parameter={name}>\n{text}\n</parameter></function>"
        "</tool_call>",
        f"<tool_call>typed\n<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>",
    ):
        syntax = tagged_calls.qwen if "<function" in call else tagged_calls.glm
        (called,) = read(syntax([TYPED]), call)
        assert isinstance(called, CalledTool)
        assert json.loads(called.arguments) == {name: text if wants_text else value}


def test_a_tool_without_a_schema_takes_what_is_written() -> None:
    """Or with one that shows no type, whatever it is."""
    text = CALLS["qwen"].replace("Bogotá", "7")
    shown: list[Any] = [5, None, [], {}, {"enum": 5}, {"allOf": 5}, {"anyOf": []}, {"type": [5]}]
    tools = [Tool("weather", parameters={"properties": {"city": schema}}) for schema in shown]
    for tool in (Tool("weather"), Tool("weather", parameters={"properties": 5}), *tools):
        assert read(tagged_calls.qwen([tool]), text) == [CalledTool("weather", '{"city": 7}')]
    assert read(tagged_calls.qwen(), text) == [CalledTool("weather", '{"city": 7}')]


def test_each_reference_of_a_schema_is_followed_once() -> None:
    names = [f"n{index}" for index in range(40)]
    defs: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{behind}"}] * 30} for name, behind in pairwise(names)
    }
    parameters = {
        "properties": {"city": {"$ref": "#/$defs/n0"}},
        "$defs": {**defs, names[-1]: {"type": "string"}},
    }
    tool, text = Tool("weather", parameters=parameters), CALLS["qwen"].replace("Bogotá", "7")
    assert read(tagged_calls.qwen([tool]), text) == [CalledTool("weather", '{"city": "7"}')]


def test_halves_of_surrogate_pairs_cannot_be_encoded_and_are_replaced() -> None:
    text = CALLS["qwen"].replace("Bogotá", r'["\ud83d"]')
    assert read(tagged_calls.qwen(), text) == [CalledTool("weather", r'{"city": ["\ufffd"]}')]


@pytest.mark.parametrize(
    ("name", "template", "end"),
    [
        ("qwen", "QWEN3_CODER", "<|im_end|>"),
        ("qwen", "STEP_3_5", "<|im_end|>"),
        ("glm", "GLM_4_5", ""),
        ("glm", "LING_3", "<|role_end|>"),
        ("minimax", "MINIMAX_M2", "[e~["),
        ("seed", "SEED_OSS", "<seed:eos>"),
    ],
)
def test_what_a_template_writes_is_read(name: str, template: str, end: str) -> None:
    arguments: dict[str, Any] = {
        "text": "two\nlines, <b>and tags</b>",
        "word": "2",
        "maybe": None,
        "count": 5,
        "share": 0.25,
        "flag": True,
        "list": [1, {"a": "ä"}],
        "tree": {},
    }
    call = {"type": "function", "function": {"name": "typed", "arguments": arguments}}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call, call]}
    rendered = ChatTemplate(getattr(chat_templates, template), {}, max_chars=10**6).render(
        [message], None, {}
    )
    if end:
        rendered = rendered[: rendered.index(end)]
    _, *calls = read(SYNTAXES[name]([TYPED]), rendered)
    assert len(calls) == 2
    for called in calls:
        assert isinstance(called, CalledTool) and called.name == "typed"
        assert json.loads(called.arguments) == arguments


TAGS: Final = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "<parameter=b>",
    ),
    *(
        "</parameter>",
        "f",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<minimax:tool_call>",
        '<invoke name="f">',
        '<parameter name="a">',
        "</invoke>",
        "</minimax:tool_call>",
        "\n",
        " ",
        "<",
    ),
]
AROUND: Final = {
    **dict.fromkeys(("qwen", "glm"), "<tool_call>((?!</tool_call>).)*</tool_call>"),
    "minimax": "(<minimax:tool_call>)?<invoke((?!</invoke>).)*</invoke>(</minimax:tool_call>)?",
    "seed": "<seed:tool_call>((?!</seed:tool_call>).)*</seed:tool_call>",
}
"""A call, without blanks, as a regular expression."""
PARTS = st.one_of(
    st.sampled_from([*CALLS.values(), *SHORT.values(), *EMPTY.values()]),
    st.sampled_from(TAGS),
    st.text(alphabet="a<>/ =_\n5", max_size=6),
)


@pytest.mark.parametrize("name", SYNTAXES)
def test_the_pattern_of_a_call_spans_no_text_between_two(name: str) -> None:
    for call in (CALLS[name], SHORT[name], EMPTY[name]):
        call = "".join(call.split())
        assert re.fullmatch(AROUND[name], call)
        assert not re.fullmatch(AROUND[name], f"{call}lost{call}")
        assert not re.fullmatch(AROUND[name], call + call)


@pytest.mark.parametrize("name", SYNTAXES)
@given(parts=st.lists(PARTS, max_size=20), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_cuts_do_not_matter_and_text_outside_of_calls_is_kept(
    name: str, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    syntax = SYNTAXES[name](())
    found = read(syntax, *pieces_of(text, cuts))
    assert found == read(syntax, text)
    pattern = ""
    for part in found:
        if isinstance(part, str):
            pattern += re.escape("".join(part.split()))
        else:
            assert isinstance(json.loads(part.arguments), dict)
            pattern += AROUND[name]
    assert re.fullmatch(pattern, "".join(text.split()))


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("size", [3, 10_000_000])
def test_hostile_texts_are_read_in_bounded_steps(name: str, size: int) -> None:
    call = CALLS[name]
    closings = re.findall("</[^>]*>", call)
    for text in (
        SYNTAXES[name](()).openings[0] * 8_000,
        call[: call.index("Bog")] * 2_000,
        call[:-1] * 2_000,
        *(call.replace("Bog", f"{closing}\n" * 8_000) for closing in closings),
        *(call.replace("Bog", f"{closing}<" * 8_000) for closing in closings),
        call.replace("Bog", "</parameter></arg_value>" + " \n" * 40_000),
    ):
        reader = CallReader(SYNTAXES[name](()))
        found: list[str | CalledTool] = []
        for begin in range(0, len(text), size):
            found += reader.push(text[begin : begin + size])
        found += reader.finish()
        assert sum(len(part) if isinstance(part, str) else 1 for part in found) <= len(text)
