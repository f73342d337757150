"""Adapters in the planner: slots are granted before rows need them, and never while in use."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import Adapter, AdapterFacts, Request, RequestId, SamplingParams
from minisgl_backend.scheduling import waiting
from minisgl_backend.scheduling.adapter_places import MOST_LOADED_BYTES, AdapterPlaces
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_backend.scheduling.sequence import Sequence
from minisgl_backend.scheduling.waiting import MOST_PAST_SLOTS
from tests.fakes.executor import Model
from tests.fakes.harness import Harness, Setup, random_setup, run_randomly

ADAPTERS = [Adapter(number, f"adapter-{number}", "", AdapterFacts(8, 1)) for number in range(1, 7)]
LARGE = [
    Adapter(number, f"adapter-{number}", "", AdapterFacts(8, 1, num_bytes=num_bytes))
    for number, num_bytes in enumerate(
        (1, 1, MOST_LOADED_BYTES // 3, MOST_LOADED_BYTES // 2, MOST_LOADED_BYTES + 1), start=1
    )
]
"""Of different sizes, so that a plan cannot load all."""


class AdaptedHarness(Harness):
    """A planner with slots. Each row of each step must have its request's adapter, and decoding
    rows with the same adapter must be next to each other. A step must not load too much."""

    def __init__(self, setup: Setup, num_slots: int, drawn: random.Random | None = None) -> None:
        """With ``drawn``, requests get adapters at random."""
        super().__init__(setup)
        self.drawn = drawn
        self.adapters = ADAPTERS if drawn is None else drawn.choice([ADAPTERS, LARGE])
        config = replace(self.scheduler._config, num_adapter_slots=num_slots)
        self.scheduler = Scheduler(setup.make_cache(), config)
        self.in_slots: dict[int, int] = {0: 0}
        self.of_rows: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self.num_loads = 0
        make_plan = self.scheduler.plan

        def watched(lookahead: Lookahead | None = None) -> StepPlan | None:
            plan = make_plan(lookahead)
            if plan is not None:
                self.follow(plan)
            return plan

        self.scheduler.plan = watched  # type: ignore[method-assign]

    def add(self, request: Request) -> None:
        """Queue a request. All samples of a prompt have the same adapter."""
        if self.drawn is not None:
            adapter = self.drawn.choice([None, *self.adapters])
            if request.leader is not None:
                adapter = self.records[request.leader].request.adapter
            request = replace(request, adapter=adapter)
        super().add(request)

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan to slots and rows, and check them."""
        for slot, adapter_id in zip(plan.adapters.load_slots, plan.adapters.load_ids, strict=True):
            self.in_slots[int(slot)] = int(adapter_id)
            self.num_loads += 1
        sizes = {adapter.id: adapter.facts.num_bytes for adapter in self.adapters}
        loaded = [sizes[adapter_id] for adapter_id in plan.adapters.load_ids.tolist()]
        assert len(loaded) == 1 or sum(loaded) <= MOST_LOADED_BYTES
        for row, slot in zip(plan.adapters.rows, plan.adapters.slots, strict=True):
            self.of_rows[int(row)] = int(slot)
        for admission in plan.admissions:
            self.requests[admission.row] = self.records[admission.request_id].request
        for row in np.concatenate([plan.chunks.rows, plan.decodes.rows]).tolist():
            adapter = self.requests[row].adapter
            expected = 0 if adapter is None else adapter.id
            assert self.in_slots[self.of_rows[row]] == expected
        places = [(self.of_rows[row], row) for row in plan.decodes.rows.tolist()]
        assert places == sorted(places)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_rows_have_their_adapters_in_random_runs(num_slots: int) -> None:
    loads = 0
    for seed in range(6):
        rng = random.Random(seed)
        harness = AdaptedHarness(random_setup(rng), num_slots, drawn=rng)
        run_randomly(harness, rng, check=True)
        loads += harness.num_loads
    assert loads > 20


def request(number: int, adapter: Adapter | None, max_tokens: int = 4) -> Request:
    prompt = np.array([number % 50 + 1, 2, 3], np.int32)
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(id=RequestId(number), prompt=prompt, sampling=sampling, adapter=adapter)


def rows_of_plan(harness: AdaptedHarness) -> list[int]:
    """The requests that run now."""
    sequences = harness.scheduler._rows.sequences
    return sorted(int(s.request.id) for s in sequences if s is not None)


def setup(num_rows: int = 4) -> Setup:
    return replace(random_setup(random.Random(1)), num_rows=num_rows, num_pages=64, page_size=16)


def test_a_request_without_a_slot_holds_nobody_up() -> None:
    harness = AdaptedHarness(setup(), num_slots=1)
    first, second = ADAPTERS[:2]
    for number, adapter in enumerate([first, second, None, first]):
        harness.add(request(number, adapter, max_tokens=6))
    harness.launch()
    assert rows_of_plan(harness) == [0, 2, 3]
    harness.drain()
    harness.verify()
    assert harness.records[RequestId(1)].ending is not None


def test_large_adapters_are_loaded_one_after_another() -> None:
    """Those of other requests run meanwhile; so does a small one that still fits."""
    large, more, small = (
        Adapter(number, f"adapter-{number}", "", AdapterFacts(8, 1, num_bytes=num_bytes))
        for number, num_bytes in enumerate((MOST_LOADED_BYTES - 1, MOST_LOADED_BYTES, 1), start=1)
    )
    harness = AdaptedHarness(setup(num_rows=6), num_slots=3)
    for number, adapter in enumerate([large, more, more, small, None, large]):
        harness.add(request(number, adapter, max_tokens=9))
    harness.launch()
    assert rows_of_plan(harness) == [0, 3, 4, 5]
    harness.launch()
    assert rows_of_plan(harness) == [0, 1, 2, 3, 4, 5]
    assert harness.num_loads == 3
    harness.drain()
    harness.verify()


def test_a_request_whose_adapter_has_to_wait_for_a_plan_is_served_by_the_next() -> None:
    """Whatever else did not fit meanwhile."""
    first, second = (
        Adapter(number, f"adapter-{number}", "", AdapterFacts(8, 1, num_bytes=MOST_LOADED_BYTES))
        for number in (1, 2)
    )
    harness = AdaptedHarness(replace(setup(), num_pages=4, max_sequence_length=64), num_slots=2)
    for number, adapter in enumerate([first, second]):
        harness.add(request(number, adapter))
    harness.add(replace(request(2, None), prompt=np.ones(60, np.int32)))  # takes all pages
    harness.launch()
    assert rows_of_plan(harness) == [0]
    harness.launch()
    assert rows_of_plan(harness) == [0, 1]
    harness.drain()
    harness.verify()


def test_requests_that_still_have_no_slot_are_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = AdaptedHarness(replace(setup(), model=Model()), num_slots=1)
    harness.add(request(0, ADAPTERS[0], max_tokens=40))
    harness.add(request(1, ADAPTERS[1]))
    for _ in range(4):
        harness.step()
    found: list[Sequence | None] = []
    queue = harness.scheduler._queue
    choose = queue.choose

    def watched() -> Sequence | None:
        found.append(choose())
        return found[-1]

    monkeypatch.setattr(queue, "choose", watched)
    for _ in range(20):
        harness.step()
    assert rows_of_plan(harness) == [0] and not found
    harness.drain()
    harness.verify()


def test_a_request_without_a_slot_is_not_passed_for_ever() -> None:
    """Others with the resident adapter keep coming: in the end they wait for it, too."""
    harness = AdaptedHarness(setup(num_rows=3), num_slots=1)  # never do all end in one step
    harness.add(request(0, ADAPTERS[0]))
    harness.step()
    harness.add(request(1, ADAPTERS[1]))
    number = 2
    while harness.records[RequestId(1)].ending is None:
        while sum(record.ending is None for record in harness.records.values()) < 4:
            harness.add(request(number, ADAPTERS[0], max_tokens=4 + number % 5))
            number += 1
        harness.step()
        assert number < 10 * MOST_PAST_SLOTS
    assert number > MOST_PAST_SLOTS / 2
    harness.drain()
    harness.verify()


@pytest.mark.parametrize(("longest", "num_passed"), [(10, 6), (60, 8)])
def test_requests_go_on_with_other_adapters_while_a_slot_is_kept(
    longest: int, num_passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one with the fewest rows. If as many again pass before it is free, so is the next one."""
    monkeypatch.setattr(waiting, "MOST_PAST_SLOTS", 4)
    harness = AdaptedHarness(replace(setup(num_rows=5), model=Model()), num_slots=2)
    first, second, third = ADAPTERS[:3]
    harness.add(request(0, first, max_tokens=longest))
    for number in range(1, 5):
        harness.add(request(number, second, max_tokens=3 + number))
    harness.step()
    harness.add(request(5, third))
    for number in range(6, 40):
        harness.add(request(number, first if number % 5 == 0 else second))
    begun: set[int] = set()
    while 5 not in (running := rows_of_plan(harness)):
        begun.update(running)
        harness.step()
    assert sorted(begun - set(range(5))) == [6, 7, 8, 9, 11, 12, 13, 14][:num_passed]
    assert (harness.records[RequestId(0)].ending is None) == (longest == 60)
    harness.drain()
    harness.verify()


def test_lower_priorities_do_not_keep_a_slot_in_use() -> None:
    """Requests without an adapter do not mind."""
    harness = AdaptedHarness(replace(setup(num_rows=3), model=Model()), num_slots=1)
    for number in range(2):
        harness.add(request(number, ADAPTERS[0], max_tokens=8 + 8 * number))
    harness.step()
    harness.add(replace(request(2, ADAPTERS[1]), priority=1))
    for number in range(3, 9):
        harness.add(request(number, ADAPTERS[0] if number % 2 else None))
    while harness.records[RequestId(2)].ending is None:
        harness.step()
    ended = {number for number in range(9) if harness.records[RequestId(number)].ending is not None}
    assert ended == {0, 1, 2, 4, 6, 8}
    harness.drain()
    harness.verify()


def test_prefixes_are_shared_by_requests_with_the_same_adapter_only() -> None:
    keys = {replace(request(0, None), cache_salt=salt).cache_key for salt in ("", "7")}
    keys |= {replace(request(0, ADAPTERS[0]), cache_salt=salt).cache_key for salt in ("", "7")}
    assert len(keys) == 4
    again = Adapter(9, ADAPTERS[0].name, "", AdapterFacts(8, 1))  # loaded anew under the same name
    assert request(0, again).cache_key not in keys


def test_the_slot_used_least_recently_goes_first() -> None:
    places = AdapterPlaces(2)
    one, two, three = ADAPTERS[:3]
    assert places.take(one) == (1, True)
    assert places.take(two) == (2, True)
    assert not places.has_place(three)
    places.give_back(two)
    assert places.take(two) == (2, False)
    places.give_back(two)
    places.give_back(one)  # its row began earlier, but was there until now
    assert places.take(three) == (2, True)
    assert places.take(one) == (1, False)
    with pytest.raises(InvariantError):
        places.take(two)
    places.check({3: 1, 1: 1})
    with pytest.raises(InvariantError):
        places.check({3: 1})
