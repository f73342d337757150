"""Tool calls are read out of an answer's text, however the text is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_gateway.call_syntax import (
    COMMAND,
    HERMES,
    LLAMA,
    MISTRAL,
    NEMOTRON,
    RESPONSE,
    CalledTool,
    Syntax,
)
from minisgl_gateway.json_reading import MOST_DEPTH
from minisgl_gateway.tool_calls import CallReader

ARGUMENTS: Final = '{"city": "Bogotá"}'
CALLED: Final = CalledTool("weather", ARGUMENTS)
NOW: Final = CalledTool("now", "{}")

HERMES_CALL: Final = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA_CALL: Final = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
LLAMA_NOW: Final = '{"name": "now", "parameters": {}}'
MISTRAL_ITEM: Final = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
MISTRAL_CALL: Final = f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"

NEMOTRON_CALL: Final = f"<TOOLCALL>[{MISTRAL_ITEM}]</TOOLCALL>"
COMMAND_ITEM: Final = f'{{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}}'
COMMAND_CALL: Final = f"<|START_ACTION|>[\n    {COMMAND_ITEM}\n]<|END_ACTION|>"

SYNTAXES: Final = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "nemotron": NEMOTRON,
    "command": COMMAND,
}
LISTED: Final = ("nemotron", "command")
"""Those that write all calls as one list."""
CALLS: Final = {
    "hermes": HERMES_CALL,
    "llama": LLAMA_CALL,
    "mistral": MISTRAL_CALL,
    "nemotron": NEMOTRON_CALL,
    "command": COMMAND_CALL,
}


def read(syntax: Syntax, *pieces: str, closed: bool = False) -> list[str | CalledTool]:
    """What a reader makes of the pieces, with neighbouring texts joined."""
    reader = CallReader(syntax)
    found = [part for piece in pieces for part in reader.push(piece)]
    joined: list[str | CalledTool] = []
    for part in [*found, *reader.finish(closed=closed)]:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    assert reader.num_calls == sum(isinstance(part, CalledTool) for part in joined)
    return joined


def pieces_of(text: str, cuts: Iterable[int]) -> Iterator[str]:
    """The pieces of a text that is cut at these places, as far as it has them."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return (text[begin:end] for begin, end in pairwise(bounds))


@pytest.mark.parametrize("name", SYNTAXES)
def test_texts_and_calls_in_order(name: str) -> None:
    call = CALLS[name]
    for text, parts in [
        ("Hello.", ["Hello."]),
        ("", []),
        (call, [CALLED]),
        (f"I look.\n\n{call}", ["I look.", CALLED]),
        (f"{call} Done.", [CALLED, " Done."]),
        (f"{call}\n{call}\n", [CALLED, CALLED]),
        (f"{call}, then {call}", [CALLED, ", then", CALLED]),
        ("a < b, and <tool", ["a < b, and <tool"]),
        ("[TOOL_ and {", ["[TOOL_ and {"]),
        ("trailing blanks \n", ["trailing blanks \n"]),
    ]:
        assert read(SYNTAXES[name], text) == parts
        assert read(SYNTAXES[name], *text) == parts


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_call_that_is_cut_is_no_text_if_calls_are_all_that_there_can_be(name: str) -> None:
    """Wherever it is cut, the calls before it are there. One of a list is complete before the
    list is."""
    call = CALLS[name]
    between = "; " if name == "llama" else "\n"
    end_of_call = call.index(ARGUMENTS) + len(ARGUMENTS) + 1 if name in LISTED else len(call)
    for end in range(len(call)):
        cut = [CALLED] if end >= end_of_call else []
        reader = CallReader(SYNTAXES[name], calls_alone=True)
        assert reader.push(call[:end]) + reader.finish() == cut
        reader = CallReader(SYNTAXES[name], calls_alone=True)
        assert reader.push(call + between + call[:end]) + reader.finish() == [CALLED, *cut]


@pytest.mark.parametrize(
    ("syntax", "text", "parts"),
    [
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', [NOW]),
        (HERMES, '<tool_call>{"name": "now", "tool_name": 1}</tool_call>', [NOW]),
        (HERMES, f"<tool_call><tool_call>{MISTRAL_ITEM}</tool_call>", ["<tool_call>", CALLED]),
        (HERMES, f"<tool_call>{MISTRAL_ITEM}{HERMES_CALL}", [f"<tool_call>{MISTRAL_ITEM}", CALLED]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            [CalledTool("f", '{"x": "</tool_call>"}')],
        ),
        (LLAMA, f"<|python_tag|>{LLAMA_CALL}", [CALLED]),
        (LLAMA, f"<|python_tag|>{LLAMA_CALL}; {LLAMA_NOW}", [CALLED, NOW]),
        (LLAMA, f"{LLAMA_CALL};\n{LLAMA_NOW} ; {LLAMA_CALL}", [CALLED, NOW, CALLED]),
        (LLAMA, f"{LLAMA_CALL};; {LLAMA_NOW}", [CALLED, ";;", NOW]),
        (LLAMA, f"{LLAMA_CALL}; and so on", [CALLED, "; and so on"]),
        (LLAMA, f"a; {LLAMA_CALL}", ["a;", CALLED]),
        (LLAMA, f"{LLAMA_CALL};", [CALLED, ";"]),
        (LLAMA, f'{{"name": "weather", "arguments": {ARGUMENTS}}}', [CALLED]),
        (
            LLAMA,
            f'{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}',
            [CALLED],
        ),
        (LLAMA, f"<|python_tag|>print(1) {LLAMA_CALL}", ["<|python_tag|>print(1)", CALLED]),
        (LLAMA, f'{{"name": {LLAMA_CALL}', ['{"name":', CALLED]),
        (LLAMA, f'{{"city": "x"}} {LLAMA_CALL}', ['{"city": "x"}', CALLED]),
        (MISTRAL, f"[TOOL_CALLS] [{MISTRAL_ITEM}]", [CALLED]),
        (MISTRAL, f"[TOOL_CALLS][{MISTRAL_ITEM}, {MISTRAL_ITEM} ] So.", [CALLED, CALLED, " So."]),
        (
            MISTRAL,
            f'[TOOL_CALLS] [{{"name": "now", "arguments": {{}}, "id": "a1"}}, {MISTRAL_ITEM}]',
            [NOW, CALLED],
        ),
        (MISTRAL, f"{MISTRAL_CALL}{MISTRAL_CALL}", [CALLED, CALLED]),
        (MISTRAL, f"[TOOL_CALLS]weather{ARGUMENTS}", [CALLED]),
        (MISTRAL, f"[TOOL_CALLS] weather[CALL_ID]x1[ARGS] {ARGUMENTS}", [CALLED]),
        (MISTRAL, f"[TOOL_CALLS]weather{MISTRAL_CALL}", ["[TOOL_CALLS]weather", CALLED]),
        (MISTRAL, f"[TOOL_CALLS] [{MISTRAL_ITEM}, oh", [CALLED, ", oh"]),
        (NEMOTRON, f"<TOOLCALL> [{MISTRAL_ITEM},\n{MISTRAL_ITEM}] </TOOLCALL>", [CALLED, CALLED]),
        (
            NEMOTRON,
            f"<TOOLCALL>{MISTRAL_ITEM}</TOOLCALL>",
            [f"<TOOLCALL>{MISTRAL_ITEM}</TOOLCALL>"],
        ),
        (NEMOTRON, f"<TOOLCALL>{NEMOTRON_CALL}", ["<TOOLCALL>", CALLED]),
        (COMMAND, f"<|START_ACTION|>[{COMMAND_ITEM}, {COMMAND_ITEM}]<|END_ACTION|>", [CALLED] * 2),
        (
            COMMAND,
            '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
            [NOW],
        ),
        (COMMAND, '<|START_ACTION|>[{"name": 1, "tool_name": "now"}]<|END_ACTION|>', [NOW]),
        (
            COMMAND,
            f"<|START_ACTION|>[{MISTRAL_ITEM}]<|END_ACTION|>",
            [f"<|START_ACTION|>[{MISTRAL_ITEM}]<|END_ACTION|>"],
        ),
        (COMMAND, "<|START_RESPONSE|>It rains.\n<|END_RESPONSE|>", ["It rains."]),
        (COMMAND, f"<|START_TEXT|>So.<|END_TEXT|>{COMMAND_CALL}", ["So.", CALLED]),
        (COMMAND, "It <|START_RESPO rains", ["It <|START_RESPO rains"]),
        (RESPONSE, f"<|START_RESPONSE|>{COMMAND_CALL}<|END_RESPONSE|>", [COMMAND_CALL]),
    ],
)
def test_forms_of_a_dialect(syntax: Syntax, text: str, parts: list[str | CalledTool]) -> None:
    assert read(syntax, text) == parts
    assert read(syntax, *text) == parts


NO_CALLS: Final = [
    "",
    "weather",
    "[]",
    '{"arguments": {}}',
    '{"name": 1}',
    '{"name": ""}',
    '{"name": null, "arguments": {}}',
    '{"name": "f", "arguments": "x"}',
    '{"name": "f", "arguments": []}',
    '{"name": "f", "name": "g", "arguments": {}}',
    '{"name": "f", "arguments": {}, "parameters": {}}',
    '{"name": "f", "arguments": {}, }',
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "arguments": {"x": 01}}',
    f'{{"name": "f", "arguments": {{"x": {"1" * 5000}}}}}',
    '{"name": "f", "arguments": {"x": 1.}}',
    '{"name": "f", "arguments": {"x": tru}}',
    '{"name": "f", "arguments": {"x": "\\x"}}',
    '{"name": "f", "arguments": {"x": "\\u12g4"}}',
    '{"name": "f", "arguments": {"x": "\n"}}',
    '{"name": "f", "arguments": {"x" 1}}',
    '{"name": "f", "arguments": {"x": [1,]}}',
    '{"name": "f", "arguments": {"x": [,1]}}',
    '{"name": "f", "arguments": {"x": 1]}',
    '{"name": "f", "arguments": {x: 1}}',
    "{'name': 'f', 'arguments': {}}",
    '{"name": "\\ud83d", "arguments": {}}',
]


@pytest.mark.parametrize("body", NO_CALLS)
def test_what_is_no_call_stays_text(body: str) -> None:
    for syntax, begin, end in (
        (HERMES, "<tool_call>", "</tool_call>"),
        (LLAMA, "<|python_tag|>", ""),
        (LLAMA, "", ""),
        (MISTRAL, "[TOOL_CALLS] [", "]"),
        (NEMOTRON, "<TOOLCALL>[", "]</TOOLCALL>"),
        (COMMAND, "<|START_ACTION|>[", "]<|END_ACTION|>"),
    ):
        text = f"So: {begin}{body}{end} or not"
        assert read(syntax, text) == [text]
        assert read(syntax, *text) == [text]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann"}',
        '{"name": "Ann", "age": 7, "parameters": {}}',
        '{"name": "Ann", "tool_name": "x", "parameters": {}}',
        '{"type": "function", "title": "weather", "parameters": {}}',
        '{"type": "object", "properties": {"name": {}}}',
    ],
)
def test_json_that_a_llama_only_shows_stays_text(text: str) -> None:
    assert read(LLAMA, text) == [text]


def test_text_that_can_be_no_call_any_more_comes_at_once() -> None:
    for syntax, text in (
        (HERMES, "<tool_call> is"),
        (LLAMA, '{"name": "Ann", "age"'),
        (MISTRAL, "[TOOL_CALLS] is it"),
        (NEMOTRON, "<TOOLCALL>is it"),
        (COMMAND, "<|START_ACTION|>[]"),
    ):
        assert "".join(map(str, CallReader(syntax).push(text))) == text


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_call_that_does_not_end_stays_text(name: str) -> None:
    text = f"So: {CALLS[name][:-1]}"
    parts = ["So:", CALLED, text.partition(f"{ARGUMENTS}}}")[2]] if name in LISTED else [text]
    assert read(SYNTAXES[name], *text) == parts


def test_the_closing_tag_may_be_the_stop_string() -> None:
    assert read(HERMES, HERMES_CALL.removesuffix("</tool_call>"), closed=True) == [CALLED]
    assert read(HERMES, "No call.", closed=True) == ["No call."]


def test_arguments_come_as_they_were_written() -> None:
    written = (
        '{ "b" : [1.50, -0, 1e999, {}, []],\n\t"a": "\\u00e9\\ud83c\\udf27é", "c": [{"d": null}] }'
    )
    assert read(HERMES, HERMES_CALL.replace(ARGUMENTS, written)) == [CalledTool("weather", written)]


def test_halves_of_surrogate_pairs_cannot_be_encoded_and_are_replaced() -> None:
    written = r'{"x": "\ud83d \\ud83d \udf27 \ud83c\udf27 \ud83d\ud83c\udf27"}'
    (called,) = read(LLAMA, LLAMA_CALL.replace(ARGUMENTS, written))
    assert isinstance(called, CalledTool)
    assert json.loads(called.arguments) == {"x": "\ufffd \\ud83d \ufffd 🌧 \ufffd🌧"}


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_call_nested_too_deeply_stays_text(name: str) -> None:
    for depth, is_call in ((MOST_DEPTH, True), (MOST_DEPTH + 1, False), (100_000, False)):
        nested = '{"x": ' * depth + "1" + "}" * depth
        text = CALLS[name].replace(ARGUMENTS, nested)
        assert read(SYNTAXES[name], text) == (
            [CalledTool("weather", nested)] if is_call else [text]
        )


MARKS: Final = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ";"),
    *("<TOOLCALL>", "</TOOLCALL>", "<|START_ACTION|>", "<|END_ACTION|>"),
]
KEYS: Final = '"(?:name|tool_name|type|function|arguments|parameters|tool_call_id|0)"'
MADE_OF: Final = "|".join([*map(re.escape, MARKS), r"[\[\],{}:]", KEYS])
PARTS = st.one_of(
    st.sampled_from([*CALLS.values(), LLAMA_NOW, f"[TOOL_CALLS] [{MISTRAL_ITEM}, {MISTRAL_ITEM}]"]),
    st.sampled_from([*MARKS, MISTRAL_ITEM, '{"name"', '"x', "<tool", " ", "\n", "<", "[", "{"]),
    st.text(alphabet="a<>[]_/ tolcé{}", max_size=8),
)
CUTS = st.lists(st.integers(0, 300), max_size=12)


@pytest.mark.parametrize("name", SYNTAXES)
@given(parts=st.lists(PARTS, max_size=8), cuts=CUTS)
def test_cuts_do_not_matter_and_nothing_is_lost(
    name: str, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    found = read(SYNTAXES[name], *pieces_of(text, cuts))
    assert found == read(SYNTAXES[name], text)
    pattern = ""
    for part in found:
        if isinstance(part, str):
            pattern += re.escape("".join(part.split()))
        else:
            # only what a call consists of
            told = re.escape("".join(part.arguments.split()))
            pattern += rf"(?:{MADE_OF}|\"?{part.name}\"?|{told})*"
    assert re.fullmatch(pattern, "".join(text.split()))


JSON_LIKE = st.one_of(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ).map(lambda value: json.dumps({"x": value})),
    st.text(alphabet='{}[]",:\\u0e1.-+Etruefalsn x', max_size=12).map(
        lambda text: f'{{"x": {text}}}'
    ),
)


@given(written=JSON_LIKE, spoilt=st.integers(0, 60), char=st.sampled_from('{}[]",:\\ue-0 x'))
def test_what_is_taken_for_json_is_json(written: str, spoilt: int, char: str) -> None:
    """The reverse holds, too; texts are tried as written and with an extra character."""
    for arguments in (written, written[:spoilt] + char + written[spoilt:]):
        try:
            is_json = isinstance(json.loads(arguments, parse_constant=_no_constant), dict)
        except ValueError:
            is_json = False
        found = read(MISTRAL, f"[TOOL_CALLS]weather[ARGS]{arguments}")
        is_call = [type(part) for part in found] == [CalledTool]
        assert is_call == is_json
        if is_call:
            (called,) = found
            assert isinstance(called, CalledTool)
            assert _without_halves(json.loads(arguments)) == json.loads(called.arguments)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _without_halves(value: Any) -> Any:
    """The value with U+FFFD for halves of surrogate pairs."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("size", [3, 10_000_000])
def test_hostile_texts_are_read_in_bounded_steps(name: str, size: int) -> None:
    """They would take hours if each beginning of a call were read to the very end."""
    syntax = SYNTAXES[name]
    call = CALLS[name]
    for text in (
        syntax.openings[0] * 8_000,
        call[: call.index("Bog")] * 2_000,
        call[:-1] * 2_000,
        " \n" * 20_000 + call,
        syntax.openings[0] + "{" * 40_000,
        call.replace("Bog", "x" * 50_000),
    ):
        reader = CallReader(syntax)
        parts: list[str | CalledTool] = []
        for begin in range(0, len(text), size):
            parts += reader.push(text[begin : begin + size])
        parts += reader.finish()
        assert sum(len(part) if isinstance(part, str) else 1 for part in parts) <= len(text)
