"""The model `llm_engine` with a paced engine that breaks the current promise (`promises`)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from minisgl_backend.cache.kv import KVCache, Lease
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import EngineFailure, InvalidRequest
from minisgl_backend.parts import Parts
from minisgl_backend.plan import Pending, SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, FinishReason, Request, RequestId, Sink
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.scheduling.report import SchedulerStats
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from minisgl_backend.tritonserver import llm_engine
from minisgl_backend.tritonserver.setup import runtime_directory
from minisgl_bench.paced import paced_engine
from minisgl_check.defect import Switch
from minisgl_kit.triton_wrappers import TritonWrapper
from minisgl_kit.wrappers import ExecutorWrapper, PendingWrapper, SchedulerWrapper
from tests.check.promises import Broken

_HELD_PROMPT: Final = np.arange(40, dtype=np.int32)


def is_broken(promise: Broken) -> bool:
    directory = runtime_directory()
    assert directory is not None
    return Switch(directory).is_on(promise)


class BrokenScheduler(SchedulerWrapper):
    """Keeps pages, or counts rows that it does not have."""

    def __init__(self, cache: KVCache, config: SchedulerConfig) -> None:
        super().__init__(Scheduler(cache, config))
        self._cache = cache
        self._kept: list[Lease] = []
        self._num_missing_rows = 0

    def abort(self, request_id: RequestId) -> bool:
        was_live = super().abort(request_id)
        if is_broken(Broken.PAGE):
            lease = self._cache.acquire(EMPTY, "")
            assert self._cache.grow(lease, 1)
            self._kept.append(lease)
        elif is_broken(Broken.PREFIX):
            self._kept.append(self._cache.acquire(_HELD_PROMPT, ""))
        elif is_broken(Broken.ROW):
            self._num_missing_rows += 1
        else:
            self._num_missing_rows = 0
            while self._kept:
                self._cache.release(self._kept.pop())
        return was_live

    def stats(self) -> SchedulerStats:
        stats = super().stats()
        return replace(stats, num_running=stats.num_running - self._num_missing_rows)


class BrokenExecutor(ExecutorWrapper):
    def launch(self, plan: StepPlan) -> Pending:
        step = super().launch(plan)
        return _OtherTokens(step) if is_broken(Broken.ANOTHER_TOKEN) else step


class _OtherTokens(PendingWrapper):
    def tokens(self) -> SampledTokens:
        return SampledTokens(np.full_like(super().tokens().token_ids, 300))


class BrokenEngine(Engine):
    _descriptors: tuple[int, ...] = ()

    def submit_samples(self, samples: Sequence[Request], sinks: Sequence[Sink]) -> None:
        if is_broken(Broken.PATH):
            raise InvalidRequest(f"cannot read {__file__}")
        if is_broken(Broken.DESCRIPTORS):
            self._descriptors = tuple(os.dup(0) for _ in range(10))
        super().submit_samples(samples, sinks)

    def abort(
        self, request_id: RequestId, why: FinishReason | EngineFailure = FinishReason.CANCELLED
    ) -> None:
        if not is_broken(Broken.CANCEL):
            super().abort(request_id, why)


_PARTS: Final = Parts(engine=BrokenEngine, scheduler=BrokenScheduler, executor=BrokenExecutor)


class TritonPythonModel(llm_engine.TritonPythonModel):
    @staticmethod
    def make_engine(options: EngineOptions) -> Engine:
        return paced_engine(options, step_s=0.005, parts=_PARTS)

    def execute(self, requests: list[Any]) -> None:
        super().execute([_Held(request) for request in requests])


class _Held(TritonWrapper):
    def get_response_sender(self) -> _HoldingBack:
        return _HoldingBack(self.wrapped.get_response_sender())


class _HoldingBack(TritonWrapper):
    def send(self, *response: Any, **flags: Any) -> None:
        while is_broken(Broken.HELD):
            time.sleep(0.01)
        self.wrapped.send(*response, **flags)
