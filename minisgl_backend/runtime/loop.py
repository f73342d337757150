"""The engine's only thread of work: drain the inbox, plan, launch, commit, deliver.

Knows the order in which planner and executor take turns, and which requests are open. Must not know
how either does its work, nor who submits.

With overlap the next step is planned and launched before the tokens of the running one are read,
so that the device never waits for Python; without it each step is committed before the next is
planned.

Invariants: every request taken from the inbox gets exactly one terminal event. Sinks are called on
this thread alone. An exception of planner or executor ends the loop, after every open request has
got its error.
"""

from __future__ import annotations

import heapq
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from minisgl_backend.errors import EngineFailure, InvariantError, MiniSGLError, Overloaded
from minisgl_backend.plan import StepPlan, StepResult
from minisgl_backend.request import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    Request,
    RequestId,
    Sink,
)
from minisgl_backend.runtime.ports import Executor, Pending, Scheduler
from minisgl_backend.runtime.stats import Phase, Recorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Add:
    """A request that was accepted at the door."""

    request: Request
    sink: Sink
    arrived_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request for ``reason``; ignored where it is not open any more."""

    request_id: RequestId
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; requests still open fail with ``error``."""

    error: MiniSGLError


@dataclass(frozen=True, slots=True)
class Fail:
    """The executor is lost: raise ``error`` in the loop, which ends it."""

    error: MiniSGLError


Message: TypeAlias = Add | Abort | Stop | Fail


@dataclass(slots=True)
class _Open:
    """A request between its acceptance and its terminal event. Times are of ``time.monotonic``."""

    request: Request
    sink: Sink
    arrived_s: float
    admitted: bool = False
    num_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step."""

    plan: StepPlan
    pending: Pending
    launched_s: float


@dataclass(slots=True)
class Pulse:
    """Shows from outside whether the loop is alive.

    ``forward_since_s`` is set while the loop waits for the device: a long forward is no hang.
    """

    tick_s: float = field(default_factory=time.monotonic)
    idle: bool = True
    forward_since_s: float | None = None


class Loop:
    """Runs planner and executor over the messages of an inbox until it is told to stop."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        overlap: bool,
        recorder: Recorder,
        on_admitted: Callable[[Request], None],
        on_ended: Callable[[Request, bool], None],
    ) -> None:
        """``on_ended`` is told of each ended request whether it had been admitted."""
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.pulse = Pulse()
        self.scheduler_stats = scheduler.stats()
        self._scheduler = scheduler
        self._executor = executor
        self._overlap = overlap
        self._recorder = recorder
        self._on_admitted = on_admitted
        self._on_ended = on_ended
        self._open: dict[RequestId, _Open] = {}
        self._deadlines: list[tuple[float, RequestId]] = []
        self._stop: Stop | None = None

    def run(self) -> None:
        """Serve until a ``Stop`` message, then fail what is open. Raises what broke the loop."""
        error: MiniSGLError = EngineFailure("the engine stopped after an internal error")
        try:
            self._serve()
            if self._stop is not None:
                error = self._stop.error
        finally:
            for request_id in list(self._open):
                self._end(request_id, Failed(error))

    def refuse_rest(self, error: MiniSGLError) -> None:
        """Fail the requests that reached the inbox after the loop had ended."""
        while True:
            try:
                message = self.inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Add):
                request = message.request
                self._open[request.id] = _Open(request, message.sink, message.arrived_s)
                self._end(request.id, Failed(error))

    def _serve(self) -> None:
        flight: _Flight | None = None
        while self._drain_inbox(block=flight is None and not self._scheduler.has_work()):
            self._end_overdue()
            plan = self._scheduler.plan()
            launched = self._launch(plan) if plan is not None else None
            if launched is None and flight is None and self._scheduler.has_work():
                raise InvariantError("the scheduler has work but no plan, and no step is running")
            if not self._overlap:
                flight, launched = launched, None
            if flight is not None:
                self._commit(flight)
            self.scheduler_stats = self._scheduler.stats()
            flight = launched

    # --- inbox -------------------------------------------------------------------------------

    def _drain_inbox(self, *, block: bool) -> bool:
        """Take all messages, waiting for the first where ``block``; False where it is over."""
        self.pulse.tick_s = time.monotonic()
        self.pulse.idle = block
        try:
            while self._stop is None:
                self._take(self.inbox.get(block=block))
                block = False
        except queue.Empty:
            pass
        self.pulse.tick_s = time.monotonic()
        self.pulse.idle = False
        return self._stop is None

    def _take(self, message: Message) -> None:
        if isinstance(message, Stop):
            self._stop = message
        elif isinstance(message, Fail):
            raise message.error
        elif isinstance(message, Abort):
            if message.request_id in self._open:
                self._abort(message.request_id, Finished(message.reason))
        else:
            self._add(message)

    def _add(self, message: Add) -> None:
        request = message.request
        self._open[request.id] = _Open(request, message.sink, message.arrived_s)
        try:
            self._scheduler.add(request)
        except MiniSGLError as error:
            self._end(request.id, Failed(error))
            return
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.id))

    def _abort(self, request_id: RequestId, event: Event) -> None:
        self._scheduler.abort(request_id)
        self._end(request_id, event)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            entry = self._open.get(request_id)
            if entry is None:
                continue
            if entry.num_tokens:
                self._abort(request_id, Finished(FinishReason.TIMEOUT))
            else:
                waited_ms = round((now - entry.arrived_s) * 1000)
                text = f"the deadline passed after {waited_ms} ms, before the first token"
                self._abort(request_id, Failed(Overloaded(text)))

    # --- steps -------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> _Flight:
        launched_s = time.monotonic()
        for admission in plan.admissions:
            entry = self._open[admission.request_id]
            if not entry.admitted:  # a retracted request is admitted again, silently
                entry.admitted = True
                self._on_admitted(entry.request)
                self._recorder.request_admitted(len(entry.request.prompt))
                self._deliver(entry.sink, Admitted(admission.num_cached_tokens))
        return _Flight(plan, self._executor.launch(plan), launched_s)

    def _commit(self, flight: _Flight) -> None:
        plan = flight.plan
        self.pulse.forward_since_s = time.monotonic()
        tokens = flight.pending.tokens()
        self.pulse.forward_since_s = None
        result = self._scheduler.commit(plan, tokens)
        now = time.monotonic()
        self._recorder.step_committed(
            _phase(plan),
            batch_size=len(plan.prefill_rows) + len(plan.decode_rows),
            num_tokens=len(tokens.token_ids),
            duration_s=now - flight.launched_s,
        )
        self._deliver_tokens(result, now)
        for completion in result.completions:
            if completion.reason is None:
                text = "the model's logits were not finite"
                self._end(completion.request_id, Failed(EngineFailure(text)))
            else:
                event = Finished(completion.reason, completion.stop_token_id)
                self._end(completion.request_id, event)

    # --- events ------------------------------------------------------------------------------

    def _deliver_tokens(self, result: StepResult, now: float) -> None:
        logprobs = result.logprobs
        for index, (request_id, token_id) in enumerate(
            zip(result.request_ids, result.token_ids.tolist(), strict=True)
        ):
            entry = self._open[request_id]
            if not entry.num_tokens:
                entry.first_token_s = now
                self._recorder.request_started(now - entry.arrived_s)
            entry.num_tokens += 1
            entry.last_token_s = now
            self._deliver(
                entry.sink, Generated(token_id, logprobs.get(index) if logprobs else None)
            )

    def _end(self, request_id: RequestId, event: Event) -> None:
        entry = self._open.pop(request_id)
        if isinstance(event, Failed):
            self._recorder.request_failed(event.error.code)
            logger.log(
                logging.ERROR if isinstance(event.error, EngineFailure) else logging.INFO,
                "request %d failed after %d tokens: %s",
                request_id,
                entry.num_tokens,
                event.error,
            )
        elif isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
            self._recorder.request_cancelled()
        else:
            self._recorder.request_finished(
                num_tokens=entry.num_tokens,
                e2e_s=time.monotonic() - entry.arrived_s,
                decode_s=entry.last_token_s - entry.first_token_s,
            )
        self._deliver(entry.sink, event)
        self._on_ended(entry.request, entry.admitted)

    def _deliver(self, sink: Sink, event: Event) -> None:
        try:
            sink(event)
        except Exception:
            # a sink belongs to one request, so its failure must not reach the others
            logger.exception("a sink failed on %s", type(event).__name__)


def _phase(plan: StepPlan) -> Phase:
    if not len(plan.prefill_rows):
        return "decode"
    return "mixed" if len(plan.decode_rows) else "prefill"
