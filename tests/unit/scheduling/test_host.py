"""Prefixes in main memory, plan by plan: when they are saved, when they are loaded, and what counts
as cached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.snapshots import SnapshotCache
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_TOKEN, StepPlan
from minisgl_backend.request import SamplingParams
from minisgl_backend.scheduling.scheduler import Scheduler
from tests.unit.scheduling.planner import CONFIG, PAGE_SIZE, commit, planned, request


def make(num_pages: int = 5, num_slots: int = 20, max_prefill_tokens: int = 100) -> Scheduler:
    cache = RadixCache(num_pages, PAGE_SIZE, host=HostCache(num_slots, PAGE_SIZE))
    return Scheduler(cache, replace(CONFIG, max_prefill_tokens=max_prefill_tokens))


def drained(scheduler: Scheduler) -> list[StepPlan]:
    """The plans until nothing is left to do."""
    plans = []
    while scheduler.has_work():
        plans.append(planned(scheduler))
        commit(scheduler, plans[-1])
        scheduler.check()
    return plans


def test_what_the_device_has_evicted_is_loaded() -> None:
    scheduler = make()
    scheduler.add(request(0, 17, max_tokens=1))
    (first,) = drained(scheduler)
    pages = first.grants.pages[:4].tolist()
    scheduler.add(request(1, 17, max_tokens=1))  # takes all pages of the first
    (second,) = drained(scheduler)
    assert second.host_saves.pages.tolist() == pages
    assert set(second.grants.pages.tolist()) >= set(pages)
    slots = second.host_saves.slots.tolist()
    scheduler.add(request(0, 17, max_tokens=1))
    (third,) = drained(scheduler)
    assert third.host_loads.slots.tolist() == slots
    assert third.host_loads.pages.tolist() == third.grants.pages[:4].tolist()
    assert third.admissions[0].num_cached_tokens == 16
    assert third.chunks.tokens.tolist() == [16]
    stats = scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (51, 16)
    assert (stats.host_saved_tokens, stats.host_loaded_tokens) == (32, 16)
    assert (stats.host_slots, stats.used_host_slots) == (20, 8)


def test_what_the_device_still_has_is_not_loaded() -> None:
    scheduler = make(num_pages=20)
    for number in (0, 1, 0):
        scheduler.add(request(number, 17, max_tokens=1))
        plans = drained(scheduler)
    assert plans[0].admissions[0].num_cached_tokens == 16
    assert not len(plans[0].host_loads.pages)
    stats = scheduler.stats()
    assert (stats.host_saved_tokens, stats.host_loaded_tokens) == (32, 0)


def test_saves_wait_for_a_plan() -> None:
    scheduler = make()
    scheduler.add(request(0, 17, max_tokens=1))
    drained(scheduler)
    assert scheduler.plan() is None
    assert scheduler.stats().host_saved_tokens == 0
    scheduler.add(request(1, 5, max_tokens=1))
    (plan,) = drained(scheduler)
    assert len(plan.host_saves.pages) == 4


def test_pages_of_a_request_that_fails_are_not_saved() -> None:
    scheduler = make()
    scheduler.add(request(0, 17, max_tokens=3))
    plan = planned(scheduler)
    commit(scheduler, plan, token=NO_TOKEN)
    assert not scheduler.has_work()
    scheduler.add(request(1, 5, max_tokens=1))
    (plan,) = drained(scheduler)
    assert not len(plan.host_saves.pages)


def test_pages_that_no_token_has_verified_are_not_saved() -> None:
    scheduler = make(max_prefill_tokens=8)
    scheduler.add(request(0, 17, max_tokens=3))
    commit(scheduler, planned(scheduler))
    scheduler.abort(request(0, 17).id)
    scheduler.add(request(1, 5, max_tokens=1))
    (plan,) = drained(scheduler)
    assert not len(plan.host_saves.pages)


def test_a_prompt_that_is_scored_is_computed() -> None:
    scheduler = make()
    for number in (0, 1):
        scheduler.add(request(number, 17, max_tokens=1))
        drained(scheduler)
    score = SamplingParams(max_tokens=1, num_prompt_logprobs=0)
    scheduler.add(request(0, 17, sampling=score))
    assert planned(scheduler).admissions[0].num_cached_tokens == 0


def test_loading_uses_up_the_budget_of_a_step() -> None:
    """64 loaded tokens are as many as 4 computed ones."""
    scheduler = make(num_pages=30, num_slots=60, max_prefill_tokens=10)
    for number in (0, 1):
        scheduler.add(request(number, 66, max_tokens=1))
        drained(scheduler)
    scheduler.add(request(0, 90, max_tokens=1))
    plan = planned(scheduler)
    num_loaded = len(plan.host_loads.pages) * PAGE_SIZE
    assert 0 < num_loaded <= 64
    assert plan.num_tokens == 10 - num_loaded // 16


def test_a_planner_in_place_of_another_finds_nothing_in_main_memory() -> None:
    scheduler = make()
    for number in (0, 1):
        scheduler.add(request(number, 17, max_tokens=1))
        drained(scheduler)
    fresh = scheduler.renewed()
    assert fresh.stats().used_host_slots == 0
    assert fresh.stats().host_saved_tokens == scheduler.stats().host_saved_tokens > 0
    fresh.add(request(0, 17, max_tokens=1))
    (plan,) = drained(fresh)
    assert plan.admissions[0].num_cached_tokens == 0
    assert not len(plan.host_saves.pages)


def make_with_states(
    num_pages: int = 20, num_snapshots: int = 8, num_state_slots: int = 8, **config: Any
) -> Scheduler:
    host = HostCache(30, PAGE_SIZE, num_state_slots=num_state_slots)
    cache = SnapshotCache(num_pages, PAGE_SIZE, num_snapshots, host=host)
    config = {"max_prefill_tokens": 100, **config}
    return Scheduler(cache, replace(CONFIG, has_states=True, **config))


def test_states_are_saved_and_loaded_with_pages() -> None:
    scheduler = make_with_states(num_pages=5)
    scheduler.add(request(0, 17, max_tokens=1))
    (first,) = drained(scheduler)
    assert first.snapshots.saved_positions.tolist() == [16]
    scheduler.add(request(1, 17, max_tokens=1))  # takes all pages of the first
    (second,) = drained(scheduler)
    saves = second.host_saves
    assert saves.snapshots.tolist() == first.snapshots.saved.tolist()
    scheduler.add(request(0, 18, max_tokens=1))
    (third,) = drained(scheduler)
    assert third.host_loads.state_slots.tolist() == saves.state_slots.tolist()
    assert third.host_loads.slots.tolist() == saves.slots.tolist()
    assert third.snapshots.begun_from.tolist() == third.host_loads.snapshots.tolist()
    assert third.admissions[0].num_cached_tokens == 16
    assert not len(third.snapshots.saved), "the loaded states are a snapshot from now on"
    scheduler.add(request(0, 18, max_tokens=1))
    (fourth,) = drained(scheduler)
    assert fourth.host_loads.is_empty
    assert fourth.snapshots.begun_from.tolist() == third.snapshots.begun_from.tolist()


def test_states_alone_are_loaded_if_the_pages_are_cached() -> None:
    scheduler = make_with_states(num_snapshots=1)
    for number in (0, 1, 0):
        scheduler.add(request(number, 17, max_tokens=1))
        plans = drained(scheduler)
    assert not len(plans[0].host_loads.pages)
    assert plans[0].host_loads.snapshots.tolist() == plans[0].snapshots.begun_from.tolist() == [0]
    assert plans[0].chunks.tokens.tolist() == [16]
    stats = scheduler.stats()
    assert (stats.prefix_hits, stats.host_loaded_tokens) == (16, 0)
    assert (stats.state_slots, stats.used_state_slots) == (8, 2)


def test_without_a_snapshot_to_load_into_all_is_computed() -> None:
    """The first takes the only one, and both are admitted by one plan."""
    scheduler = make_with_states(num_pages=10, num_snapshots=1)
    for number in (0, 1, 2):
        scheduler.add(request(number, 17, max_tokens=1))
        drained(scheduler)
    for number in (0, 1):
        scheduler.add(request(number, 17, max_tokens=1))
    (plan,) = drained(scheduler)
    assert [admission.num_cached_tokens for admission in plan.admissions] == [16, 0]
    assert len(plan.host_loads.snapshots) == 1


def test_a_request_that_does_not_fit_gives_its_snapshot_back() -> None:
    scheduler = make_with_states(num_pages=6, num_snapshots=2)
    for number in (0, 1):
        scheduler.add(request(number, 17, max_tokens=1))
        drained(scheduler)
    scheduler.add(request(2, 9, max_tokens=4))
    commit(scheduler, planned(scheduler))
    scheduler.add(request(0, 17, max_tokens=1))
    plan = planned(scheduler)
    assert not plan.admissions
    scheduler.check()
    commit(scheduler, plan)
    (*_, last) = drained(scheduler)
    assert last.host_loads.snapshots.tolist() == last.snapshots.begun_from.tolist()


def test_states_of_a_request_that_fails_are_not_saved() -> None:
    scheduler = make_with_states()
    scheduler.add(request(0, 17, max_tokens=3))
    commit(scheduler, planned(scheduler), token=NO_TOKEN)
    scheduler.add(request(1, 5, max_tokens=1))
    (plan,) = drained(scheduler)
    assert plan.host_saves.is_empty


def test_the_second_level_keeps_what_the_first_has() -> None:
    host = HostCache(4, PAGE_SIZE)
    with_states = HostCache(4, PAGE_SIZE, num_state_slots=2)
    windows = WindowPages(4, num_pages=8, page_size=PAGE_SIZE, window=5)
    with pytest.raises(InvariantError, match="main memory keeps other things"):
        RadixCache(8, PAGE_SIZE, windows=windows, host=host)
    with pytest.raises(InvariantError, match="main memory keeps other things"):
        SnapshotCache(8, PAGE_SIZE, 2, host=host)
    with pytest.raises(InvariantError, match="main memory keeps other things"):
        RadixCache(8, PAGE_SIZE, host=with_states)
    cache = NaiveCache(8, PAGE_SIZE)
    lease = cache.acquire(np.arange(9, dtype=np.int32), "")
    assert cache.host is None and not len(cache.finite_pages(lease))
