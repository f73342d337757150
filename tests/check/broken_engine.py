"""The `model.py` of an `llm_engine` that breaks the promise that a file names, if it is there.

It is copied into a repository of the test's own: it may import nothing but the package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from minisgl_backend.cache.kv import Lease
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import EngineFailure, InvalidRequest
from minisgl_backend.plan import SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, FinishReason, RequestId
from minisgl_backend.runtime.engine import Engine, EngineInfo
from minisgl_backend.scheduling.rows import Rows
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_backend.tritonserver import llm_engine
from minisgl_backend.tritonserver.responder import Responder
from minisgl_bench import paced

DEFECT = Path(__file__).parents[2] / "defect"
HELD_PROMPT = np.arange(40, dtype=np.int32)


def is_broken(name: str) -> bool:
    return DEFECT.exists() and DEFECT.read_text() == name


class BrokenScheduler(Scheduler):
    kept: ClassVar[list[Lease]] = []

    def abort(self, request_id: RequestId) -> bool:
        was_live = super().abort(request_id)
        if is_broken("a page leaks"):
            lease = self._cache.acquire(EMPTY)
            self._cache.grow(lease, 1)
            self.kept.append(lease)
        elif is_broken("a prefix stays locked"):
            self.kept.append(self._cache.acquire(HELD_PROMPT))
        else:
            while self.kept:
                self._cache.release(self.kept.pop())
        return was_live


class BrokenRows(Rows):
    def give_back(self, row: int) -> None:
        super().give_back(row)
        if is_broken("a row is freed twice"):
            self._free.append(row)
        else:
            self._free = sorted(set(self._free), reverse=True)


class BrokenExecutor(paced.PacedExecutor):
    def launch(self, plan: StepPlan) -> Any:
        step = super().launch(plan)
        if is_broken("another token"):
            tokens = SampledTokens(step.tokens().token_ids * 0 + 300)
            return mock.Mock(spec_set=["tokens"], tokens=lambda: tokens)
        return step


class BrokenEngine(Engine):
    def __init__(self, info: EngineInfo, scheduler: Any, executor: Any, *, overlap: bool) -> None:
        scheduler.__class__ = BrokenScheduler
        scheduler._rows.__class__ = BrokenRows
        executor.__class__ = BrokenExecutor
        super().__init__(info, scheduler, executor, overlap=overlap)

    def abort(
        self, request_id: RequestId, why: FinishReason | EngineFailure = FinishReason.CANCELLED
    ) -> None:
        if not is_broken("a cancel is ignored"):
            super().abort(request_id, why)


class TritonPythonModel(llm_engine.TritonPythonModel):
    @staticmethod
    def make_engine(options: EngineOptions) -> Engine:
        with mock.patch.object(paced, "Engine", BrokenEngine):
            return paced.paced_engine(options, step_s=0.005)

    def _accept(self, request: Any, responder: Responder) -> None:
        if is_broken("an answer is lost"):
            self._lost = responder
            return
        if is_broken("an answer is found"):
            self._lost.finish()
        if is_broken("an error tells a path"):
            raise InvalidRequest(f"cannot read {__file__}")
        if is_broken("descriptors leak"):
            self._kept = [os.dup(0) for _ in range(10)]
        super()._accept(request, responder)
