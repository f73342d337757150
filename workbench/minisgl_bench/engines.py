"""Engines of a benchmark's own, in this process, one after the other, and what they are asked.

Knows how to start and end one, and how to wait for an answer; must not know what is measured.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import MiniSGLError
from minisgl_backend.request import (
    Admitted,
    Event,
    Failed,
    Finished,
    Generated,
    IntArray,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.ports import Executor
from minisgl_bench.profiling import MarkedExecutor, MarkedScheduler, nvtx_range


@contextmanager
def running_engine(
    options: EngineOptions, *, nvtx: bool = False
) -> Iterator[tuple[Engine, Executor]]:
    """An engine and its executor for as long as the block lasts; ``nvtx`` marks its phases."""
    import torch

    from minisgl_backend.build import build_executor, build_scheduler
    from minisgl_backend.execution.executor import ModelExecutor
    from minisgl_backend.execution.ranks import LeadingExecutor

    if torch.cuda.is_available():  # what an engine before this one held
        gc.collect()
        torch.cuda.empty_cache()
    mark = nvtx_range() if nvtx else None
    info, executor = build_executor(options)
    scheduler = build_scheduler(options, info)
    if mark is None:
        engine = Engine(info, scheduler, executor, overlap=options.overlap)
    else:
        if isinstance(executor, ModelExecutor):
            executor.mark(mark)
        engine = Engine(
            info,
            MarkedScheduler(scheduler, mark),
            MarkedExecutor(executor, mark),
            overlap=options.overlap,
        )
    if isinstance(executor, LeadingExecutor):
        executor.on_lost(engine.fail)
    try:
        yield engine, executor
    finally:
        engine.close(drain_s=0)


@dataclass(slots=True)
class Collector:
    """The sink of one request: its tokens, and when they came; times of ``time.perf_counter``."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: MiniSGLError | None = None
    done: threading.Event = field(default_factory=threading.Event)
    sent_s: float = field(default_factory=time.perf_counter)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Generated):
            self.times_s.append(time.perf_counter())
            self.tokens.append(event.token_id)
            self.logprobs.append(event.logprobs)
        elif isinstance(event, Admitted):
            self.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, Failed):
            self.error = event.error
            self.done.set()
        elif isinstance(event, Finished):
            self.done.set()

    def wait(self) -> None:
        """Until the request has ended; raises what it failed with."""
        self.done.wait()
        if self.error is not None:
            raise self.error


def submitted(engine: Engine, prompt: IntArray, sampling: SamplingParams) -> Collector:
    """The sink of a request that the engine now has."""
    sink = Collector()
    engine.submit(Request(id=engine.new_id(), prompt=prompt, sampling=sampling), sink)
    return sink
