"""What an engine refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import (
    EngineFailure,
    InvalidRequest,
    Overloaded,
)
from minisgl_backend.request import (
    Admitted,
    Finished,
    FinishReason,
)
from minisgl_backend.runtime.loop import Loop, Stop
from minisgl_backend.runtime.open_requests import OpenRequest
from minisgl_backend.runtime.recorder import Recorder
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.fakes.clock import LoopClock
from tests.unit.runtime.bench import NUM_PAGES, PAGE_SIZE, Bench, Recording
from tests.waiting import PATIENCE_S, wait_until


def test_who_waits_for_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request is not refused, since it spent less time in the queue."""
    clock = LoopClock(monkeypatch)
    it = Bench(max_running=1, max_queue_time_s=600)
    it.executor.gate.clear()
    running = it.submit(it.request([2], max_tokens=50))
    wait_until(lambda: any(isinstance(event, Admitted) for event in running.events))
    waiting = [it.submit(it.request([i])) for i in (1, 3)]
    clock.ahead_s = 601
    it.executor.gate.set()
    for sink in waiting:
        assert isinstance(sink.error(), Overloaded)
        assert "waited for 600 s" in str(sink.error())
    assert running.ending() == Finished(FinishReason.LENGTH)
    clock.ahead_s = 0
    assert it.submit(it.request([1])).ending() == Finished(FinishReason.LENGTH)
    assert it.engine.stats().failed == {"UNAVAILABLE": 2}
    it.engine.close(drain_s=0)


def test_a_full_queue_refuses_with_the_numbers(bench: Bench) -> None:
    bench.executor.gate.clear()
    sinks = [bench.submit(bench.request([1])) for _ in range(6)]
    with pytest.raises(Overloaded, match=r"6 requests open of at most 6 \(4 running, 2 queued\)"):
        bench.submit(bench.request([1]))
    assert bench.engine.is_queue_full()
    bench.executor.gate.set()
    assert all(sink.ending() == Finished(FinishReason.LENGTH) for sink in sinks)
    assert not bench.engine.is_queue_full()
    assert bench.engine.stats().rejected == {"queue_full": 1}


def test_samples_are_accepted_all_or_none(bench: Bench) -> None:
    """Each sample counts as a request; the prompt counts once."""
    bench.executor.gate.clear()
    first, sinks = bench.submit_samples(bench.request([1, 2, 3], max_tokens=100), 4)
    with pytest.raises(Overloaded, match="4 requests open of at most 6"):
        bench.submit_samples(bench.request([1]), 3)
    _, others = bench.submit_samples(bench.request([1]), 2)
    with pytest.raises(InvalidRequest, match="at most 6 samples fit the engine, 4 running and 2"):
        bench.submit_samples(bench.request([1]), 7)
    for one in first:
        bench.engine.abort(one.id)
    bench.executor.gate.set()
    assert {sink.ending() for sink in sinks} == {Finished(FinishReason.CANCELLED)}
    assert {sink.ending() for sink in others} == {Finished(FinishReason.LENGTH)}
    wait_until(lambda: bench.engine.stats().scheduler.num_running == 0)


def test_samples_wait_in_the_queue_with_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LoopClock(monkeypatch)
    it = Bench(max_running=1, max_queued=10, max_queued_tokens=30, max_queue_time_s=600)
    it.executor.gate.clear()
    _, sinks = it.submit_samples(it.request(list(range(28))), 6)
    wait_until(lambda: any(isinstance(event, Admitted) for event in sinks[0].events))
    clock.ahead_s = 601  # the first has begun, so the others may wait longer
    it.executor.gate.set()
    assert {sink.ending() for sink in sinks} == {Finished(FinishReason.LENGTH)}
    it.engine.close(drain_s=0)


def test_waiting_prompt_tokens_are_bounded() -> None:
    it = Bench(max_running=1, max_queued=10, max_queued_tokens=30)
    it.executor.gate.clear()
    first = it.submit(it.request([1]))
    assert it.executor.gate.is_set() is False
    wait_until(lambda: any(isinstance(event, Admitted) for event in first.events))
    it.submit(it.request(list(range(20))))
    with pytest.raises(Overloaded, match="20 prompt tokens wait, and 20 more exceed 30"):
        it.submit(it.request(list(range(20))))
    it.executor.gate.set()
    it.engine.close(drain_s=PATIENCE_S)


def test_a_model_without_an_output_head_embeds_only(bench: Bench) -> None:
    bench.engine.info = replace(bench.info, generates=False)
    with pytest.raises(InvalidRequest, match="embed must be true: the checkpoint has no output"):
        bench.engine.check(bench.request([1]))
    bench.engine.check(bench.request([1], embed=True, max_tokens=0))
    scored = bench.request([1], embed=True, max_tokens=0, num_prompt_logprobs=0)
    with pytest.raises(InvalidRequest, match="num_prompt_logprobs needs an output head"):
        bench.engine.check(scored)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([100], {}, "input_ids must be token ids in 0 .. 99, got 100"),
        ([-1], {}, "input_ids must be token ids in 0 .. 99, got -1"),
        ([1], {"stop_token_ids": (7, 100)}, "stop_token_ids must be token ids"),
        ([1], {"logit_bias": ((100, 1.0),)}, "logit_bias must be token ids"),
        ([1] * 128, {}, "prompt of 128 tokens does not fit the context of 128"),
        ([1] * 100, {"max_tokens": 29}, "exceeds the context of 128"),
        (
            [1],
            {"max_tokens": 0},
            "max_tokens must be >= 1 without num_prompt_logprobs or embed, got 0",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    bench: Bench, prompt: list[int], sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        bench.submit(bench.request(prompt, **sampling))
    assert bench.engine.stats().rejected == {"invalid": 1}
    assert bench.submit(bench.request([1])).ending() == Finished(FinishReason.LENGTH)


def test_a_request_that_comes_in_while_the_loop_ends_is_refused(bench: Bench) -> None:
    loop = Loop(
        Scheduler(RadixCache(NUM_PAGES, PAGE_SIZE), SchedulerConfig()),
        bench.executor,
        overlap=False,
        recorder=Recorder(),
        on_admitted=lambda request: None,
        on_ended=lambda request, admitted: None,
        max_queue_time_s=None,
        grammars=None,
        adapters=None,
    )
    early, late = Recording(), Recording()
    loop.inbox.put(OpenRequest(bench.request([1]), early, 0.0))
    loop.inbox.put(Stop(Overloaded("the server is shutting down")))
    loop.inbox.put(OpenRequest(bench.request([1]), late, 0.0))
    loop.inbox.put(Stop(Overloaded("once more")))
    loop.run()
    assert isinstance(early.error(), Overloaded)
    assert not late.events
    loop.refuse_rest(EngineFailure("the engine is down"))
    assert isinstance(late.error(), EngineFailure)
