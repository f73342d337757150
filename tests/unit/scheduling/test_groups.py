"""Requests with a common prefix: computed once, and read together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.plan import NO_TOKEN, StepPlan
from minisgl_backend.request import (
    RequestId,
)
from minisgl_backend.scheduling.scheduler import Scheduler
from tests.unit.scheduling.planner import CONFIG, PAGE_SIZE, chunks, commit, planned, request, step


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
    """The rows, first page and end of each group."""
    rows = np.split(plan.groups.members, np.cumsum(plan.groups.sizes))[: len(plan.groups.sizes)]
    columns = plan.groups.begins.tolist(), plan.groups.ends.tolist()
    return [(of.tolist(), begin, end) for of, begin, end in zip(rows, *columns, strict=True)]


def test_a_prefix_is_computed_once_by_requests_that_come_together() -> None:
    scheduler = sharing()
    for number in range(3):
        scheduler.add(request(number, 17 + number, first=7))
    plan = planned(scheduler)
    assert chunks(plan) == [(0, 0, 17, True)]
    ahead = planned(scheduler)  # ahead of the commit: the prefix is still on its way
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
    assert (plan.decodes.rows.tolist(), groups(plan)) == ([0], [])
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
    assert (ahead.decodes.rows.tolist(), groups(ahead)) == ([0, 1], [])
    commit(scheduler, first)
    plan = planned(scheduler)
    assert groups(plan) == [([0, 1], 0, 4)]
    assert plan.grants.rows.tolist()[-4:] == [1] * 4


def test_no_groups_are_named_unless_asked_for() -> None:
    scheduler = sharing(names_groups=False, max_overtaken=0)
    for number in range(2):
        scheduler.add(request(number, 17, first=7))
    step(scheduler)
    assert groups(planned(scheduler)) == []
