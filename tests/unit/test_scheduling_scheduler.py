"""The scheduler's decisions, one at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

from minisgl_backend.cache.kv import Lease
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import EngineFailure, InvariantError
from minisgl_backend.plan import NO_TOKEN, SampledTokens, StepPlan
from minisgl_backend.request import (
    Failed,
    Finished,
    FinishReason,
    IntArray,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE = 4
CONFIG = SchedulerConfig(
    max_running_requests=4,
    max_prefill_tokens=16,
    reserve_tokens=0,
)


def make(
    *,
    max_running_requests: int = 4,
    max_prefill_tokens: int = 16,
    num_pages: int = 32,
    reserve_tokens: int = 0,
) -> Scheduler:
    config = replace(
        CONFIG,
        max_running_requests=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
        reserve_tokens=reserve_tokens,
    )
    return Scheduler(RadixCache(num_pages, PAGE_SIZE), config)


def request(
    number: int,
    num_prompt_tokens: int,
    max_tokens: int = 8,
    *,
    first: int | None = None,
    priority: int = 0,
    sampling: SamplingParams | None = None,
) -> Request:
    """A prompt that shares nothing with others, unless ``first`` says so."""
    prompt = np.arange(num_prompt_tokens, dtype=np.int32)
    prompt[0] = 1000 + number if first is None else first
    return Request(
        id=RequestId(number),
        prompt=prompt,
        priority=priority,
        sampling=replace(sampling or SamplingParams(), max_tokens=max_tokens),
    )


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.check()
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, token: int | Seq[int] = 5) -> StepResult:
    count = len(plan.sample_rows)
    ids = [token] * count if isinstance(token, int) else list(token)
    result = scheduler.commit(plan, SampledTokens(np.array(ids, dtype=np.int32)))
    scheduler.check()
    return result


def step(scheduler: Scheduler, token: int | Seq[int] = 5) -> StepResult:
    return commit(scheduler, planned(scheduler), token)


def chunks(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """Row, start, length of each prefill chunk, and whether it samples."""
    columns = (
        plan.prefill_rows.tolist(),
        plan.prefill_starts.tolist(),
        plan.prefill_lengths.tolist(),
        plan.prefill_samples.astype(bool).tolist(),
    )
    return list(zip(*columns, strict=True))


def failures(result: StepResult) -> list[int]:
    """The requests that ended because their logits were not finite, and all that ended."""
    for event in result.ended.values():
        assert isinstance(event, Failed) and isinstance(event.error, EngineFailure)
        assert str(event.error) == "the model's logits were not finite"
    return list(result.ended)


def admitted(plan: StepPlan) -> list[int]:
    return [admission.request_id for admission in plan.admissions]


def test_prefill_and_decode_share_a_step_and_decode_never_waits() -> None:
    scheduler = make()
    scheduler.add(request(0, 4, max_tokens=8))
    step(scheduler)
    scheduler.add(request(1, 40))
    for start in (0, 16, 32):
        plan = planned(scheduler)
        assert plan.decode_rows.tolist() == [0]
        assert chunks(plan) == [(1, start, min(16, 40 - start), start == 32)]
        commit(scheduler, plan)
    assert planned(scheduler).decode_rows.tolist() == [0, 1]


def test_the_budget_is_filled_across_prompts() -> None:
    scheduler = make()
    for number in range(3):
        scheduler.add(request(number, 10))
    plan = planned(scheduler)
    assert chunks(plan) == [(0, 0, 10, True), (1, 0, 6, False)]
    assert admitted(plan) == [0, 1]
    assert plan.prefill_tokens.tolist() == [1000, *range(1, 10), 1001, *range(1, 6)]
    plan = planned(scheduler)
    assert chunks(plan) == [(1, 6, 4, True), (2, 0, 10, True)]


def test_a_higher_priority_goes_before_a_prefill_under_way() -> None:
    scheduler = make()
    scheduler.add(request(0, 40))
    step(scheduler)
    scheduler.add(request(1, 12, priority=1))
    scheduler.add(request(2, 12))
    plan = planned(scheduler)
    assert chunks(plan) == [(1, 0, 12, True), (0, 16, 4, False)]
    assert admitted(plan) == [1]
    commit(scheduler, plan)
    scheduler.add(request(3, 16, priority=1))
    plan = planned(scheduler)
    assert chunks(plan) == [(2, 0, 16, True)]
    assert admitted(plan) == [3]


def test_rows_are_a_limit() -> None:
    scheduler = make(max_running_requests=2)
    for number in range(3):
        scheduler.add(request(number, 2, max_tokens=2))
    assert admitted(planned(scheduler)) == [0, 1]
    assert scheduler.stats().num_running == 2
    assert scheduler.stats().num_waiting == 1


def test_overlap_plans_ahead_without_tokens_and_stops_at_the_length() -> None:
    scheduler = make()
    scheduler.add(request(0, 4, max_tokens=3))
    plans = [planned(scheduler) for _ in range(3)]
    assert [plan.decode_positions.tolist() for plan in plans] == [[], [4], [5]]
    assert scheduler.plan() is None
    results = [commit(scheduler, plan) for plan in plans]
    assert [result.ended for result in results] == [{}, {}, {0: Finished(FinishReason.LENGTH)}]
    assert not scheduler.has_work()


def test_a_stop_token_ends_the_request_and_what_is_in_flight_is_dropped() -> None:
    scheduler = make()
    scheduler.add(request(0, 4, sampling=SamplingParams(stop_token_ids=(9, 7))))
    first, second = planned(scheduler), planned(scheduler)
    result = commit(scheduler, first, 7)
    assert result.request_ids == [0]
    assert result.token_ids.tolist() == [7]
    assert result.ended == {0: Finished(FinishReason.STOP, 7)}
    assert not scheduler.has_work()
    assert scheduler.stats().num_running == 1, "its row waits for the step in flight"
    assert scheduler.plan() is None
    late = commit(scheduler, second, 3)
    assert (late.request_ids, late.token_ids.tolist(), late.ended) == ([], [], {})
    assert scheduler.stats().num_running == 0


def test_a_stop_token_before_min_tokens_does_not_end() -> None:
    scheduler = make()
    sampling = SamplingParams(stop_token_ids=(9,), min_tokens=2)
    scheduler.add(request(0, 4, sampling=sampling))
    assert step(scheduler, 9).ended == {}
    assert step(scheduler, 9).ended == {}
    assert step(scheduler, 9).ended == {0: Finished(FinishReason.STOP, 9)}


def test_logits_that_are_not_finite_end_that_request_alone() -> None:
    scheduler = make()
    for number in range(3):
        scheduler.add(request(number, 4))
    plan = planned(scheduler)
    failing = plan.grant_pages[plan.grant_rows == 1].tolist()
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
    assert plan.decode_rows.tolist() == [0, 2]
    assert plan.broken_pages.tolist() == failing
    commit(scheduler, plan)
    assert planned(scheduler).broken_pages.tolist() == []


def test_chunks_of_a_prompt_that_fails_are_not_shared_any_more() -> None:
    scheduler = make(max_prefill_tokens=8)
    scheduler.add(request(0, 20, first=1))
    plan = planned(scheduler)
    commit(scheduler, plan)
    granted = plan.grant_pages.tolist()
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
    assert planned(scheduler).broken_pages.tolist() == list(range(32)), "those of all requests"


@pytest.mark.parametrize("ended_by", ["abort", "stop"])
def test_logits_that_break_after_the_end_taint_the_pages(ended_by: str) -> None:
    """The step in which they do was launched before the request ended."""
    scheduler = make()
    scheduler.add(request(0, 8, sampling=SamplingParams(stop_token_ids=(9,), max_tokens=8)))
    first = planned(scheduler)
    second = planned(scheduler)
    held = {*first.grant_pages.tolist(), *second.grant_pages.tolist()}
    commit(scheduler, first, 9 if ended_by == "stop" else 5)
    if ended_by == "abort":
        assert scheduler.abort(RequestId(0))
    assert commit(scheduler, second, NO_TOKEN).ended == {}
    scheduler.check()
    assert scheduler.stats().cached_pages == 0
    scheduler.add(request(1, 4))
    assert set(planned(scheduler).broken_pages.tolist()) == held


def broken(scheduler: Scheduler, number: int = 99) -> set[int]:
    """The pages that the next plan clears; it serves one more request, whose token is finite."""
    scheduler.add(request(number, 1, max_tokens=1))
    plan = planned(scheduler)
    commit(scheduler, plan)
    pages: list[int] = plan.broken_pages.tolist()
    assert len(pages) == len(set(pages))
    return set(pages)


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
    """The page that is written in part, at once; those that are cached, once they are evicted."""
    scheduler = make(num_pages=8, max_prefill_tokens=6)
    scheduler.add(request(0, 20))
    plan = planned(scheduler)
    pages = plan.grant_pages.tolist()
    commit(scheduler, plan)
    assert scheduler.abort(RequestId(0))
    assert scheduler.stats().cached_pages == 1
    assert broken(scheduler, 98) == {pages[1]}, "no step has written to the others"
    assert broken(scheduler, 97) == set(), "each once"
    scheduler.add(request(1, 32, max_tokens=1))
    plan = planned(scheduler)
    assert pages[0] in plan.broken_pages.tolist()
    assert set(plan.broken_pages.tolist()) <= set(plan.grant_pages.tolist())


def test_an_abort_with_a_chunk_in_flight_waits_for_what_it_writes() -> None:
    scheduler = make(max_prefill_tokens=5)
    scheduler.add(request(0, 20))
    plan = planned(scheduler)
    assert scheduler.abort(RequestId(0))
    assert scheduler.stats().num_running == 1
    commit(scheduler, plan)
    assert broken(scheduler) == {plan.grant_pages.tolist()[1]}


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
    """Request 0 is in the middle of its prompt, request 1 fails on the part that it has cached."""
    scheduler = make(max_prefill_tokens=8)
    scheduler.add(request(0, 20, first=1))
    plan = planned(scheduler)
    shared = plan.grant_pages.tolist()[:2]
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
    """Two requests compute the same prompt. The younger is given the older one's first pages while
    its last chunk, which reads its own, is in flight."""
    scheduler = make(num_pages=16, max_prefill_tokens=12)
    scheduler.add(request(0, 18, max_tokens=1, first=1))
    scheduler.add(request(1, 13, max_tokens=1, first=1, priority=-1))
    plans = [planned(scheduler) for _ in range(3)]
    assert [chunks(plan) for plan in plans] == [
        [(0, 0, 12, False)],
        [(0, 12, 6, True), (1, 0, 6, False)],
        [(1, 6, 7, True)],
    ]
    older = plans[0].grant_pages.tolist()
    commit(scheduler, plans[0])
    assert scheduler.abort(RequestId(0))
    commit(scheduler, plans[1], NO_TOKEN)
    assert scheduler.stats().cached_pages == 1, "the older one's, which the younger now has"
    commit(scheduler, plans[2])
    younger = plans[1].grant_pages[plans[1].grant_rows == 1].tolist()
    assert broken(scheduler) == {*older, younger[0]}


def test_what_is_replaced_before_its_token_is_sampled_is_cleared() -> None:
    """Two requests compute the same prompt, and the older one is through first."""
    scheduler = make(num_pages=16, max_prefill_tokens=16)
    scheduler.add(request(0, 12, max_tokens=1, first=1, priority=1))
    scheduler.add(request(1, 12, max_tokens=1, first=1))
    plans = [planned(scheduler) for _ in range(2)]
    assert chunks(plans[0]) == [(0, 0, 12, True), (1, 0, 4, False)]
    for plan in plans:
        commit(scheduler, plan)
    replaced = plans[0].grant_pages[plans[0].grant_rows == 1].tolist()
    assert broken(scheduler) == {replaced[0]}, "the others its own token has verified"


def test_a_prompt_is_shared_as_soon_as_its_prefill_is_committed() -> None:
    scheduler = make()
    scheduler.add(request(0, 10, first=1))
    scheduler.add(request(1, 10, first=1))
    plan = planned(scheduler)
    assert [admission.num_cached_tokens for admission in plan.admissions] == [0, 0]
    commit(scheduler, plan)
    scheduler.add(request(2, 10, first=1))
    plan = planned(scheduler)
    assert [admission.num_cached_tokens for admission in plan.admissions] == [8]
    assert chunks(plan) == [(1, 6, 4, True), (2, 8, 2, True)]
    stats = scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (30, 8)


def test_a_prompt_that_is_cached_in_full_still_computes_a_token() -> None:
    scheduler = make()
    scheduler.add(request(0, 8, max_tokens=1, first=1))
    step(scheduler)
    scheduler.add(request(1, 8, first=1))
    plan = planned(scheduler)
    assert plan.admissions[0].num_cached_tokens == 4
    assert chunks(plan) == [(0, 4, 4, True)]


def test_duplicates_are_remapped_in_the_next_plan() -> None:
    scheduler = make(max_prefill_tokens=100)
    scheduler.add(request(0, 10, first=1))
    scheduler.add(request(1, 10, first=1))
    plan = planned(scheduler)
    pages = plan.grant_pages.reshape(2, 3)
    assert np.unique(pages).size == 6
    commit(scheduler, plan)
    plan = planned(scheduler)
    assert plan.grant_rows.tolist() == [1, 1]
    assert plan.grant_indices.tolist() == [0, 1]
    assert plan.grant_pages.tolist() == pages[0, :2].tolist()
    assert scheduler.stats().free_pages == 32 - 4


def test_no_remap_goes_to_a_row_that_was_given_back() -> None:
    scheduler = make(max_prefill_tokens=100)
    scheduler.add(request(0, 10, first=1))
    scheduler.add(request(1, 10, first=1))
    step(scheduler)
    scheduler.abort(RequestId(1))
    plan = planned(scheduler)
    assert plan.grant_rows.tolist() == []
    assert plan.released_rows.tolist() == [1]


def test_the_youngest_is_retracted_and_comes_back_with_its_output() -> None:
    scheduler = make(num_pages=4, max_prefill_tokens=100)
    sampling = SamplingParams(presence_penalty=1.0)
    scheduler.add(request(0, 7, max_tokens=6, sampling=sampling))
    scheduler.add(request(1, 7, max_tokens=6, sampling=sampling))
    plan = planned(scheduler)
    assert [len(admission.history) for admission in plan.admissions] == [7, 7]
    commit(scheduler, plan, (11, 12))
    step(scheduler, (21, 22))
    plan = planned(scheduler)
    assert plan.decode_rows.tolist() == [0]
    assert plan.released_rows.tolist() == [1]
    stats = scheduler.stats()
    assert (stats.num_retractions, stats.num_running, stats.num_waiting) == (1, 1, 1)
    for _ in range(3):
        assert commit(scheduler, plan).request_ids == [0]
        plan = planned(scheduler)
    result = commit(scheduler, plan)
    assert result.ended == {0: Finished(FinishReason.LENGTH)}
    plan = planned(scheduler)
    assert admitted(plan) == [1]
    assert plan.released_rows.tolist() == [0]
    assert plan.admissions[0].num_prompt_tokens == 7
    assert plan.admissions[0].history.tolist() == [1001, 1, 2, 3, 4, 5, 6, 12, 22]
    start = plan.admissions[0].num_cached_tokens
    assert plan.prefill_tokens.tolist() == [1001, 1, 2, 3, 4, 5, 6, 12, 22][start:]
    for _ in range(3):
        assert commit(scheduler, plan).ended == {}
        plan = planned(scheduler)
    assert commit(scheduler, plan).ended == {1: Finished(FinishReason.LENGTH)}


def test_a_lower_priority_is_retracted_before_a_younger_request() -> None:
    scheduler = make(num_pages=4, max_prefill_tokens=100)
    scheduler.add(request(0, 7, max_tokens=6, priority=-1))
    scheduler.add(request(1, 7, max_tokens=6))
    step(scheduler)
    step(scheduler)
    planned(scheduler)
    assert scheduler.abort(RequestId(1))
    assert scheduler.stats().num_waiting == 1
    assert scheduler.abort(RequestId(0))
    assert scheduler.stats().num_waiting == 0


def test_with_a_step_in_flight_pages_come_only_after_its_commit() -> None:
    scheduler = make(num_pages=4, max_prefill_tokens=100)
    scheduler.add(request(0, 7, max_tokens=6))
    scheduler.add(request(1, 7, max_tokens=6))
    step(scheduler)
    in_flight = planned(scheduler)
    assert in_flight.decode_rows.tolist() == [0, 1]
    assert scheduler.plan() is None, "both need a page, and the youngest still writes to its own"
    assert scheduler.stats().num_retractions == 1
    assert scheduler.plan() is None
    assert scheduler.stats().num_retractions == 1, "its pages are on their way: no other goes"
    result = commit(scheduler, in_flight)
    assert result.request_ids == [0, 1], "the token that was in flight is not lost"
    assert planned(scheduler).decode_rows.tolist() == [0]


def test_a_request_can_end_or_be_aborted_while_it_is_being_retracted() -> None:
    for token, aborts in ((9, False), (5, True)):
        scheduler = make(num_pages=4, max_prefill_tokens=100)
        sampling = SamplingParams(stop_token_ids=(9,))
        scheduler.add(request(0, 7, max_tokens=6))
        scheduler.add(request(1, 7, max_tokens=6, sampling=sampling))
        step(scheduler)
        in_flight = planned(scheduler)
        assert scheduler.plan() is None
        if aborts:
            assert scheduler.abort(RequestId(1))
            assert not scheduler.abort(RequestId(1))
        result = commit(scheduler, in_flight, (5, token))
        ended = {1: Finished(FinishReason.STOP, 9)}
        assert result.ended == ({} if aborts else ended)
        assert scheduler.stats().num_waiting == 0
        assert scheduler.stats().num_running == 1


@pytest.mark.parametrize("priority", [0, 1])
def test_prefilling_and_decoding_sequences_give_way_by_precedence_alone(priority: int) -> None:
    scheduler = make(num_pages=6, max_prefill_tokens=4)
    scheduler.add(request(0, 3, max_tokens=12))
    step(scheduler)
    scheduler.add(request(1, 20, max_tokens=1, priority=priority))
    plan = planned(scheduler)
    assert admitted(plan) == [1]
    commit(scheduler, plan)
    plan = planned(scheduler)
    assert scheduler.stats().num_retractions == 1
    if priority:
        assert plan.decode_rows.tolist() == []
        assert chunks(plan) == [(1, 4, 4, False)]
    else:
        assert plan.decode_rows.tolist() == [0]
        assert chunks(plan) == []


def test_the_reserve_keeps_a_newcomer_out_until_there_is_room() -> None:
    for reserve_tokens, expected in ((0, [0, 1]), (100, [0])):
        scheduler = make(num_pages=8, max_prefill_tokens=100, reserve_tokens=reserve_tokens)
        scheduler.add(request(0, 8, max_tokens=20))
        scheduler.add(request(1, 8, max_tokens=20))
        assert admitted(planned(scheduler)) == expected


def test_a_prompt_as_large_as_the_pool_runs_alone() -> None:
    scheduler = make(num_pages=8, reserve_tokens=64)
    scheduler.add(request(0, 4, max_tokens=2))
    step(scheduler)
    scheduler.add(request(1, 32, max_tokens=1))
    plan = planned(scheduler)
    assert admitted(plan) == []
    commit(scheduler, plan)
    plan = planned(scheduler)
    assert admitted(plan) == [1]
    commit(scheduler, plan)
    step(scheduler)
    assert not scheduler.has_work()


class CountingCache(RadixCache):
    """Counts the look-ups of prefixes."""

    num_acquired = 0

    def acquire(self, tokens: IntArray, salt: str = "") -> Lease:
        self.num_acquired += 1
        return super().acquire(tokens, salt)


def test_a_blocked_request_is_not_matched_again_in_each_step() -> None:
    cache = CountingCache(8, 4)
    scheduler = Scheduler(cache, CONFIG)
    scheduler.add(request(0, 4, max_tokens=20))
    step(scheduler)
    scheduler.add(request(1, 31, max_tokens=1))
    for _ in range(10):
        step(scheduler)
    assert cache.num_acquired == 2
    assert scheduler.abort(RequestId(0))
    assert admitted(planned(scheduler)) == [1]


def test_aborts_are_idempotent_at_every_moment() -> None:
    scheduler = make(max_prefill_tokens=4)
    for number in range(4):
        scheduler.add(request(number, 6))
    step(scheduler)
    in_flight = planned(scheduler)
    for number in range(4):
        assert scheduler.abort(RequestId(number))
        assert not scheduler.abort(RequestId(number))
        scheduler.check()
    assert not scheduler.abort(RequestId(99))
    assert not scheduler.has_work()
    assert scheduler.plan() is None
    assert commit(scheduler, in_flight).request_ids == []
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.free_pages + stats.evictable_pages == stats.total_pages


def test_an_id_is_live_only_once() -> None:
    scheduler = make()
    scheduler.add(request(0, 4))
    with pytest.raises(InvariantError, match="request 0 is live already"):
        scheduler.add(request(0, 4))


def test_commits_come_in_order_and_in_full() -> None:
    scheduler = make()
    scheduler.add(request(0, 4))
    first, second = planned(scheduler), planned(scheduler)
    with pytest.raises(InvariantError, match="step 1 is committed, 0 is due"):
        commit(scheduler, second)
    commit(scheduler, first)
    with pytest.raises(InvariantError, match="step 0 is committed, 1 is due"):
        commit(scheduler, first)
    with pytest.raises(InvariantError, match="2 tokens for 1 rows"):
        commit(scheduler, second, (1, 2))


class LeakyCache(NaiveCache):
    """Refuses what its counts promise."""

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        return False


class StingyCache(NaiveCache):
    """Grants no page to a decoding row."""

    def grow_each(self, leases: Seq[Lease]) -> IntArray | None:
        return None


def test_a_cache_that_breaks_its_word_is_found_out() -> None:
    scheduler = Scheduler(LeakyCache(32, 4), CONFIG)
    scheduler.add(request(0, 4))
    with pytest.raises(InvariantError, match="pages have leaked"):
        scheduler.plan()
    scheduler = Scheduler(StingyCache(32, 4), CONFIG)
    scheduler.add(request(0, 4))
    step(scheduler)
    with pytest.raises(InvariantError, match="does not grant the pages"):
        scheduler.plan()


def test_check_sees_books_that_disagree() -> None:
    scheduler = make(max_prefill_tokens=4)
    scheduler.add(request(0, 8))
    planned(scheduler)
    life = scheduler._life
    life.prefilling.clear()
    with pytest.raises(InvariantError, match="prefilling"):
        scheduler.check()
    life.live.clear()
    with pytest.raises(InvariantError, match="neither waiting nor in a row"):
        scheduler.check()
    life.rows.capacity[0] += 4
    with pytest.raises(InvariantError, match="row 0 has another capacity than its lease"):
        scheduler.check()


def sharing(*, max_overtaken: int = 8, names_groups: bool = True) -> Scheduler:
    config = replace(
        CONFIG,
        max_prefill_tokens=64,
        max_overtaken=max_overtaken,
        worthwhile_tokens=PAGE_SIZE,
        names_groups=names_groups,
        group_cost_tokens=0,
    )
    return Scheduler(RadixCache(64, PAGE_SIZE), config)


def groups(plan: StepPlan) -> list[tuple[list[int], int, int]]:
    """Rows, first page and end of each group."""
    rows = np.split(plan.group_rows, np.cumsum(plan.group_sizes))[: len(plan.group_sizes)]
    columns = plan.group_begins.tolist(), plan.group_ends.tolist()
    return [(of.tolist(), begin, end) for of, begin, end in zip(rows, *columns, strict=True)]


def test_a_prefix_is_computed_once_by_requests_that_come_together() -> None:
    scheduler = sharing()
    for number in range(3):
        scheduler.add(request(number, 17 + number, first=7))
    plan = planned(scheduler)
    assert chunks(plan) == [(0, 0, 17, True)]
    ahead = planned(scheduler)  # of the commit: the prefix is still on its way
    assert chunks(ahead) == []
    commit(scheduler, plan)
    assert chunks(planned(scheduler)) == [(1, 16, 2, True), (2, 16, 3, True)]


def test_without_a_bound_on_passing_no_request_waits_for_a_prefix() -> None:
    scheduler = sharing(max_overtaken=0)
    for number in range(2):
        scheduler.add(request(number, 17, first=7))
    assert chunks(planned(scheduler)) == [(0, 0, 17, True), (1, 0, 17, True)]


@pytest.mark.parametrize("ended_by", ["abort", "failure"])
def test_a_prefix_that_does_not_come_is_computed_by_the_next(ended_by: str) -> None:
    scheduler = sharing()
    for number in range(2):
        scheduler.add(request(number, 17, first=7))
    plan = planned(scheduler)
    if ended_by == "abort":
        assert scheduler.abort(RequestId(0))
        assert scheduler.plan() is None
        commit(scheduler, plan)
        assert chunks(planned(scheduler)) == [(0, 16, 1, True)]
    else:
        commit(scheduler, plan, NO_TOKEN)
        assert chunks(planned(scheduler)) == [(0, 0, 17, True)]


def test_groups_form_and_dissolve() -> None:
    scheduler = sharing()
    for number in range(3):
        scheduler.add(request(number, 17, max_tokens=9, first=7))
    step(scheduler)
    plan = planned(scheduler)
    assert (plan.decode_rows.tolist(), groups(plan)) == ([0], [])
    commit(scheduler, plan)
    plan = planned(scheduler)
    assert groups(plan) == [([0, 1, 2], 0, 4)]
    assert groups(planned(scheduler)) == groups(plan)
    scheduler.abort(RequestId(1))
    assert groups(planned(scheduler)) == [([0, 2], 0, 4)]
    scheduler.abort(RequestId(0))
    assert groups(planned(scheduler)) == []


def test_a_row_is_in_a_group_once_it_has_the_pages_of_the_others() -> None:
    scheduler = sharing(max_overtaken=0)
    for number in range(2):
        scheduler.add(request(number, 17, first=7))
    first = planned(scheduler)
    ahead = planned(scheduler)  # both have pages of their own
    assert (ahead.decode_rows.tolist(), groups(ahead)) == ([0, 1], [])
    commit(scheduler, first)
    plan = planned(scheduler)
    assert groups(plan) == [([0, 1], 0, 4)]
    assert plan.grant_rows.tolist()[-4:] == [1] * 4


def test_no_groups_are_named_unless_asked_for() -> None:
    scheduler = sharing(names_groups=False, max_overtaken=0)
    for number in range(2):
        scheduler.add(request(number, 17, first=7))
    step(scheduler)
    assert groups(planned(scheduler)) == []
