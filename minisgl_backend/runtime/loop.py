"""The loop of the engine's only working thread: drain the inbox, plan, launch, commit, deliver.

Knows in which order planner and executor take turns, and which requests are open. Must not know how
either does its work, nor where requests come from.

With overlap, the next step is planned and launched before the tokens of the running step are read,
so that the device never waits for Python. Without it, each step is committed before the next one is
planned. A step in which a row has a grammar is launched just as early, but it samples only once the
tokens before it are known, with masks of the allowed tokens:

    device         | sample k-1 | forward k ..................... | sample k | forward k+1 ...
    loop               launch k | follow k-1 | commit k-1, plan k+1 | mask k | launch k+1
    other threads                            | write masks of k     |

After a step that checks guesses of the MTP layer, the next one is also planned early, as if all of
these were right. But it is launched only once they are known, since they say where rows go on:

    device         | check k ................. | guess | check k+1 ............
    loop               plan k+1 ..... read k, launch k+1 | commit k, plan k+2

When a step raises an exception (it *breaks*), only the request at fault may fail. So the loop takes
a fresh planner, and lets the open requests come back one at a time, with the tokens that they have
(``returning``). If a step breaks again, the request that came back last fails, and with it the
other samples of its prompt. The executor is not reset: an admission tells it everything about a
row. But if the executor raises ``EngineFailure``, it is lost and the loop ends; it also ends if
steps keep breaking regardless.

Invariants: every request taken from the inbox gets exactly one terminal event. Sinks are called on
this thread only. If an exception ends the loop, every open request has failed before it is raised.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from minisgl_backend.errors import EngineFailure, EngineLost, InvariantError, MiniSGLError
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.plan import Pending, SampledTokens, StepPlan
from minisgl_backend.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestId,
    TerminalEvent,
)
from minisgl_backend.runtime.adapters import Adapters, Fetched
from minisgl_backend.runtime.constraints import Compiled, Constraints, StepMasks
from minisgl_backend.runtime.open_requests import OpenRequest, OpenRequests
from minisgl_backend.runtime.ports import Executor, Scheduler
from minisgl_backend.runtime.recorder import Recorder, StepKind
from minisgl_backend.runtime.returning import Returning
from minisgl_backend.scheduling.checks import moved_back
from minisgl_backend.scheduling.report import StepResult

logger = logging.getLogger(__name__)

_CUT: Final = Finished(FinishReason.LENGTH)
_PATIENCE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request with ``event``; ignored if the request is no longer open."""

    request_id: RequestId
    event: TerminalEvent


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; requests that are still open fail with ``error``."""

    error: MiniSGLError


@dataclass(frozen=True, slots=True)
class Fail:
    """End the loop by raising ``error`` in it: the executor is lost."""

    error: EngineFailure


Message: TypeAlias = OpenRequest | Fetched | Compiled | Abort | Stop | Fail
"""What other threads put into the inbox: requests, and orders."""


@dataclass(slots=True)
class _Flight:
    """A launched step that is not committed yet. If it ``needs_masks``, ``masks`` are those being
    written for it, and ``is_masked`` says that they are written and on the device. ``tokens`` are
    what it has sampled, once they are read."""

    plan: StepPlan
    pending: Pending
    launched_s: float
    needs_masks: bool
    masks: StepMasks | None = None
    is_masked: bool = False
    tokens: SampledTokens | None = None


@dataclass(slots=True)
class Pulse:
    """Shows other threads whether the loop is alive.

    ``tick_s`` is the time of its last sign of life. While it ``is_waiting``, for a message or for
    the device, silence means nothing: a long step is not a hang, nor is a launch that compiles
    kernels.
    """

    tick_s: float = field(default_factory=time.monotonic)
    is_waiting: bool = True


class Loop:
    """Runs planner and executor for the requests of an inbox, until it is told to stop."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        overlap: bool,
        recorder: Recorder,
        on_admitted: Callable[[Request], None],
        on_ended: Callable[[Request, bool], None],
        max_queue_time_s: float | None,
        grammars: Grammars | None,
        adapters: Adapters | None,
    ) -> None:
        """``on_ended`` gets each request that has ended, and whether it had been admitted."""
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.pulse = Pulse()
        self.scheduler_stats = scheduler.stats()
        self._scheduler = scheduler
        self._executor = executor
        self._overlap = overlap
        self._recorder = recorder
        self._open = OpenRequests(
            recorder=recorder,
            on_admitted=on_admitted,
            on_ended=on_ended,
            max_queue_time_s=max_queue_time_s,
        )
        self._constraints = Constraints(grammars)
        self._adapters = adapters
        self._fetching: set[RequestId] = set()
        self._stop: Stop | None = None
        self._flights: deque[_Flight] = deque()
        self._returning = Returning()
        self._has_leaked = False

    def run(self) -> None:
        """Serve until a ``Stop`` message, then fail open requests. Raises what broke the loop."""
        error: MiniSGLError = EngineLost("the engine stopped after an internal error")
        try:
            while self._stop is None:
                try:
                    self._serve()
                except EngineFailure:
                    raise
                except Exception:
                    logger.exception("a step broke; starting again with an empty planner")
                    self._start_again()
            error = self._stop.error
        finally:
            self._open.fail_all(error)

    def close(self) -> None:
        """Close the executor and free all that it holds on the device. Call after ``run``."""
        self._constraints.close()
        if self._adapters is not None:
            self._adapters.close()
        self._executor.close()
        self._flights.clear()
        del self._executor

    def refuse_rest(self, error: MiniSGLError) -> None:
        """Fail the requests that came into the inbox after the loop had ended."""
        while True:
            try:
                message = self.inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, OpenRequest):
                self._open.add(message)
                self._open.end(message.request.id, Failed(error))

    def _serve(self) -> None:
        while self._drain_inbox(block=not self._flights and not self._has_work()):
            self._end_overdue()
            self._readmit()
            plan = self._scheduler.plan(self._constraints)
            self._mask_oldest()
            if plan is not None:
                self._launch(plan)
            elif not self._flights and self._scheduler.has_work():
                raise InvariantError("the scheduler has work but no plan, and no step is running")
            num_ahead = 1 if self._overlap and plan is not None else 0
            while len(self._flights) > num_ahead:
                self._commit()
            self.scheduler_stats = self._scheduler.stats()
            if not self._flights and not self._has_work():
                self._check_idle()

    def _check_idle(self) -> None:
        """Log once if rows or pages are held although no request is open; serving goes on."""
        stats = self.scheduler_stats
        if (stats.num_running or stats.used_pages) and not self._has_leaked:
            self._has_leaked = True
            logger.error(
                "no request is open, but %d rows and %d pages are in use: they have leaked",
                stats.num_running,
                stats.used_pages,
            )

    def _has_work(self) -> bool:
        return self._scheduler.has_work() or self._returning.is_waiting

    # --- inbox -------------------------------------------------------------------------------

    def _drain_inbox(self, *, block: bool) -> bool:
        """Take all messages; False if one is a ``Stop``. With ``block``, wait for the first; but
        not for long while requests wait for an adapter or a grammar, as their time may run out."""
        may_time_out = self._constraints.are_compiling or self._fetching
        patience_s = _PATIENCE_S if may_time_out else None
        self.pulse.tick_s = time.monotonic()
        self.pulse.is_waiting = block
        try:
            while self._stop is None:
                self._take(self.inbox.get(block=block, timeout=patience_s))
                block = False
        except queue.Empty:
            pass
        self.pulse.tick_s = time.monotonic()
        self.pulse.is_waiting = False
        return self._stop is None

    def _take(self, message: Message) -> None:
        if isinstance(message, Stop):
            self._stop = message
        elif isinstance(message, Fail):
            raise message.error
        elif isinstance(message, Abort):
            if message.request_id in self._open:
                self._abort(message.request_id, message.event)
        elif isinstance(message, Fetched):
            self._take_fetched(message)
        elif isinstance(message, Compiled):
            self._take_compiled(message)
        else:
            self._add(message)

    def _add(self, entry: OpenRequest) -> None:
        self._open.add(entry)
        request, adapters = entry.request, self._adapters
        if (
            adapters is None
            or request.adapter is None
            or adapters.hold(request.id, request.adapter, self.inbox.put)
        ):
            self._prepare(request)
        else:
            self._fetching.add(request.id)

    def _take_fetched(self, message: Fetched) -> None:
        request_id = message.request_id
        if request_id not in self._open:
            return
        self._fetching.discard(request_id)
        if message.error is None:
            self._prepare(self._open[request_id].request)
        else:
            self._end(request_id, Failed(message.error))

    def _prepare(self, request: Request) -> None:
        """Go on with a request whose adapter, if any, is in memory."""
        if request.sampling.grammar is None:
            self._enter(request.id)
        else:
            self._constraints.compile(request, self.inbox.put)

    def _take_compiled(self, message: Compiled) -> None:
        if message.request_id not in self._open:
            return
        error = self._constraints.compiled(message)
        if error is None:
            self._enter(message.request_id)
        else:
            self._end(message.request_id, Failed(error))

    def _enter(self, request_id: RequestId) -> None:
        """Let a request begin: it has everything that it needs."""
        if self._returning.is_over:
            self._schedule(request_id)
        else:
            self._returning.append(request_id)

    def _schedule(self, request_id: RequestId) -> None:
        entry = self._open[request_id]
        tokens = np.array(entry.tokens, dtype=np.int32)
        self._scheduler.add(entry.request, tokens, entry.num_scored)

    def _abort(self, request_id: RequestId, event: Event) -> None:
        self._scheduler.abort(request_id)
        self._end(request_id, event)

    def _end(self, request_id: RequestId, event: Event) -> None:
        self._constraints.forget(request_id)
        self._fetching.discard(request_id)
        self._returning.ended(request_id)
        request = self._open[request_id].request
        if self._adapters is not None and request.adapter is not None:
            self._adapters.let_go(request_id, request.adapter)
        self.scheduler_stats = self._scheduler.stats()  # its caller may look as soon as it knows
        self._open.end(request_id, event)

    def _end_overdue(self) -> None:
        for request_id, event in self._open.out_of_time(time.monotonic()):
            self._abort(request_id, event)

    # --- steps -------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> None:
        if plan.assumes_right:
            before = self._flights[-1]
            plan = moved_back(plan, before.plan, self._tokens(before))
        launched_s = time.monotonic()
        for admission in plan.admissions:
            self._open.admit(admission.request_id, admission.num_cached_tokens)
        self._constraints.admit(plan)
        with self._on_device():
            pending = self._executor.launch(plan)
        needs_masks = len(plan.masked_rows) > 0
        self._flights.append(_Flight(plan, pending, launched_s, needs_masks))
        self._begin_masks()

    def _begin_masks(self) -> None:
        """Begin to write the masks of the oldest step in flight, if it needs any: only for this
        step are all earlier tokens known."""
        flight = self._flights[0] if self._flights else None
        if flight is not None and flight.needs_masks and flight.masks is None:
            flight.masks = self._constraints.masks(flight.plan, flight.pending)

    def _mask_oldest(self) -> None:
        """Wait until the masks of the oldest step in flight are written, and let it sample. Ends
        requests whose grammars have reached their limits."""
        flight = self._flights[0] if self._flights else None
        if flight is None or flight.masks is None or flight.is_masked:
            return
        failed = flight.masks.written()
        flight.is_masked = True
        with self._on_device():
            flight.pending.mask(flight.masks.samples)
        for request_id, event in failed.items():
            if request_id in self._open:
                self._abort(request_id, event)

    def _commit(self) -> None:
        self._mask_oldest()
        flight = self._flights[0]
        plan = flight.plan
        tokens = self._tokens(flight)
        self._flights.popleft()
        ended = self._follow_grammars(flight, tokens)
        result = self._scheduler.commit(plan, tokens)
        self._end_by_grammars(ended, result)
        if result.request_ids or result.scored or result.ended:  # as embeddings do without a token
            self._returning.progressed()
        now = time.monotonic()
        self._recorder.step_committed(
            _kind(plan),
            batch_size=len(plan.checks.rows) + len(plan.chunks.rows) + len(plan.decodes.rows),
            num_tokens=len(result.token_ids),
            duration_s=now - flight.launched_s,
        )
        self._open.deliver(result, now)
        for request_id, event in result.ended.items():
            self._end(request_id, event)

    def _tokens(self, flight: _Flight) -> SampledTokens:
        """What a step has sampled, once the device has run it."""
        if flight.tokens is None:
            with self._on_device():
                flight.tokens = flight.pending.tokens()
        return flight.tokens

    def _follow_grammars(
        self, flight: _Flight, tokens: SampledTokens
    ) -> dict[RequestId, TerminalEvent]:
        """Let matchers take the tokens of a step; returns the requests that their grammars end.

        Then begins the masks of the next step, before any other work: the device waits for them.
        """
        ended = {}
        if flight.masks is not None:
            ended = self._constraints.follow(flight.masks, tokens.token_ids)
        self._begin_masks()
        return ended

    def _end_by_grammars(self, ended: dict[RequestId, TerminalEvent], result: StepResult) -> None:
        """Add the requests that their grammars end to ``result``, unless they have ended already.
        An end by the grammar replaces an end by length."""
        for request_id, event in ended.items():
            if request_id in result.request_ids and result.ended.get(request_id, _CUT) == _CUT:
                self._scheduler.abort(request_id)
                result.ended[request_id] = event

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        self.pulse.is_waiting = True
        try:
            yield
        finally:
            self.pulse.tick_s = time.monotonic()
            self.pulse.is_waiting = False

    # --- after a step that broke -------------------------------------------------------------

    def _start_again(self) -> None:
        """Take a fresh planner. Raises ``EngineFailure`` if several in a row have not helped."""
        while self._flights:  # these may still write to pages that the fresh planner will grant
            flight = self._flights.popleft()
            with suppress(Exception), self._on_device():
                if flight.masks is not None and not flight.is_masked:
                    flight.masks.written()
                flight.pending.tokens()
        self._scheduler = self._scheduler.renewed()
        self.scheduler_stats = self._scheduler.stats()  # there may be no further step for long
        self._has_leaked = False
        culprit = self._returning.begin()
        if culprit is not None and culprit in self._open:
            # one that fails is the end of their common answer; each would break a step, in vain
            for request_id in self._open.samples_beside(culprit):
                failure = EngineFailure("the request broke a step of the engine")
                self._end(request_id, Failed(failure))
        self._returning.come_back(
            request_id
            for request_id in self._open.ids()
            if not self._constraints.is_compiling(request_id) and request_id not in self._fetching
        )

    def _readmit(self) -> None:
        """Let the next request come back, once the one before it has a new token."""
        while not self._returning.is_over:
            request_id = self._returning.next(self._open.num_tokens())
            if request_id is None:
                return
            self._constraints.come_back(request_id, self._open[request_id].tokens)
            self._schedule(request_id)


def _kind(plan: StepPlan) -> StepKind:
    if not len(plan.chunks.rows):
        return "decode"
    return "mixed" if len(plan.decodes.rows) or len(plan.checks.rows) else "prefill"
