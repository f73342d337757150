"""The requests between their acceptance and their terminal event, and the events for their sinks.

Knows sinks, the clock and the counters. Must not know planner or executor, only their
``StepResult``s. Used on the loop's thread only, so all sinks are called on that thread.

Invariant: every request that is added gets exactly one terminal event, by ``end``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minisgl_backend.errors import EngineFailure, MiniSGLError, Overloaded
from minisgl_backend.request import (
    Admitted,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    Request,
    RequestId,
    Sink,
    TokenId,
)
from minisgl_backend.runtime.recorder import Recorder
from minisgl_backend.runtime.timeouts import Timeouts
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.token_buffer import TokenBuffer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenRequest:
    """An accepted request, and what the loop records about it.

    Times are readings of ``time.monotonic``.
    """

    request: Request
    sink: Sink
    arrived_s: float
    admitted: bool = False
    num_scored: int = 0
    """Log-probabilities of its prompt that were delivered."""
    tokens: list[TokenId] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    buffer: TokenBuffer | None = None
    """The buffer of its sink, if that has one."""


class OpenRequests:
    """All open requests, in the order in which they came."""

    def __init__(
        self,
        *,
        recorder: Recorder,
        on_admitted: Callable[[Request], None],
        on_ended: Callable[[Request, bool], None],
        max_queue_time_s: float | None,
    ) -> None:
        """``on_ended`` gets each request that has ended, and whether it had been admitted."""
        self._recorder = recorder
        self._on_admitted = on_admitted
        self._on_ended = on_ended
        self._open: dict[RequestId, OpenRequest] = {}
        self._timeouts = Timeouts(max_queue_time_s)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._open

    def __getitem__(self, request_id: RequestId) -> OpenRequest:
        return self._open[request_id]

    def ids(self) -> list[RequestId]:
        """The ids of all open requests."""
        return list(self._open)

    def samples_beside(self, request_id: RequestId) -> list[RequestId]:
        """The ids of the open samples of a request's prompt, its own included."""
        first = _first_sample(self._open[request_id].request)
        return [it for it, entry in self._open.items() if _first_sample(entry.request) == first]

    def num_tokens(self) -> dict[RequestId, int]:
        """Number of tokens that each request has."""
        return {request_id: len(entry.tokens) for request_id, entry in self._open.items()}

    def add(self, entry: OpenRequest) -> None:
        """Add a request that was accepted."""
        self._open[entry.request.id] = entry
        self._timeouts.add(entry.request, entry.arrived_s)

    def admit(self, request_id: RequestId, num_cached_tokens: int) -> None:
        """Deliver ``Admitted`` to a request that gets a row for the first time."""
        entry = self._open[request_id]
        if not entry.admitted:
            entry.admitted = True
            self._timeouts.begun(request_id)
            self._on_admitted(entry.request)
            if entry.request.leader is None:  # its other samples share the prompt
                self._recorder.request_admitted(len(entry.request.prompt))
            self._deliver(entry.sink, Admitted(num_cached_tokens))

    def deliver(self, result: StepResult, now_s: float) -> None:
        """Deliver what a step has made known: log-probabilities of prompts, embeddings, tokens. The
        caller ends the requests that end with it right after."""
        for request_id, scored in result.scored:
            entry = self._open[request_id]
            entry.num_scored += len(scored)
            self._deliver(entry.sink, scored)
        for request_id, vector in result.embedded:
            self._deliver(self._open[request_id].sink, Embedded(vector))
        logprobs, ended = result.logprobs, result.ended
        last = {it: index for index, it in enumerate(result.request_ids) if it in ended}
        for index, (request_id, token_id) in enumerate(
            zip(result.request_ids, result.token_ids.tolist(), strict=True)
        ):
            entry = self._open[request_id]
            if not entry.tokens:
                entry.first_token_s = now_s
                self._recorder.request_started(now_s - entry.arrived_s)
            entry.tokens.append(token_id)
            entry.last_token_s = now_s
            buffer = entry.buffer
            if buffer is None or logprobs or request_id in ended:
                found = logprobs.get(index) if logprobs else None
                is_last = last.get(request_id) == index
                self._deliver(entry.sink, Generated(token_id, found, is_last))
                continue
            buffer.tokens.append(token_id)
            if buffer.is_awaited:
                self._wake(buffer)

    def out_of_time(self, now_s: float) -> Iterator[tuple[RequestId, Event]]:
        """The requests whose time is up, each with its terminal event."""
        for request_id in self._timeouts.overdue(now_s):
            entry = self._open[request_id]
            # a further sample without tokens is an empty answer; whether the request as a whole
            # fails for lack of a token is up to its first sample
            if entry.tokens or entry.request.leader is not None:
                yield request_id, Finished(FinishReason.TIMEOUT)
            else:
                waited_ms = math.ceil((now_s - entry.arrived_s) * 1000)
                text = f"the deadline passed after {waited_ms} ms, before the first token"
                yield request_id, Failed(Overloaded(text))
        for request_id in self._timeouts.stale(now_s):
            text = f"queue full: the request waited for {self._timeouts.max_queue_time_s:g} s"
            yield request_id, Failed(Overloaded(text))

    def end(self, request_id: RequestId, event: Event) -> None:
        """End a request: count it, and deliver ``event``, which is terminal."""
        entry = self._open.pop(request_id)
        self._timeouts.ended(request_id)
        if isinstance(event, Failed):
            self._recorder.request_failed(event.error.code)
            logger.log(
                logging.ERROR if isinstance(event.error, EngineFailure) else logging.INFO,
                "request %.80r (%d) failed after %d tokens: %s",
                entry.request.label,
                request_id,
                len(entry.tokens),
                event.error,
            )
        elif isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
            self._recorder.request_cancelled()
        else:
            self._recorder.request_finished(
                num_tokens=len(entry.tokens),
                e2e_s=time.monotonic() - entry.arrived_s,
                decode_s=entry.last_token_s - entry.first_token_s,
            )
        # before the event, so that its receiver finds the place in the queue free
        self._on_ended(entry.request, entry.admitted)
        self._deliver(entry.sink, event)

    def fail_all(self, error: MiniSGLError) -> None:
        """Fail all open requests."""
        for request_id in list(self._open):
            self.end(request_id, Failed(error))

    def _wake(self, buffer: TokenBuffer) -> None:
        try:
            buffer.wake()
        except Exception:
            logger.exception("a sink failed on a token")

    def _deliver(self, sink: Sink, event: Event) -> None:
        try:
            sink(event)
        except Exception:
            # a sink belongs to one request, so its failure must not reach the others
            logger.exception("a sink failed on %s", type(event).__name__)


def _first_sample(request: Request) -> RequestId:
    return request.id if request.leader is None else request.leader
