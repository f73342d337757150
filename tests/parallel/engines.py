"""Whole engines, with ranks as processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.build import build_executor, build_grammars
from minisgl_backend.build_scheduler import build_scheduler
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import MiniSGLError
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.ranks import LeadingExecutor
from minisgl_backend.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    IntArray,
    PromptLogprobs,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.runtime.engine import Engine
from minisgl_check.processes import runs

WAIT_S = 120.0


@dataclass(slots=True, eq=False)
class Answer:
    """The sink of one request, and what it got."""

    request_id: RequestId
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    error: MiniSGLError | None = None
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Generated):
            self.tokens.append(event.token_id)
            self.logprobs.append(event.logprobs)
            self.started.set()
        elif isinstance(event, PromptLogprobs):
            self.prompt_logprobs += event.tokens()
        elif isinstance(event, (Finished, Failed)):
            assert not self.ended.is_set(), "one terminal event each"
            if isinstance(event, Finished):
                self.reason = event.reason
            else:
                self.error = event.error
            self.ended.set()


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """An engine of several ranks; with one rank there are no followers."""

    engine: Engine
    followers: Followers | None

    def submit(self, prompt: IntArray, sampling: SamplingParams) -> Answer:
        answer = Answer(self.engine.new_id())
        request = Request(id=answer.request_id, prompt=prompt, sampling=sampling)
        self.engine.submit(request, answer)
        return answer

    def kill(self, rank: int, number: signal.Signals) -> None:
        assert self.followers is not None
        os.kill(self.followers.pids[rank - 1], number)


@contextmanager
def ranked_engine(size: int, model: Path | None = None, **options: Any) -> Iterator[Ranked]:
    """An engine over ``size`` ranks, in float64: sums over ranks round differently from one sum."""
    given = {"dtype": "float64", "tensor_parallel_size": size, "device": "cpu", **options}
    if model is not None:
        given["model"] = str(model)
    parsed = EngineOptions.from_mapping(given)
    info, executor = build_executor(parsed)
    engine = Engine(
        info,
        build_scheduler(parsed, info),
        executor,
        overlap=parsed.overlap,
        grammars=build_grammars(parsed, Path(info.folder), info.vocab_size, info.eos_token_ids),
    )
    followers = None
    if isinstance(executor, LeadingExecutor):
        executor.on_lost(engine.fail)
        followers = executor.followers
    try:
        yield Ranked(engine, followers)
    finally:
        engine.close(drain_s=0)
    if followers is not None:
        assert not any(runs(pid) for pid in followers.pids)


def wait_for_all(answers: Sequence[Answer]) -> None:
    for answer in answers:
        assert answer.ended.wait(WAIT_S)


def some_prompts(count: int, *, vocab_size: int, seed: int = 0) -> list[IntArray]:
    """Prompts of 3 to 90 tokens, most of which begin with one of two prefixes."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, vocab_size, length).astype(np.int32) for length in (60, 37, 0)]
    return [
        np.concatenate(
            [prefixes[index % 3], rng.integers(0, vocab_size, rng.integers(3, 30))]
        ).astype(np.int32)
        for index in range(count)
    ]
