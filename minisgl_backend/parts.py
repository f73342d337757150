"""What may take the place of an engine's own parts: an argument of ``build_engine``.

Benchmarks mark what an engine does, checks break it on purpose, and both need the real one around
what they replace. Knows how each part is made, and by which protocol the others use it. Must not
know who replaces a part, or why: without the argument an engine has no code of theirs in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.execution.executor import WatchLogits
from minisgl_backend.execution.ranks import RankExecutor
from minisgl_backend.runtime.engine import Engine, EngineInfo
from minisgl_backend.runtime.ports import Executor
from minisgl_backend.runtime.ports import Scheduler as SchedulerPort
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig


class MakeEngine(Protocol):
    """Makes what joins planner and executor, as the class ``Engine`` does."""

    def __call__(
        self, info: EngineInfo, scheduler: SchedulerPort, executor: Executor, *, overlap: bool
    ) -> Engine: ...


def _unchanged(executor: RankExecutor) -> RankExecutor:
    return executor


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the parts of an engine are made; what is not given is as in every engine.

    ``executor`` gets the executor of this rank, with its model loaded, and returns what runs the
    steps. ``watch_logits`` looks at the logits of each step that is not captured, before they are
    sampled. ``follower`` is the module that the processes of the other ranks run.
    """

    engine: MakeEngine = Engine
    scheduler: Callable[[KVCache, SchedulerConfig], SchedulerPort] = Scheduler
    executor: Callable[[RankExecutor], RankExecutor] = _unchanged
    watch_logits: WatchLogits | None = None
    follower: str = "minisgl_backend.cli.rank"


STANDARD: Final = Parts()
