"""The reference in docs/ says what the code says."""

from __future__ import annotations

from tools.reference import PATH, render


def test_the_reference_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == render(), "run `make docs`"
