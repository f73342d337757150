"""Replacements for an engine's parts: an argument of ``build_engine``.

Benchmarks trace an engine and checks break it on purpose; in both, the rest of the engine must be
the real one. Knows how each part is made, and by which protocol the others use it. Must not know
who replaces a part, or why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.runtime.adapters import Adapters
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.runtime.ports import Executor
from minisgl_backend.runtime.ports import Scheduler as SchedulerPort
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:  # they bring torch
    from minisgl_backend.execution.ranks import RankExecutor
    from minisgl_backend.execution.stages import WatchLogits


class MakeEngine(Protocol):
    """Joins planner and executor to an engine, as the class ``Engine`` does."""

    def __call__(
        self,
        info: EngineInfo,
        scheduler: SchedulerPort,
        executor: Executor,
        *,
        overlap: bool,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> Engine: ...


def _unchanged(executor: RankExecutor) -> RankExecutor:
    return executor


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the parts of an engine are made.

    ``executor`` gets this rank's executor, with its model loaded, and returns the one that runs the
    steps. ``watch_logits`` gets the logits of each step that is not captured, before they are
    sampled. ``follower`` is the module that the processes of the other ranks run, ``replica`` the
    one that the processes of replicas run; the other parts here have no effect inside replicas.
    """

    engine: MakeEngine = Engine
    scheduler: Callable[[KVCache, SchedulerConfig], SchedulerPort] = Scheduler
    executor: Callable[[RankExecutor], RankExecutor] = _unchanged
    watch_logits: WatchLogits | None = None
    follower: str = "minisgl_backend.tensor_parallel"
    replica: str = "minisgl_backend.replica"


STANDARD: Final = Parts()
