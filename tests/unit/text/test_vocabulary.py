"""Tokens for which the model has no embedding."""

from __future__ import annotations

import logging

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.text.vocabulary import Vocabulary

TOKENS = ["a", "b", None, "c", "<pad>"]


def vocabulary(special: set[int]) -> Vocabulary:
    return Vocabulary(TOKENS, frozenset(special), None)


def test_a_text_that_the_model_cannot_read_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has 2 tokens that the model, of 3 embeddings"):
        vocabulary({4}).check_fits(3)


def test_special_tokens_beyond_the_model_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        vocabulary({4}).check_fits(4)
    assert "the first is '<pad>', of id 4" in caplog.text


def test_all_tokens_fit(caplog: pytest.LogCaptureFixture) -> None:
    vocabulary({4}).check_fits(5)
    vocabulary(set()).check_fits(1000)
    assert not caplog.text
