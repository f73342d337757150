"""The parts of an engine that breaks when it is told to (``defect``).

Wraps the real parts, and goes into an engine as an argument of ``build_engine``. Must not know the
expected effects of a defect: ``breaks`` and ``ranks`` do. Runs in the processes of the engine's
ranks. Without a defect the engine works like any other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.cache.kv import KVCache, Lease
from minisgl_backend.device.base import HostArray
from minisgl_backend.execution.ranks import RankExecutor
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.parts import Parts
from minisgl_backend.plan import Pending, SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId, Sink
from minisgl_backend.runtime import ports
from minisgl_backend.runtime.adapters import Adapters
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from minisgl_check.defect import MARK, STEP_S, Defect, Switch
from minisgl_kit.wrappers import CacheWrapper, ExecutorWrapper, PendingWrapper, SchedulerWrapper

_LONGEST_PAUSE_S: Final = 0.05
_PAUSED: Final = 0.1
"""The share of moments at which there is a pause."""
_SCARCE: Final = 0.5
"""The share of a phase's steps, after the first, in which there are no pages."""


class Frailty:
    """The state that the parts of one rank share: the switch, and the rows of marked requests."""

    def __init__(self, switch: Switch, *, raises_once: Defect = Defect.ONE_FORWARD) -> None:
        """``raises_once`` is the defect that makes a single forward pass of this rank raise."""
        self.switch = switch
        self.marked: set[int] = set()
        self._raises_once = raises_once

    def parts(self) -> Parts:
        """The parts of an engine, or of a rank other than 0."""

        def scheduler(cache: KVCache, config: SchedulerConfig) -> ports.Scheduler:
            cache = FrailCache(self, cache)
            return FrailScheduler(self, Scheduler(cache, config), cache)

        return Parts(
            engine=partial(FrailEngine, self),
            scheduler=scheduler,
            executor=partial(FrailExecutor, self),
            watch_logits=self.break_logits,
            follower="minisgl_check.frail_rank",
        )

    def pause(self) -> None:
        """Sleep at random; called at eight points between a request's arrival and its end."""
        if self.switch.is_on(Defect.PAUSES) and random.random() < _PAUSED:
            time.sleep(random.uniform(0, _LONGEST_PAUSE_S))

    def break_logits(self, logits: Tensor, rows: HostArray) -> Tensor:
        """The end of a forward pass: it raises, or its logits, [num_samples, vocab_size], are bad.

        ``rows`` [num_samples] are the rows of the logits.
        """
        if self.switch.is_on(self._raises_once):
            self.switch.off()
            raise RuntimeError("a forward pass breaks")
        if self.switch.is_on(Defect.EVERY_FORWARD):
            raise RuntimeError("forward passes break")
        marked = [index for index, row in enumerate(rows.tolist()) if row in self.marked]
        if marked and self.switch.is_on(Defect.SAMPLING):
            raise RuntimeError("this row cannot be sampled")
        if marked and self.switch.is_on(Defect.NAN):
            return logits.index_fill(0, torch.tensor(marked), float("nan"))
        return logits


class FrailEngine(Engine):
    """Takes requests late."""

    def __init__(
        self,
        frailty: Frailty,
        info: EngineInfo,
        scheduler: ports.Scheduler,
        executor: ports.Executor,
        *,
        overlap: bool,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._frailty = frailty
        super().__init__(
            info, scheduler, executor, overlap=overlap, grammars=grammars, adapters=adapters
        )

    def submit_samples(self, samples: Sequence[Request], sinks: Sequence[Sink]) -> None:
        self._frailty.pause()
        super().submit_samples(samples, sinks)


class FrailCache(CacheWrapper):
    """Gives pages back late."""

    def __init__(self, frailty: Frailty, cache: KVCache) -> None:
        super().__init__(cache)
        self._frailty = frailty

    def release(self, lease: Lease) -> None:
        self._frailty.pause()
        super().release(lease)


class FrailScheduler(SchedulerWrapper):
    """Finds no pages in some steps of a phase, and takes its time."""

    def __init__(self, frailty: Frailty, scheduler: ports.Scheduler, cache: KVCache) -> None:
        super().__init__(scheduler)
        self._frailty = frailty
        self._cache = cache
        self._prefilling: set[int] = set()
        """Rows with a planned chunk, but not yet their last one."""

    def add(self, request: Request, generated: IntArray = EMPTY, num_scored: int = 0) -> None:
        self._frailty.pause()
        super().add(request, generated, num_scored)

    def abort(self, request_id: RequestId) -> bool:
        self._frailty.pause()
        return super().abort(request_id)

    def plan(self, lookahead: Lookahead | None = None) -> StepPlan | None:
        self._frailty.pause()
        switch = self._frailty.switch
        plan = None
        if self._is_scarce() and not (switch.was_met and random.random() >= _SCARCE):
            switch.meet()
            plan = self._plan_without_pages(lookahead)
        # without any plan, the loop would consider the planner broken
        plan = super().plan(lookahead) if plan is None else plan
        if plan is not None:
            self._prefilling.difference_update(plan.released_rows.tolist())
            self._prefilling.update(plan.chunks.rows.tolist())
            self._prefilling.difference_update(plan.sample_rows.tolist())
        return plan

    def _is_scarce(self) -> bool:
        """Whether pages vanish in the present phase. At least one request must hold a row."""
        stats, switch = self.stats(), self._frailty.switch
        if not stats.num_running:
            return False
        if self._prefilling:
            return switch.is_on(Defect.NO_PAGES_BETWEEN_CHUNKS)
        waits = stats.num_waiting > 0
        return switch.is_on(Defect.NO_PAGES_TO_ADMIT if waits else Defect.NO_PAGES_TO_DECODE)

    def _plan_without_pages(self, lookahead: Lookahead | None) -> StepPlan | None:
        """A plan made while another lease holds all free and evictable pages."""
        cache = self._cache
        hoard = cache.acquire(EMPTY, "")
        assert cache.grow(hoard, (cache.num_free + cache.num_evictable) * cache.page_size)
        plan = super().plan(lookahead)
        cache.release(hoard)
        return plan


class FrailExecutor(ExecutorWrapper):
    """Knows the rows of marked requests; steps begin late, and may be slow."""

    def __init__(self, frailty: Frailty, executor: RankExecutor) -> None:
        super().__init__(executor)
        self._frailty = frailty

    def launch(self, plan: StepPlan) -> Pending:
        self._frailty.pause()
        # before each step, since a row changes hands only between steps
        self._frailty.marked.difference_update(plan.released_rows.tolist())
        for admission in plan.admissions:
            self._frailty.marked.discard(admission.row)
            if admission.sampling.seed == MARK:
                self._frailty.marked.add(admission.row)
        return FrailPending(self._frailty, super().launch(plan))


class FrailPending(PendingWrapper):
    """Its copy back to the host takes its time."""

    def __init__(self, frailty: Frailty, step: Pending) -> None:
        super().__init__(step)
        self._frailty = frailty

    def tokens(self) -> SampledTokens:
        self._frailty.pause()
        if self._frailty.switch.is_on(Defect.SLOW):
            time.sleep(STEP_S)
        return super().tokens()
