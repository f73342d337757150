"""Calls whose arguments are an object with bare keys and with marks around strings."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_gateway.bare_calls import GEMMA, QUOTE
from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.dialects.bare import Gemma4
from minisgl_gateway.json_reading import MOST_DEPTH
from minisgl_gateway.tool_calls import CallReader

from minisgl_backend.text.template import ChatTemplate
from tests.fakes import chat_templates
from tests.gateway.test_tool_calls import pieces_of, read

WEATHER: Final = CalledTool("weather", '{"city": "Bogotá"}')
NOW: Final = CalledTool("now", "{}")
CALL: Final = '<|tool_call>call:weather{city:<|"|>Bogotá<|"|>}<tool_call|>'
EMPTY: Final = "<|tool_call>call:now{}<tool_call|>"


def test_texts_and_calls_in_order() -> None:
    for text, parts in [
        ("Hello.", ["Hello."]),
        (CALL, [WEATHER]),
        (EMPTY, [NOW]),
        (f"I look.\n\n{CALL}", ["I look.", WEATHER]),
        (f"{CALL} Done.", [WEATHER, " Done."]),
        (f"{CALL}<b>", [WEATHER, "<b>"]),
        (f"{CALL}{EMPTY}{CALL}", [WEATHER, NOW, WEATHER]),
        (f"{CALL}\n{EMPTY}\n", [WEATHER, NOW]),
        (f"{CALL}, then {EMPTY}", [WEATHER, ", then", NOW]),
        (f"<|tool_call>{CALL}", ["<|tool_call>", WEATHER]),
        (f"{CALL}<|tool_call>{EMPTY}", [WEATHER, "<|tool_call>", NOW]),
        (f"<|tool_call>call:weather{{city:{EMPTY}", ["<|tool_call>call:weather{city:", NOW]),
        ("a < b, and <|tool", ["a < b, and <|tool"]),
        (f"So: {CALL[:-1]}", [f"So: {CALL[:-1]}"]),
        (f"{CALL}{CALL[:-1]}", [WEATHER, CALL[:-1]]),
    ]:
        assert read(GEMMA, text) == parts
        assert read(GEMMA, *text) == parts
    assert read(GEMMA, CALL.removesuffix("<tool_call|>"), closed=True) == [WEATHER]
    for end in range(len(CALL)):
        reader = CallReader(GEMMA, calls_alone=True)
        assert reader.push(CALL + CALL[:end]) + reader.finish() == [WEATHER]


def test_the_result_that_a_model_begins_behind_its_calls_is_no_text() -> None:
    for text, parts in [
        (f"I look.{CALL}{EMPTY}<|tool_response>", ["I look.", WEATHER, NOW]),
        (f"{CALL}\n<|tool_response>\n", [WEATHER]),
        (f"{CALL}<|tool_response>So", [WEATHER, "So"]),
        (f"{CALL}<|tool_resp", [WEATHER, "<|tool_resp"]),
        ("Write <|tool_response>.", ["Write <|tool_response>."]),
    ]:
        assert read(GEMMA, text) == parts
        assert read(GEMMA, *text) == parts


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('a:<|"|><|"|>', {"a": ""}),
        ('a:<|"|>say "hi",\n{b:[1]} <tool_call|><|"|>', {"a": 'say "hi",\n{b:[1]} <tool_call|>'}),
        ('a:<|"|>\\u00e9 <|"<|" |"|><|"|>', {"a": '\\u00e9 <|"<|" |"|>'}),
        ("a:5,b:-0.5e-07,c:12345678901234567890", {"a": 5, "b": -5e-8, "c": 12345678901234567890}),
        ("a:true,b:false,c:null", {"a": True, "b": False, "c": None}),
        ("a:True,b:False,c:None", {"a": True, "b": False, "c": None}),
        (
            'a:[],b:{},c:[1,<|"|>x<|"|>,{d:[[]]}],e:{f:{g:null}}',
            {"a": [], "b": {}, "c": [1, "x", {"d": [[]]}], "e": {"f": {"g": None}}},
        ),
        ('<|"|>a: {b}<|"|>:1,<|"|><|"|>:2', {"a: {b}": 1, "": 2}),
        ("$a-b.c é/d:1", {"$a-b.c é/d": 1}),
        (' a : 1 ,\n\tb : [ 1 , {} , { } ] , c:<|"|> <|"|> ', {"a": 1, "b": [1, {}, {}], "c": " "}),
    ],
)
def test_arguments_become_json(written: str, arguments: Any) -> None:
    (called,) = read(GEMMA, f"<|tool_call> call: f {{{written}}} <tool_call|>")
    assert isinstance(called, CalledTool) and called.name == "f"
    assert json.loads(called.arguments) == arguments


@pytest.mark.parametrize(
    "body",
    [
        "",
        "weather{}",
        "call:{}",
        "call:weather",
        f"call:{'a' * 300}{{}}",
        "call:a\nb{}",
        "call:weather[]",
        'call:weather{"city":"Oslo"}',
        "call:weather{city:Oslo}",
        "call:weather{city}",
        "call:weather{:1}",
        f"call:weather{{{'a' * 300}:1}}",
        'call:weather{<|"|>city<|"|>1}',
        'call:weather{<|"|>city<|"|>:}',
        "call:weather{city:1,}",
        "call:weather{,city:1}",
        "call:weather{city:1 days:2}",
        "call:weather{city:[1,]}",
        "call:weather{city:[,1]}",
        "call:weather{city:[1}}",
        "call:weather{city:{a:1]}",
        "call:weather{city:01}",
        "call:weather{city:1.}",
        "call:weather{city:inf}",
        "call:weather{city:tru}",
        f"call:weather{{city:{'1' * 5000}}}",
        'call:weather{city:<|"|>a<|"|>b}',
        "call:weather{}}",
        "call:weather{} and",
    ],
)
def test_what_is_no_call_stays_text(body: str) -> None:
    text = f"So: <|tool_call>{body}<tool_call|> or not"
    assert read(GEMMA, text) == [text]
    assert read(GEMMA, *text) == [text]


def test_text_that_can_be_no_call_any_more_comes_at_once() -> None:
    for text in ("<|tool_call> is", "<|tool_call>call:f{city:Oslo", "<|tool_call>call:f{} an"):
        assert "".join(map(str, CallReader(GEMMA).push(text))) == text


def test_a_call_nested_too_deeply_stays_text() -> None:
    for depth, is_call in ((MOST_DEPTH, True), (MOST_DEPTH + 1, False), (100_000, False)):
        text = "<|tool_call>call:f" + "{x:" * depth + "1" + "}" * depth + "<tool_call|>"
        nested = '{"x": ' * depth + "1" + "}" * depth
        assert read(GEMMA, text) == ([CalledTool("f", nested)] if is_call else [text])


VALUES: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text().filter(lambda text: (text + QUOTE).index(QUOTE) == len(text)),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.from_regex("[a-z_.$-]+", fullmatch=True), inner)
    ),
    max_leaves=12,
)
TEMPLATE: Final = ChatTemplate(chat_templates.GEMMA_4, {}, max_chars=10**6)


@given(
    arguments=st.dictionaries(st.sampled_from("abcd"), VALUES),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
def test_what_a_template_writes_is_read(arguments: dict[str, Any], cuts: list[int]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    rendered = TEMPLATE.render([message], None, {})
    text = rendered[rendered.index("<|tool_call>") : rendered.rindex("<tool_call|>") + 12]
    calls = read(GEMMA, *pieces_of(text, cuts))
    assert len(calls) == 2
    for called in calls:
        assert isinstance(called, CalledTool) and called.name == "f"
        assert json.loads(called.arguments) == arguments


PARTS: Final = st.one_of(
    st.sampled_from([CALL, EMPTY, "<|tool_call>call:f{", "<|tool_call>", "<tool_call|>", "call:"]),
    st.sampled_from([QUOTE, "<|tool_response>", "a:", "{", "}", "[", "]", ",", "1", "true", "<|"]),
    st.text(alphabet='a<>|_"/ {}:5\n', max_size=6),
)


@given(parts=st.lists(PARTS, max_size=20), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_cuts_do_not_matter_and_text_outside_of_calls_is_kept(
    parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    found = read(GEMMA, *pieces_of(text, cuts))
    assert found == read(GEMMA, text)
    pattern = ""
    for part in found:
        if isinstance(part, str):
            pattern += re.escape("".join(part.split()))
        else:
            assert isinstance(json.loads(part.arguments), dict)
            pattern += r"<\|tool_call>.*<tool_call\|>(<\|tool_response>)?"
    assert re.fullmatch(pattern, "".join(text.split()))


@pytest.mark.parametrize("size", [3, 10_000_000])
def test_hostile_texts_are_read_in_bounded_steps(size: int) -> None:
    """They would take hours if each beginning of a call were read to the very end."""
    for text in (
        "<|tool_call>" * 8_000,
        CALL[: CALL.index("Bog")] * 2_000,
        CALL[:-1] * 2_000,
        (CALL + "<|tool_resp") * 2_000,
        CALL + " \n" * 20_000 + CALL,
        "<|tool_call>call:f" + "{a:" * 40_000,
        "<|tool_call>call:f{a:" + "[" * 40_000,
        CALL.replace("Bog", '<|"|' * 20_000),
        CALL.replace("city", "x" * 50_000),
        "<|tool_call>call:f{" + ",".join(f"k{n}:{n}" for n in range(20_000)) + "}<tool_call|>",
    ):
        reader = CallReader(GEMMA)
        found: list[str | CalledTool] = []
        for begin in range(0, len(text), size):
            found += reader.push(text[begin : begin + size])
        found += reader.finish()
        assert sum(len(part) if isinstance(part, str) else 1 for part in found) <= len(text)


def called(index: int, **more: Any) -> dict[str, Any]:
    """A message with a call, and a text beside it."""
    function = {"name": f"f{index}", "arguments": {"n": index}}
    call = {"id": str(index), "type": "function", "function": function}
    return {"role": "assistant", "content": f"Text {index}.", "tool_calls": [call], **more}


def result(index: int) -> dict[str, Any]:
    content = [{"type": "text", "text": f"of {index}"}]
    return {"role": "tool", "tool_call_id": str(index), "content": content}


def test_results_are_told_with_their_calls_and_the_names_of_these() -> None:
    several = {**called(1), "content": "", "tool_calls": called(1)["tool_calls"] * 2}
    several["tool_calls"] = [*called(1)["tool_calls"], *called(2)["tool_calls"]]
    user = {"role": "user", "content": "Look."}
    text = TEMPLATE.render(Gemma4().messages([user, several, result(2), result(1)], ()), None, {})
    told = (
        "<|turn>assistant\n<|tool_call>call:f1{n:1}<tool_call|><|tool_call>call:f2{n:2}<tool_call|>"
    )
    told += '<|tool_response>response:f2{value:<|"|>of 2<|"|>}<tool_response|>'
    told += '<|tool_response>response:f1{value:<|"|>of 1<|"|>}<tool_response|>'
    assert told in text
    older = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "g", "arguments": {}}}],
    }
    (_, message) = Gemma4().messages(
        [user, older, {"role": "tool", "name": "g", "content": "5"}], ()
    )
    assert message["tool_responses"] == [{"name": "g", "response": "5"}]
    lone = {"role": "tool", "tool_call_id": "9", "content": "5"}
    assert Gemma4().messages([user, lone], ()) == [user, lone]
    (_, message) = Gemma4().messages([user, several, lone], ())
    assert message["tool_responses"] == [{"name": "unknown", "response": "5"}]


def test_a_text_beside_calls_does_not_end_the_turn() -> None:
    """Templates write it behind the results, with the end of the turn behind that."""
    user = {"role": "user", "content": "Look."}
    begun = [user, called(1, reasoning_content="Hm."), result(1), called(2), result(2)]
    text = TEMPLATE.render(Gemma4().messages(begun, ()), None, {})
    _, turn = text.split("<|turn>assistant\n")
    assert "<turn|>" not in turn
    assert turn.startswith("<|channel>thought\nHm.\n\nText 1.\n<channel|><|tool_call>call:f1{n:1}")
    assert "<|channel>thought\nText 2.\n<channel|><|tool_call>call:f2{n:2}" in turn
    ended = [*begun, {"role": "assistant", "content": "Done."}, user]
    text = TEMPLATE.render(Gemma4().messages(ended, ()), None, {})
    _, turn = text.split("<|turn>assistant\n")
    assert turn.count("Text 1.") == turn.count("Text 2.") == 1
    assert "<tool_response|>Text 1.\n\nText 2.\n\nDone.<turn|>\n<|turn>user\n" in turn
    broken_off = [*begun, user]
    *_, last, _ = Gemma4().messages(broken_off, ())
    assert last["content"] == "Text 1.\n\nText 2."
