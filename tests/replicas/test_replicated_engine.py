"""Replicas whose updates come in an order of our choosing: with real ones, a replica cannot be made
to end at an exact moment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import (
    EngineFailure,
    EngineLost,
    InvariantError,
    Overloaded,
    Recovering,
)
from minisgl_backend.replicas.gatherer import Gatherer, Happened
from minisgl_backend.replicas.messages import (
    Message,
    Update,
    decode_event,
    decode_request,
    encode_event,
    encode_observations,
    encode_stats,
)
from minisgl_backend.replicas.replicated_engine import ReplicatedEngine
from minisgl_backend.request import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    PromptLogprobs,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    samples_of,
)
from minisgl_backend.routing.router import Placement, Router
from minisgl_backend.runtime.recorder import EngineStats, Observations
from minisgl_backend.runtime_files import State
from minisgl_backend.scheduling.report import SchedulerStats
from minisgl_backend.token_buffer import BufferedSink, TokenBuffer
from minisgl_kit.routing import shares_of_load
from tests.fakes.engine_info import engine_info

INFO = engine_info(eos_token_ids=(7,), page_size=4, max_queued_requests=99, max_queued_tokens=10**9)
PROMPT = list(range(10, 19))
DONE = Finished(FinishReason.LENGTH)


class FakeReplica:
    """Records what it is sent."""

    pid: int | None = 1
    num_starts = 1

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: list[Message] = []
        self.is_closed = False
        self.on_close: Callable[[], None] = lambda: None

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self, patience_s: float | None = None) -> None:
        self.on_close()
        self.is_closed = True

    @property
    def requests(self) -> list[list[RequestId]]:
        """The ids of the samples of each request."""
        return [decode_request(message)[1] for message in self.sent if "ids" in message]

    @property
    def aborted(self) -> list[tuple[RequestId, Event]]:
        ends = [message["abort"] for message in self.sent if "abort" in message]
        return [(RequestId(each[1]), decode_event(each)) for each in ends]


def updates_of(happened: Iterable[Happened]) -> list[Update]:
    """What a replica reports about it, all at once."""
    gatherer = Gatherer()
    for each in happened:
        gatherer.add(each)
    return gatherer.take(0.0, everything=True)


class World:
    def __init__(self, num_replicas: int = 2, **options: Any) -> None:
        self.replicas = [FakeReplica(number) for number in range(num_replicas)]
        given = EngineOptions(data_parallel_size=num_replicas, **options)
        self.engine = ReplicatedEngine([INFO] * num_replicas, self.replicas, given)
        self.events: dict[RequestId, list[Event]] = {}

    def submit(self, prompt: list[int] = PROMPT, *, n: int = 1) -> list[RequestId]:
        ids = [self.engine.new_id() for _ in range(n)]
        request = Request(
            id=ids[0],
            prompt=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=20, seed=3, logit_bias=((5, 0.5),)),
            cache_salt="s",
            label="client's",
        )
        samples = samples_of(request, ids)

        def sink_of(request_id: RequestId) -> Callable[[Event], None]:
            return lambda event: self.events.setdefault(request_id, []).append(event)

        self.engine.submit_samples(samples, [sink_of(each) for each in ids])
        return ids

    def place(self, request_id: RequestId) -> int:
        """The replica that was sent a request; the request must not have moved."""
        (found,) = (
            replica.number
            for replica in self.replicas
            if any(request_id in ids for ids in replica.requests)
        )
        return found

    def tell(self, replica: int, *updates: Update) -> None:
        self.engine.take(replica, {"updates": list(updates)})

    def event(self, request_id: RequestId, event: Event) -> None:
        self.tell(self.place(request_id), *updates_of([(request_id, event)]))


def stats(num_steps: int, *, num_running: int = 0) -> EngineStats:
    zeros = EngineStats.sum([])
    scheduler = SchedulerStats(
        num_waiting=0,
        num_running=num_running,
        total_pages=50,
        free_pages=50,
        cached_pages=0,
        evictable_pages=0,
        num_retractions=1,
        prefix_queries=10,
        prefix_hits=5,
    )
    return EngineStats(
        scheduler=scheduler,
        num_open=num_running,
        num_prompt_tokens=9,
        num_generated_tokens=8,
        num_cancelled=zeros.num_cancelled,
        rejected={},
        failed={},
        num_steps=num_steps,
    )


def test_a_request_that_has_told_nothing_goes_to_another_replica() -> None:
    world = World()
    (request,) = world.submit()
    first = world.place(request)
    world.event(request, Admitted(0))
    world.engine.lost(first, is_last=False)
    (other,) = (r for r in world.replicas if r.number != first)
    moved, ids = decode_request(other.sent[0])
    assert ids == [request]
    assert moved.prompt.tolist() == PROMPT
    assert (moved.sampling.seed, moved.cache_salt, moved.label) == (3, "s", "client's")
    assert moved.sampling.logit_bias == ((5, 0.5),)
    world.tell(other.number, encode_event(request, Admitted(4)))
    last = Generated(43, is_last=True)
    world.tell(
        other.number, *updates_of([(request, Generated(42)), (request, last), (request, DONE)])
    )
    assert world.events[request] == [Admitted(0), Generated(42), Generated(43, None, True), DONE]
    assert world.engine.stats().num_open == 0


def test_a_request_that_has_told_a_token_fails_and_others_go_on() -> None:
    world = World(routing_slack=1.0)
    told, silent = world.submit()[0], world.submit()[0]
    first = world.place(told)
    assert first == world.place(silent), "both have one prefix"
    world.event(told, Generated(42))
    world.engine.lost(first, is_last=False)
    end = world.events[told][-1]
    assert isinstance(end, Failed) and end.error.code == "INTERNAL"
    assert silent not in world.events
    assert world.engine.stats().failed == {"INTERNAL": 1}
    assert world.engine.stats().num_open == 1
    assert world.engine.replicas()[1 - first].num_routed == 1


def test_a_request_moves_once() -> None:
    """Otherwise one that breaks a replica would break them all."""
    world = World(3)
    (request,) = world.submit()
    first = world.place(request)
    world.engine.lost(first, is_last=False)
    (second,) = (r.number for r in world.replicas if r.requests and r.number != first)
    world.engine.lost(second, is_last=False)
    assert [type(event) for event in world.events[request]] == [Failed]
    assert sum(len(replica.requests) for replica in world.replicas) == 2


def test_samples_move_together_or_not_at_all() -> None:
    world = World(routing_slack=1.0)
    told, silent = world.submit(n=2), world.submit(n=3)
    first = world.place(told[0])
    world.event(told[1], Generated(42))
    world.engine.lost(first, is_last=False)
    assert all(isinstance(world.events[each][-1], Failed) for each in told)
    assert world.replicas[1 - first].requests == [silent]


def test_what_was_aborted_is_aborted_again_where_it_goes() -> None:
    world = World()
    (request,) = world.submit()
    first = world.place(request)
    world.engine.abort(request)
    world.engine.abort(request, EngineFailure("too late"))
    assert world.replicas[first].aborted == [(request, Finished(FinishReason.CANCELLED))]
    world.engine.lost(first, is_last=False)
    other = world.replicas[1 - first]
    assert other.aborted == [(request, Finished(FinishReason.CANCELLED))]
    world.tell(other.number, encode_event(request, Finished(FinishReason.CANCELLED)))
    assert world.events[request] == [Finished(FinishReason.CANCELLED)]
    assert world.engine.stats().num_cancelled == 1


def test_an_aborted_request_that_cannot_move_ends_as_it_was_told() -> None:
    world = World()
    (request,) = world.submit()
    first = world.place(request)
    world.engine.lost(1 - first, is_last=False)
    world.engine.abort(request, FinishReason.STOP)
    world.engine.lost(first, is_last=False)
    assert world.events[request] == [Finished(FinishReason.STOP)]


def test_requests_of_an_engine_that_breaks_wait_for_its_end() -> None:
    """Its errors come before the end of its process, and callers do not see them."""
    world = World()
    (request,) = world.submit()
    first = world.place(request)
    world.event(request, Failed(EngineLost("the engine stopped")))
    assert request not in world.events
    assert world.place(world.submit()[0]) == 1 - first
    world.engine.lost(first, is_last=False)
    assert [request] in world.replicas[1 - first].requests


def test_without_replicas_requests_are_refused_until_one_is_back() -> None:
    world = World()
    for number in (0, 1):
        world.engine.lost(number, is_last=False)
    assert world.engine.health().state is State.LOADING
    with pytest.raises(Recovering):
        world.submit()
    assert world.engine.stats().rejected == {"down": 1}
    world.engine.joined(1)
    assert world.engine.health().ready
    assert world.place(world.submit()[0]) == 1


def test_a_request_that_has_told_nothing_may_be_sent_again_if_no_replica_is_left() -> None:
    world = World(routing_slack=1.0)
    (told,), (silent,) = world.submit(), world.submit()
    first = world.place(told)
    assert world.place(silent) == first
    world.event(told, Generated(42))
    world.engine.lost(1 - first, is_last=False)
    world.engine.lost(first, is_last=False)
    codes = []
    for request in (told, silent):
        last = world.events[request][-1]
        assert isinstance(last, Failed)
        codes.append(last.error.code)
    assert codes == ["INTERNAL", "UNAVAILABLE"]


def test_the_engine_is_broken_once_no_replica_will_come_back() -> None:
    world = World()
    world.engine.lost(0, is_last=True)
    assert world.engine.health().ready
    world.engine.lost(1, is_last=True)
    assert world.engine.health().state is State.BROKEN


def test_the_limits_of_the_queue_are_those_of_all_replicas() -> None:
    world = World(2, max_queued_requests=1)
    for _ in range(5):
        world.submit()
    with pytest.raises(Overloaded, match=r"of at most 5 \(4 running, 1 queued\)"):
        world.submit()
    assert world.engine.is_queue_full()
    world = World(2, max_queued_tokens=2 * len(PROMPT))
    first, _ = world.submit()[0], world.submit()[0]
    with pytest.raises(Overloaded, match="prompt tokens wait"):
        world.submit()
    world.event(first, Admitted(0))
    world.submit()


def test_counts_outlive_the_process_that_made_them() -> None:
    world = World()
    world.engine.take(0, {"stats": encode_stats(stats(7, num_running=2))})
    world.engine.take(1, {"stats": encode_stats(stats(5))})
    world.engine.lost(0, is_last=False)
    found = world.engine.stats()
    assert (found.num_steps, found.num_generated_tokens) == (12, 16)
    assert (found.scheduler.num_running, found.scheduler.total_pages) == (0, 50)
    world.engine.take(0, {"stats": encode_stats(stats(1))})
    assert world.engine.stats().num_steps == 13
    assert [replica.stats.num_steps for replica in world.engine.replicas()] == [8, 5]
    assert [replica.is_up for replica in world.engine.replicas()] == [False, True]


def test_right_guesses_by_place_are_those_of_all_processes() -> None:
    def guessed(*num_checks_by_right: int) -> Any:
        some = stats(1)
        scheduler = replace(some.scheduler, num_checks_by_right=num_checks_by_right)
        return json.loads(json.dumps({"stats": encode_stats(replace(some, scheduler=scheduler))}))

    world = World()
    assert world.engine.stats().scheduler.num_right_by_place == ()
    world.engine.take(0, guessed(5, 1, 2))
    assert world.engine.stats().scheduler.num_right_by_place == (3, 2)
    world.engine.take(1, guessed(7, 10, 20))
    world.engine.lost(0, is_last=False)
    assert world.engine.stats().scheduler.num_right_by_place == (33, 22)
    world.engine.take(0, guessed(0, 100, 200))
    assert world.engine.stats().scheduler.num_right_by_place == (333, 222)


def test_observations_of_all_replicas_come_together() -> None:
    world = World()
    for replica in (0, 1):
        observations = Observations()
        observations.prompt_tokens.append(replica)
        observations.step_s.append(("decode", 0.5))
        message = {"pulse": 0.0, "observations": encode_observations(observations)}
        world.engine.take(replica, message)
    taken = world.engine.take_observations()
    assert list(taken.prompt_tokens) == [0, 1]
    assert list(taken.step_s) == [("decode", 0.5)] * 2


def test_closing_ends_what_is_open() -> None:
    world = World()
    told, silent = world.submit(), world.submit()
    world.event(told[0], Generated(42))
    assert world.engine.close(drain_s=0)
    for request in (*told, *silent):
        end = world.events[request][-1]
        assert isinstance(end, Failed) and isinstance(end.error, Overloaded)
    assert all(replica.is_closed for replica in world.replicas)
    with pytest.raises(Overloaded, match="shutting down"):
        world.submit()


def test_closing_ends_what_replicas_that_are_killed_have_not_ended() -> None:
    """A step may take longer than replicas are waited for."""
    world = World()
    requests = world.submit() + world.submit(n=2)
    for replica in world.replicas:
        replica.on_close = partial(world.engine.lost, replica.number, is_last=True)
    assert world.engine.close(drain_s=0)
    for request in requests:
        (end,) = world.events[request]
        assert isinstance(end, Failed) and isinstance(end.error, Overloaded)


def test_a_message_that_breaks_the_bookkeeping_ends_no_request_silently() -> None:
    """A request that a message ends before it breaks something does not end again later."""
    world = World(num_replicas=1)
    (request,) = world.submit()
    page = ["+", [11], [0]], ["+", [12], [0]]  # published again without having left
    with pytest.raises(InvariantError):
        world.tell(0, encode_event(request, DONE), *page)
    assert world.events[request] == [DONE]


def test_a_sink_that_fails_does_not_reach_other_requests() -> None:
    world = World()
    (good,) = world.submit()
    request = Request(id=world.engine.new_id(), prompt=np.array(PROMPT, np.int32))

    def broken(event: Event) -> None:
        raise ValueError("a sink")

    world.engine.submit(request, broken)
    replica = world.place(good)
    world.tell(replica, *updates_of([(request.id, Generated(3)), (good, Generated(3))]))
    assert world.events[good] == [Generated(3)]


def buffered(world: World, events: list[Event | str]) -> tuple[RequestId, TokenBuffer]:
    """A request whose sink has a buffer; ``events`` are what it gets, and the calls to wake it."""
    request = Request(id=world.engine.new_id(), prompt=np.array(PROMPT, np.int32))
    buffer = TokenBuffer(lambda: events.append("woken"))
    world.engine.submit(request, BufferedSink(events.append, buffer))
    return request.id, buffer


def test_common_tokens_go_to_the_buffer_in_order_with_events() -> None:
    world, events = World(), list[Event | str]()
    request_id, buffer = buffered(world, events)
    last = Generated(5, is_last=True)
    world.tell(
        world.place(request_id),
        *updates_of(
            [
                (request_id, Admitted(0)),
                (request_id, Generated(3)),
                (request_id, Generated(4)),
                (request_id, last),
                (request_id, DONE),
                (request_id, Generated(9)),  # for nobody
            ]
        ),
    )
    assert events == [Admitted(0), "woken", last, DONE]
    assert buffer.take() == [3, 4]
    assert buffer.take() == []


def test_a_buffer_that_awaits_nothing_is_not_woken() -> None:
    world, events = World(), list[Event | str]()
    request_id, buffer = buffered(world, events)
    buffer.is_awaited = False
    world.event(request_id, Generated(3))
    assert events == [] and buffer.tokens == [3]


def test_a_buffer_whose_reader_fails_does_not_reach_other_requests() -> None:
    world = World()
    (good,) = world.submit()
    request_id, buffer = buffered(world, [])

    def fail() -> None:
        raise ValueError("a reader")

    buffer.wake = fail
    replica = world.place(good)
    world.tell(replica, *updates_of([(request_id, Generated(3)), (good, Generated(3))]))
    assert world.events[good] == [Generated(3)]


def test_the_router_learns_that_a_scored_prompt_is_computed() -> None:
    """Its log-probabilities come before its first token."""
    world = World(num_replicas=1)
    (request,) = world.submit()
    one = np.zeros(1, np.int32)
    scores = PromptLogprobs(one, one.astype(np.float32), one, one[None], one[None].astype("f4"))
    world.event(request, scores)
    world.event(request, Generated(3))
    num_rows, num_waiting_tokens, _ = shares_of_load(world.engine._router)[:, 0]
    assert num_rows > 0
    assert num_waiting_tokens == 0


def test_the_router_learns_of_each_page_that_tokens_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    grown: list[Placement] = []
    real = Router.grow

    def grow(router: Router, placements: Sequence[Placement]) -> None:
        grown.extend(placements)
        real(router, placements)

    monkeypatch.setattr(Router, "grow", grow)
    for num_prompt_tokens in range(1, 10):
        world = World(num_replicas=1)
        (request,) = world.submit(PROMPT[:num_prompt_tokens])
        for num_tokens in range(1, 12):
            token = Generated(3, TokenLogprobs(0.0, 1) if num_tokens % 3 == 0 else None)
            world.event(request, token)
            pages = -(-(num_prompt_tokens + num_tokens) // INFO.page_size)
            assert len(grown) == pages - -(-num_prompt_tokens // INFO.page_size)
        grown.clear()
