"""Sequences that leave their rows when pages run out, and come back."""

from __future__ import annotations

import pytest

from minisgl_backend.request import (
    Finished,
    FinishReason,
    RequestId,
    SamplingParams,
)
from tests.unit.scheduling.planner import admitted, chunks, commit, make, planned, request, step


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
    assert plan.decodes.rows.tolist() == [0]
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
    assert plan.chunks.tokens.tolist() == [1001, 1, 2, 3, 4, 5, 6, 12, 22][start:]
    for _ in range(3):
        assert commit(scheduler, plan).ended == {}
        plan = planned(scheduler)
    assert commit(scheduler, plan).ended == {1: Finished(FinishReason.LENGTH)}


def test_what_a_retracted_request_finds_is_no_hit() -> None:
    scheduler = make(num_pages=4, max_prefill_tokens=100)
    scheduler.add(request(0, 7, max_tokens=6))
    scheduler.add(request(1, 7, max_tokens=6))
    found = []
    while scheduler.has_work():
        plan = planned(scheduler)
        found += [admission.num_cached_tokens for admission in plan.admissions]
        commit(scheduler, plan)
    stats = scheduler.stats()
    assert (stats.num_retractions, found) == (1, [0, 0, 4])
    assert (stats.prefix_queries, stats.prefix_hits) == (14, 0)


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
    assert in_flight.decodes.rows.tolist() == [0, 1]
    assert scheduler.plan() is None, "both need a page, and the youngest still writes to its own"
    assert scheduler.stats().num_retractions == 1
    assert scheduler.plan() is None
    assert scheduler.stats().num_retractions == 1, "its pages are on their way: no other goes"
    result = commit(scheduler, in_flight)
    assert result.request_ids == [0, 1], "the token that was in flight is not lost"
    assert planned(scheduler).decodes.rows.tolist() == [0]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_can_end_while_it_is_being_retracted(is_aborted: bool) -> None:
    scheduler = make(num_pages=4, max_prefill_tokens=100)
    sampling = SamplingParams(stop_token_ids=(9,))
    scheduler.add(request(0, 7, max_tokens=6))
    scheduler.add(request(1, 7, max_tokens=6, sampling=sampling))
    step(scheduler)
    in_flight = planned(scheduler)
    assert scheduler.plan() is None
    if is_aborted:
        assert scheduler.abort(RequestId(1))
        assert not scheduler.abort(RequestId(1))
    result = commit(scheduler, in_flight, (5, 5 if is_aborted else 9))
    assert result.ended == ({} if is_aborted else {1: Finished(FinishReason.STOP, 9)})
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
        assert plan.decodes.rows.tolist() == []
        assert chunks(plan) == [(1, 4, 4, False)]
    else:
        assert plan.decodes.rows.tolist() == [0]
        assert chunks(plan) == []
