"""Steps, bookkeeping and sinks that break, and an executor that is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from minisgl_backend.cache.kv import Lease
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import (
    EngineFailure,
    InvariantError,
    Overloaded,
)
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
)
from minisgl_backend.runtime.returning import MAX_BARREN
from minisgl_backend.runtime_files import State
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.scheduler import Scheduler
from tests.fakes.executor import (
    Model,
    expected_prompt_logprobs,
    expected_tokens,
)
from tests.unit.runtime.bench import NUM_PAGES, Bench, Recording
from tests.waiting import PATIENCE_S, wait_until


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("poison_after", [0, 5])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_request_that_breaks_steps_fails_alone(
    overlap: bool, poison_after: int, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All others, running or waiting, get the same tokens as without it."""
    it = Bench(overlap=overlap, max_running=4, max_queued=100)
    it.executor.gate.clear()
    requests = [it.request([i] * (1 + 3 * i), seed=i, presence_penalty=0.5) for i in range(8)]
    it.executor.poison = [requests[place].id]
    it.executor.poison_after = poison_after
    sinks = [it.submit(request) for request in requests]
    it.executor.gate.set()
    for request, sink in zip(requests, sinks, strict=True):
        if request is requests[place]:
            assert isinstance(sink.error(), EngineFailure)
            assert sink.tokens == expected_tokens(request, it.model)[:poison_after]
        else:
            assert sink.ending() == Finished(FinishReason.LENGTH)
            assert sink.tokens == expected_tokens(request, it.model)
        assert sum(isinstance(event, Admitted) for event in sink.events) <= 1
    assert "poison" in caplog.text
    assert it.engine.health().ready
    wait_until(lambda: it.engine.stats().scheduler.num_running == 0)
    pages = it.engine.stats().scheduler
    assert pages.free_pages + pages.cached_pages == NUM_PAGES
    it.engine.close(drain_s=0)


def test_all_samples_of_a_prompt_that_breaks_steps_fail_with_the_first_and_the_engine_goes_on() -> (
    None
):
    it = Bench(max_queued=10)
    it.executor.gate.clear()
    samples, sinks = it.submit_samples(it.request([1] * 9), 4)
    it.executor.poison = [sample.id for sample in samples]
    request = it.request([2] * 9)
    other = it.submit(request)
    it.executor.gate.set()
    for sink in sinks:
        assert "broke a step" in str(sink.error()) and not sink.tokens
    assert other.ending() == Finished(FinishReason.LENGTH)
    assert other.tokens == expected_tokens(request, it.model)
    assert it.engine.health().ready
    it.engine.close(drain_s=0)


def test_after_the_only_request_has_failed_no_row_and_no_page_count_as_used() -> None:
    """The counts do not wait for the next request."""
    it = Bench()
    request = it.request([1] * 9, max_tokens=20)
    it.executor.poison, it.executor.poison_after = [request.id], 5
    assert isinstance(it.submit(request).error(), EngineFailure)
    wait_until(lambda: it.engine.health().ready and it.engine.stats().num_open == 0)
    pages = it.engine.stats().scheduler
    assert pages.num_running == 0 and pages.used_pages == 0
    it.engine.close(drain_s=0)


def test_a_step_that_breaks_once_costs_nobody() -> None:
    it = Bench(max_queued=10)
    it.executor.gate.clear()
    it.executor.failure = RuntimeError("once")
    it.executor.most_failures = 1
    requests = [it.request([i], max_tokens=20) for i in range(5)]
    sinks = [it.submit(request) for request in requests]
    it.executor.gate.set()
    wait_until(lambda: it.executor.num_failures == 1)
    it.executor.gate.clear()  # it runs as long as it takes to cancel it
    gone = it.request([7], max_tokens=100)
    cancelled = it.submit(gone)
    it.engine.abort(gone.id)
    it.executor.gate.set()
    requests.append(it.request([9]))
    sinks.append(it.submit(requests[-1]))
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.ending() == Finished(FinishReason.LENGTH)
        assert sink.tokens == expected_tokens(request, it.model)
    assert cancelled.ending() == Finished(FinishReason.CANCELLED)
    it.engine.close(drain_s=0)


def test_steps_that_break_now_and_then_do_not_end_an_engine_that_embeds() -> None:
    """Its requests get no tokens."""
    it = Bench()
    it.executor.failure = RuntimeError("now and then")
    for number in range(2 * MAX_BARREN):
        it.executor.most_failures = number + 1
        sink = it.submit(it.request([number] * 9, max_tokens=0, embed=True))
        assert sink.ending() == Finished(FinishReason.LENGTH)
    assert it.executor.num_failures == 2 * MAX_BARREN
    it.engine.close(drain_s=0)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompts_logprobs_come_once_though_a_step_breaks_in_its_midst(max_tokens: int) -> None:
    it = Bench()
    it.executor.most_failures = 1
    request = it.request(list(range(90)), max_tokens=max_tokens, num_prompt_logprobs=0)
    sink = Recording()

    def breaking(event: Event) -> None:
        sink(event)
        if isinstance(event, PromptLogprobs):
            it.executor.failure = RuntimeError("once")

    it.engine.submit(request, breaking)
    assert sink.ending() == Finished(FinishReason.LENGTH)
    assert it.executor.num_failures == 1
    parts = [event for event in sink.events if isinstance(event, PromptLogprobs)]
    told = PromptLogprobs.joined(parts)
    assert len(parts) > 3 and told.token_ids.tolist() == list(range(1, 90))
    assert told.logprobs.tolist() == expected_prompt_logprobs(request, it.model)
    assert sink.tokens == expected_tokens(request, it.model)
    it.engine.close(drain_s=0)


@pytest.mark.parametrize("leak", [False, True])
def test_leaked_pages_are_logged_once(
    leak: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of three leases is never released; the engine continues to serve."""
    right = RadixCache.release

    def forgetful(cache: RadixCache, lease: Lease) -> None:
        if leak:
            monkeypatch.setattr(RadixCache, "release", right)
        else:
            right(cache, lease)

    monkeypatch.setattr(RadixCache, "release", forgetful)
    it = Bench()
    for prompt in ([1] * 9, [2] * 9, [3] * 9):
        sink = it.submit(it.request(prompt))
        assert sink.ending() == Finished(FinishReason.LENGTH)
        wait_until(lambda: it.engine.stats().scheduler.num_running == 0)
    it.engine.close(drain_s=0)
    told = [record.getMessage() for record in caplog.records if "leaked" in record.getMessage()]
    expected = "no request is open, but 0 rows and 4 pages are in use: they have leaked"
    assert told == ([expected] if leak else [])
    assert it.engine.stats().scheduler.used_pages == (4 if leak else 0)


@pytest.mark.parametrize("method", ["plan", "commit", "add"])
def test_a_planner_that_breaks_is_replaced(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(max_queued=10)
    it.submit(it.request([5] * 9)).ending()
    queries = it.engine.stats().scheduler.prefix_queries
    it.executor.gate.clear()
    requests = [it.request([i] * 9, max_tokens=20) for i in range(6)]
    sinks = [it.submit(request) for request in requests[:5]]
    right = getattr(Scheduler, method)

    def wrong(*args: Any) -> Any:
        monkeypatch.setattr(Scheduler, method, right)
        raise InvariantError("the books disagree")

    monkeypatch.setattr(Scheduler, method, wrong)
    sinks.append(it.submit(requests[5]))
    it.executor.gate.set()
    endings = [sink.ending() for sink in sinks]
    for request, sink, ending in zip(requests, sinks, endings, strict=True):
        assert ending == Finished(FinishReason.LENGTH)
        assert sink.tokens == expected_tokens(request, it.model)
    wait_until(lambda: it.engine.stats().scheduler.num_running == 0)
    pages = it.engine.stats().scheduler
    assert pages.free_pages + pages.cached_pages == NUM_PAGES
    assert pages.prefix_queries > queries
    it.engine.close(drain_s=0)


def test_a_lost_executor_ends_the_engine_at_once() -> None:
    it = Bench()
    it.executor.gate.clear()
    it.executor.failure = EngineFailure("a rank is lost")
    sinks = [it.submit(it.request([i])) for i in range(3)]
    it.executor.gate.set()
    assert all(isinstance(sink.error(), EngineFailure) for sink in sinks)
    wait_until(lambda: it.engine.health().state is State.BROKEN)
    assert it.executor.num_failures == 1
    it.engine.close(drain_s=0)


def test_steps_that_always_break_fail_every_open_request_and_refuse_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = Bench()
    it.executor.gate.clear()
    sinks = [it.submit(it.request([i])) for i in range(5)]
    it.executor.failure = RuntimeError("the device is on fire")
    it.executor.gate.set()
    for sink in sinks:
        assert isinstance(sink.error(), EngineFailure)
        assert "fire" not in str(sink.error())  # the story is in the log
    wait_until(lambda: not it.engine.health().ready)
    assert "the device is on fire" in caplog.text
    with pytest.raises(Overloaded, match="the engine is down"):
        it.submit(it.request([1]))
    it.engine.close(drain_s=PATIENCE_S)
    assert it.engine.stats().failed == {"INTERNAL": 5}


def test_requests_that_break_steps_are_counted_only_while_no_token_comes_between() -> None:
    it = Bench()
    for _ in range(3):
        poison, healthy = it.request([1]), it.request([2])
        it.executor.poison = [poison.id]
        assert isinstance(it.submit(poison).error(), EngineFailure)
        assert it.submit(healthy).ending() == Finished(FinishReason.LENGTH)
    assert it.engine.health().ready
    it.engine.close(drain_s=0)


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    it = Bench(model=Model(vocabulary=100, nan_every=20), max_queued=100)
    requests = [it.request([i], max_tokens=10) for i in range(30)]
    sinks = [it.submit(request) for request in requests]
    num_failed = 0
    for request, sink in zip(requests, sinks, strict=True):
        expected = expected_tokens(request, it.model)
        if expected[-1] < 0:
            assert "not finite" in str(sink.error())
            assert sink.tokens == expected[:-1]
            num_failed += 1
        else:
            assert sink.ending() == Finished(FinishReason.LENGTH)
            assert sink.tokens == expected
    assert 0 < num_failed < 30
    it.engine.close(drain_s=0)


def test_a_failing_sink_harms_only_its_request(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise ValueError("no room")

    bench.engine.submit(bench.request([1]), broken)
    assert bench.submit(bench.request([2])).ending() == Finished(FinishReason.LENGTH)
    assert "no room" in caplog.text


def test_a_lost_executor_fails_what_is_open(bench: Bench) -> None:
    bench.executor.gate.clear()
    sinks = [bench.submit(bench.request([i])) for i in range(3)]
    bench.engine.fail(EngineFailure("a rank is gone"))
    bench.executor.gate.set()
    for sink in sinks:
        assert isinstance(sink.error(), EngineFailure)
    wait_until(lambda: bench.engine.health().state is State.BROKEN)


def test_a_planner_that_finds_no_step_is_replaced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan, num_calls = Scheduler.plan, itertools.count()

    def plan_late(self: Scheduler, lookahead: Lookahead | None) -> StepPlan | None:
        return plan(self, lookahead) if next(num_calls) > 0 else None

    monkeypatch.setattr(Scheduler, "plan", plan_late)
    request = bench.request([1, 2, 3])
    sink = bench.submit(request)
    assert sink.ending() == Finished(FinishReason.LENGTH)
    assert sink.tokens == expected_tokens(request, bench.model)
    assert "has work but no plan" in caplog.text
