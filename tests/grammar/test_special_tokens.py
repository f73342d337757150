"""Special tokens are found where texts have them."""

from __future__ import annotations

import pytest

from minisgl_backend.grammar.special_tokens import SpecialTokens

MARKS = SpecialTokens({"<a>": 1, "<a>b": 2, "[c|d]": 3, "b<a": 4})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("a b", ["a b"]),
        ("<a>", [1]),
        ("x<a>y", ["x", 1, "y"]),
        ("<a>b", [2]),  # the longest
        ("b<a>", [4, ">"]),  # the first
        ("<a><a>bb", [1, 2, "b"]),
        ("c[c|d]d", ["c", 3, "d"]),
    ],
)
def test_parts_of_a_text(text: str, parts: list[str | int]) -> None:
    assert MARKS.parts_of(text) == parts
    assert MARKS.begin(text) is bool(parts and isinstance(parts[0], int))
    assert SpecialTokens().parts_of(text) == ([text] if text else [])
    assert not SpecialTokens().begin(text)
