"""The engine's door and loop, over the real planner and the executor without a model."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from minisgl_backend.cache.kv import Lease
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import (
    EngineFailure,
    InvalidRequest,
    InvariantError,
    MiniSGLError,
    Overloaded,
)
from minisgl_backend.plan import Admission, Pending, SampledTokens, StepPlan
from minisgl_backend.request import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    IntArray,
    PromptLogprobs,
    Request,
    SamplingParams,
    samples_of,
)
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.loop import Loop, Stop
from minisgl_backend.runtime.open_requests import OpenRequest
from minisgl_backend.runtime.recorder import Recorder
from minisgl_backend.runtime_files import State
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.fakes.engine_info import engine_info
from tests.fakes.executor import (
    FakeExecutor,
    Model,
    expected_prompt_logprobs,
    expected_tokens,
    tokens_of,
)

NUM_PAGES, PAGE_SIZE, CONTEXT = 64, 4, 128
WAIT_S = 20


class GatedExecutor:
    """Runs a step once the gate is open; ``failure`` breaks the steps read after it is set.

    ``poison`` breaks the steps with a row of that request, once it has ``poison_after`` tokens.
    """

    def __init__(self, model: Model) -> None:
        self.inner = FakeExecutor(NUM_PAGES, PAGE_SIZE, CONTEXT, model)
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()
        self.failure: Exception | None = None
        self.num_failures = 0
        self.most_failures = 1_000_000
        self.poison: int | None = None
        self.poison_after = 0
        self.closed = False
        self._admitted: dict[int, Admission] = {}

    def launch(self, plan: StepPlan) -> Pending:
        self._admitted |= {admission.row: admission for admission in plan.admissions}
        return GatedPending(self, self.inner.launch(plan), self._is_poisoned(plan))

    def _is_poisoned(self, plan: StepPlan) -> bool:
        rows = [*plan.prefill_rows.tolist(), *plan.decode_rows.tolist()]
        prefilled = plan.prefill_starts + plan.prefill_lengths
        ends = [*prefilled.tolist(), *(plan.decode_positions + 1).tolist()]
        of_rows = (self._admitted[row] for row in rows)
        return any(
            admission.request_id == self.poison
            and end >= admission.num_prompt_tokens + self.poison_after
            for admission, end in zip(of_rows, ends, strict=True)
        )

    def close(self) -> None:
        self.closed = True


@dataclass
class GatedPending:
    executor: GatedExecutor
    inner: Pending
    poisoned: bool

    def masks(self, num_rows: int) -> IntArray:
        return self.inner.masks(num_rows)

    def mask(self, rows: IntArray) -> None:
        self.inner.mask(rows)

    def tokens(self) -> SampledTokens:
        self.executor.reading.set()
        assert self.executor.gate.wait(WAIT_S)
        if self.executor.num_failures < self.executor.most_failures and self.executor.failure:
            self.executor.num_failures += 1
            raise self.executor.failure
        if self.poisoned:
            raise ValueError("poison")
        return self.inner.tokens()


@dataclass
class Recording:
    """A sink that keeps all events."""

    events: list[Event] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Generated):
            self.first.set()
        if isinstance(event, Finished | Failed):
            self.done.set()

    def ending(self) -> Event:
        assert self.done.wait(WAIT_S)
        return self.events[-1]

    def error(self) -> MiniSGLError:
        ending = self.ending()
        assert isinstance(ending, Failed)
        return ending.error

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Generated)]


class Bench:
    """An engine, its executor, and short ways to use them."""

    def __init__(
        self,
        *,
        overlap: bool = True,
        model: Model | None = None,
        max_running: int = 4,
        max_queued: int = 2,
        max_queued_tokens: int = 1000,
        eos: tuple[int, ...] = (),
        max_queue_time_s: float | None = None,
    ) -> None:
        self.model = model or Model(vocabulary=100)
        self.executor = GatedExecutor(self.model)
        cache = RadixCache(NUM_PAGES, PAGE_SIZE)
        config = SchedulerConfig(max_running_requests=max_running, max_prefill_tokens=16)
        self.info = engine_info(
            vocab_size=self.model.vocabulary,
            eos_token_ids=eos,
            max_sequence_length=CONTEXT,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            max_running_requests=max_running,
            max_queued_requests=max_queued,
            max_queued_tokens=max_queued_tokens,
            max_queue_time_s=max_queue_time_s,
        )
        self.engine = Engine(self.info, Scheduler(cache, config), self.executor, overlap=overlap)

    def request(
        self, prompt: list[int], *, deadline_s: float | None = None, **sampling: Any
    ) -> Request:
        params = SamplingParams(**{"max_tokens": 8, **sampling})
        return Request(
            id=self.engine.new_id(),
            prompt=tokens_of(prompt),
            sampling=params,
            deadline_s=deadline_s,
        )

    def submit(self, request: Request) -> Recording:
        sink = Recording()
        self.engine.submit(request, sink)
        return sink

    def submit_samples(self, request: Request, n: int) -> tuple[list[Request], list[Recording]]:
        """The samples, and what they get."""
        samples = samples_of(request, [request.id, *(self.engine.new_id() for _ in range(n - 1))])
        sinks = [Recording() for _ in samples]
        self.engine.submit_samples(samples, sinks)
        return samples, sinks

    def wait_until(self, condition: object) -> None:
        assert callable(condition)
        limit = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < limit, "the condition did not come true"
            time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[Bench]:
    it = Bench()
    yield it
    it.executor.gate.set()
    it.engine.close(drain_s=0)


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
    assert stats.num_generated_tokens >= 50 * 8


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
    bench.wait_until(lambda: pages().scheduler.num_running == 0)
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
    it.wait_until(lambda: time.monotonic() > deadline_s)
    it.executor.gate.set()
    error = waiting.error()
    assert isinstance(error, Overloaded)
    assert "before the first token" in str(error)
    assert running.ending() == Finished(FinishReason.LENGTH)
    it.engine.close(drain_s=0)


def test_who_waits_for_too_long_is_refused() -> None:
    """A running request is not refused, since it waited for a shorter time in the queue."""
    it = Bench(max_running=1, max_queue_time_s=0.6)
    it.executor.gate.clear()
    running = it.submit(it.request([2], max_tokens=50))
    it.wait_until(lambda: any(isinstance(event, Admitted) for event in running.events))
    waiting = [it.submit(it.request([i])) for i in (1, 3)]
    arrived_s = time.monotonic()
    it.wait_until(lambda: time.monotonic() - arrived_s > 0.6)
    it.executor.gate.set()
    for sink in waiting:
        assert isinstance(sink.error(), Overloaded)
        assert "waited for 0.6 s" in str(sink.error())
    assert running.ending() == Finished(FinishReason.LENGTH)
    assert it.submit(it.request([1])).ending() == Finished(FinishReason.LENGTH)
    assert it.engine.stats().failed == {"UNAVAILABLE": 2}
    it.engine.close(drain_s=0)


def test_a_deadline_after_the_first_token_is_a_finish_reason(bench: Bench) -> None:
    request = bench.request([1], max_tokens=100, deadline_s=time.monotonic() + 1.0)
    reached = threading.Event()
    release = threading.Event()
    sink = Recording()

    def hold(event: Event) -> None:
        sink(event)
        if isinstance(event, Generated) and not reached.is_set():
            reached.set()
            release.wait(WAIT_S)

    bench.engine.submit(request, hold)
    assert reached.wait(WAIT_S)
    assert request.deadline_s is not None
    bench.wait_until(lambda: time.monotonic() > request.deadline_s)
    release.set()
    assert sink.ending() == Finished(FinishReason.TIMEOUT)
    assert sink.tokens


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


def test_samples_are_accepted_all_or_none(bench: Bench) -> None:
    """Each counts as a request, and the prompt once."""
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
    bench.wait_until(lambda: bench.engine.stats().scheduler.num_running == 0)


def test_samples_wait_in_the_queue_with_one_prompt() -> None:
    it = Bench(max_running=1, max_queued=10, max_queued_tokens=30, max_queue_time_s=0.2)
    it.executor.gate.clear()
    _, sinks = it.submit_samples(it.request(list(range(28))), 6)
    it.wait_until(lambda: any(isinstance(event, Admitted) for event in sinks[0].events))
    time.sleep(0.3)  # the first has begun, so the others may wait for longer
    it.executor.gate.set()
    assert {sink.ending() for sink in sinks} == {Finished(FinishReason.LENGTH)}
    it.engine.close(drain_s=0)


def test_a_deadline_ends_samples_that_have_no_token_yet() -> None:
    it = Bench(max_running=1, max_queued=10)
    late = time.monotonic() + 0.3
    _, sinks = it.submit_samples(it.request([1, 2], deadline_s=late, max_tokens=100), 3)
    it.wait_until(lambda: bool(sinks[0].tokens))
    it.executor.gate.clear()
    time.sleep(0.4)
    it.executor.gate.set()
    endings = [sink.ending() for sink in sinks]
    if endings[0] == Finished(FinishReason.TIMEOUT):
        assert endings[1:] == [Finished(FinishReason.TIMEOUT)] * 2
        assert sinks[2].tokens == []
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


def test_waiting_prompt_tokens_are_bounded() -> None:
    it = Bench(max_running=1, max_queued=10, max_queued_tokens=30)
    it.executor.gate.clear()
    first = it.submit(it.request([1]))
    assert it.executor.gate.is_set() is False
    it.wait_until(lambda: any(isinstance(event, Admitted) for event in first.events))
    it.submit(it.request(list(range(20))))
    with pytest.raises(Overloaded, match="20 prompt tokens wait, and 20 more exceed 30"):
        it.submit(it.request(list(range(20))))
    it.executor.gate.set()
    it.engine.close(drain_s=WAIT_S)


def test_a_model_without_an_output_head_embeds_only(bench: Bench) -> None:
    bench.engine.info = replace(bench.info, generates=False)
    with pytest.raises(InvalidRequest, match="embed must be true: the checkpoint has no output"):
        bench.engine.check(bench.request([1]))
    bench.engine.check(bench.request([1], embed=True, max_tokens=0))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([100], {}, "input_ids must be token ids in 0..99, got 100"),
        ([-1], {}, "input_ids must be token ids in 0..99, got -1"),
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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("poison_after", [0, 5])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_request_that_breaks_steps_fails_alone(
    overlap: bool, poison_after: int, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All others, running or waiting, get the same tokens as if nothing had broken."""
    it = Bench(overlap=overlap, max_running=4, max_queued=100)
    it.executor.gate.clear()
    requests = [it.request([i] * (1 + 3 * i), seed=i, presence_penalty=0.5) for i in range(8)]
    it.executor.poison = requests[place].id
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
    it.wait_until(lambda: it.engine.stats().scheduler.num_running == 0)
    pages = it.engine.stats().scheduler
    assert pages.free_pages + pages.cached_pages == NUM_PAGES
    it.engine.close(drain_s=0)


def test_a_step_that_breaks_once_costs_nobody() -> None:
    it = Bench(max_queued=10)
    it.executor.gate.clear()
    it.executor.failure = RuntimeError("once")
    it.executor.most_failures = 1
    requests = [it.request([i], max_tokens=20) for i in range(5)]
    sinks = [it.submit(request) for request in requests]
    it.executor.gate.set()
    it.wait_until(lambda: it.executor.num_failures == 1)
    gone = it.request([7], max_tokens=100)
    cancelled = it.submit(gone)
    it.engine.abort(gone.id)
    requests.append(it.request([9]))
    sinks.append(it.submit(requests[-1]))
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.ending() == Finished(FinishReason.LENGTH)
        assert sink.tokens == expected_tokens(request, it.model)
    assert cancelled.ending() == Finished(FinishReason.CANCELLED)
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


def test_a_prompt_that_is_only_scored_may_fill_the_context(bench: Bench) -> None:
    prompt = [token % 100 for token in range(CONTEXT)]
    sink = bench.submit(bench.request(prompt, max_tokens=0, num_prompt_logprobs=0))
    assert sink.ending() == Finished(FinishReason.LENGTH)
    with pytest.raises(InvalidRequest, match="does not fit the context"):
        bench.submit(bench.request(prompt, max_tokens=1, num_prompt_logprobs=0))


@pytest.mark.parametrize("leak", [False, True])
def test_pages_that_nobody_gives_back_are_told_once(
    leak: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first lease of three is never released; the engine serves on."""
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
        it.wait_until(lambda: it.engine.stats().scheduler.num_running == 0)
    it.engine.close(drain_s=0)
    told = [record.getMessage() for record in caplog.records if "leaked" in record.getMessage()]
    expected = "no request is open, but 0 rows and 4 pages are in use: they have leaked"
    assert told == ([expected] if leak else [])
    assert it.engine.stats().scheduler.used_pages == (4 if leak else 0)


@pytest.mark.parametrize("method", ["plan", "commit", "add"])
def test_books_that_break_are_begun_anew(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    it.wait_until(lambda: it.engine.stats().scheduler.num_running == 0)
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
    it.wait_until(lambda: it.engine.health().state is State.BROKEN)
    assert it.executor.num_failures == 1
    it.engine.close(drain_s=0)


def test_steps_that_always_break_fail_every_open_request_and_close_the_door(
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
    it.wait_until(lambda: not it.engine.health().ready)
    assert "the device is on fire" in caplog.text
    with pytest.raises(Overloaded, match="the engine is down"):
        it.submit(it.request([1]))
    it.engine.close(drain_s=WAIT_S)
    assert it.engine.stats().failed == {"INTERNAL": 5}


def test_requests_that_break_steps_are_counted_only_while_no_token_comes_between() -> None:
    it = Bench()
    for _ in range(3):
        poison, healthy = it.request([1]), it.request([2])
        it.executor.poison = poison.id
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


def test_a_failing_sink_harms_only_its_request(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise ValueError("no room")

    bench.engine.submit(bench.request([1]), broken)
    assert bench.submit(bench.request([2])).ending() == Finished(FinishReason.LENGTH)
    assert "no room" in caplog.text


def test_close_lets_running_requests_finish_and_refuses_new_ones(bench: Bench) -> None:
    bench.executor.gate.clear()
    sink = bench.submit(bench.request([1]))
    closing = threading.Thread(target=bench.engine.close, kwargs={"drain_s": WAIT_S})
    closing.start()
    bench.wait_until(lambda: not bench.engine.health().ready)
    with pytest.raises(Overloaded, match="shutting down"):
        bench.submit(bench.request([1]))
    bench.executor.gate.set()
    assert sink.ending() == Finished(FinishReason.LENGTH)
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_close_without_patience_fails_what_is_open(bench: Bench) -> None:
    bench.executor.gate.clear()
    sinks = [bench.submit(bench.request([1], max_tokens=100)) for _ in range(6)]
    closing = threading.Thread(target=bench.engine.close, kwargs={"drain_s": 0.0})
    closing.start()
    bench.wait_until(lambda: not bench.engine.health().ready)
    bench.executor.gate.set()
    closing.join(WAIT_S)
    assert all("shutting down" in str(sink.error()) for sink in sinks)


def test_samples_for_histograms_are_handed_over_once(bench: Bench) -> None:
    bench.submit(bench.request([1, 2, 3])).ending()
    bench.wait_until(lambda: bench.engine.stats().num_open == 0)
    samples = bench.engine.take_samples()
    assert list(samples.prompt_tokens) == [3]
    assert list(samples.generation_tokens) == [8]
    assert len(samples.time_to_first_token_s) == len(samples.e2e_latency_s) == 1
    assert samples.step_s[0][0] == "prefill"
    assert not bench.engine.take_samples().prompt_tokens


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
    bench.wait_until(lambda: bench.engine.health().tick_age_s == 0.0)
    bench.executor.gate.clear()
    sink = bench.submit(bench.request([1]))
    assert bench.executor.reading.wait(WAIT_S)
    health = bench.engine.health()
    assert health.ready and health.tick_age_s == 0.0
    bench.executor.gate.set()
    sink.ending()


def test_a_lost_executor_fails_what_is_open(bench: Bench) -> None:
    bench.executor.gate.clear()
    sinks = [bench.submit(bench.request([i])) for i in range(3)]
    bench.engine.fail(EngineFailure("a rank is gone"))
    bench.executor.gate.set()
    for sink in sinks:
        assert isinstance(sink.error(), EngineFailure)
    bench.wait_until(lambda: bench.engine.health().state is State.BROKEN)


def test_a_planner_that_finds_no_step_is_replaced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan, num_calls = Scheduler.plan, itertools.count()
    monkeypatch.setattr(Scheduler, "plan", lambda self: plan(self) if next(num_calls) > 0 else None)
    request = bench.request([1, 2, 3])
    sink = bench.submit(request)
    assert sink.ending() == Finished(FinishReason.LENGTH)
    assert sink.tokens == expected_tokens(request, bench.model)
    assert "has work but no plan" in caplog.text


def test_a_request_that_comes_in_while_the_loop_ends_is_refused(bench: Bench) -> None:
    loop = Loop(
        Scheduler(RadixCache(NUM_PAGES, PAGE_SIZE), SchedulerConfig()),
        bench.executor,
        overlap=False,
        recorder=Recorder(),
        on_admitted=lambda request: None,
        on_ended=lambda request, admitted: None,
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
