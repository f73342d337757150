"""The engine that breaks as a file tells it: the real one, with a few of its classes extended.

Knows the classes that it extends. Must not know who asks, or what must come of a defect: that is
for ``breaks``. Runs in the processes of the engine's ranks; without a defect all is as ever.
"""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from minisgl_backend.execution.batch import StepIndices
from minisgl_backend.execution.cpu_executor import CpuExecutor, CpuPending
from minisgl_backend.execution.sampler import Sample, Sampler
from torch import Tensor

from minisgl_backend.attention.base import HostArray
from minisgl_backend.cache.kv import Lease, RadixCache
from minisgl_backend.plan import Admission, SampledTokens, StepPlan
from minisgl_backend.request import RequestId
from minisgl_backend.runtime.loop import Loop
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_backend.tritonserver.setup import runtime_directory
from minisgl_check.defect import FILE, MARK, MET, STEP_S, Defect

_LONGEST_PAUSE_S: Final = 0.05
_PAUSED: Final = 0.1
"""Share of the moments at which there is a pause."""
_HIDDEN: Final = 0.5
"""Share of the steps of a phase, after the first, in which there are no pages."""


def _is_on(defect: Defect) -> bool:
    directory = runtime_directory()
    try:
        return directory is not None and (directory / FILE).read_text("utf-8") == defect.value
    except OSError:
        return False


def mark_met() -> None:
    """Say that a defect came to bear."""
    _met().touch()


def _met() -> Path:
    directory = runtime_directory()
    assert directory is not None
    return directory / MET


def pause() -> None:
    """Sleep now and then; called at eight points between a request's arrival and its end."""
    if _is_on(Defect.PAUSES) and random.random() < _PAUSED:
        time.sleep(random.uniform(0, _LONGEST_PAUSE_S))


class FrailCache(RadixCache):
    """Some of its pages may be hidden, as if others held them."""

    hidden = 0

    @property
    def num_free(self) -> int:
        return max(0, super().num_free - self.hidden)

    @property
    def num_evictable(self) -> int:
        hidden = max(0, self.hidden - super().num_free)
        return max(0, super().num_evictable - hidden)

    def release(self, lease: Lease) -> None:
        pause()
        super().release(lease)

    def _make_room(self, num_pages: int) -> bool:
        is_there = num_pages <= self.num_free + self.num_evictable
        return is_there and super()._make_room(num_pages)


class FrailScheduler(Scheduler):
    """Finds no pages in some of the steps of a phase; and takes its time."""

    def plan(self) -> StepPlan | None:
        pause()
        if not self._is_scarce() or (_met().exists() and random.random() >= _HIDDEN):
            return super().plan()
        mark_met()
        self._hide(self._cache.num_pages)
        plan = super().plan()
        self._hide(0)
        # if nothing could be planned at all, the loop would think that the planner is broken
        return super().plan() if plan is None else plan

    def abort(self, request_id: RequestId) -> bool:
        pause()
        return super().abort(request_id)

    def renewed(self) -> Scheduler:
        scheduler = super().renewed()
        scheduler.__class__ = type(self)
        return scheduler

    def _is_scarce(self) -> bool:
        """Whether the phase has come in which pages vanish; somebody holds a row by then."""
        if not self._rows.num_used:
            return False
        if self._life.prefilling:
            return _is_on(Defect.NO_PAGES_BETWEEN_CHUNKS)
        return _is_on(Defect.NO_PAGES_TO_ADMIT if len(self._queue) else Defect.NO_PAGES_TO_DECODE)

    def _hide(self, num_pages: int) -> None:
        assert isinstance(self._cache, FrailCache)
        self._cache.hidden = num_pages


class FrailSampler(Sampler):
    """Cannot sample for the rows of marked requests, or finds no number in their logits."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        self._marked: set[int] = set()

    def admit(self, admission: Admission) -> None:
        super().admit(admission)
        if admission.sampling.seed == MARK:
            self._marked.add(admission.row)

    def release(self, row: int) -> None:
        super().release(row)
        self._marked.discard(row)

    def sample(self, logits: Tensor, rows: HostArray, positions: HostArray) -> Sample:
        marked = [index for index, row in enumerate(rows.tolist()) if row in self._marked]
        if marked and _is_on(Defect.SAMPLING):
            raise RuntimeError("this row cannot be sampled")
        if marked and _is_on(Defect.NAN):
            logits = logits.index_fill(0, torch.tensor(marked), float("nan"))
        return super().sample(logits, rows, positions)


class FrailPending(CpuPending):
    """Its copy back to the host takes its time."""

    def tokens(self) -> SampledTokens:
        pause()
        return super().tokens()


class FrailExecutor(CpuExecutor):
    """Forward passes raise, or are slow."""

    raises_once = Defect.ONE_FORWARD

    def launch(self, plan: StepPlan) -> CpuPending:
        pause()
        return FrailPending(self._device.submit(partial(self._run_unless_broken, plan)))

    def _forward(self, plan: StepPlan, indices: StepIndices) -> Tensor:
        if _is_on(self.raises_once):
            directory = runtime_directory()
            assert directory is not None
            (directory / FILE).unlink()
            raise RuntimeError("a forward pass breaks")
        if _is_on(Defect.EVERY_FORWARD):
            raise RuntimeError("forward passes break")
        if _is_on(Defect.SLOW):
            time.sleep(STEP_S)
        return super()._forward(plan, indices)


class FrailFollower(FrailExecutor):
    """The same on another rank than 0."""

    raises_once = Defect.ONE_FORWARD_OF_RANK_1


class FrailLoop(Loop):
    """Looks late into its inbox."""

    def _drain_inbox(self, *, block: bool) -> bool:
        pause()
        return super()._drain_inbox(block=block)
