"""The engine's loop, over the real planner and the executor without a model."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from minisgl_backend.errors import (
    InvalidRequest,
    Overloaded,
)
from minisgl_backend.plan import Pending, StepPlan
from minisgl_backend.request import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    PromptLogprobs,
    samples_of,
)
from minisgl_backend.token_buffer import BufferedSink, TokenBuffer
from tests.fakes.clock import LoopClock
from tests.fakes.executor import (
    Model,
    expected_tokens,
)
from tests.unit.runtime.bench import CONTEXT, NUM_PAGES, Bench, Recording
from tests.waiting import PATIENCE_S, wait_until


@pytest.mark.parametrize("overlap", [True, False])
def test_every_request_gets_its_tokens_and_one_ending(overlap: bool) -> None:
    it = Bench(overlap=overlap, max_queued=100)
    requests = [it.request(list(range(1, 2 + i % 30)), seed=i) for i in range(50)]
    sinks = [it.submit(request) for request in requests]
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.ending() == Finished(FinishReason.LENGTH)
        assert sink.tokens == expected_tokens(request, it.model)
        assert isinstance(sink.events[0], Admitted)
        marks = [event.is_last for event in sink.events if isinstance(event, Generated)]
        assert marks == [False] * (len(marks) - 1) + [True]
        assert sum(isinstance(e, Admitted | Finished | Failed) for e in sink.events) == 2
    it.engine.close(drain_s=0)
    assert it.executor.closed
    stats = it.engine.stats()
    assert stats.num_open == 0
    assert stats.num_generated_tokens == 50 * 8


@pytest.mark.parametrize("overlap", [True, False])
def test_guesses_bring_several_tokens_at_once(overlap: bool) -> None:
    """There are only two tokens, so that many guesses are right."""
    it = Bench(overlap=overlap, max_queued=100, model=Model(vocabulary=2), speculative_tokens=5)
    requests = [it.request([0, 1] * 5, seed=seed, max_tokens=40) for seed in range(20)]
    sinks = [it.submit(request) for request in requests]
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.ending() == Finished(FinishReason.LENGTH)
        assert sink.tokens == expected_tokens(request, it.model)
        marks = [event.is_last for event in sink.events if isinstance(event, Generated)]
        assert marks == [False] * 39 + [True]
    it.engine.close(drain_s=0)
    stats = it.engine.stats()
    assert stats.num_generated_tokens == 20 * 40
    assert 0 < stats.scheduler.num_right_guesses < stats.scheduler.num_guesses
    by_place = stats.scheduler.num_right_by_place
    assert len(by_place) == 5 and sum(by_place) == stats.scheduler.num_right_guesses
    assert sorted(by_place, reverse=True) == list(by_place)
    assert sum(stats.scheduler.num_checks_by_right) == stats.scheduler.num_checks


def test_steps_that_check_guesses_count_as_decode_steps() -> None:
    it = Bench(overlap=False, model=Model(vocabulary=2), speculative_tokens=5)
    it.submit(it.request([0, 1] * 5, max_tokens=40)).ending()
    it.engine.close(drain_s=0)
    observations = it.engine.take_observations()
    assert set(observations.batch_size) == {1}
    kinds = [kind for kind, _ in observations.step_s]
    assert kinds == ["prefill", *["decode"] * (len(kinds) - 1)]
    assert it.engine.stats().scheduler.num_checks > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_generated_tokens_are_those_of_answers(overlap: bool) -> None:
    """Not what rows sample for nothing: after a stop token, and for a prompt alone."""
    it = Bench(overlap=overlap, max_queued=100)
    prompts = [[i] * 9 for i in range(20)]
    sinks = [it.submit(it.request(p, max_tokens=40, stop_token_ids=(3, 5, 7))) for p in prompts]
    sinks += [it.submit(it.request(p, max_tokens=0, embed=True)) for p in prompts]
    sinks += [it.submit(it.request(p, max_tokens=0, num_prompt_logprobs=0)) for p in prompts]
    endings = [sink.ending() for sink in sinks]
    assert {FinishReason.STOP, FinishReason.LENGTH} == {
        ending.reason for ending in endings if isinstance(ending, Finished)
    }
    it.engine.close(drain_s=0)
    assert it.engine.stats().num_generated_tokens == sum(len(sink.tokens) for sink in sinks)


@pytest.mark.parametrize("overlap", [True, False])
def test_counts_are_those_after_the_request_when_its_caller_learns_of_its_end(
    overlap: bool,
) -> None:
    seen = []

    def sink(event: Event) -> None:
        if isinstance(event, Finished):
            seen.append(it.engine.stats().scheduler)

    with Bench(overlap=overlap) as it:
        for number in range(3):
            it.engine.submit(it.request([number], max_tokens=3), sink)
            wait_until(lambda: len(seen) > number)  # noqa: B023
    assert [(stats.num_running, stats.num_waiting) for stats in seen] == [(0, 0)] * 3


def test_common_tokens_go_to_the_buffer_of_a_sink_that_has_one(bench: Bench) -> None:
    request, woken = bench.request([1, 2], max_tokens=9), list[int]()
    buffer = TokenBuffer(lambda: woken.append(len(buffer.tokens)))
    sink = Recording()
    bench.engine.submit(request, BufferedSink(sink, buffer))
    assert sink.ending() == Finished(FinishReason.LENGTH)
    *common, last = expected_tokens(request, bench.model)
    assert buffer.take() == common and woken == list(range(1, 9))
    assert sink.events[1:-1] == [Generated(last, is_last=True)]


def test_a_repeated_prompt_is_found_in_the_cache(bench: Bench) -> None:
    prompt = list(range(20))
    assert bench.submit(bench.request(prompt)).ending()
    sink = bench.submit(bench.request(prompt))
    sink.ending()
    assert sink.events[0] == Admitted(num_cached_tokens=16)


def test_abort_ends_a_running_request_and_is_idempotent(bench: Bench) -> None:
    request = bench.request([1, 2, 3], max_tokens=100)
    bench.executor.gate.clear()
    sink = bench.submit(request)
    for _ in range(3):
        bench.engine.abort(request.id)
    bench.engine.abort(bench.engine.new_id())
    bench.executor.gate.set()
    assert sink.ending() == Finished(FinishReason.CANCELLED)
    assert bench.engine.stats().num_cancelled == 1
    pages = bench.engine.stats
    wait_until(lambda: pages().scheduler.num_running == 0)
    free = pages().scheduler
    assert free.free_pages + free.cached_pages == NUM_PAGES
    assert sum(isinstance(e, Finished | Failed) for e in sink.events) == 1


def test_an_abort_for_a_stop_string_is_no_cancellation(bench: Bench) -> None:
    request = bench.request([1, 2, 3], max_tokens=100)
    sink = bench.submit(request)
    bench.engine.abort(request.id, FinishReason.STOP)
    assert sink.ending() in (Finished(FinishReason.STOP), Finished(FinishReason.LENGTH))
    assert bench.engine.stats().num_cancelled == 0


def test_a_deadline_before_the_first_token_is_an_error() -> None:
    it = Bench(max_running=1)
    it.executor.gate.clear()
    running = it.submit(it.request([2]))
    deadline_s = time.monotonic() + 0.01
    waiting = it.submit(it.request([1], deadline_s=deadline_s))
    wait_until(lambda: time.monotonic() > deadline_s)
    it.executor.gate.set()
    error = waiting.error()
    assert isinstance(error, Overloaded)
    assert "before the first token" in str(error)
    assert running.ending() == Finished(FinishReason.LENGTH)
    it.engine.close(drain_s=0)


def test_a_deadline_after_the_first_token_is_a_finish_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sink = LoopClock(monkeypatch), Recording()
    request = bench.request([1], max_tokens=100, deadline_s=time.monotonic() + 3600)

    def pass_the_deadline(event: Event) -> None:
        sink(event)
        if isinstance(event, Generated):
            clock.ahead_s = 3601

    bench.engine.submit(request, pass_the_deadline)
    assert sink.ending() == Finished(FinishReason.TIMEOUT)
    assert sink.tokens


@pytest.mark.parametrize("overlap", [True, False])
def test_samples_get_their_tokens_and_share_their_prompt(overlap: bool) -> None:
    it = Bench(overlap=overlap, max_queued=100)
    asked = it.request(list(range(30)), seed=2**64 - 2, num_prompt_logprobs=0)
    samples, sinks = it.submit_samples(asked, 9)
    assert [one.sampling.seed for one in samples[:4]] == [2**64 - 2, 2**64 - 1, 0, 1]
    for one, sink in zip(samples, sinks, strict=True):
        assert sink.ending() == Finished(FinishReason.LENGTH)
        assert sink.tokens == expected_tokens(one, it.model)
        scored = [event for event in sink.events if isinstance(event, PromptLogprobs)]
        assert sum(map(len, scored)) == (29 if one is samples[0] else 0)
    it.engine.close(drain_s=0)
    stats = it.engine.stats()
    assert stats.num_prompt_tokens == 30 and stats.num_open == 0
    assert stats.scheduler.prefix_hits == 8 * 28


def test_a_deadline_ends_samples_that_have_no_token_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LoopClock(monkeypatch)
    it = Bench(max_running=1, max_queued=10)
    request = it.request([1, 2], deadline_s=time.monotonic() + 3600, max_tokens=100)
    samples = samples_of(request, [request.id, it.engine.new_id(), it.engine.new_id()])
    sinks = [Recording() for _ in samples]

    def pass_the_deadline(event: Event) -> None:
        sinks[0](event)
        if isinstance(event, Generated):
            clock.ahead_s = 3601

    it.engine.submit_samples(samples, [pass_the_deadline, *sinks[1:]])
    assert [sink.ending() for sink in sinks] == [Finished(FinishReason.TIMEOUT)] * 3
    assert sinks[0].tokens
    assert sinks[1].tokens == sinks[2].tokens == []
    it.engine.close(drain_s=0)


def test_the_other_samples_go_on_if_the_first_ends_early(bench: Bench) -> None:
    bench.executor.gate.clear()
    asked = bench.request(list(range(60)), max_tokens=20)
    samples, sinks = bench.submit_samples(asked, 4)
    bench.engine.abort(samples[0].id)
    bench.executor.gate.set()
    assert sinks[0].ending() == Finished(FinishReason.CANCELLED)
    for one, sink in zip(samples[1:], sinks[1:], strict=True):
        assert sink.ending() == Finished(FinishReason.LENGTH)
        assert sink.tokens == expected_tokens(one, bench.model)


def test_a_prompt_that_is_only_scored_may_fill_the_context(bench: Bench) -> None:
    prompt = [token % 100 for token in range(CONTEXT)]
    sink = bench.submit(bench.request(prompt, max_tokens=0, num_prompt_logprobs=0))
    assert sink.ending() == Finished(FinishReason.LENGTH)
    with pytest.raises(InvalidRequest, match="does not fit the context"):
        bench.submit(bench.request(prompt, max_tokens=1, num_prompt_logprobs=0))


def test_the_models_end_of_sequence_ends_a_request_unless_ignored() -> None:
    it = Bench(model=Model(vocabulary=8), eos=(3,))
    free = it.request([1, 2], max_tokens=60, ignore_eos=True)
    plain = it.request([1, 2], max_tokens=60)
    everything = it.submit(free)
    stopped = it.submit(plain)
    assert everything.ending() == Finished(FinishReason.LENGTH)
    cut = everything.tokens.index(3) + 1
    assert stopped.ending() == Finished(FinishReason.STOP, stop_token_id=3)
    assert stopped.tokens == everything.tokens[:cut]
    it.engine.close(drain_s=0)


def test_close_lets_running_requests_finish_and_refuses_new_ones(bench: Bench) -> None:
    bench.executor.gate.clear()
    sink = bench.submit(bench.request([1]))
    closing = threading.Thread(target=bench.engine.close, kwargs={"drain_s": PATIENCE_S})
    closing.start()
    wait_until(lambda: not bench.engine.health().ready)
    with pytest.raises(Overloaded, match="shutting down"):
        bench.submit(bench.request([1]))
    bench.executor.gate.set()
    assert sink.ending() == Finished(FinishReason.LENGTH)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_close_without_patience_fails_what_is_open(bench: Bench) -> None:
    bench.executor.gate.clear()
    sinks = [bench.submit(bench.request([1], max_tokens=100)) for _ in range(6)]
    assert bench.executor.reading.wait(PATIENCE_S)  # from here on the inbox is not drained
    inbox = bench.engine._loop.inbox
    num_messages = inbox.qsize()
    closing = threading.Thread(target=bench.engine.close, kwargs={"drain_s": 0.0})
    closing.start()
    wait_until(lambda: inbox.qsize() > num_messages)
    bench.executor.gate.set()
    closing.join(PATIENCE_S)
    assert all("shutting down" in str(sink.error()) for sink in sinks)


def test_observations_for_histograms_are_handed_over_once(bench: Bench) -> None:
    bench.submit(bench.request([1, 2, 3])).ending()
    wait_until(lambda: bench.engine.stats().num_open == 0)
    observations = bench.engine.take_observations()
    assert list(observations.prompt_tokens) == [3]
    assert list(observations.generation_tokens) == [8]
    assert len(observations.time_to_first_token_s) == len(observations.e2e_latency_s) == 1
    assert observations.step_s[0][0] == "prefill"
    assert not bench.engine.take_observations().prompt_tokens


def test_a_launch_that_takes_long_is_no_hang(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, ages_s = bench.executor.launch, []

    def compile_first(plan: StepPlan) -> Pending:
        ready_s = time.monotonic() + 0.01
        while time.monotonic() < ready_s:
            pass
        ages_s.append(bench.engine.health().tick_age_s)
        return launch(plan)

    monkeypatch.setattr(bench.executor, "launch", compile_first)
    bench.submit(bench.request([1])).ending()
    assert ages_s and not any(ages_s)


def test_once_closed_it_lets_the_executor_go() -> None:
    it = Bench()
    it.submit(it.request([1]))
    executor = weakref.ref(it.executor)
    del it.executor
    it.engine.close(drain_s=0)
    gc.collect()
    assert executor() is None


def test_health_is_calm_while_idle_and_while_the_device_works(bench: Bench) -> None:
    wait_until(lambda: bench.engine.health().tick_age_s == 0.0)
    bench.executor.gate.clear()
    sink = bench.submit(bench.request([1]))
    assert bench.executor.reading.wait(PATIENCE_S)
    health = bench.engine.health()
    assert health.ready and health.tick_age_s == 0.0
    bench.executor.gate.set()
    sink.ending()
