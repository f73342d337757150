"""What matchers say about tokens to come, and masks after guesses, equal what they say later."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_backend.grammar.matchers import Batch, Grammars, Matcher
from minisgl_backend.request import IntArray
from tests.grammar.matching import EOS, VOCABULARY, compiled
from tests.grammar.schemas import SCHEMAS, closed

MARK: Final = VOCABULARY.names.index("<|im_start|>")
COMPACT: Final = {
    **closed(city={"type": "string"}, country={"enum": ["France", "Norway"]}),
    "x-guidance": {"whitespace_flexible": False},
}


def ids(text: str) -> list[int]:
    """The fewest tokens of a text that is spelled greedily."""
    found, rest = [], text.encode()
    while rest:
        token = max(
            (
                token
                for token, piece in enumerate(VOCABULARY.pieces)
                if piece and rest.startswith(piece)
            ),
            key=lambda token: len(VOCABULARY.pieces[token]),
        )
        found.append(token)
        rest = rest[len(VOCABULARY.pieces[token]) :]
    return found


def letters(text: str) -> list[int]:
    """A token for each letter."""
    return [VOCABULARY.pieces.index(letter.encode()) for letter in text]


def spelled(tokens: Sequence[int]) -> str:
    return b"".join(VOCABULARY.pieces[token] for token in tokens).decode()


def masks_of(
    grammars: Grammars, matchers: Sequence[Matcher], guesses: dict[int, list[int]]
) -> IntArray:
    batch = Batch(matchers, guesses)
    num_masks = len(matchers) + sum(map(len, guesses.values()))
    masks = np.zeros((num_masks, grammars.num_words), np.int32)
    assert grammars.fill(batch, masks).result() == {}
    return masks


def some_tokens(
    grammars: Grammars, matcher: Matcher, chance: random.Random, most: int
) -> list[int]:
    """Random tokens that may come next one after the other, but none that ends the answer. Moves
    the matcher."""
    tokens: list[int] = []
    while len(tokens) < most:
        (mask,) = masks_of(grammars, [matcher], {})
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(VOCABULARY)]
        options = [token for token in np.flatnonzero(bits).tolist() if token != EOS]
        token = chance.choice(options or [EOS])
        if not matcher.allowed([token]):
            return tokens
        assert not grammars.advance(Batch([matcher]), [token])
        tokens.append(token)
    return tokens


RULES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"min_tokens": 6, "stop_token_ids": (EOS, 50)},
    {"ignore_eos": True, "max_tokens": 9},
    {"begins_after": MARK},
    {"begins_after": MARK, "min_tokens": 4},
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    schema=SCHEMAS,
    seed=st.integers(0, 2**32),
    num_before=st.integers(0, 8),
    rules=st.sampled_from(RULES),
)
def test_masks_after_guesses_are_those_of_later_steps(
    grammars: Grammars, schema: dict[str, Any], seed: int, num_before: int, rules: dict[str, Any]
) -> None:
    """Beside answers without guesses; the matcher itself stays where it is."""
    chance = random.Random(seed)

    def begun() -> Matcher:
        matcher = compiled(grammars, "json_schema", schema, **rules)
        matcher.consume(before)
        return matcher

    before: list[int] = []
    scout = compiled(grammars, "json_schema", schema, **rules)
    if scout.is_free:
        free = [chance.randrange(10, 1900) for _ in range(chance.randrange(4))]
        scout.consume([*free, MARK])
        before = some_tokens(grammars, scout, chance, num_before)
        guesses = some_tokens(grammars, scout, chance, 5)
        said = [*free, MARK, *before, *guesses]
        cut = chance.randrange(len(said) + 1)
        before, guesses = said[:cut], said[cut:]
    else:
        before = some_tokens(grammars, scout, chance, num_before)
        guesses = some_tokens(grammars, scout, chance, 5)
    matcher, beside, later = begun(), compiled(grammars, "regex", "[ab]c{9}"), begun()
    assert matcher.allowed(guesses) == len(guesses)
    found = masks_of(grammars, [beside, matcher, beside_too := begun()], {1: guesses})
    expected = []
    for token in [*guesses, None]:
        expected.append(masks_of(grammars, [later], {})[0])
        if token is not None:
            later.consume([token])
    assert np.array_equal(found[1:-1], expected)
    assert np.array_equal(found[0], masks_of(grammars, [beside], {})[0])
    assert np.array_equal(found[-1], masks_of(grammars, [beside_too], {})[0])
    assert np.array_equal(found[1], masks_of(grammars, [matcher], {})[0]), "it has not moved"


def test_forced_tokens_are_all_that_masks_allow(grammars: Grammars) -> None:
    matcher = compiled(grammars, "json_schema", COMPACT)
    assert spelled(matcher.forced()) == '{"city":'
    matcher.consume(ids('{"city":"Paris'))
    assert not matcher.forced()
    matcher.consume(ids('",'))
    forced = list(matcher.forced())
    assert spelled(forced) == '"country":"'
    masks = masks_of(grammars, [matcher], {0: forced})
    for token, mask in zip(forced, masks, strict=False):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [token]
    assert matcher.allowed(forced) == len(forced)


def test_nothing_is_forced_before_a_grammar_begins(grammars: Grammars) -> None:
    matcher = compiled(grammars, "json_schema", COMPACT, begins_after=MARK)
    assert not matcher.forced()
    matcher.consume([40, 41])
    assert not matcher.forced()
    matcher.consume([MARK])
    assert spelled(matcher.forced()) == '{"city":'


def test_a_section_that_may_be_opened_is_not_looked_into(grammars: Grammars) -> None:
    section = {"begins_after": MARK, "opened_by": 50}
    matcher = compiled(grammars, "json_schema", COMPACT, **section)
    assert not matcher.forced() and matcher.allowed([50, 40]) == 0
    matcher.consume([50])
    assert not matcher.forced() and matcher.allowed([40, MARK, *ids('{"city":')]) == 5
    again = compiled(grammars, "json_schema", COMPACT, **section)
    again.consume(ids('{"')[:1])
    assert again.forced()


@pytest.mark.parametrize(
    ("said", "guessed", "num_allowed"),
    [
        ("", "ab,cd", 4),  # with d the answer is over
        ("ab,", "ab", 1),
        ("ab,", "aab", 1),
        ("a", "c", 0),
        ("ab,c", "d", 0),
        ("ab,", "", 0),
    ],
)
def test_guesses_end_before_what_is_not_allowed_or_ends_an_answer(
    grammars: Grammars, said: str, guessed: str, num_allowed: int
) -> None:
    matcher = compiled(grammars, "regex", "(ab|cd),(ab|cd)")
    matcher.consume(letters(said))
    assert matcher.allowed(letters(guessed)) == num_allowed
    matcher.consume(letters(guessed)[:num_allowed])
    assert not matcher.inner.is_stopped()


def test_an_end_token_is_not_guessed_in_a_grammar(grammars: Grammars) -> None:
    matcher = compiled(grammars, "regex", "[ab]*")
    assert matcher.allowed([*letters("aa"), EOS, *letters("a")]) == 2


def test_an_answer_fails_alone_if_what_follows_its_guesses_takes_too_much_work(
    grammars: Grammars,
) -> None:
    heavy = compiled(grammars, "regex", "(.*a.{1,30}){20}")
    fine = compiled(grammars, "regex", "[ab]{150}")
    guesses = letters("a" * 20)
    assert heavy.allowed(guesses) == 20
    masks = np.zeros((22, grammars.num_words), np.int32)
    failed = grammars.fill(Batch([heavy, fine], {0: guesses}), masks).result()
    assert failed.keys() == {0} and "too complex" in failed[0]
    assert np.array_equal(masks[-1], masks_of(grammars, [fine], {})[0])
