"""An engine whose executor computes without a model and waits at a gate, for tests of the loop."""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import MiniSGLError
from minisgl_backend.plan import Admission, Pending, SampledTokens, StepPlan
from minisgl_backend.request import (
    Event,
    Failed,
    Finished,
    Generated,
    IntArray,
    Request,
    SamplingParams,
    samples_of,
)
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.fakes.engine_info import engine_info
from tests.fakes.executor import FakeExecutor, Model, tokens_of
from tests.waiting import PATIENCE_S

NUM_PAGES, PAGE_SIZE, CONTEXT = 64, 4, 128


class GatedExecutor:
    """Runs a step once the gate is open; ``failure`` breaks steps that are read after it is set.

    ``poison`` breaks steps with a row of these requests, once they have ``poison_after`` tokens.
    """

    def __init__(self, model: Model) -> None:
        self.inner = FakeExecutor(NUM_PAGES, PAGE_SIZE, CONTEXT, model)
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()
        self.failure: Exception | None = None
        self.num_failures = 0
        self.most_failures = 1_000_000
        self.poison: Container[int] = ()
        self.poison_after = 0
        self.closed = False
        self._admitted: dict[int, Admission] = {}

    def launch(self, plan: StepPlan) -> Pending:
        self._admitted |= {admission.row: admission for admission in plan.admissions}
        return GatedPending(self, self.inner.launch(plan), self._is_poisoned(plan))

    def _is_poisoned(self, plan: StepPlan) -> bool:
        rows = [*plan.chunks.rows.tolist(), *plan.decodes.rows.tolist()]
        prefilled = plan.chunks.ends
        ends = [*prefilled.tolist(), *(plan.decodes.positions + 1).tolist()]
        of_rows = (self._admitted[row] for row in rows)
        return any(
            admission.request_id in self.poison
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

    def masks(self, num_masks: int) -> IntArray:
        return self.inner.masks(num_masks)

    def mask(self, samples: IntArray) -> None:
        self.inner.mask(samples)

    def tokens(self) -> SampledTokens:
        self.executor.reading.set()
        assert self.executor.gate.wait(PATIENCE_S)
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
        assert self.done.wait(PATIENCE_S)
        return self.events[-1]

    def error(self) -> MiniSGLError:
        ending = self.ending()
        assert isinstance(ending, Failed)
        return ending.error

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Generated)]


class Bench:
    """An engine, its executor, and shortcuts to use them."""

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
        speculative_tokens: int = 0,
    ) -> None:
        self.model = model or Model(vocabulary=100)
        self.executor = GatedExecutor(self.model)
        cache = RadixCache(NUM_PAGES, PAGE_SIZE)
        config = SchedulerConfig(
            max_running_requests=max_running,
            max_prefill_tokens=16,
            speculative_tokens=speculative_tokens,
        )
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

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.gate.set()
        self.engine.close(drain_s=0)

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
        """The samples, and what each gets."""
        samples = samples_of(request, [request.id, *(self.engine.new_id() for _ in range(n - 1))])
        sinks = [Recording() for _ in samples]
        self.engine.submit_samples(samples, sinks)
        return samples, sinks
