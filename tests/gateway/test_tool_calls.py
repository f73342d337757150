"""Calls of tools are read out of an answer's text, however the text is cut."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_gateway.tool_calls import CLOSING, OPENING, CalledTool, ToolCallReader

WEATHER = '{"name": "weather", "arguments": {"city": "Bogotá"}}'
CALL = f"{OPENING}\n{WEATHER}\n{CLOSING}"
CALLED = CalledTool("weather", '{"city": "Bogotá"}')


def read(*pieces: str, closed: bool = False) -> list[str | CalledTool]:
    """All that a reader makes of the pieces, neighbouring texts joined."""
    reader = ToolCallReader()
    found = [part for piece in pieces for part in reader.push(piece)]
    joined: list[str | CalledTool] = []
    for part in [*found, *reader.finish(closed=closed)]:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    assert reader.num_calls == sum(isinstance(part, CalledTool) for part in joined)
    return joined


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello.", ["Hello."]),
        ("", []),
        (CALL, [CALLED]),
        (f"I look.\n\n{CALL}", ["I look.", CALLED]),
        (f"{CALL}\n{CALL}\n", [CALLED, CALLED]),
        (f"{CALL} Done.", [CALLED, " Done."]),
        (f'{OPENING}{{"name": "now"}}{CLOSING}', [CalledTool("now", "{}")]),
        ("a < b, and <tool", ["a < b, and <tool"]),
        ("trailing blanks \n", ["trailing blanks \n"]),
    ],
)
def test_texts_and_calls_in_order(text: str, parts: list[str | CalledTool]) -> None:
    assert read(text) == parts
    assert read(*text) == parts


@pytest.mark.parametrize(
    "body",
    [
        "",
        "weather",
        "[]",
        '{"arguments": {}}',
        '{"name": 1}',
        '{"name": ""}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "name": "g"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": "\\ud83d"}}',
        '{"name": "\\ud83d"}',
    ],
)
def test_what_is_no_call_stays_text(body: str) -> None:
    text = f"So: {OPENING}{body}{CLOSING} or not"
    assert read(text) == [text]
    assert read(*text) == [text]


def test_a_call_without_end_to_its_depth_stays_text() -> None:
    text = (
        OPENING + '{"name": "f", "arguments": ' + '{"x": ' * 100_000 + "1" + "}" * 100_001 + CLOSING
    )
    assert read(text) == [text]


def test_a_call_that_does_not_end_stays_text() -> None:
    text = f"So: {OPENING}{WEATHER}"
    assert read(*text) == [text]


def test_the_closing_tag_may_be_the_stop_string() -> None:
    assert read(f"{OPENING}{WEATHER}", closed=True) == [CALLED]
    assert read("No call.", closed=True) == ["No call."]


PARTS = st.one_of(
    st.sampled_from([CALL, OPENING, CLOSING, "<tool", " ", "\n", "<", WEATHER]),
    st.text(alphabet="a<>_/ tolcé{}", max_size=8),
)


@given(st.lists(PARTS, max_size=8), st.lists(st.integers(0, 200), max_size=12))
def test_cuts_do_not_matter_and_nothing_is_lost(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = read(*(text[begin:end] for begin, end in pairwise(bounds)))
    assert found == read(text)
    pattern = ""
    for part in found:
        if isinstance(part, str):
            pattern += re.escape("".join(part.split()))
        else:
            pattern += f"{OPENING}.*?{CLOSING}"
    assert re.fullmatch(pattern, "".join(text.split()))
