"""Guesses at next tokens: how they are made, what is planned with them, and how they are judged."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_TOKEN, SampledTokens, StepPlan
from minisgl_backend.request import (
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    IntArray,
    PromptLogprobs,
    Request,
    RequestId,
    SamplingParams,
    TokenId,
    TokenLogprobs,
)
from minisgl_backend.scheduling.guesses import Guesser
from minisgl_backend.scheduling.lookup import RecentAnswers
from minisgl_backend.scheduling.running import RunningRows
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_backend.scheduling.sequence import Sequence
from tests.unit.scheduling.planner import (
    broken,
    chunks,
    commit,
    failures,
    make,
    planned,
    request,
    run_to_first_tokens,
    step,
)

AGAIN = (1, 2, 3, 4, 5, 1, 2)
"""The end of a prompt: if 3 is sampled after it, the guesses are 4, 5, 1, 2, 3, 4, ..."""


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def repeating(
    number: int, num_prompt_tokens: int = 8, max_tokens: int = 8, **sampling: Any
) -> Request:
    """A request whose prompt ends with ``AGAIN``."""
    one = request(number, num_prompt_tokens, max_tokens, sampling=SamplingParams(**sampling))
    prompt = one.prompt + 100 * (number + 1)
    prompt[-len(AGAIN) :] = AGAIN
    return replace(one, prompt=prompt)


def started(*requests: Request, **config: Any) -> Scheduler:
    """A planner whose requests have their first token, which is 3."""
    scheduler = make(**{"speculative_tokens": 4, **config})
    return run_to_first_tokens(scheduler, requests, lambda: step(scheduler, 3))


def guessed(plan: StepPlan) -> dict[int, tuple[int, list[int]]]:
    """For each row with guesses, the position and the tokens of its check."""
    checks, ends = plan.checks, np.cumsum(plan.checks.lengths).tolist()
    columns = (checks.rows.tolist(), checks.starts.tolist(), checks.lengths.tolist(), ends)
    return {
        row: (start, checks.tokens[end - length : end].tolist())
        for row, start, length, end in zip(*columns, strict=True)
    }


def decoded(plan: StepPlan) -> list[tuple[int, int]]:
    """The rows and positions of the plan's decodes."""
    decodes = plan.decodes
    return list(zip(decodes.rows.tolist(), decodes.positions.tolist(), strict=True))


def counted(scheduler: Scheduler) -> tuple[int, int, int]:
    """How often guesses were checked, their number, and that of the right ones."""
    stats = scheduler.stats()
    return stats.num_checks, stats.num_guesses, stats.num_right_guesses


def rows_of(*sampling: SamplingParams) -> RunningRows:
    """Rows with one token again and again, so that there is always something to guess."""
    rows = RunningRows(len(sampling))
    for number, params in enumerate(sampling):
        one = Request(id=RequestId(number), prompt=ints(*[7] * 8), sampling=params)
        sequence = Sequence(one, (number, number), one.prompt)
        sequence.row = rows.take(sequence, num_cached_tokens=7, capacity=1000)
    return rows


def say(rows: RunningRows) -> None:
    """Let the first row get its token again."""
    rows.append(ints(0), ints(7))
    rows.planned[0] += 1


def begun(rows: RunningRows, *, most_tokens: int = 8, max_rows: int = 8) -> Guesser:
    """With the columns of ``rows`` in the order of their sequences."""
    recent = RecentAnswers(100)
    guesses = Guesser(rows, recent, most_tokens=most_tokens, max_rows=max_rows, mtp_tokens=0)
    for row in range(len(rows.sequences)):
        guesses.begin(row)
    return guesses


def counts(guesses: Guesser, *rows: int) -> dict[int, int]:
    """How many guesses each row has."""
    return counts_of(guesses.of_rows(ints(*rows)))


def counts_of(found: dict[int, IntArray]) -> dict[int, int]:
    return {row: len(guesses) for row, guesses in found.items()}


LONG = SamplingParams(max_tokens=500)
SEVENS = replace(LONG, grammar=Grammar(GrammarKind.REGEX, "7*"))


@dataclass
class Told:
    """A ``Lookahead`` that was told what to say."""

    forced_by: dict[int, Seq[TokenId]] = field(default_factory=dict)
    most_allowed: int = 100
    asked: list[list[TokenId]] = field(default_factory=list)

    def forced(self, request_id: RequestId) -> Seq[TokenId]:
        return self.forced_by.get(request_id, ())

    def allowed(self, request_id: RequestId, guesses: Seq[TokenId]) -> int:
        self.asked.append(list(guesses))
        return min(len(guesses), self.most_allowed)


def test_wrong_guesses_make_fewer_and_right_ones_all() -> None:
    guesses = begun(rows_of(LONG, LONG))
    assert counts(guesses, 0, 1) == {0: 8, 1: 8}
    for num_guesses, num_right, then in ((8, 2, 5), (5, 1, 3), (3, 3, 8), (8, 7, 8)):
        guesses.judge(0, num_guesses, num_right)
        assert counts(guesses, 0, 1) == {0: then, 1: 8}


def test_a_row_whose_guesses_were_all_wrong_pauses_and_then_tries_one() -> None:
    rows = rows_of(LONG)
    guesses = begun(rows)
    guesses.judge(0, 8, 0)
    for _ in range(4):
        assert counts(guesses, 0) == {}
        say(rows)
    assert counts(guesses, 0) == {0: 1}
    guesses.judge(0, 1, 1)
    assert counts(guesses, 0) == {0: 8}


def test_a_row_begins_anew_with_each_sequence() -> None:
    guesses = begun(rows_of(LONG))
    guesses.judge(0, 8, 0)
    guesses.begin(0)
    assert counts(guesses, 0) == {0: 8}


def test_nothing_is_guessed_while_many_rows_are_taken() -> None:
    rows = rows_of(LONG, LONG, LONG)
    guesses = begun(rows, max_rows=2)
    assert counts(guesses, 0, 1, 2) == {}
    assert counts(guesses, 0, 2) == {}
    rows.give_back(1)
    assert counts(guesses, 0, 2) == {0: 8, 2: 8}


def test_rows_with_a_grammar_get_no_guesses_without_a_lookahead() -> None:
    guesses = begun(rows_of(SEVENS, replace(LONG, repetition_penalty=1.5)))
    assert counts(guesses, 0, 1) == {1: 8}


def test_forced_tokens_come_before_those_that_are_looked_up() -> None:
    """What is looked up follows the forced ones: 7, 7, 7, if these end with that."""
    guesses = begun(rows_of(SEVENS, LONG), most_tokens=5)
    for forced, expected in (
        ((), [7] * 5),
        ((7, 7), [7] * 5),
        ((7, 8), [7, 8]),
        ((1, 2, 3, 4, 5, 6), [1, 2, 3, 4, 5]),
    ):
        told = Told({0: forced})
        found = guesses.of_rows(ints(0, 1), told)
        assert {row: each.tolist() for row, each in found.items()} == {0: expected, 1: [7] * 5}
        assert told.asked == [expected]


def test_only_what_a_grammar_allows_is_guessed() -> None:
    guesses = begun(rows_of(SEVENS))
    assert guesses.of_rows(ints(0), Told(most_allowed=3))[0].tolist() == [7] * 3


def test_a_row_looks_nothing_up_for_a_while_after_guesses_that_were_not_allowed() -> None:
    """Forced tokens are guessed meanwhile."""
    rows = rows_of(SEVENS)
    guesses, told = begun(rows), Told({0: (8, 9)})
    assert not guesses.of_rows(ints(0), Told(most_allowed=0))
    for _ in range(4):
        assert not guesses.of_rows(ints(0), Told())
        assert guesses.of_rows(ints(0), told)[0].tolist() == [8, 9]
        say(rows)
    assert guesses.of_rows(ints(0), Told())[0].tolist() == [7]


def test_the_last_token_that_a_row_may_have_is_not_forced() -> None:
    rows = rows_of(replace(SEVENS, max_tokens=4))
    guesses, told = begun(rows), Told({0: (8, 8, 8, 8, 8)})
    for count in (3, 2, 1, None):
        assert counts_of(guesses.of_rows(ints(0), told)) == ({} if count is None else {0: count})
        say(rows)


def test_the_last_token_that_a_row_may_have_is_not_guessed() -> None:
    rows = rows_of(SamplingParams(max_tokens=4))
    guesses = begun(rows)
    for count in (3, 2, 1, None):
        assert counts(guesses, 0) == ({} if count is None else {0: count})
        say(rows)


def test_a_row_gets_its_right_guesses_and_the_token_after_them() -> None:
    scheduler = started(repeating(0, max_tokens=20))
    plan = planned(scheduler)
    assert guessed(plan) == {0: (8, [3, 4, 5, 1, 2])}
    assert not decoded(plan)
    result = commit(scheduler, plan, (4, 5, 1, 2, 3))
    assert result.request_ids == [0] * 5
    assert result.token_ids.tolist() == [4, 5, 1, 2, 3]
    plan = planned(scheduler)
    assert guessed(plan) == {0: (13, [3, 4, 5, 1, 2])}


@pytest.mark.parametrize(
    ("sampled", "num_right"), [((4, 5, 9, 2, 3), 2), ((4, 9, 1, 2, 3), 1), ((9, 5, 1, 2, 3), 0)]
)
def test_what_is_sampled_after_a_wrong_guess_is_dropped(
    sampled: tuple[int, ...], num_right: int
) -> None:
    scheduler = started(repeating(0, max_tokens=20))
    result = step(scheduler, sampled)
    kept = list(sampled[: num_right + 1])
    assert result.token_ids.tolist() == kept and not result.ended
    assert counted(scheduler) == (1, 4, num_right)
    at = 9 + num_right
    plan = planned(scheduler)
    assert not guessed(plan) and decoded(plan) == [(0, at)]


def test_guesses_are_counted_over_all_rows_and_steps() -> None:
    scheduler = started(
        repeating(0, max_tokens=20), repeating(1, max_tokens=20), max_prefill_tokens=20
    )
    step(scheduler, (4, 5, 1, 2, 3, 4, 50, 1, 2, 3))
    plan = planned(scheduler)
    assert guessed(plan).keys() == {0}
    commit(scheduler, plan, (4, 5, 9, 2, 3, 51))
    assert counted(scheduler) == (3, 12, 7)
    assert scheduler.stats().num_right_by_place == (3, 2, 1, 1)
    assert scheduler.renewed().stats().num_right_by_place == (3, 2, 1, 1)


def test_there_are_as_many_places_as_guesses_of_any_source() -> None:
    for config, num_places in (
        ({}, 0),
        ({"speculative_tokens": 4}, 4),
        ({"mtp_tokens": 3}, 3),
        ({"speculative_tokens": 2, "mtp_tokens": 3}, 3),
    ):
        assert make(**config).stats().num_right_by_place == (0,) * num_places


def test_a_stop_token_among_right_guesses_ends_the_request_there() -> None:
    scheduler = started(repeating(0, stop_token_ids=(5,)))
    result = step(scheduler, (4, 5, 1, 2, 3))
    assert result.request_ids == [0, 0]
    assert result.token_ids.tolist() == [4, 5]
    assert result.ended == {0: Finished(FinishReason.STOP, 5)}
    assert not scheduler.has_work() and scheduler.stats().num_running == 0


def test_a_stop_token_before_min_tokens_is_a_guess_like_others() -> None:
    scheduler = started(repeating(0, max_tokens=20, stop_token_ids=(5,), min_tokens=3))
    assert step(scheduler, (4, 5, 1, 2, 3)).token_ids.tolist() == [4, 5, 1, 2, 3]
    result = step(scheduler, (4, 5, 1, 2, 3))
    assert result.token_ids.tolist() == [4, 5]
    assert result.ended == {0: Finished(FinishReason.STOP, 5)}


def test_a_row_is_judged_by_its_last_guesses() -> None:
    scheduler = started(
        repeating(0, max_tokens=40), repeating(1, max_tokens=40), max_prefill_tokens=20
    )
    step(scheduler, (9, 5, 1, 2, 3, 4, 9, 1, 2, 3))
    for token in (1, 2, 3):
        step(scheduler, token)
    assert guessed(planned(scheduler)) == {1: (13, [3, 4, 9, 1])}, "the first row pauses"


def test_a_request_ends_with_its_last_token_among_right_guesses() -> None:
    scheduler = started(repeating(0, max_tokens=4))
    plan = planned(scheduler)
    assert guessed(plan) == {0: (8, [3, 4, 5])}
    result = commit(scheduler, plan, (4, 5, 1))
    assert result.token_ids.tolist() == [4, 5, 1]
    assert result.ended == {0: Finished(FinishReason.LENGTH)}
    assert not scheduler.has_work() and scheduler.stats().num_running == 0


def test_nothing_is_planned_until_guesses_are_judged() -> None:
    scheduler = started(repeating(0), request(1, 4))
    plan = planned(scheduler)
    assert guessed(plan)
    scheduler.add(request(2, 4))
    assert scheduler.plan() is None
    commit(scheduler, plan)
    assert scheduler.plan() is not None


def test_a_row_with_something_to_guess_waits_for_its_last_token() -> None:
    scheduler = make(speculative_tokens=4)
    prompt = ints(*AGAIN, 3)
    scheduler.add(replace(request(0, 8), prompt=prompt))
    first = planned(scheduler)
    assert scheduler.plan() is None
    commit(scheduler, first, 4)
    assert guessed(planned(scheduler)) == {0: (8, [4, 5, 1, 2, 3])}


def test_a_row_with_forced_tokens_waits_for_its_last_token() -> None:
    """What is allowed is asked only then."""
    scheduler = make(speculative_tokens=4)
    scheduler.add(replace(request(0, 4, 20), sampling=SEVENS))
    told = Told({0: (8, 9)})
    first = planned(scheduler)
    assert scheduler.plan(told) is None and not told.asked
    commit(scheduler, first, 8)
    told.forced_by = {0: (9, 10)}
    plan = scheduler.plan(told)
    assert plan is not None and guessed(plan) == {0: (4, [8, 9, 10])}
    assert plan.masked_rows.tolist() == [0] and plan.sample_rows.tolist() == [0] * 3
    result = commit(scheduler, plan, (9, 10, 11))
    assert result.token_ids.tolist() == [9, 10, 11]
    assert counted(scheduler) == (1, 2, 2)
    assert scheduler.stats().num_right_by_place == (1, 1, 0, 0)


def test_a_row_with_a_grammar_overlaps_while_there_is_nothing_to_guess() -> None:
    scheduler = make(speculative_tokens=4)
    scheduler.add(replace(request(0, 8), sampling=SEVENS))
    plans = [scheduler.plan(Told()) for _ in range(3)]
    assert [plan and decoded(plan) for plan in plans] == [[], [(0, 8)], [(0, 9)]]


def test_other_rows_overlap_as_ever() -> None:
    scheduler = make(speculative_tokens=4)
    scheduler.add(request(0, 8))
    plans = [planned(scheduler) for _ in range(3)]
    assert [decoded(plan) for plan in plans] == [[], [(0, 8)], [(0, 9)]]


def test_other_rows_decode_beside_guesses() -> None:
    scheduler = started(repeating(0), request(1, 4))
    plan = planned(scheduler)
    assert guessed(plan).keys() == {0}
    assert decoded(plan) == [(1, 4)]
    result = commit(scheduler, plan, (4, 5, 9, 2, 3, 77))
    answers: dict[int, list[int]] = {0: [], 1: []}
    for request_id, token in zip(result.request_ids, result.token_ids.tolist(), strict=True):
        answers[request_id].append(token)
    assert answers == {0: [4, 5, 9], 1: [77]}
    plan = planned(scheduler)
    assert decoded(plan) == [(0, 11), (1, 5)]


def test_prompts_begin_beside_guesses_and_share_their_budget() -> None:
    scheduler = started(repeating(0))
    scheduler.add(request(1, 20))
    plan = planned(scheduler)
    assert (plan.checks.rows.tolist(), plan.checks.lengths.tolist()) == ([0], [5])
    assert chunks(plan) == [(1, 0, 11, False)]
    result = commit(scheduler, plan, (4, 9, 1, 2, 3))
    assert result.token_ids.tolist() == [4, 9]
    plan = planned(scheduler)
    assert (decoded(plan), plan.chunks.starts.tolist()) == ([(0, 10)], [11])


def test_nothing_is_guessed_while_many_prompts_are_computed() -> None:
    scheduler = started(repeating(0, max_tokens=40), speculative_max_requests=1)
    scheduler.add(request(1, 20, max_tokens=1))
    plan = planned(scheduler)
    assert guessed(plan).keys() == {0} and plan.chunks.rows.tolist() == [1]
    commit(scheduler, plan, (4, 5, 1, 2, 3))
    plan = planned(scheduler)
    assert not guessed(plan) and decoded(plan) == [(0, 13)]
    assert plan.chunks.rows.tolist() == [1]
    commit(scheduler, plan, (77, 4))
    assert guessed(planned(scheduler)) == {0: (14, [4, 5, 1, 2, 3])}


def test_prompts_are_scored_and_embedded_beside_guesses() -> None:
    scheduler = started(repeating(0))
    asked = SamplingParams(num_prompt_logprobs=0, embed=True)
    scheduler.add(request(1, 3, max_tokens=0, sampling=asked))
    plan = planned(scheduler)
    vector, nothing = np.ones(2, np.float32), np.empty((2, 0))
    scores = PromptLogprobs(
        ints(1, 2),
        np.array([-1, -2], np.float32),
        ints(1, 1),
        nothing.astype(np.int32),
        nothing.astype(np.float32),
    )
    tokens = SampledTokens(
        ints(4, 9, 1, 2, 3, 77), prompt_logprobs=(scores,), embeddings={5: vector}
    )
    result = scheduler.commit(plan, tokens)
    assert (result.request_ids, result.token_ids.tolist()) == ([0, 0], [4, 9])
    assert result.scored == [(1, scores)]
    assert result.embedded == [(1, vector)]
    assert result.ended == {1: Finished(FinishReason.LENGTH)}


@pytest.mark.parametrize(
    ("num_others", "expected"), [(3, [3, 4, 5, 1]), (5, None)], ids=["one page", "no page"]
)
def test_there_are_only_guesses_that_have_pages(
    num_others: int, expected: list[int] | None
) -> None:
    """Of four pages the row has two, and another request one or two."""
    scheduler = started(repeating(0), request(1, num_others), num_pages=4)
    plan = planned(scheduler)
    if expected is None:
        assert not guessed(plan)
        assert decoded(plan) == [(0, 8)]
        assert scheduler.stats().num_retractions == 1
    else:
        assert guessed(plan) == {0: (8, expected)}
        assert decoded(plan) == [(1, num_others)]


@pytest.mark.parametrize(("budget", "expected"), [(10, [3, 4, 5, 1, 2]), (6, [3, 4, 5]), (3, None)])
def test_there_are_only_guesses_within_half_of_the_budget(
    budget: int, expected: list[int] | None
) -> None:
    scheduler = started(repeating(0), max_prefill_tokens=budget)
    plan = planned(scheduler)
    assert guessed(plan) == ({} if expected is None else {0: (8, expected)})
    assert decoded(plan) == ([(0, 8)] if expected is None else [])


@pytest.mark.parametrize(("length", "expected"), [(8, [3, 4, 5, 1]), (10, [3, 4]), (11, None)])
def test_guesses_end_with_a_section(length: int, expected: list[int] | None) -> None:
    scheduler = started(repeating(0, length), section=12)
    plan = planned(scheduler)
    assert guessed(plan) == ({} if expected is None else {0: (length, expected)})
    assert decoded(plan) == ([(0, length)] if expected is None else [])


def test_an_abort_drops_guesses_in_flight() -> None:
    scheduler = started(repeating(0))
    plan = planned(scheduler)
    assert scheduler.abort(RequestId(0))
    assert scheduler.stats().num_running == 1
    result = commit(scheduler, plan, (4, 5, 1, 2, 3))
    assert (result.request_ids, result.ended) == ([], {})
    assert scheduler.stats().num_running == 0
    assert broken(scheduler) == set()


def test_a_row_may_be_retracted_in_the_step_that_checks_its_guesses() -> None:
    """The first request needs a page, and there is none."""
    scheduler = started(request(0, 4), repeating(1, 9), num_pages=4)
    plan = planned(scheduler)
    assert guessed(plan) == {1: (9, [3, 4, 5])}
    assert not decoded(plan)
    assert scheduler.stats().num_retractions == 1
    result = commit(scheduler, plan, (4, 5, 9))
    assert (result.request_ids, result.token_ids.tolist()) == ([1] * 3, [4, 5, 9])
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    num_tokens = 4
    while scheduler.has_work():
        num_tokens += step(scheduler, 8).request_ids.count(RequestId(1))
    assert num_tokens == 8


def test_guesses_leave_pages_to_rows_that_need_one_to_decode() -> None:
    scheduler = started(repeating(0), request(1, 4), num_pages=4)
    plan = planned(scheduler)
    assert not guessed(plan)
    assert scheduler.stats().num_retractions == 1, "there is one page for two rows"
    scheduler = started(repeating(0), request(1, 4), num_pages=5)
    plan = planned(scheduler)
    assert guessed(plan) == {0: (8, [3, 4, 5, 1])}
    assert decoded(plan) == [(1, 4)]
    assert scheduler.stats().num_retractions == 0


def test_a_row_that_has_no_guesses_after_all_is_granted_no_page_for_them() -> None:
    """The first row's guesses take half of the budget."""
    scheduler = started(
        repeating(0, max_tokens=24),
        request(1, 4),
        repeating(2),
        max_prefill_tokens=20,
        speculative_tokens=18,
        num_pages=11,
    )
    plan = planned(scheduler)
    assert guessed(plan).keys() == {0}
    assert decoded(plan) == [(1, 4), (2, 8)]
    assert [plan.grants.rows.tolist().count(row) for row in range(3)] == [3, 1, 1]


def test_prompts_go_on_beside_guesses() -> None:
    scheduler = started(repeating(0, max_tokens=20), speculative_tokens=30)
    scheduler.add(request(1, 8))
    plan = planned(scheduler)
    assert guessed(plan)[0] == (8, [3, 4, 5, 1, 2, 3, 4, 5])
    assert plan.chunks.lengths.tolist() == [8]


def test_the_number_of_samples_must_be_right() -> None:
    scheduler = started(repeating(0))
    plan = planned(scheduler)
    for count in (4, 6):
        tokens = SampledTokens(np.full(count, 4, np.int32))
        with pytest.raises(InvariantError, match=f"{count} tokens for 5 samples"):
            scheduler.commit(plan, tokens)
        scheduler = started(repeating(0))
        plan = planned(scheduler)


@pytest.mark.parametrize("sampled", [(4, NO_TOKEN, 1, 2, 3), (9, 5, NO_TOKEN, 2, 3)])
def test_a_request_with_guesses_fails_if_any_logits_are_not_finite(
    sampled: tuple[int, ...],
) -> None:
    """After a right guess, and after a wrong one, whose pages it has broken, too."""
    scheduler = make(speculative_tokens=4)
    for each in (repeating(0), request(1, 4)):
        scheduler.add(each)
    first = planned(scheduler)
    commit(scheduler, first, (3, 13))
    plan = planned(scheduler)
    held = {
        page for each in (first, plan) for page in each.grants.pages[each.grants.rows == 0].tolist()
    }
    assert len(held) == 4
    result = commit(scheduler, plan, (*sampled, 77))
    assert (result.request_ids, result.token_ids.tolist()) == ([1], [77])
    assert failures(result) == [0]
    assert broken(scheduler) == held


def test_each_token_has_its_logprobs() -> None:
    scheduler = started(repeating(0), request(1, 4))
    plan = planned(scheduler)
    logprobs = {index: TokenLogprobs(-float(index), 1) for index in range(6)}
    tokens = SampledTokens(ints(4, 5, 9, 2, 3, 77), logprobs)
    result = scheduler.commit(plan, tokens)
    pairs = zip(result.request_ids, result.token_ids.tolist(), strict=True)
    found = {pair: result.logprobs[index].logprob for index, pair in enumerate(pairs)}
    assert found == {(0, 4): 0, (0, 5): -1, (0, 9): -2, (1, 77): -5}
    assert len(result.logprobs) == 4


def test_answers_that_ended_are_looked_into_by_requests_that_share_their_prefixes() -> None:
    scheduler = make(speculative_tokens=4, speculative_recent_tokens=50)
    answer = (41, 42, 43, 44, 45, 46)

    def guessed_after(number: int, cache_salt: str = "") -> list[list[int]]:
        """What is guessed while this request gets ``answer``."""
        one = replace(request(number, 4, len(answer)), cache_salt=cache_salt)
        scheduler.add(one)
        found = []
        while (plan := scheduler.plan()) is not None:
            found += [tokens for _, tokens in guessed(plan).values()]
            commit(scheduler, plan, [answer[at - 4] for at in plan.sample_positions.tolist()])
        return found

    assert guessed_after(0) == []
    assert guessed_after(1) == [[43, 44, 45]]
    assert guessed_after(2, "other") == []
    assert guessed_after(3, "other") == [[43, 44, 45]]


# --- rows with recurrent states, which are kept where a step begins ------------------------------


def with_states(*requests: Request, **config: Any) -> Scheduler:
    return started(*requests, **{"num_snapshots": 8, **config})


@pytest.mark.parametrize(
    ("sampled", "num_right"), [((4, 5, 9, 2, 3), 2), ((4, 9, 1, 2, 3), 1), ((9, 5, 1, 2, 3), 0)]
)
def test_a_row_with_states_goes_on_after_its_right_guesses(
    sampled: tuple[int, ...], num_right: int
) -> None:
    """The next step begins with the token after them, even if no more is guessed."""
    scheduler = with_states(repeating(0, max_tokens=20))
    result = step(scheduler, sampled)
    assert result.token_ids.tolist() == list(sampled[: num_right + 1])
    plan, ahead = planned(scheduler), planned(scheduler)
    assert not guessed(plan) and not guessed(ahead)
    assert (decoded(plan), decoded(ahead)) == ([(0, 9 + num_right)], [(0, 10 + num_right)])


def test_states_are_kept_where_a_check_begins_and_none_passes_such_a_position() -> None:
    """They are kept at each multiple of 8."""
    scheduler = with_states(repeating(0, max_tokens=60))
    plan = planned(scheduler)
    assert guessed(plan) == {0: (8, [3, 4, 5, 1, 2])}
    assert plan.snapshots.kept_rows.tolist() == [0]
    (number,) = plan.snapshots.kept.tolist()
    commit(scheduler, plan, (4, 5, 1, 2, 3))
    plan = planned(scheduler)
    assert guessed(plan) == {0: (13, [3, 4, 5])}
    assert not len(plan.snapshots.kept_rows)
    commit(scheduler, plan, (4, 5, 1))
    plan = planned(scheduler)
    assert guessed(plan) == {0: (16, [1, 2, 3, 4, 5])}
    assert plan.snapshots.kept_rows.tolist() == [0]
    assert plan.snapshots.kept.tolist() == [number]
    assert not len(plan.snapshots.saved)


def test_a_row_decodes_right_before_the_position_at_which_its_states_are_kept() -> None:
    scheduler = with_states(repeating(0, 15))
    plan = planned(scheduler)
    assert (guessed(plan), decoded(plan)) == ({}, [(0, 15)])
    commit(scheduler, plan, 4)
    plan = planned(scheduler)
    assert guessed(plan) == {0: (16, [4, 5, 1, 2, 3])}
    assert plan.snapshots.kept_rows.tolist() == [0]
