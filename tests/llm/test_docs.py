"""The examples in docs/offline.md are true."""

from __future__ import annotations

import doctest
from pathlib import Path

from tests.docs.markdown import Page


def test_examples() -> None:
    page = Page(Path(__file__).parents[2] / "docs" / "offline.md")
    text = "".join(block.text for block in page.blocks if block.language == "pycon")
    test = doctest.DocTestParser().get_doctest(text, {}, "offline.md", None, 0)
    assert len(test.examples) > 12
    told: list[str] = []
    doctest.DocTestRunner().run(test, out=told.append)
    assert not told, "".join(told)
