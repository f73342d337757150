"""Wrappers of an engine's parts, which pass on everything but what a subclass overrides.

They go into an engine through ``parts.Parts``. Know the protocols of planner, cache and executor.
Must not know what subclasses mark, record or break.

An engine may ask a planner or a cache for an empty one like itself. A wrapper then stays the same
object, and wraps the empty one from then on: the state of a subclass outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.kv import KVCache, Lease, Verified
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.plan import Groups, Pending, SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId
from minisgl_backend.runtime.ports import Scheduler
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.report import SchedulerStats, StepResult

if TYPE_CHECKING:
    from minisgl_backend.execution.ranks import RankExecutor


class SchedulerWrapper:
    """A planner (``runtime.ports.Scheduler``)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.wrapped = scheduler

    def add(self, request: Request, generated: IntArray = EMPTY, num_scored: int = 0) -> None:
        self.wrapped.add(request, generated, num_scored)

    def abort(self, request_id: RequestId) -> bool:
        return self.wrapped.abort(request_id)

    def plan(self, lookahead: Lookahead | None = None) -> StepPlan | None:
        return self.wrapped.plan(lookahead)

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        return self.wrapped.commit(plan, tokens)

    def has_work(self) -> bool:
        return self.wrapped.has_work()

    def stats(self) -> SchedulerStats:
        return self.wrapped.stats()

    def renewed(self) -> Scheduler:
        self.wrapped = self.wrapped.renewed()
        return self


class CacheWrapper:
    """The planner's view of the pages (``cache.kv.KVCache``)."""

    def __init__(self, cache: KVCache) -> None:
        self.wrapped = cache
        self.page_size = cache.page_size
        self.num_pages = cache.num_pages

    @property
    def num_free(self) -> int:
        return self.wrapped.num_free

    @property
    def num_cached(self) -> int:
        return self.wrapped.num_cached

    @property
    def num_evictable(self) -> int:
        return self.wrapped.num_evictable

    def match_length(self, tokens: IntArray, salt: str) -> int:
        return self.wrapped.match_length(tokens, salt)

    def acquire(self, tokens: IntArray, salt: str, *, resumed_at: int = 0) -> Lease:
        return self.wrapped.acquire(tokens, salt, resumed_at=resumed_at)

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        return self.wrapped.grow(lease, num_tokens)

    def grow_each(self, leases: Sequence[Lease]) -> IntArray | None:
        return self.wrapped.grow_each(leases)

    def publish(self, lease: Lease, tokens: IntArray, *, verified: Verified) -> range:
        return self.wrapped.publish(lease, tokens, verified=verified)

    def promise(self, lease: Lease, tokens: IntArray) -> None:
        self.wrapped.promise(lease, tokens)

    def promised_length(self, tokens: IntArray, salt: str) -> int:
        return self.wrapped.promised_length(tokens, salt)

    def finite_pages(self, lease: Lease) -> IntArray:
        return self.wrapped.finite_pages(lease)

    def groups(self, leases: Sequence[Lease], cost_tokens: int) -> Groups:
        return self.wrapped.groups(leases, cost_tokens)

    @property
    def windows(self) -> WindowPages | None:
        return self.wrapped.windows

    @property
    def host(self) -> HostCache | None:
        return self.wrapped.host

    @property
    def num_taken_snapshots(self) -> int:
        return self.wrapped.num_taken_snapshots

    def cached_length(self, tokens: IntArray, salt: str) -> int:
        return self.wrapped.cached_length(tokens, salt)

    def take_snapshot(self, *, rolls: bool = False, spared: Set[int] = frozenset()) -> int | None:
        return self.wrapped.take_snapshot(rolls=rolls, spared=spared)

    def attach_snapshot(self, lease: Lease, num_tokens: int, snapshot: int) -> None:
        self.wrapped.attach_snapshot(lease, num_tokens, snapshot)

    def return_snapshot(self, snapshot: int) -> None:
        self.wrapped.return_snapshot(snapshot)

    def snapshots_along(self, lease: Lease) -> Sequence[tuple[int, int]]:
        return self.wrapped.snapshots_along(lease)

    def release(self, lease: Lease) -> None:
        self.wrapped.release(lease)

    def discard(self, lease: Lease) -> None:
        self.wrapped.discard(lease)

    def take_broken(self) -> IntArray:
        return self.wrapped.take_broken()

    def emptied(self) -> KVCache:
        self.wrapped = self.wrapped.emptied()
        return self

    def check(self) -> None:
        self.wrapped.check()


class ExecutorWrapper:
    """The executor of a rank (``execution.ranks.RankExecutor``)."""

    def __init__(self, executor: RankExecutor) -> None:
        self.wrapped = executor

    def launch(self, plan: StepPlan) -> Pending:
        return self.wrapped.launch(plan)

    def renew(self) -> None:
        self.wrapped.renew()

    def close(self) -> None:
        self.wrapped.close()


class PendingWrapper:
    """A launched step (``plan.Pending``)."""

    def __init__(self, step: Pending) -> None:
        self.wrapped = step

    def masks(self, num_masks: int) -> IntArray:
        return self.wrapped.masks(num_masks)

    def mask(self, samples: IntArray) -> None:
        self.wrapped.mask(samples)

    def tokens(self) -> SampledTokens:
        return self.wrapped.tokens()
