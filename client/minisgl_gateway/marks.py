"""Marks in a text that comes in pieces: a piece may end in the middle of one.

Must not know what any mark means.
"""

from __future__ import annotations

from collections.abc import Sequence


def begun_mark(text: str, marks: Sequence[str]) -> int:
    """Where one of the ``marks`` may begin that the text does not complete; its length if nowhere.

    A whole mark must not be in the text.
    """
    longest = max(map(len, marks))
    return next(
        at
        for at in range(max(0, len(text) - longest + 1), len(text) + 1)
        if any(mark.startswith(text[at:]) for mark in marks)
    )
