"""What fuzzing finds is kept, and tried first from then on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import corpus
from tests.properties.corpus import kept


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus, "CORPUS", tmp_path)
    return tmp_path


def breaking_at_100(seen: list[int]) -> Any:
    def is_small(number: int) -> None:
        seen.append(number)
        assert number < 100

    return kept("number")(given(number=st.integers(0, 10_000))(is_small))


def test_the_smallest_that_breaks_is_kept_while_fuzzing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        breaking_at_100([])()
    assert not list(folder.iterdir())
    monkeypatch.setattr(corpus, "is_fuzzing", lambda: True)
    with pytest.raises(AssertionError):
        breaking_at_100([])()
    assert json.loads((folder / "is_small.jsonl").read_text()) == {"number": 100}
    seen: list[int] = []
    with pytest.raises(AssertionError):
        breaking_at_100(seen)()
    assert seen[0] == 100


@pytest.mark.parametrize(
    "value",
    [
        b"\0\xff",
        "\ud800",
        float("inf"),
        {"a": [None, True]},
        np.array([2**64 - 1], np.uint64),
        np.array([b"\xff"], np.object_),
    ],
)
def test_all_that_is_drawn_can_be_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    seen: list[Any] = []

    def breaks(value: Any) -> None:
        seen.append(value)
        raise ValueError

    monkeypatch.setattr(corpus, "is_fuzzing", lambda: True)
    for _ in range(2):
        test = kept("value")(given(value=st.just(value))(breaks))
        with pytest.raises(ValueError):
            test()
    np.testing.assert_equal(seen[-1], value)
    assert len((folder / "breaks.jsonl").read_text().splitlines()) == 2


def test_the_corpus_is_of_properties_that_there_are() -> None:
    names = {path.stem for path in Path(corpus.CORPUS).glob("*.jsonl")}
    source = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert names and all(f"def {name}(" in source for name in names)
