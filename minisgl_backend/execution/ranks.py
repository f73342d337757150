"""The tensor-parallel ranks: rank 0 leads, in the engine's process, and the others follow it.

Every rank runs the same plans with the same executor over its part of the model. Only rank 0 plans
and samples: followers get plans by a ``plan_channel`` and tokens by a broadcast of the group.
(Equal logits on all ranks are what libraries do in practice, not what they promise, and one token
that differs would go unnoticed and spoil its row for good.)

A rank that dies, or that is silent for too long, cannot be replaced: what its peers wait for never
comes. Then the followers are ended, and the leader's steps raise ``EngineFailure`` from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from minisgl_backend.errors import EngineFailure
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.plan_channel import PlanSender
from minisgl_backend.parallel.group import Group
from minisgl_backend.plan import SampledTokens, StepPlan
from minisgl_backend.request import IntArray

_LEAVE_S: Final = 10.0
"""Patience with libraries that end their communicators."""


class Pending(Protocol):
    """A launched step."""

    def tokens(self) -> SampledTokens: ...


class Executor(Protocol):
    """What runs a rank's part of each step."""

    def launch(self, plan: StepPlan) -> Pending: ...

    def close(self) -> None: ...


class LeadingExecutor:
    """Rank 0: gives each plan to the followers, then runs its own part (``Executor``)."""

    def __init__(
        self,
        executor: Executor,
        group: Group,
        followers: Followers,
        *,
        timeout_s: float,
        steps_may_hang: bool,
    ):
        """``timeout_s`` is the patience with a silent rank; it bounds a whole step where that may
        hang, since the group's collectives do not end by themselves."""
        self.followers = followers
        self._executor = executor
        self._group = group
        self._plans = PlanSender(followers.peers, followers.slots, timeout_s=timeout_s)
        self._step_timeout_s = timeout_s if steps_may_hang else float("inf")
        self._waiting_since_s: float | None = None
        self._on_lost: Callable[[EngineFailure], None] = lambda failure: None
        self._is_closed = False
        followers.on_lost = self._lost
        followers.is_overdue = self._is_overdue

    def on_lost(self, report: Callable[[EngineFailure], None]) -> None:
        """Call ``report`` when a follower is lost, on another thread; at once if it already is."""
        self._on_lost = report
        failure = self.followers.failure
        if failure is not None:
            report(failure)

    def launch(self, plan: StepPlan) -> Pending:
        """Enqueue the step on all ranks. Raises ``EngineFailure`` where a rank is lost."""
        if self.followers.failure is not None:
            raise self.followers.failure
        try:
            self._plans.send(plan.encode())
            step = self._executor.launch(plan)
        except Exception as error:  # from here on the ranks are out of step
            raise self.followers.lose(f"a step failed: {error}") from error
        return _LeadingStep(self, step)

    def wait(self, step: Pending) -> SampledTokens:
        """The tokens of a launched step. Raises ``EngineFailure`` where a rank is lost."""
        self._waiting_since_s = time.monotonic()
        try:
            tokens = step.tokens()
        except Exception as error:
            raise self.followers.lose(f"a step failed: {error}") from error
        finally:
            self._waiting_since_s = None
        if self.followers.failure is not None:
            raise self.followers.failure
        return tokens

    def close(self) -> None:
        """Let the steps under way end, then the followers, and leave the group. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._executor.close()
        self.followers.close()
        self._group.leave(patience_s=_LEAVE_S)

    def _lost(self, failure: EngineFailure) -> None:
        self._on_lost(failure)
        self._group.leave()

    def _is_overdue(self) -> bool:
        since_s = self._waiting_since_s
        return since_s is not None and time.monotonic() - since_s > self._step_timeout_s


class _LeadingStep:
    """A step launched on all ranks (``Pending``)."""

    def __init__(self, leader: LeadingExecutor, step: Pending):
        self._leader = leader
        self._step = step

    def tokens(self) -> SampledTokens:
        return self._leader.wait(self._step)


def follow(executor: Executor, plans: Iterable[IntArray]) -> None:
    """Run the plans of rank 0 until they end; raises what a step raises."""
    running: Pending | None = None
    for words in plans:
        launched = executor.launch(StepPlan.decode(words))
        if running is not None:
            running.tokens()
        running = launched
    executor.close()
