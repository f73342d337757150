"""What a model thinks is separated from what it answers, however the text is cut."""

from __future__ import annotations

import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_gateway.thinking import ThinkingReader, Thought

from tests.gateway.test_tool_calls import pieces_of

MARKS: Final = ("<think>", "</think>")


def read(*pieces: str, inside: bool = False, marks: tuple[str, str] = MARKS) -> tuple[str, str]:
    """Thoughts and answer."""
    reader = ThinkingReader(marks, inside)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    is_thought = [isinstance(part, Thought) for part in parts]
    assert is_thought == sorted(is_thought, reverse=True), "thoughts come first"
    assert all(part.text if isinstance(part, Thought) else part for part in parts)
    return (
        "".join(part.text for part in parts if isinstance(part, Thought)),
        "".join(part for part in parts if isinstance(part, str)),
    )


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>\nLet me see.\n\nYes.\n</think>\n\nHello.\n", "Let me see.\n\nYes.", "Hello.\n"),
        ("\n<think>Yes.</think> Hello.", "Yes.", " Hello."),
        ("<think>\n\n</think>\n\nHello.", "", "Hello."),
        ("<think></think>", "", ""),
        ("Hello.", "", "Hello."),
        ("\n Hello.\n", "", "\n Hello.\n"),
        ("", "", ""),
        (" \n", "", " \n"),
        ("<thi", "", "<thi"),
        ("<thin ice", "", "<thin ice"),
        ("A tag: <think>no</think>", "", "A tag: <think>no</think>"),
        ("<think>a <b> </thin </think>c</think>", "a <b> </thin ", "c</think>"),
        ("<think>Cut off\n", "Cut off", ""),
        ("<think>Cut off </thi", "Cut off </thi", ""),
        ("<think>\n", "", ""),
    ],
)
def test_a_section_at_the_beginning(text: str, thought: str, answer: str) -> None:
    assert read(text) == (thought, answer)
    assert read(*text) == (thought, answer)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("\nLet me see.\n</think>\n\nHello.", "Let me see.", "Hello."),
        ("</think>\n\nHello.", "", "Hello."),
        ("<think>\nTwice.\n</think>\nHello.", "Twice.", "Hello."),
        ("Only thoughts", "Only thoughts", ""),
        ("<", "<", ""),
        ("", "", ""),
    ],
)
def test_a_section_that_the_prompt_has_begun(text: str, thought: str, answer: str) -> None:
    assert read(text, inside=True) == (thought, answer)
    assert read(*text, inside=True) == (thought, answer)


def test_other_marks() -> None:
    marks = ("[THINK]", "[/THINK]")
    assert read(*"[THINK]So[/THINK]Yes", marks=marks) == ("So", "Yes")


def test_thoughts_come_as_they_are_thought() -> None:
    reader = ThinkingReader(MARKS)
    assert [
        reader.push(piece) for piece in ("<th", "ink>\n", "One", "\n", "two <", "b\n</think")
    ] == [
        [],
        [],
        [Thought("One")],
        [],
        [Thought("\ntwo ")],
        [Thought("<b")],
    ]
    assert reader.push(">\n") == []
    assert reader.push("\nHi") == ["Hi"]


PIECES = st.lists(
    st.sampled_from([*MARKS, "<", "think", "/", ">", "\n", " ", "a", "</", "b c"]), max_size=12
)


@given(pieces=PIECES, inside=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_cuts_do_not_matter_and_only_marks_and_breaks_are_lost(
    pieces: list[str], inside: bool, cuts: list[int]
) -> None:
    text = "".join(pieces)
    found = read(*pieces_of(text, cuts), inside=inside)
    assert found == read(text, inside=inside)
    thought, answer = (re.escape("".join(part.split())) for part in found)
    assert re.fullmatch(f"(<think>)?{thought}(</think>)?{answer}", "".join(text.split()))
