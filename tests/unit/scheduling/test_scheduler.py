"""Steps of the planner: what they prefill, decode and admit, and when requests end."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest

from minisgl_backend.cache.kv import Lease
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import (
    Finished,
    FinishReason,
    IntArray,
    RequestId,
    SamplingParams,
)
from minisgl_backend.scheduling.scheduler import Scheduler
from tests.unit.scheduling.planner import (
    CONFIG,
    admitted,
    chunks,
    commit,
    make,
    planned,
    request,
    step,
)


def test_prefill_and_decode_share_a_step_and_decode_never_waits() -> None:
    scheduler = make()
    scheduler.add(request(0, 4, max_tokens=8))
    step(scheduler)
    scheduler.add(request(1, 40))
    for start in (0, 16, 32):
        plan = planned(scheduler)
        assert plan.decodes.rows.tolist() == [0]
        assert chunks(plan) == [(1, start, min(16, 40 - start), start == 32)]
        commit(scheduler, plan)
    assert planned(scheduler).decodes.rows.tolist() == [0, 1]


def test_the_budget_is_filled_across_prompts() -> None:
    scheduler = make()
    for number in range(3):
        scheduler.add(request(number, 10))
    plan = planned(scheduler)
    assert chunks(plan) == [(0, 0, 10, True), (1, 0, 6, False)]
    assert admitted(plan) == [0, 1]
    assert plan.chunks.tokens.tolist() == [1000, *range(1, 10), 1001, *range(1, 6)]
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
    assert [plan.decodes.positions.tolist() for plan in plans] == [[], [4], [5]]
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
    pages = plan.grants.pages.reshape(2, 3)
    assert np.unique(pages).size == 6
    commit(scheduler, plan)
    plan = planned(scheduler)
    assert plan.grants.rows.tolist() == [1, 1]
    assert plan.grants.indices.tolist() == [0, 1]
    assert plan.grants.pages.tolist() == pages[0, :2].tolist()
    assert scheduler.stats().free_pages == 32 - 4


def test_no_remap_goes_to_a_row_that_was_given_back() -> None:
    scheduler = make(max_prefill_tokens=100)
    scheduler.add(request(0, 10, first=1))
    scheduler.add(request(1, 10, first=1))
    step(scheduler)
    scheduler.abort(RequestId(1))
    plan = planned(scheduler)
    assert plan.grants.rows.tolist() == []
    assert plan.released_rows.tolist() == [1]


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
    """Counts prefix look-ups."""

    num_acquired = 0

    def acquire(self, tokens: IntArray, salt: str, *, resumed_at: int = 0) -> Lease:
        self.num_acquired += 1
        return super().acquire(tokens, salt, resumed_at=resumed_at)


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
    with pytest.raises(InvariantError, match="2 tokens for 1 samples"):
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
