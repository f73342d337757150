"""The responses of one request: events of the engine come in, packets go out when they may.

Knows events, the window and the responder of one request, all of whose samples it serves. Must not
know the engine, other requests, or what a response looks like: ``encode`` turns a packet into one.

The engine's thread puts events in and never waits: it takes a lock under which nothing blocks. A
sender thread takes out the next packet, and only one at a time works for a stream (``_claim``), so
its packets stay in order.

Invariants: the responder gets its final flag as soon as all samples have ended, one has failed, or
the stream is muted: by a verdict, or because it is no longer acknowledged. A muted stream sends
nothing else. The token with which a sample ends is in the packet that says so: no client gets an
end without one, unless the sample ended without one (by its deadline, or cancelled). A sample that
a stop string has ended sends nothing more, whatever comes from the engine.
Log-probabilities of the prompt come before all tokens and before the end, at most
``_MOST_LOGPROBS`` per packet, so that no packet takes its reader long; each packet is sent once the
one before it is acknowledged. A client that is answered only once gets all in its single packet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Final

from minisgl_backend.errors import MiniSGLError
from minisgl_backend.request import (
    Admitted,
    Embedded,
    Event,
    Failed,
    Finished,
    FloatArray,
    Generated,
    PromptLogprobs,
    RequestId,
    TokenLogprobs,
)
from minisgl_backend.token_buffer import TokenBuffer
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.window import Window
from minisgl_backend.wire.acks import Ack, Verdict
from minisgl_backend.wire.packets import Packet, SampleDelta, StreamStart, Times

_MOST_LOGPROBS: Final = 4096
"""The most log-probabilities of a prompt in one packet, alternatives included."""


class Duty(Enum):
    """What the clock asks of a stream."""

    NOTHING = auto()
    SEND = auto()
    GIVE_UP = auto()


class _Sample:
    """What is not sent yet of one sample. ``last`` is its last token until its end is known."""

    __slots__ = ("buffer", "finish", "has_ended", "last", "logprobs")

    def __init__(self, buffer: TokenBuffer) -> None:
        self.buffer = buffer
        self.logprobs: list[TokenLogprobs] = []
        self.last: Generated | None = None
        self.finish: Finished | None = None
        self.has_ended = False

    def append(self, event: Generated) -> None:
        self.buffer.tokens.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)

    def end(self, event: Finished) -> None:
        """The engine has ended it."""
        if self.last is not None:
            self.append(self.last)
        self.finish, self.has_ended = event, True

    def stop(self) -> None:
        """A stop string has ended it, and the client knows."""
        self.logprobs, self.last = [], None
        self.finish, self.has_ended = None, True

    @property
    def has_delta(self) -> bool:
        """Whether there is something to send; after a stop string there is not."""
        return self.finish is not None or (not self.has_ended and bool(self.buffer.tokens))

    def take(self, sample: int) -> SampleDelta | None:
        """What is new, if anything; it counts as sent."""
        if not self.has_delta:
            return None
        finish, logprobs = self.finish, self.logprobs
        self.finish, self.logprobs = None, []
        return SampleDelta(self.buffer.take(), logprobs, finish, sample)


class _WaitingLogprobs:
    """Log-probabilities of the prompt that are not sent yet, in parts of at most
    ``_MOST_LOGPROBS``."""

    def __init__(self) -> None:
        self._parts: deque[PromptLogprobs] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, scored: PromptLogprobs) -> None:
        most = max(1, _MOST_LOGPROBS // (1 + scored.alternatives.shape[1]))
        self._parts.extend(
            scored.part(begin, begin + most) for begin in range(0, len(scored), most)
        )

    def take(self) -> PromptLogprobs | None:
        """The next part, if there is one."""
        return self._parts.popleft() if self._parts else None

    def take_all(self) -> PromptLogprobs | None:
        """All parts as one."""
        parts = list(self._parts)
        self._parts.clear()
        return PromptLogprobs.joined(parts) if parts else None

    def clear(self) -> None:
        self._parts.clear()


def _with_token(times: Times, now_ns: int) -> Times:
    first_ns = times.first_token_time_ns or now_ns
    return replace(times, first_token_time_ns=first_ns, last_token_time_ns=now_ns)


class ResponseStream:
    """Gathers the tokens of one request's samples, and gives them out as packets."""

    def __init__(
        self,
        *,
        key: int,
        sample_ids: Sequence[RequestId],
        responder: Responder,
        start: StreamStart,
        reply_to: str,
        encode: Callable[[Packet], Any],
        window: Window,
        arrival_time_ns: int,
    ) -> None:
        """``sample_ids`` are the engine's ids of the samples. A detokenizer acknowledges packets at
        ``reply_to``. If that is empty, each counts as acknowledged once Triton took it."""
        self.key = key
        self.sample_ids = sample_ids
        self.responder = responder
        self.encode = encode
        self.is_acknowledged = bool(reply_to)
        self.has_interval = window.has_interval
        """Whether tokens may wait for nothing but time."""
        self._reply_to = reply_to
        self._start = start
        self._lock = threading.Lock()
        self._window = window
        self._samples = [_Sample(TokenBuffer(self._wake)) for _ in sample_ids]
        self._on_ready: Callable[[], None] = lambda: None
        self._num_running = len(sample_ids)
        self._prompt_logprobs = _WaitingLogprobs()
        self._is_whole = not self.is_acknowledged and not start.stream
        """Whether everything goes out in a single packet."""
        self._num_cached_tokens: int | None = None
        self._times = Times(arrival_time_ns) if start.wanted.perf_metrics else None
        self._embedding: FloatArray | None = None
        self._failure: MiniSGLError | None = None
        """With which the engine failed a sample; the last packet says so."""
        self._num_sent = 0
        self._has_sent_tokens = False
        self._claimed = False
        """Whether a sender works for the stream, or the stream is on its way to one."""
        self._muted = False
        self._error: MiniSGLError | None = None
        """With which the stream was muted, unless it was by a verdict."""

    @property
    def is_urgent(self) -> bool:
        """Whether what goes out next should not wait for the packets of other streams.

        That is its first tokens, its end, a probe, and all of a stream that is not acknowledged.
        Log-probabilities of the prompt are never urgent.
        """
        if self._prompt_logprobs and not self._muted:
            return False
        return (
            not self._has_sent_tokens
            or self._muted
            or self._is_complete
            or not self._has_deltas
            or not self.is_acknowledged
        )

    @property
    def _has_deltas(self) -> bool:
        return any(sample.has_delta for sample in self._samples)

    def buffers(self, on_ready: Callable[[], None]) -> Sequence[TokenBuffer] | None:
        """Where the common tokens of each sample go; ``on_ready`` is called if the stream must be
        handed to a sender. None if each token must come as an event, so that its time is known."""
        if self._times is not None:
            return None
        self._on_ready = on_ready
        return [sample.buffer for sample in self._samples]

    # --- the engine's thread -----------------------------------------------------------------

    def _wake(self) -> None:
        with self._lock:
            is_ready = self._claim(time.monotonic())
        if is_ready:
            self._on_ready()

    def put(self, index: int, event: Event) -> bool:
        """Take an event of a sample; True if the caller must hand the stream to a sender."""
        sample = self._samples[index]
        with self._lock:
            if sample.has_ended:
                return False  # by a stop string; the engine learns of it only now
            if type(event) is Generated:
                if self._times is not None:
                    self._times = _with_token(self._times, time.time_ns())
                if event.is_last:
                    sample.last = event  # for the packet with the terminal event
                    return False
                sample.append(event)
                if self._claimed or not self._window.is_open:
                    return False  # the usual case on a busy server, for every token
            elif isinstance(event, Admitted):
                if index:
                    return False  # its prompt is that of the first
                if self._times is not None:
                    self._times = replace(self._times, first_scheduled_time_ns=time.time_ns())
                self._num_cached_tokens = event.num_cached_tokens
            elif isinstance(event, PromptLogprobs):
                self._prompt_logprobs.add(event)
            elif isinstance(event, Embedded):
                self._embedding = event.vector  # for the packet with the terminal event
                return False
            elif isinstance(event, Failed):
                self._failure = self._failure or event.error
                self._prompt_logprobs.clear()
            else:
                assert isinstance(event, Finished)
                sample.end(event)
                self._num_running -= 1
            return self._claim(time.monotonic())

    # --- the channel's thread ----------------------------------------------------------------

    def acknowledge(self, ack: Ack) -> tuple[bool, float | None]:
        """Take an acknowledgement. Returns whether a sender is needed, and when the packet was
        sent."""
        with self._lock:
            sent_s = self._window.acknowledged(ack.index)
            if ack.verdict is not Verdict.CONTINUE:
                self._muted = True
            if ack.stopped:
                for index, sample in enumerate(self._samples):
                    if ack.has_stopped(index):
                        self._num_running -= not sample.has_ended
                        sample.stop()
            return self._claim(time.monotonic()), sent_s

    def mute(self, error: MiniSGLError) -> bool:
        """End without a last packet, with ``error``; True if a sender is needed now."""
        with self._lock:
            self._muted = True
            self._error = error
            return self._claim(time.monotonic())

    @property
    def is_muted(self) -> bool:
        """Whether the stream will send nothing but the final flag."""
        with self._lock:
            return self._muted

    @property
    def is_settled(self) -> bool:
        """Whether no acknowledgement is outstanding."""
        with self._lock:
            return self._window.is_open

    # --- the clock's thread ------------------------------------------------------------------

    def tick(self, now_s: float, newest_acknowledged_s: float, grace_s: float) -> Duty:
        """What must be done now; after ``SEND`` the caller hands the stream to a sender."""
        with self._lock:
            if self._claimed:
                return Duty.NOTHING
            if self._claim(now_s):
                return Duty.SEND
            if not self.is_acknowledged:
                return Duty.NOTHING
            if self._window.is_overdue(now_s, newest_acknowledged_s, grace_s):
                return Duty.GIVE_UP
            if self._window.probe_is_due(now_s):
                self._set_claimed(True)
                return Duty.SEND
            return Duty.NOTHING

    # --- senders -----------------------------------------------------------------------------

    def take(self) -> Packet | None:
        """What goes out now; None if the final flag goes alone."""
        now_s = time.monotonic()
        with self._lock:
            if self._muted:
                return None
            deltas: list[SampleDelta] = []
            prompt_logprobs = self._take_prompt_logprobs()
            is_last = self._is_complete and not self._prompt_logprobs
            if not self._prompt_logprobs and (is_last or self._window.may_send_tokens(now_s)):
                taken = [sample.take(index) for index, sample in enumerate(self._samples)]
                deltas = [one for one in taken if one is not None]
            num_cached_tokens, self._num_cached_tokens = self._num_cached_tokens, None
            index = self._num_sent
            self._num_sent += 1
            has_tokens = any(one.token_ids for one in deltas)
            self._has_sent_tokens |= has_tokens
            self._window.sent(index, now_s, with_tokens=has_tokens)
            return Packet(
                reply_to=self._reply_to,
                key=self.key,
                index=index,
                deltas=deltas,
                start=self._start if index == 0 else None,
                num_cached_tokens=num_cached_tokens,
                is_last=is_last,
                error=self._failure if is_last else None,
                times=self._times,
                prompt_logprobs=prompt_logprobs,
                embedding=self._embedding if is_last else None,
            )

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        """The log-probabilities of the prompt that go out now, if any."""
        if self._is_whole:
            return self._prompt_logprobs.take_all() if self._is_complete else None
        return self._prompt_logprobs.take() if self._window.is_open else None

    def release(self, index: int) -> bool:
        """A sender has sent packet ``index``; True if the stream needs a sender again."""
        now_s = time.monotonic()
        with self._lock:
            if self.is_acknowledged:
                self._window.handed_over(index, now_s)
            else:
                self._window.acknowledged(index)
            self._set_claimed(False)
            return self._claim(now_s)

    def end(self) -> None:
        """Send the final flag of a muted stream, alone or with the error it was muted with."""
        error = self._error
        if error is not None:
            self.responder.fail(error)
        else:
            self.responder.finish()

    def _claim(self, now_s: float) -> bool:
        """Claim the stream for a sender if there is something to send; returns whether the caller
        must hand it to one."""
        if self._claimed:
            return False
        self._tell_buffers()  # the window may have opened, or closed
        if not self._muted and not self._may_send(now_s):
            return False
        self._set_claimed(True)
        return True

    def _set_claimed(self, claimed: bool) -> None:
        self._claimed = claimed
        self._tell_buffers()

    def _tell_buffers(self) -> None:
        """Tell the buffers whether their tokens are awaited."""
        is_awaited = not self._claimed and self._window.is_open
        for sample in self._samples:
            sample.buffer.is_awaited = is_awaited

    def _may_send(self, now_s: float) -> bool:
        if self._is_whole:
            return self._is_complete
        if self._prompt_logprobs:
            return self._window.is_open
        if self._is_complete:
            return True
        return self._has_deltas and self._window.may_send_tokens(now_s)

    @property
    def _is_complete(self) -> bool:
        """Whether there is nothing to wait for: all samples have ended, or one has failed."""
        return not self._num_running or self._failure is not None
