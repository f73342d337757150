"""What the loop needs from the two halves it joins: a planner and an executor.

Knows only the vocabulary of ``request`` and ``plan``; implementations are chosen in ``build``.
"""

from __future__ import annotations

from typing import Protocol

from minisgl_backend.plan import Pending, SampledTokens, StepPlan, StepResult
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId
from minisgl_backend.scheduling.stats import SchedulerStats


class Scheduler(Protocol):
    """Decides what each step does. Pure: no clock, thread, tensor or environment."""

    def add(self, request: Request, generated: IntArray = EMPTY) -> None:
        """Queue a request that has the tokens ``generated`` already, int32[num_tokens].

        Raises ``InvalidRequest`` where it could never fit the context or the pool of pages.
        """

    def abort(self, request_id: RequestId) -> bool:
        """End a request without a result; False where it is not (or no longer) live. Idempotent."""

    def plan(self) -> StepPlan | None:
        """The next step, or None where nothing can run; may be called before the last commit."""

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        """Take the tokens of the oldest plan that is not committed yet."""

    def has_work(self) -> bool:
        """Whether a request is live: then, with no plan in flight, plan() is not None."""

    def stats(self) -> SchedulerStats:
        """Counts, in constant time."""

    def renewed(self) -> Scheduler:
        """A planner like this one with nothing in it, for when this one's books are in doubt."""


class Executor(Protocol):
    """Runs plans on a device, in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> Pending:
        """Enqueue the step; must not wait for the device."""

    def close(self) -> None:
        """Free what the device holds."""
