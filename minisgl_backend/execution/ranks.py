"""The tensor-parallel ranks: rank 0 leads, in the engine's process, and the others follow it.

Every rank runs the same plans, with the same executor, on its part of the model. Only rank 0 plans:
the followers get plans through the ``rank_channel``. Tokens are the same on all ranks: each rank
either takes rank 0's, or chooses among the same numbers, which the group has gathered from all
ranks. (It could not choose from its own copy of the logits: no library promises that these are the
same bit by bit.)

A step may break on a rank. Then that rank runs no further steps until rank 0 has asked how many
steps it has run. If all ranks have run the same number, they go on together, and the error goes to
the caller. If not, some ranks hang in a collective operation, as they also do when a rank dies or
is silent for too long. A rank cannot be replaced, so the followers are ended, and from then on the
leader's steps raise ``EngineFailure``.

While there are no steps, the answer to the same question serves as a follower's sign of life.

How ranks start is in ``tensor_parallel``, how their processes end in ``followers``. Must not know
layers or pages, or why a plan is as it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from minisgl_backend.errors import EngineFailure
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.rank_channel import FollowerEnd
from minisgl_backend.parallel.group import Group
from minisgl_backend.plan import Pending, SampledTokens, StepPlan, decode_plan, encode_plan
from minisgl_backend.request import IntArray

logger = logging.getLogger(__name__)

_LEAVE_S: Final = 10.0
"""The time that libraries have to end their communicators."""
_QUIET_SHARE: Final = 0.25
"""Idle followers are asked after this share of the timeout, and have the rest to answer."""


class RankExecutor(Protocol):
    """Runs a rank's part of each step. With several ranks, it refuses steps after one that broke,
    until ``renew``."""

    def launch(self, plan: StepPlan) -> Pending:
        """Enqueue the rank's part of a step."""

    def renew(self) -> None:
        """Run steps again after one that broke."""

    def close(self) -> None:
        """Wait for the steps in the queue, and free what the device holds."""


@dataclass(slots=True, eq=False)
class _LeadingStep:
    """A step launched on all ranks (``Pending``), and the outcome of rank 0's part."""

    leader: LeadingExecutor
    pending: Pending
    outcome: SampledTokens | Exception | None = None

    def masks(self, num_masks: int) -> IntArray:
        return self.pending.masks(num_masks)

    def mask(self, samples: IntArray) -> None:
        self.pending.mask(samples)

    def tokens(self) -> SampledTokens:
        return self.leader.finish(self)


class LeadingExecutor:
    """Rank 0: sends each plan to the followers, then runs its own part (``Executor``)."""

    def __init__(
        self,
        executor: RankExecutor,
        group: Group,
        followers: Followers,
        *,
        timeout_s: float,
        steps_may_hang: bool,
    ):
        """A rank that is silent for ``timeout_s`` is lost.

        The caller must leave ``group`` when a follower is lost (``Followers.on_lost``). With
        ``steps_may_hang``, the group's collectives do not end by themselves if a rank is missing,
        and the timeout limits a whole step.
        """
        self.followers = followers
        self._executor = executor
        self._group = group
        self._channel = followers.channel
        self._timeout_s = timeout_s
        self._steps_may_hang = steps_may_hang
        self._launched: deque[_LeadingStep] = deque()
        self._num_done = 0
        self._turn = threading.Lock()  # held while talking to the followers
        self._waiting_since_s: float | None = None
        self._quiet_since_s = time.monotonic()
        self._asked_s: float | None = None
        self._is_closed = False
        followers.start_steps(timeout_s)
        followers.watch_for(self._complaint)

    def on_lost(self, report: Callable[[EngineFailure], None]) -> None:
        """Call ``report`` on another thread when a follower is lost, or at once if one is lost."""
        self.followers.on_lost(report)

    def launch(self, plan: StepPlan) -> Pending:
        """Enqueue the step on all ranks. Raises ``EngineFailure`` if a rank is lost."""
        with self._turn:
            if self.followers.failure is not None:
                raise self.followers.failure
            try:
                self._channel.send(encode_plan(plan))
                with self._waiting():
                    step = _LeadingStep(self, self._executor.launch(plan))
            except Exception as error:
                self._regroup(error)
                raise
            self._launched.append(step)
        return step

    def finish(self, step: _LeadingStep) -> SampledTokens:
        """The tokens of a launched step. Raises ``EngineFailure`` if a rank is lost."""
        outcome = step.outcome
        if outcome is None:
            outcome = self._outcome_of(step)
            if isinstance(outcome, Exception):
                with self._turn:
                    self._regroup(outcome)
        if self.followers.failure is not None:
            raise self.followers.failure
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """Wait for the steps in flight, end the followers, and leave the group. Idempotent."""
        with self._turn:
            if self._is_closed:
                return
            self._is_closed = True
        with self._waiting():
            self._executor.close()
        self.followers.close()
        self._group.leave(patience_s=_LEAVE_S)
        del self._executor  # followers and errors may keep this object, but not the device's memory

    def _outcome_of(self, step: _LeadingStep) -> SampledTokens | Exception:
        """Wait for rank 0's part of a step, and return its outcome."""
        outcome: SampledTokens | Exception
        with self._waiting():
            try:
                outcome = step.pending.tokens()
                self._num_done += 1
            except Exception as error:
                outcome = error
        step.outcome = outcome
        self._launched.remove(step)
        self._quiet_since_s = time.monotonic()
        return outcome

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Within this context rank 0 may wait for the others, forever if one of them is lost.

        Its own work in here also counts as waiting, such as compiling what the warm-up missed.
        """
        self._waiting_since_s = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since_s = None

    def _regroup(self, cause: Exception) -> None:
        """After a step that broke here, make all ranks go on, or raise ``EngineFailure``."""
        if isinstance(cause, EngineFailure):
            raise self.followers.lose(f"a step failed: {cause}") from cause
        while self._launched:
            self._outcome_of(self._launched[0])
        self._executor.renew()
        try:
            self._channel.ask()
            answers = self._channel.wait_answers()
        except EngineFailure as error:
            raise self.followers.lose(f"a step failed: {error}") from cause
        if any(num_done != self._num_done for num_done in answers):
            raise self.followers.lose(f"a step broke on some ranks only: {cause}") from cause

    # --- on the thread that watches the followers ----------------------------------------------

    def _complaint(self) -> str | None:
        """What is wrong with the ranks, if anything. Called twice a second."""
        since_s = self._waiting_since_s
        if since_s is not None:
            waited_s = time.monotonic() - since_s
            is_overdue = self._steps_may_hang and waited_s > self._timeout_s
            return "a step of the ranks does not end" if is_overdue else None
        if self.followers.failure is not None or not self._turn.acquire(blocking=False):
            return None
        try:
            return None if self._is_closed else self._ask_idle()
        except EngineFailure as error:
            return str(error)
        finally:
            self._turn.release()

    def _ask_idle(self) -> str | None:
        """Ask idle followers for a sign of life. Returns what is wrong if one does not answer in
        time."""
        now_s = time.monotonic()
        if self._launched:
            self._asked_s = None
        elif self._asked_s is None:
            if now_s - self._quiet_since_s > _QUIET_SHARE * self._timeout_s:
                self._channel.ask()
                self._asked_s = now_s
        elif self._channel.have_answered():
            self._asked_s, self._quiet_since_s = None, now_s
        elif now_s - self._asked_s > (1 - _QUIET_SHARE) * self._timeout_s:
            return "an idle rank does not answer"
        return None


class Follower:
    """A rank other than 0: runs the plans that rank 0 sends."""

    def __init__(self, executor: RankExecutor):
        self._executor = executor
        self._running: Pending | None = None
        self._num_done = 0
        self._is_broken = False

    def follow(self, channel: FollowerEnd) -> None:
        """Run plans until rank 0 sends no more. Raises ``EngineFailure`` if the ranks are lost."""
        for words in channel:
            if len(words) == 0:
                self._go_on(None)
                self._executor.renew()
                self._is_broken = False
                channel.answer(self._num_done)
            elif not self._is_broken:
                self._go_on(decode_plan(words))
        self._executor.close()

    def _go_on(self, plan: StepPlan | None) -> None:
        """Launch the next step, if there is one, and wait for the one before it."""
        before, self._running = self._running, None
        if plan is not None:
            with self._breakable():
                self._running = self._executor.launch(plan)
        if before is not None:
            with self._breakable():
                before.tokens()
                self._num_done += 1

    @contextmanager
    def _breakable(self) -> Iterator[None]:
        """Log what breaks inside, and run nothing more until rank 0 asks."""
        try:
            yield
        except EngineFailure:
            raise
        except Exception:
            logger.exception("a step broke")
            self._is_broken = True
