"""Pages that may hold NaN: which ones the planner has cleared, and for whom."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.plan import NO_TOKEN, SampledTokens
from minisgl_backend.request import (
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from tests.unit.scheduling.planner import (
    broken,
    chunks,
    commit,
    failures,
    make,
    planned,
    request,
    step,
)


def test_logits_that_are_not_finite_end_that_request_alone() -> None:
    scheduler = make()
    for number in range(3):
        scheduler.add(request(number, 4))
    plan = planned(scheduler)
    failing = plan.grants.pages[plan.grants.rows == 1].tolist()
    logprobs = {2: TokenLogprobs(-1.5, 1)}
    tokens = SampledTokens(np.array([3, NO_TOKEN, 4], dtype=np.int32), logprobs)
    result = scheduler.commit(plan, tokens)
    assert result.request_ids == [0, 2]
    assert result.token_ids.tolist() == [3, 4]
    assert result.logprobs == {1: TokenLogprobs(-1.5, 1)}
    assert failures(result) == [1]
    assert scheduler.stats().cached_pages == 2, "what the failed one computed is not shared"
    scheduler.check()
    plan = planned(scheduler)
    assert plan.decodes.rows.tolist() == [0, 2]
    assert plan.broken_pages.tolist() == failing
    commit(scheduler, plan)
    assert planned(scheduler).broken_pages.tolist() == []


def test_chunks_of_a_prompt_that_fails_are_not_shared_any_more() -> None:
    scheduler = make(max_prefill_tokens=8)
    scheduler.add(request(0, 20, first=1))
    plan = planned(scheduler)
    commit(scheduler, plan)
    granted = plan.grants.pages.tolist()
    step(scheduler)
    assert scheduler.stats().cached_pages > 0
    assert failures(step(scheduler, NO_TOKEN)) == [0]
    stats = scheduler.stats()
    assert (stats.cached_pages, stats.used_pages) == (0, 0)
    scheduler.check()
    scheduler.add(request(1, 4))
    assert sorted(planned(scheduler).broken_pages.tolist()) == sorted(granted)
    scheduler = scheduler.renewed()
    scheduler.add(request(1, 4))
    plan = planned(scheduler)
    assert plan.broken_pages.tolist() == list(range(32)), "those of all requests"
    assert 0 in plan.released_rows and len(plan.released_rows) > 1, (
        "broken plans may have named some"
    )


@pytest.mark.parametrize("ended_by", ["abort", "stop"])
def test_logits_that_break_after_the_end_taint_the_pages(ended_by: str) -> None:
    """The step in which they break was launched before the request ended."""
    scheduler = make()
    scheduler.add(request(0, 8, sampling=SamplingParams(stop_token_ids=(9,), max_tokens=8)))
    first = planned(scheduler)
    second = planned(scheduler)
    held = {*first.grants.pages.tolist(), *second.grants.pages.tolist()}
    commit(scheduler, first, 9 if ended_by == "stop" else 5)
    if ended_by == "abort":
        assert scheduler.abort(RequestId(0))
    assert commit(scheduler, second, NO_TOKEN).ended == {}
    scheduler.check()
    assert scheduler.stats().cached_pages == 0
    scheduler.add(request(1, 4))
    assert set(planned(scheduler).broken_pages.tolist()) == held


def test_a_request_that_ends_with_finite_tokens_leaves_clean_pages() -> None:
    scheduler = make(num_pages=8, max_prefill_tokens=4)
    for number in range(6):
        scheduler.add(request(number, 10, max_tokens=5))
    while scheduler.has_work():
        plan = planned(scheduler)
        assert plan.broken_pages.tolist() == []
        commit(scheduler, plan)
    assert scheduler.abort(RequestId(0)) is False
    assert broken(scheduler) == set()


def test_an_abort_between_chunks_leaves_pages_to_be_cleared() -> None:
    """A partly written page is cleared at once, cached ones when they are evicted."""
    scheduler = make(num_pages=8, max_prefill_tokens=6)
    scheduler.add(request(0, 20))
    plan = planned(scheduler)
    pages = plan.grants.pages.tolist()
    commit(scheduler, plan)
    assert scheduler.abort(RequestId(0))
    assert scheduler.stats().cached_pages == 1
    assert broken(scheduler, 98) == {pages[1]}, "no step has written to the others"
    assert broken(scheduler, 97) == set(), "each once"
    scheduler.add(request(1, 32, max_tokens=1))
    plan = planned(scheduler)
    assert pages[0] in plan.broken_pages.tolist()
    assert set(plan.broken_pages.tolist()) <= set(plan.grants.pages.tolist())


def test_an_abort_with_a_chunk_in_flight_waits_for_what_it_writes() -> None:
    scheduler = make(max_prefill_tokens=5)
    scheduler.add(request(0, 20))
    plan = planned(scheduler)
    assert scheduler.abort(RequestId(0))
    assert scheduler.stats().num_running == 1
    commit(scheduler, plan)
    assert broken(scheduler) == {plan.grants.pages.tolist()[1]}


def test_a_finite_token_verifies_the_chunks_that_others_left() -> None:
    scheduler = make(num_pages=8, max_prefill_tokens=8)
    scheduler.add(request(0, 20, first=1))
    step(scheduler)
    assert scheduler.abort(RequestId(0))
    scheduler.add(request(1, 9, max_tokens=1, first=1))
    plan = planned(scheduler)
    assert plan.admissions[0].num_cached_tokens == 8
    commit(scheduler, plan)
    scheduler.add(request(2, 32, max_tokens=1))
    assert planned(scheduler).broken_pages.tolist() == []


def test_what_a_failed_request_has_read_is_not_found_again_though_others_hold_it() -> None:
    """Request 0 is in the middle of its prompt; request 1 fails on the part that 0 has cached."""
    scheduler = make(max_prefill_tokens=8)
    scheduler.add(request(0, 20, first=1))
    plan = planned(scheduler)
    shared = plan.grants.pages.tolist()[:2]
    commit(scheduler, plan)
    scheduler.add(request(1, 9, first=1, priority=1))
    plan = planned(scheduler)
    assert [admission.num_cached_tokens for admission in plan.admissions] == [8]
    assert failures(commit(scheduler, plan, NO_TOKEN)) == [1]
    scheduler.add(request(2, 9, max_tokens=1, first=1, priority=1))
    plan = planned(scheduler)
    assert [admission.num_cached_tokens for admission in plan.admissions] == [0]
    assert not set(shared) & set(plan.broken_pages.tolist()), "request 0 still uses them"
    commit(scheduler, plan)
    assert scheduler.abort(RequestId(0))
    assert set(shared) <= broken(scheduler)


def test_a_token_does_not_verify_pages_that_its_step_has_not_read() -> None:
    """Two requests compute the same prompt. The younger one is given the older one's first pages
    while its last chunk, which reads its own pages, is in flight."""
    scheduler = make(num_pages=16, max_prefill_tokens=12)
    scheduler.add(request(0, 18, max_tokens=1, first=1))
    scheduler.add(request(1, 13, max_tokens=1, first=1, priority=-1))
    plans = [planned(scheduler) for _ in range(3)]
    assert [chunks(plan) for plan in plans] == [
        [(0, 0, 12, False)],
        [(0, 12, 6, True), (1, 0, 6, False)],
        [(1, 6, 7, True)],
    ]
    older = plans[0].grants.pages.tolist()
    commit(scheduler, plans[0])
    assert scheduler.abort(RequestId(0))
    commit(scheduler, plans[1], NO_TOKEN)
    assert scheduler.stats().cached_pages == 1, "the older one's, which the younger now has"
    commit(scheduler, plans[2])
    younger = plans[1].grants.pages[plans[1].grants.rows == 1].tolist()
    assert broken(scheduler) == {*older, younger[0]}


def test_what_is_replaced_before_its_token_is_sampled_is_cleared() -> None:
    """Two requests compute the same prompt, and the older one is done first."""
    scheduler = make(num_pages=16, max_prefill_tokens=16)
    scheduler.add(request(0, 12, max_tokens=1, first=1, priority=1))
    scheduler.add(request(1, 12, max_tokens=1, first=1))
    plans = [planned(scheduler) for _ in range(2)]
    assert chunks(plans[0]) == [(0, 0, 12, True), (1, 0, 4, False)]
    for plan in plans:
        commit(scheduler, plan)
    replaced = plans[0].grants.pages[plans[0].grants.rows == 1].tolist()
    assert broken(scheduler) == {replaced[0]}, "the others its own token has verified"
