"""Guesses of an MTP layer: when it makes some, when they are used, and what waits for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_TOKEN, SampledTokens, StepPlan
from minisgl_backend.request import Finished, FinishReason, Request, RequestId, SamplingParams
from minisgl_backend.scheduling.checks import moved_back
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.scheduling.scheduler import Scheduler
from tests.unit.scheduling.planner import (
    broken,
    chunks,
    commit,
    failures,
    make,
    planned,
    request,
    run_to_first_tokens,
)
from tests.unit.scheduling.test_guesses import SEVENS, Told, counted, decoded, guessed, ints

MORE = (21, 22, 23)
"""What the layer guesses."""
LEFT = (-2, -3, -4)
"""What stands for that in checks of rows without a grammar, whose guesses stay on the device."""


def started(*requests: Request, **config: Any) -> Scheduler:
    """A planner whose requests have their first token, 20, and the guesses ``MORE`` after it."""
    scheduler = make(**{"mtp_tokens": 3, **config})
    return run_to_first_tokens(
        scheduler, requests, lambda: landed(scheduler, planned(scheduler), 20)
    )


def landed(
    scheduler: Scheduler, plan: StepPlan, token: int | Seq[int], were: Seq[int] = MORE
) -> StepResult:
    """Commit a step. The guesses in its checks that were left to the device ``were`` these; those
    that are reported now are ``MORE``."""
    checked = [were[LEFT.index(it)] if it in LEFT else it for it in plan.checks.tokens.tolist()]
    is_left = bool((plan.checks.tokens < 0).any())
    reported = [MORE] * len(plan.reported_rows)
    return commit(scheduler, plan, token, reported, checked if is_left else None)


def named(plan: StepPlan) -> list[int]:
    """The rows for which the layer guesses."""
    rows: list[int] = plan.mtp_rows.tolist()
    return rows


def said_before(number: int, count: int) -> Request:
    """A request in whose prompt the last ``count`` tokens, with the token 20 sampled next, have
    stood before, followed by 31, 32, ..."""
    last = list(range(10, 10 + count - 1))
    prompt = [*last, 20, *range(31, 39), *last]
    return replace(request(number, 1, 30), prompt=ints(100 + number, *prompt))


def with_grammar(number: int, max_tokens: int = 20) -> Request:
    return replace(request(number, 4), sampling=replace(SEVENS, max_tokens=max_tokens))


# --- which rows are named -------------------------------------------------------------------------


def test_rows_are_named_that_get_a_token() -> None:
    """Neither those in the middle of their prompts, nor those that do not run yet."""
    scheduler = started(request(0, 4, 20), max_running_requests=2)
    scheduler.add(request(1, 20, 20))
    scheduler.add(request(2, 4, 20))
    plan = planned(scheduler)
    assert guessed(plan) == {0: (4, [20, *LEFT])}
    assert chunks(plan) == [(1, 0, 12, False)]
    assert named(plan) == [0]
    landed(scheduler, plan, (21, 22, 23, 24))
    plan = planned(scheduler)
    assert chunks(plan) == [(1, 12, 8, True)]
    assert named(plan) == [0, 1]
    landed(scheduler, plan, (9, 0, 0, 0, 20))
    assert guessed(planned(scheduler)) == {0: (9, [9, *LEFT]), 1: (20, [20, *LEFT])}


def test_no_row_is_named_without_a_layer() -> None:
    scheduler = make(speculative_tokens=3)
    scheduler.add(request(0, 4, 20))
    for _ in range(3):
        plan = planned(scheduler)
        assert not named(plan)
        commit(scheduler, plan)


def test_no_row_is_named_beside_many() -> None:
    scheduler = started(request(0, 4, 20), speculative_max_requests=1)
    scheduler.add(request(1, 20, 1))
    plan = planned(scheduler)
    assert guessed(plan) and named(plan) == [], "a prompt has taken a row in this step"
    landed(scheduler, plan, (21, 22, 23, 24))
    plan = planned(scheduler)
    assert not guessed(plan) and decoded(plan) == [(0, 8)]
    assert chunks(plan) == [(1, 12, 8, True)] and named(plan) == []
    commit(scheduler, plan)
    plan = planned(scheduler)
    assert not guessed(plan) and named(plan) == [0]
    landed(scheduler, plan, 20)
    assert guessed(planned(scheduler)) == {0: (10, [20, *LEFT])}


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(1, []), (2, []), (3, [-2]), (4, [-2, -3]), (5, list(LEFT))]
)
def test_the_last_token_that_a_row_may_have_is_not_guessed(
    max_tokens: int, expected: list[int]
) -> None:
    """The first one comes with the prompt. A row for which that leaves nothing is not named."""
    scheduler = make(mtp_tokens=3)
    scheduler.add(request(0, 4, max_tokens))
    plan = planned(scheduler)
    assert named(plan) == ([0] if expected else [])
    landed(scheduler, plan, 20)
    if max_tokens > 1:
        plan = planned(scheduler)
        assert guessed(plan) == ({0: (4, [20, *expected])} if expected else {})
        assert decoded(plan) == ([] if expected else [(0, 4)])


@pytest.mark.parametrize(("max_tokens", "expected"), [(6, [0]), (5, [])])
def test_the_passes_of_the_layer_end_within_the_limit(max_tokens: int, expected: list[int]) -> None:
    """With seven guesses at tokens after the one at position 4, they take 4 to 9."""
    scheduler = make(mtp_tokens=7)
    scheduler.add(request(0, 4, max_tokens))
    assert named(planned(scheduler)) == expected


# --- pages ----------------------------------------------------------------------------------------


def test_passes_of_the_layer_have_pages() -> None:
    """Pages have 4 positions. The prompt takes 7, and the passes 7 and 8."""
    scheduler = make(mtp_tokens=3)
    scheduler.add(request(0, 7, 20))
    plan = planned(scheduler)
    assert named(plan) == [0]
    assert plan.grants.indices.tolist() == [0, 1, 2]


def test_a_single_guess_takes_no_page() -> None:
    scheduler = make(mtp_tokens=1, num_pages=2)
    scheduler.add(request(0, 8, 20))
    plan = planned(scheduler)
    assert named(plan) == [0]
    assert plan.grants.indices.tolist() == [0, 1]


def test_a_row_without_pages_for_the_passes_decodes_without_guesses() -> None:
    """Nobody is retracted for them."""
    scheduler = make(mtp_tokens=3, num_pages=4)
    scheduler.add(request(0, 7, 9))
    scheduler.add(request(1, 7, 9))
    plan = planned(scheduler)
    assert named(plan) == []
    assert plan.grants.indices.tolist() == [0, 1, 0, 1]
    commit(scheduler, plan)
    plan = planned(scheduler)
    assert decoded(plan) == [(0, 7), (1, 7)]
    assert scheduler.stats().num_retractions == 0


def test_pages_are_for_rows_that_cannot_decode_without_first() -> None:
    """The second row needs a page for its next token; the passes of the first one need one, too.
    Of both, only the second is named if there is one page."""
    for num_pages, expected in ((5, [1]), (6, [0, 1])):
        scheduler = make(mtp_tokens=3, num_pages=num_pages)
        scheduler.add(request(0, 7, 9))
        scheduler.add(request(1, 8, 8))
        plan = planned(scheduler)
        assert named(plan) == expected
        landed(scheduler, plan, 20)
        assert scheduler.stats().num_retractions == 0
        plan = planned(scheduler)
        assert sorted([*guessed(plan), *(row for row, _ in decoded(plan))]) == [0, 1]
        assert scheduler.stats().num_retractions == 0


@pytest.mark.parametrize(("num_pages", "expected"), [(5, []), (6, [0, 1])])
def test_rows_need_pages_if_all_their_guesses_are_right(
    num_pages: int, expected: list[int]
) -> None:
    """Both rows have a page for four more tokens, which are all checked."""
    scheduler = started(request(0, 4, 20), request(1, 4, 20), num_pages=num_pages)
    plan = planned(scheduler)
    assert guessed(plan) == {0: (4, [20, *LEFT]), 1: (4, [20, *LEFT])}
    assert named(plan) == expected


def test_nothing_is_guessed_for_a_row_that_is_retracted() -> None:
    """Although the pass for a single guess needs no page."""
    scheduler = make(mtp_tokens=1, num_pages=4)
    for each in (request(0, 4), request(1, 9)):
        scheduler.add(each)
    plan = planned(scheduler)
    assert named(plan) == [0, 1]
    commit(scheduler, plan, 20)
    plan = planned(scheduler)
    assert guessed(plan) == {1: (9, [20, -2])}
    assert scheduler.stats().num_retractions == 1
    assert named(plan) == []


def test_a_row_may_be_retracted_in_the_step_that_checks_its_guesses() -> None:
    """The first request needs a page, and there is none. Nothing is guessed for the second then."""
    scheduler = started(request(0, 4), request(1, 9), num_pages=4)
    plan = planned(scheduler)
    assert guessed(plan) == {1: (9, [20, -2, -3])}
    assert not decoded(plan) and named(plan) == []
    assert scheduler.stats().num_retractions == 1
    result = landed(scheduler, plan, (21, 22, 9))
    assert (result.request_ids, result.token_ids.tolist()) == ([1] * 3, [21, 22, 9])
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    num_tokens = 4
    while scheduler.has_work():
        plan = planned(scheduler)
        num_tokens += landed(scheduler, plan, 8).request_ids.count(RequestId(1))
    assert num_tokens == 8


# --- when guesses are used ------------------------------------------------------------------------


def test_guesses_go_on_after_those_that_were_right() -> None:
    scheduler = started(request(0, 4, 20))
    plan = planned(scheduler)
    assert guessed(plan) == {0: (4, [20, *LEFT])}
    assert named(plan) == [0] and not decoded(plan)
    result = landed(scheduler, plan, (21, 9, 0, 0))
    assert result.token_ids.tolist() == [21, 9]
    plan = planned(scheduler)
    assert guessed(plan) == {0: (6, [9, *LEFT])}
    result = landed(scheduler, plan, (41, 42, 43, 44), were=(41, 42, 43))
    assert result.token_ids.tolist() == [41, 42, 43, 44]
    assert guessed(planned(scheduler)) == {0: (10, [44, *LEFT])}
    assert counted(scheduler) == (2, 6, 4)


def test_wrong_guesses_make_neither_fewer_nor_a_pause() -> None:
    scheduler = started(request(0, 4, 20))
    for position in range(4, 9):
        plan = planned(scheduler)
        assert guessed(plan) == {0: (position, [20, *LEFT])}
        landed(scheduler, plan, (20, 0, 0, 0))


def test_guesses_for_another_position_are_not_used() -> None:
    """Beside a check of what was looked up the layer guesses nothing, since the check may reach the
    end."""
    one = said_before(0, 10)
    at = len(one.prompt)
    one = replace(one, sampling=SamplingParams(max_tokens=8))
    scheduler = started(one, speculative_tokens=5, max_prefill_tokens=32)
    plan = planned(scheduler)
    assert guessed(plan) == {0: (at, [20, 31, 32, 33, 34, 35])} and named(plan) == []
    commit(scheduler, plan, (20, 0, 0, 0, 0, 0))
    plan = planned(scheduler)
    assert not guessed(plan) and decoded(plan) == [(0, at + 1)]
    assert named(plan) == [0]


def test_guesses_that_come_after_the_row_was_planned_further_are_not_used() -> None:
    """As nothing is told about its grammar, it does not wait for them."""
    scheduler = make(mtp_tokens=3)
    scheduler.add(with_grammar(0))
    first, second, third = (planned(scheduler) for _ in range(3))
    assert [named(each) for each in (first, second, third)] == [[0]] * 3
    assert (decoded(second), decoded(third)) == ([(0, 4)], [(0, 5)])
    commit(scheduler, first, 20, [(31, 32, 33)])
    commit(scheduler, second, 20, [(41, 42, 43)])
    assert scheduler.plan(Told()) is None, "it waits for the third step now"
    commit(scheduler, third, 20, [(51, 52, 53)])
    plan = scheduler.plan(Told())
    assert plan is not None and guessed(plan) == {0: (6, [20, 51, 52, 53])}


def test_guesses_that_come_after_a_step_without_any_was_planned_are_not_used() -> None:
    """In the second step there are too many requests, of which one ends at once."""
    scheduler = make(mtp_tokens=3, speculative_max_requests=1)
    scheduler.add(with_grammar(0))
    first = planned(scheduler)
    scheduler.add(request(1, 4, 1))
    second = planned(scheduler)
    assert named(first) == [0] and named(second) == [] and (0, 4) in decoded(second)
    landed(scheduler, first, 20)
    commit(scheduler, second, 20)
    plan = scheduler.plan(Told())
    assert plan is not None and not guessed(plan) and decoded(plan) == [(0, 5)]


def test_a_row_begins_without_the_guesses_of_the_last_sequence_in_it() -> None:
    """Nothing is guessed for the second request, as the third one begins with it."""
    scheduler = started(request(0, 4, 20), speculative_max_requests=1)
    assert scheduler.abort(RequestId(0))
    scheduler.add(request(1, 4, 20))
    scheduler.add(request(2, 4, 1))
    plan = planned(scheduler)
    assert plan.chunks.rows.tolist() == [0, 1] and named(plan) == []
    commit(scheduler, plan, 20)
    plan = planned(scheduler)
    assert not guessed(plan) and decoded(plan) == [(0, 4)]


def test_guesses_are_limited_by_half_of_the_budget() -> None:
    scheduler = started(request(0, 4, 20), request(1, 4, 20), max_prefill_tokens=12)
    plan = planned(scheduler)
    assert guessed(plan) == {0: (4, [20, *LEFT]), 1: (4, [20, -2])}


@pytest.mark.parametrize(("count", "expected"), [(8, [31, 32, 33, 34, 35]), (7, list(LEFT))])
def test_what_is_looked_up_is_better_after_many_tokens(count: int, expected: list[int]) -> None:
    one = said_before(0, count)
    scheduler = started(one, speculative_tokens=5, max_prefill_tokens=32)
    assert guessed(planned(scheduler)) == {0: (len(one.prompt), [20, *expected])}


def test_what_is_looked_up_is_used_if_the_layer_has_not_guessed() -> None:
    """Two requests are too many, and the second one ends at once."""
    scheduler = make(
        mtp_tokens=3, speculative_tokens=5, speculative_max_requests=1, max_prefill_tokens=64
    )
    one = said_before(0, 4)
    scheduler.add(one)
    scheduler.add(request(1, 4, 1))
    plan = planned(scheduler)
    assert named(plan) == []
    commit(scheduler, plan, 20)
    assert guessed(planned(scheduler)) == {0: (len(one.prompt), [20, 31, 32, 33, 34, 35])}


def test_a_row_that_pauses_looking_up_has_guesses_of_the_layer() -> None:
    scheduler = started(said_before(0, 10), speculative_tokens=5, max_prefill_tokens=32)
    plan = planned(scheduler)
    at = len(said_before(0, 10).prompt)
    assert guessed(plan) == {0: (at, [20, 31, 32, 33, 34, 35])}
    landed(scheduler, plan, (20, 0, 0, 0, 0, 0))
    assert guessed(planned(scheduler)) == {0: (at + 1, [20, *LEFT])}


def test_only_what_was_looked_up_is_judged() -> None:
    """After wrong guesses of the layer, as many tokens are looked up as ever."""
    scheduler = started(said_before(0, 7), speculative_tokens=5, max_prefill_tokens=32)
    plan = planned(scheduler)
    at = len(said_before(0, 7).prompt)
    assert guessed(plan) == {0: (at, [20, *LEFT])}
    landed(scheduler, plan, (31, 0, 0, 0))
    assert guessed(planned(scheduler)) == {0: (at + 1, [31, 32, 33, 34, 35, 36])}


# --- with a grammar -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forced", "expected"),
    [((), list(MORE)), ((8,), [8]), ((8, 9), [8, 9]), ((1, 2, 3, 4, 5), [1, 2, 3])],
)
def test_forced_tokens_come_first(forced: tuple[int, ...], expected: list[int]) -> None:
    """As many as the layer guesses, if nothing is looked up."""
    scheduler = started(with_grammar(0))
    told = Told({0: forced})
    plan = scheduler.plan(told)
    assert plan is not None
    assert guessed(plan) == {0: (4, [20, *expected])}
    assert told.asked == [expected]


def test_more_tokens_may_be_forced_if_more_are_looked_up() -> None:
    scheduler = started(with_grammar(0), speculative_tokens=4)
    plan = scheduler.plan(Told({0: (1, 2, 3, 4, 5)}))
    assert plan is not None and guessed(plan) == {0: (4, [20, 1, 2, 3, 4])}


def test_only_what_a_grammar_allows_is_guessed() -> None:
    scheduler = started(with_grammar(0))
    plan = scheduler.plan(Told(most_allowed=2))
    assert plan is not None and guessed(plan) == {0: (4, [20, 21, 22])}


def test_a_row_none_of_whose_guesses_is_allowed_decodes_and_has_others_next() -> None:
    scheduler = started(with_grammar(0))
    plan = scheduler.plan(Told(most_allowed=0))
    assert plan is not None and not guessed(plan) and decoded(plan) == [(0, 4)]
    assert named(plan) == [0]
    landed(scheduler, plan, 20)
    plan = scheduler.plan(Told())
    assert plan is not None and guessed(plan) == {0: (5, [20, *MORE])}


def test_guesses_of_the_layer_come_before_those_that_are_looked_up_under_a_grammar() -> None:
    sampling = replace(SEVENS, max_tokens=30)
    for count in (4, 10):
        one = replace(said_before(0, count), sampling=sampling)
        scheduler = started(one, speculative_tokens=5, max_prefill_tokens=32)
        plan = scheduler.plan(Told())
        assert plan is not None
        assert guessed(plan) == {0: (len(one.prompt), [20, *MORE])}


def test_rows_with_a_grammar_have_guesses_beside_others_without() -> None:
    """Only theirs are reported, and only those of the others stay on the device."""
    scheduler = started(request(0, 4, 20), with_grammar(1))
    plan = scheduler.plan(Told())
    assert plan is not None
    assert guessed(plan) == {0: (4, [20, *LEFT]), 1: (4, [20, *MORE])}
    assert (named(plan), plan.reported_rows.tolist()) == ([0, 1], [1])
    checked = (20, 31, 32, 33, 20, *MORE)
    result = commit(scheduler, plan, (31, 9, 0, 0, 21, 22, 9, 0), [(41, 42, 43)], checked)
    assert result.token_ids.tolist() == [31, 21, 22, 9, 9]
    plan = scheduler.plan(Told())
    assert plan is not None
    assert guessed(plan) == {0: (6, [9, *LEFT]), 1: (7, [9, 41, 42, 43])}


def test_a_row_begins_with_none_of_the_guesses_that_were_told_of_another() -> None:
    """The second request takes the row of the first one, which had a grammar."""
    scheduler = started(with_grammar(0))
    assert scheduler.abort(RequestId(0))
    scheduler.add(request(1, 4, 20))
    plan = planned(scheduler)
    assert plan.chunks.rows.tolist() == [0]
    landed(scheduler, plan, 20)
    assert guessed(planned(scheduler)) == {0: (4, [20, *LEFT])}


# --- steps that are planned before guesses are known ----------------------------------------------


AHEAD = [-1, *LEFT]
"""The tokens of a check whose first one is not known either."""


def sampled(plan: StepPlan, tokens: Seq[int], were: Seq[int] = MORE) -> SampledTokens:
    """What a step samples whose checks have guesses that ``were`` these."""
    checked = [were[LEFT.index(it)] if it in LEFT else it for it in plan.checks.tokens.tolist()]
    return SampledTokens(ints(*tokens), checked=ints(*checked))


def test_guesses_are_checked_in_a_step_that_is_planned_before_they_are_made() -> None:
    scheduler = make(mtp_tokens=3)
    scheduler.add(request(0, 4, 20))
    first, second = planned(scheduler), planned(scheduler)
    assert guessed(second) == {0: (4, AHEAD)} and named(second) == [0]
    assert not second.assumes_right
    landed(scheduler, first, 20)
    result = landed(scheduler, second, (21, 22, 9, 0))
    assert result.token_ids.tolist() == [21, 22, 9]
    assert guessed(planned(scheduler)) == {0: (7, [9, *LEFT])}


@pytest.mark.parametrize(
    ("tokens", "start"),
    [((9, 0, 0, 0), 5), ((21, 9, 0, 0), 6), ((21, 22, 9, 0), 7), ((21, 22, 23, 24), 8)],
)
def test_rows_are_moved_back_to_before_their_wrong_guesses(tokens: Seq[int], start: int) -> None:
    scheduler = started(request(0, 4, 20))
    first, second = planned(scheduler), planned(scheduler)
    assert guessed(first) == {0: (4, [20, *LEFT])}
    assert second.assumes_right and guessed(second) == {0: (8, AHEAD)}
    second = moved_back(second, first, sampled(first, tokens))
    assert not second.assumes_right and guessed(second) == {0: (start, AHEAD)}
    result = landed(scheduler, first, tokens)
    assert result.token_ids.tolist() == list(tokens[: start - 4])
    third = planned(scheduler)
    assert third.assumes_right and guessed(third) == {0: (start + 4, AHEAD)}
    landed(scheduler, second, (21, 8, 0, 0))
    assert counted(scheduler) == (2, 6, start - 4)


def test_each_row_is_moved_back_by_its_own_guesses() -> None:
    scheduler = started(request(0, 4, 20), request(1, 4, 20))
    first, second = planned(scheduler), planned(scheduler)
    second = moved_back(second, first, sampled(first, (21, 9, 0, 0, 21, 22, 23, 24)))
    assert guessed(second) == {0: (6, AHEAD), 1: (8, AHEAD)}


def test_prompts_are_planned_beside_guesses_that_are_not_known() -> None:
    scheduler = started(request(0, 4, 30))
    first = planned(scheduler)
    scheduler.add(request(1, 4, 20))
    second = planned(scheduler)
    assert guessed(second) == {0: (8, AHEAD)} and chunks(second) == [(1, 0, 4, True)]
    assert named(second) == [0, 1]
    second = moved_back(second, first, sampled(first, (9, 0, 0, 0)))
    landed(scheduler, first, (9, 0, 0, 0))
    third = planned(scheduler)
    assert third.assumes_right and guessed(third) == {0: (9, AHEAD), 1: (4, AHEAD)}
    landed(scheduler, second, (21, 9, 0, 0, 20))
    third = moved_back(third, second, sampled(second, (21, 9, 0, 0, 20)))
    assert guessed(third) == {0: (7, AHEAD), 1: (4, AHEAD)}
    landed(scheduler, third, (9, 0, 0, 0, 21, 22, 23, 24))


def test_pages_are_granted_as_if_guesses_were_right() -> None:
    """Pages have 4 positions: 8 to 11 are checked next, 12 and 13 are those of the layer's passes.
    If all guesses are wrong, the row has these pages already."""
    scheduler = started(request(0, 4, 30))
    first, second = planned(scheduler), planned(scheduler)
    assert first.grants.indices.tolist() == [2] and second.grants.indices.tolist() == [3]
    landed(scheduler, first, (9, 0, 0, 0))
    landed(scheduler, moved_back(second, first, sampled(first, (9, 0, 0, 0))), (9, 0, 0, 0))
    assert not len(planned(scheduler).grants.indices)


@pytest.mark.parametrize(("max_tokens", "expected"), [(8, None), (9, {0: (8, AHEAD)})])
def test_rows_near_their_end_wait_until_guesses_are_known(
    max_tokens: int, expected: dict[int, tuple[int, list[int]]] | None
) -> None:
    """If all guesses are right, it has 5 tokens, the last of which is not computed yet. It would
    have fewer guesses next, though it may not have got there."""
    scheduler = started(request(0, 4, max_tokens))
    first, second = planned(scheduler), scheduler.plan()
    assert guessed(first) == {0: (4, [20, *LEFT])}
    assert (None if second is None else guessed(second)) == expected
    landed(scheduler, first, (9, 0, 0, 0))
    if second is None:
        assert guessed(planned(scheduler)) == {0: (5, [9, *LEFT])}


def test_no_row_is_left_out_of_a_step_that_is_planned_ahead() -> None:
    """Neither if another one waits, nor for the prompt of a request beside which nothing is
    guessed."""
    scheduler = started(request(0, 4, 8), request(1, 4, 20), speculative_max_requests=2)
    first = planned(scheduler)
    assert [*guessed(first)] == [0, 1] and scheduler.plan() is None
    scheduler.add(request(2, 40, 4))
    assert scheduler.plan() is None
    landed(scheduler, first, (9, 0, 0, 0, 9, 0, 0, 0))
    second = planned(scheduler)
    assert chunks(second) and [*guessed(second)] == [0, 1] and named(second) == []
    assert scheduler.plan() is None
    landed(scheduler, second, (9, 0, 0, 0, 9, 0, 0, 0))
    third = planned(scheduler)
    assert chunks(third) and decoded(third) == [(0, 6), (1, 6)]


@pytest.mark.parametrize(("num_pages", "goes_ahead"), [(7, False), (8, True)])
def test_a_step_is_planned_ahead_only_if_there_are_pages_for_all(
    num_pages: int, goes_ahead: bool
) -> None:
    """Pages have 4 positions. Both rows have three, with those for the layer's passes, and need one
    more each: positions 9 to 12 are checked, if all guesses were right."""
    scheduler = started(request(0, 5, 30), request(1, 5, 30), num_pages=num_pages)
    first, second = planned(scheduler), scheduler.plan()
    assert [*guessed(first)] == [0, 1]
    assert (second is not None) == goes_ahead


def test_a_step_is_planned_ahead_only_if_half_of_the_budget_holds_all_guesses() -> None:
    scheduler = started(request(0, 4, 30), request(1, 4, 30), max_prefill_tokens=12)
    assert guessed(planned(scheduler)) == {0: (4, [20, *LEFT]), 1: (4, [20, -2])}
    assert scheduler.plan() is None


def test_what_is_looked_up_waits_until_tokens_are_known() -> None:
    scheduler = make(mtp_tokens=3, speculative_tokens=5)
    scheduler.add(request(0, 4, 20))
    plan = planned(scheduler)
    scheduler.add(request(1, 4, 20))
    assert scheduler.plan() is None
    landed(scheduler, plan, 20)
    plan = planned(scheduler)
    assert guessed(plan) and chunks(plan)
    assert scheduler.plan() is None


def test_grammars_wait_until_tokens_are_known() -> None:
    scheduler = make(mtp_tokens=3)
    scheduler.add(request(0, 4, 20))
    plan = planned(scheduler)
    scheduler.add(with_grammar(1))
    second = planned(scheduler)
    assert guessed(second) == {0: (4, AHEAD)} and second.masked_rows.tolist() == [1]
    landed(scheduler, plan, 20)
    assert scheduler.plan(Told()) is None
    landed(scheduler, second, (21, 22, 23, 24, 20))
    third = scheduler.plan(Told())
    assert third is not None and guessed(third)[0] == (8, [24, *LEFT])


def test_no_more_than_one_step_is_ahead_of_guesses() -> None:
    scheduler = started(request(0, 4, 40))
    planned(scheduler), planned(scheduler)
    assert scheduler.plan() is None


def test_a_request_that_ends_drops_the_step_that_was_planned_ahead() -> None:
    """Guesses that are checked for nothing do not count."""
    one = request(0, 4, 20, sampling=SamplingParams(stop_token_ids=(22,)))
    scheduler = started(one)
    first, second = planned(scheduler), planned(scheduler)
    tokens = (21, 22, 23, 24)
    second = moved_back(second, first, sampled(first, tokens))
    result = landed(scheduler, first, tokens)
    assert result.token_ids.tolist() == [21, 22]
    assert result.ended == {0: Finished(FinishReason.STOP, 22)}
    assert scheduler.stats().num_running == 1, "the next step still writes to its pages"
    result = landed(scheduler, second, (9, 9, 9, 9))
    assert (result.request_ids, result.ended) == ([], {})
    assert scheduler.stats().num_running == 0
    assert counted(scheduler) == (1, 3, 1)


@pytest.mark.parametrize("after", [1, 2])
def test_an_abort_drops_steps_that_were_planned_ahead(after: int) -> None:
    scheduler = started(request(0, 4, 20), request(1, 4, 20))
    first, second = planned(scheduler), None
    if after == 2:
        second = planned(scheduler)
    assert scheduler.abort(RequestId(0))
    second = second or planned(scheduler)
    assert [*guessed(second)] == ([1] if after == 1 else [0, 1])
    second = moved_back(second, first, sampled(first, (21, 9, 0, 0, 21, 22, 9, 0)))
    assert landed(scheduler, first, (21, 9, 0, 0, 21, 22, 9, 0)).request_ids == [1] * 3
    tokens = [9] * len(second.checks.tokens)
    assert landed(scheduler, second, tokens).request_ids == [1]
    assert scheduler.stats().num_running == 1


# --- what waits -----------------------------------------------------------------------------------


def test_chunks_overlap_until_the_last_one() -> None:
    scheduler = make(mtp_tokens=3)
    scheduler.add(request(0, 40, 20))
    plans = [planned(scheduler) for _ in range(3)]
    assert [chunks(plan)[0] for plan in plans] == [
        (0, 0, 16, False),
        (0, 16, 16, False),
        (0, 32, 8, True),
    ]
    assert [named(plan) for plan in plans] == [[], [], [0]]
    assert scheduler.plan() is None, "too many steps are in flight"


def test_rows_that_are_not_named_overlap() -> None:
    scheduler = make(mtp_tokens=3, speculative_max_requests=1)
    scheduler.add(request(0, 4, 20))
    scheduler.add(request(1, 4, 20))
    plans = [planned(scheduler) for _ in range(3)]
    assert [decoded(plan) for plan in plans] == [[], [(0, 4), (1, 4)], [(0, 5), (1, 5)]]
    assert not any(named(plan) for plan in plans)


# --- ends -----------------------------------------------------------------------------------------


def test_a_stop_token_among_right_guesses_ends_the_request_there() -> None:
    one = request(0, 4, 20, sampling=SamplingParams(stop_token_ids=(22,)))
    scheduler = started(one)
    result = landed(scheduler, planned(scheduler), (21, 22, 23, 24))
    assert result.token_ids.tolist() == [21, 22]
    assert result.ended == {0: Finished(FinishReason.STOP, 22)}
    assert not scheduler.has_work() and scheduler.stats().num_running == 0


def test_an_abort_drops_guesses_that_come() -> None:
    scheduler = make(mtp_tokens=3)
    scheduler.add(request(0, 4, 20))
    plan = planned(scheduler)
    assert scheduler.abort(RequestId(0))
    result = landed(scheduler, plan, 20)
    assert (result.request_ids, result.ended) == ([], {})
    assert scheduler.stats().num_running == 0


def test_an_abort_drops_guesses_in_flight() -> None:
    scheduler = started(request(0, 4, 20))
    plan = planned(scheduler)
    assert scheduler.abort(RequestId(0))
    result = landed(scheduler, plan, (21, 22, 23, 24))
    assert (result.request_ids, result.ended) == ([], {})
    assert scheduler.stats().num_running == 0
    assert broken(scheduler) == set()


def test_a_request_without_a_finite_token_fails_whatever_the_layer_guesses() -> None:
    scheduler = started(request(0, 4, 20), request(1, 4, 20))
    plan = planned(scheduler)
    assert named(plan) == [0, 1]
    tokens = (21, NO_TOKEN, 0, 0, 21, 22, 23, 24)
    result = landed(scheduler, plan, tokens)
    assert failures(result) == [0]
    assert guessed(planned(scheduler)) == {1: (8, [24, *LEFT])}


def test_guesses_of_a_row_with_a_grammar_are_told() -> None:
    scheduler = make(mtp_tokens=3)
    scheduler.add(with_grammar(0))
    plan = planned(scheduler)
    assert named(plan) == plan.reported_rows.tolist() == [0]
    with pytest.raises(InvariantError, match="MTP guesses for 0 rows, not for 1"):
        commit(scheduler, plan, 20)


def test_guesses_of_a_row_without_a_grammar_are_not_told() -> None:
    scheduler = make(mtp_tokens=3)
    scheduler.add(request(0, 4, 20))
    plan = planned(scheduler)
    assert named(plan) == [0] and not len(plan.reported_rows)
    with pytest.raises(InvariantError, match="MTP guesses for 1 rows, not for 0"):
        commit(scheduler, plan, 20, [MORE])


@pytest.mark.parametrize(
    ("checked", "expected"),
    [
        (None, "the device does not tell the tokens of checks"),
        ((20, 21, 22), "3 tokens of checks, not 4"),
        ((20, 21, 22, 23, 24), "5 tokens of checks, not 4"),
    ],
)
def test_guesses_that_were_left_to_the_device_are_told_with_the_samples(
    checked: tuple[int, ...] | None, expected: str
) -> None:
    scheduler = started(request(0, 4, 20))
    plan = planned(scheduler)
    with pytest.raises(InvariantError, match=expected):
        commit(scheduler, plan, (21, 22, 23, 24), checked=checked)


def test_what_was_looked_up_may_be_checked_beside_guesses_that_stay_on_the_device() -> None:
    """What was looked up is 31, 32, ..., of which one token is right."""
    one = said_before(0, 10)
    at = len(one.prompt)
    scheduler = started(one, request(1, 4, 20), speculative_tokens=5, max_prefill_tokens=32)
    plan = planned(scheduler)
    assert guessed(plan) == {0: (at, [20, 31, 32, 33, 34, 35]), 1: (4, [20, *LEFT])}
    result = landed(scheduler, plan, (31, 9, 0, 0, 0, 0, 21, 22, 9, 0))
    assert result.token_ids.tolist() == [31, 21, 22, 9, 9]
    assert counted(scheduler) == (2, 8, 3)


# --- rows with recurrent states -------------------------------------------------------------------


def test_guesses_end_where_states_are_kept() -> None:
    """At multiples of 8."""
    scheduler = started(request(0, 6, 40), num_snapshots=8)
    plan = planned(scheduler)
    assert guessed(plan) == {0: (6, [20, -2])}
    landed(scheduler, plan, (21, 22))
    plan = planned(scheduler)
    assert guessed(plan) == {0: (8, [22, *LEFT])}
    assert plan.snapshots.kept_rows.tolist() == [0]
    assert named(plan) == [0]


@pytest.mark.parametrize(("token", "start", "kept"), [(21, 8, [0]), (9, 7, [])])
def test_rows_wait_where_their_states_may_have_to_be_kept(
    token: int, start: int, kept: list[int]
) -> None:
    """Before position 8, which the row has reached only if its guess is right."""
    scheduler = started(request(0, 6, 40), num_snapshots=8)
    first = planned(scheduler)
    assert guessed(first) == {0: (6, [20, -2])} and scheduler.plan() is None
    landed(scheduler, first, (token, 22))
    plan = planned(scheduler)
    assert [*(at for at, _ in guessed(plan).values()), *(at for _, at in decoded(plan))] == [start]
    assert plan.snapshots.kept_rows.tolist() == kept


def test_no_guess_is_cut_off_where_the_row_may_not_have_got_to() -> None:
    """States are kept before position 16. The third step would end there if all guesses were right,
    and so have one guess less."""
    scheduler = started(request(0, 8, 40), num_snapshots=8, mtp_tokens=2)
    first, second = planned(scheduler), planned(scheduler)
    assert guessed(first) == {0: (8, [20, -2, -3])} and guessed(second) == {0: (11, [-1, -2, -3])}
    landed(scheduler, first, (21, 22, 23))
    assert scheduler.plan() is None
    landed(scheduler, second, (9, 0, 0))
    assert guessed(planned(scheduler)) == {0: (12, [9, -2, -3])}
