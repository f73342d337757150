"""Answers with a grammar are the same with guesses as without, at any temperature.

The engines are real ones with random weights. So the requests' grammars or biases make them repeat
themselves, or begin like their prompts, else there would be little to look up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import pytest

from minisgl_backend.request import (
    FinishReason,
    IntArray,
    SamplingParams,
)
from tests.grammar.matching import VOCABULARY
from tests.grammar.test_engine import (
    OPTIONS,
    SCHEMA,
    grammar,
    piece,
)
from tests.grammar.test_lookahead import MARK, letters
from tests.parallel.engines import Answer, Ranked, ranked_engine, wait_for_all

GUESSING: Final[dict[str, Any]] = {"speculative_tokens": 6, "speculative_max_requests": 16}
RECORDS: Final = {
    "type": "array",
    "items": SCHEMA,
    "minItems": 4,
    "x-guidance": {"whitespace_flexible": False},
}
QUOTE: Final = tuple((token, 3.0) for token, piece in enumerate(VOCABULARY.pieces) if piece == b'"')

Asked: TypeAlias = tuple[IntArray, SamplingParams]


def said(text: str) -> IntArray:
    """A prompt."""
    return np.array([40, 41, *letters(text)], np.int32)


def requests() -> list[Asked]:
    """Greedy and random ones of each kind, some with logprobs."""
    asked: list[Asked] = [
        (
            said('[{"name":"ab"'),
            SamplingParams(grammar=grammar("json_schema", RECORDS), logit_bias=QUOTE),
        ),
        (said("abcabcabc"), SamplingParams(grammar=grammar("regex", "(abc|abd)*"))),
        (said("abababab"), SamplingParams(grammar=grammar("regex", "[ab]{5,70}"), min_tokens=9)),
        (said("a,b"), SamplingParams(grammar=grammar("regex", "(a,){12}(x|y),(done|gone)"))),
        (said("ab"), SamplingParams(grammar=grammar("regex", "[ab]*"), ignore_eos=True)),
        (
            said("ab"),
            SamplingParams(grammar=grammar("regex", "[abc]*"), stop_token_ids=(piece("c"),)),
        ),
        (
            np.array([50, 51, 52, MARK, *letters("abab"), 50, 51], np.int32),
            SamplingParams(
                grammar=grammar("regex", "(ab)*", begins_after=MARK),
                logit_bias=((50, 90.0), (51, 90.0), (52, 90.0), (MARK, 89.0)),
            ),
        ),
        (said("abab"), SamplingParams(logit_bias=((piece("a"), 99.0), (piece("b"), 99.0)))),
    ]
    return [
        (prompt, replace(each, max_tokens=50, temperature=temperature, seed=seed, num_logprobs=top))
        for temperature in (0.0, 1.0)
        for seed, top in ((1, None), (2, 2))
        for prompt, each in asked
    ]


def answered(ranked: Ranked, asked: Sequence[Asked]) -> list[Answer]:
    answers = [ranked.submit(*each) for each in asked]
    wait_for_all(answers)
    assert all(answer.error is None for answer in answers)
    return answers


def outcomes(answers: Sequence[Answer]) -> list[tuple[list[int], FinishReason | None]]:
    return [(answer.tokens, answer.reason) for answer in answers]


@pytest.fixture(scope="module")
def plain() -> list[Answer]:
    """The answers without guesses, one after the other."""
    with ranked_engine(1, **OPTIONS) as ranked:
        return [answered(ranked, [each])[0] for each in requests()]


@pytest.fixture
def guessing() -> Iterator[Ranked]:
    with ranked_engine(1, **OPTIONS, **GUESSING) as ranked:
        yield ranked


def num_guesses(ranked: Ranked) -> tuple[int, int]:
    """And how many of them were right."""
    stats = ranked.engine.stats().scheduler
    return stats.num_guesses, stats.num_right_guesses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False, "page_size": 1},
        {"speculative_tokens": 2, "page_size": 4, "max_prefill_tokens": 16},
        {"speculative_tokens": 40},
    ],
    ids=str,
)
def test_answers_are_those_without_guesses(plain: list[Answer], options: dict[str, Any]) -> None:
    with ranked_engine(1, **{**OPTIONS, **GUESSING, **options}) as ranked:
        alone = [answered(ranked, [each])[0] for each in requests()]
        together = answered(ranked, requests())
        num_made, num_right = num_guesses(ranked)
    assert outcomes(alone) == outcomes(plain)
    assert outcomes(together) == outcomes(plain)
    assert 0 < num_right < num_made
    for found, expected in zip(alone, plain, strict=True):
        assert [one and one.rank for one in found.logprobs] == [
            one and one.rank for one in expected.logprobs
        ]
