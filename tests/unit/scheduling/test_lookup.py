"""What followed when the last tokens of a sequence stood somewhere before."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.request import IntArray
from minisgl_backend.scheduling.lookup import RecentAnswers, guesses_at


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ((1, 2, 3, 9, 8, 1, 2, 3), 2, [9, 8]),
        ((1, 2, 3, 9, 8, 1, 2, 3), 1, [9]),
        ((1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3), 1, [8]),
        ((5, 1, 2, 3, 1, 2, 3), 8, [1, 2, 3, 1, 2, 3, 1, 2]),
        ((1, 2, 3, 9, 1, 2, 3), 7, [9, 1, 2, 3, 9, 1, 2]),
        ((4, 4, 4, 4), 3, [4, 4, 4]),
        ((4, 4, 4), 3, []),
        ((3,), 3, []),
        ((1, 2, 3, 4, 5, 6), 3, []),
        ((9, 2, 3, 7, 1, 2, 3), 3, []),
        ((1, 9, 3, 7, 1, 2, 3), 3, []),
        ((2, 3, 7, 1, 2, 3), 3, []),
        ((1, 2, 3, 9, 8, 1, 2, 3), 0, []),
        ((9, 1, 2, 3, 8, 1, 2, 3, 7, 9, 1, 2, 3), 2, [8, 1]),
        ((4, 9, 1, 2, 3, 8, 9, 1, 2, 3, 7, 4, 9, 1, 2, 3), 1, [8]),
        ((9, 1, 2, 3, 8, 9, 1, 2, 3, 7, 4, 9, 1, 2, 3), 1, [7]),
        ((5, *range(40), 8, *range(40), 9, 5, *range(40)), 1, [9]),
        ((5, *range(31), 8, *range(31), 9, 5, *range(31)), 1, [8]),
    ],
)
def test_what_followed_the_last_tokens_before(
    tokens: tuple[int, ...], most: int, expected: list[int]
) -> None:
    assert guesses_at(ints(*tokens), most).tolist() == expected


def recent(*answers: tuple[int, ...], size: int = 40, key: str = "") -> RecentAnswers:
    found = RecentAnswers(size)
    for answer in answers:
        found.add(ints(*answer), key)
    return found


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ((9, 1, 2, 3), 8, [4, 5]),
        ((9, 1, 2, 3), 1, [4]),
        ((9, 8, 2, 3), 8, []),
        ((1, 2, 3, 7, 9, 1, 2, 3), 8, [7, 9, 1, 2, 3, 7, 9, 1]),
        ((1, 2, 3, 7, 0, 1, 2, 3), 8, [4, 5]),
        ((3, 4, 5), 8, []),
        ((9, 3, 4, 5), 8, []),
    ],
)
def test_the_longer_match_counts_and_one_of_its_own_if_both_are_equal(
    tokens: tuple[int, ...], most: int, expected: list[int]
) -> None:
    answers = recent((0, 1, 2, 3, 4, 5), (6, 6, 6, 6))
    assert guesses_at(ints(*tokens), most, answers).tolist() == expected


def test_answers_are_for_requests_with_their_key() -> None:
    answers = recent((1, 2, 3, 4), key="a")
    assert guesses_at(ints(9, 1, 2, 3), 2, answers, "a").tolist() == [4]
    assert not len(guesses_at(ints(9, 1, 2, 3), 2, answers, "b"))
    answers.add(ints(1, 2, 3, 5), "b")
    assert guesses_at(ints(9, 1, 2, 3), 2, answers, "a").tolist() == [4]
    assert guesses_at(ints(9, 1, 2, 3), 2, answers, "b").tolist() == [5]


def test_new_answers_take_the_place_of_the_oldest() -> None:
    answers = recent((1, 2, 3, 4, 5), (11, 12, 13, 14, 15), size=14)
    assert guesses_at(ints(9, 1, 2, 3), 9, answers).tolist() == [4, 5]
    answers.add(ints(21, 22, 23, 24), "")  # over the end
    assert not len(guesses_at(ints(9, 1, 2, 3), 9, answers))
    assert guesses_at(ints(9, 11, 12, 13), 9, answers).tolist() == [14, 15]
    answers.add(ints(*range(30, 60)), "")  # more than there is room for
    assert not len(guesses_at(ints(9, 11, 12, 13), 9, answers))
    assert guesses_at(ints(9, 54, 55, 56), 9, answers).tolist() == [57, 58, 59]


def test_of_equal_matches_the_newest_answer_counts() -> None:
    answers = recent((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 6), size=13)
    assert guesses_at(ints(9, 1, 2, 3), 1, answers).tolist() == [6]
    answers.add(ints(1, 2, 3, 7), "")  # in front of the one before it
    assert guesses_at(ints(9, 1, 2, 3), 1, answers).tolist() == [7]


def test_answers_of_few_tokens_take_no_room() -> None:
    answers = recent((1, 2, 3, 4), size=10)
    for _ in range(9):
        answers.add(ints(8, 8, 8), "")
        answers.add(ints(), "")
    assert guesses_at(ints(9, 1, 2, 3), 1, answers).tolist() == [4]


def test_only_the_latest_places_of_a_token_are_looked_at() -> None:
    often = (5, 6) * 3000
    assert guesses_at(ints(1, 5, 9, *often, 1, 5), 1).tolist() == []
    assert guesses_at(ints(1, 5, 9, 7, *often, 9, 7, 5, 6), 2).tolist() == []
    assert guesses_at(ints(*often, 5), 3).tolist() == [6, 5, 6]


@pytest.mark.parametrize("size", [0, 1, 2])
def test_next_to_no_room(size: int) -> None:
    answers = recent((1, 2, 3, 4), (), size=size)
    assert not len(guesses_at(ints(9, 1, 2, 3), 2, answers))


def test_matches_do_not_reach_from_one_answer_into_another() -> None:
    answers = recent((5, 1), (2, 3, 4, 8))
    assert not len(guesses_at(ints(9, 1, 2, 3), 2, answers))
    assert guesses_at(ints(9, 2, 3, 4), 2, answers).tolist() == [8]


def test_drawn_texts_against_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = rng.integers(0, 3, rng.integers(1, 40)).astype(np.int32)
        text, best, at = tokens.tolist(), 0, -1
        for end in range(len(text) - 1):
            length = 0
            while length <= end and length < 32 and text[end - length] == text[-1 - length]:
                length += 1
            if length >= max(best, 3):
                best, at = length, end
        expected = [] if at < 0 else [text[at + 1 + i % (len(text) - at - 1)] for i in range(5)]
        assert guesses_at(tokens, 5).tolist() == expected


@pytest.mark.parametrize(("least", "expected"), [(3, [4]), (4, [5]), (5, [])])
def test_as_many_of_the_last_tokens_as_asked_must_have_stood_together(
    least: int, expected: list[int]
) -> None:
    """Three in the text itself, or four in an answer."""
    text = ints(1, 2, 3, 4, 9, 9, 0, 1, 2, 3)
    answers = RecentAnswers(50)
    if least > 3:
        answers.add(ints(0, 1, 2, 3, 5), "")
    assert guesses_at(text, 1, answers, least=least).tolist() == expected
