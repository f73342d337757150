"""What the loop needs from the two parts that it connects, a planner and an executor.

Knows only the vocabulary of ``request``, ``plan``, ``report`` and ``lookahead``; ``build`` chooses
the implementations.
"""

from __future__ import annotations

from typing import Protocol

from minisgl_backend.plan import Pending, SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.report import SchedulerStats, StepResult


class Scheduler(Protocol):
    """Decides what each step does. Pure: no clock, thread, tensor or environment."""

    def add(self, request: Request, generated: IntArray = EMPTY, num_scored: int = 0) -> None:
        """Queue a request that fits the context and the pool of pages (``runtime.capacity``).

        ``generated``, int32[num_tokens], is the output that it already has, and ``num_scored`` the
        number of log-probabilities of its prompt that were already delivered.
        """

    def abort(self, request_id: RequestId) -> bool:
        """End a request without a result; False if it is not live. Idempotent."""

    def plan(self, lookahead: Lookahead | None = None) -> StepPlan | None:
        """The next step, or None if nothing can run before a step in flight is committed. May be
        called before the last commit; then a plan may assume that guesses are right
        (``StepPlan.assumes_right``). Requests with a grammar get no guesses without
        ``lookahead``."""

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        """Take the tokens of ``plan``, which is the oldest one that is not committed yet."""

    def has_work(self) -> bool:
        """Whether a request is live. If so, and no plan is in flight, plan() is not None."""

    def stats(self) -> SchedulerStats:
        """Counts at this moment, in constant time."""

    def renewed(self) -> Scheduler:
        """An empty planner like this one, to replace it when its bookkeeping is in doubt."""


class Executor(Protocol):
    """Runs plans on a device, in the order in which they are launched.

    ``launch``, and ``tokens`` of what it returns, raise ``EngineFailure`` if the executor is lost:
    then no further step can run.
    """

    def launch(self, plan: StepPlan) -> Pending:
        """Enqueue the step, without waiting for the device."""

    def close(self) -> None:
        """Free what the device holds."""
