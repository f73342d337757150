"""Whatever a planner is told about the next tokens of requests with a grammar, right or wrong, they
get their tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import pytest

from minisgl_backend.request import Grammar, GrammarKind, Request, RequestId, TokenId
from tests.fakes.executor import expected_tokens
from tests.fakes.harness import (
    Harness,
    Setup,
    random_setup,
    run_randomly,
    with_guesses,
    with_mtp,
)
from tests.properties.effort import examples

NUM_SEEDS: Final = examples(40)
FORM: Final = Grammar(GrammarKind.REGEX, ".*")


class ToldHarness(Harness):
    """Every other request has a grammar, and ``lookahead`` knows most of its tokens."""

    def add(self, request: Request) -> None:
        if request.id % 2:
            request = replace(request, sampling=replace(request.sampling, grammar=FORM))
        super().add(request)


class Told:
    """Tokens that requests of a harness will get next, now and then with a wrong one."""

    def __init__(self, harness: ToldHarness, rng: random.Random) -> None:
        self._harness = harness
        self._rng = rng
        self._will_say: dict[RequestId, list[TokenId]] = {}
        self.num_told = 0

    def forced(self, request_id: RequestId) -> Sequence[TokenId]:
        record = self._harness.records[request_id]
        assert record.request.sampling.grammar is not None
        if request_id not in self._will_say:
            self._will_say[request_id] = expected_tokens(record.request, self._harness.setup.model)
        begin = len(record.tokens)
        told = self._will_say[request_id][begin : begin + self._rng.choice([0, 0, 1, 3, 8])]
        if told and self._rng.random() < 0.2:
            told[self._rng.randrange(len(told))] = 1
        self.num_told += len(told)
        return told

    def allowed(self, request_id: RequestId, guesses: Sequence[TokenId]) -> int:
        assert guesses and min(guesses) >= 0, "no guesses that only the device knows"
        return self._rng.choice([len(guesses), len(guesses), self._rng.randint(0, len(guesses))])


@pytest.mark.parametrize("changed", [with_guesses, with_mtp])
def test_requests_get_their_tokens_whatever_is_told_about_them(
    changed: Callable[[Setup], Setup],
) -> None:
    num_told = num_right = 0
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        harness = ToldHarness(changed(random_setup(rng)))
        harness.lookahead = told = Told(harness, random.Random(seed))
        run_randomly(harness, rng, check=True)
        num_told += told.num_told
        num_right += harness.scheduler.stats().num_right_guesses
    assert num_told > 0 and num_right > 0
