"""The threads that move an engine's open streams, and what acknowledgements cause.

Knows all open streams of an engine and how to abort a request. Must not know tensors or tokens.

Threads: a few senders, the only ones that wait for Triton; the channel's thread, which brings
acknowledgements; and a clock, which checks streams every 25 ms for intervals that are over, and
every 0.1 s for probes that are due, cancelled direct clients, and acknowledgements that never came.

Invariants: a stream stays here until its final flag is sent. The engine's thread never waits for
any of this.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from minisgl_backend.errors import EngineFailure, MiniSGLError
from minisgl_backend.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    RequestId,
    Sink,
)
from minisgl_backend.token_buffer import BufferedSink
from minisgl_backend.tritonserver.channel import EngineChannel
from minisgl_backend.tritonserver.lane import num_stream_lanes
from minisgl_backend.tritonserver.outbox import Outbox
from minisgl_backend.tritonserver.response_stream import Duty, ResponseStream
from minisgl_backend.tritonserver.window import Acknowledged
from minisgl_backend.wire.acks import Ack, Verdict

logger = logging.getLogger(__name__)

_ENDS: Final = (Finished, Failed)
_KEYS: Final = struct.Struct("=128Q")
_TICK_S: Final = 0.025
_TURNS: Final = 4
"""One tick of this many is a stream's turn: then it is checked, also if it has no interval, and
whether its client has given up."""
_LINGER_S: Final = 10.0
"""How long a stream that ended early is remembered for acknowledgements still outstanding."""
_CALM_S: Final = 1.0
"""Failures of the clock that follow each other faster than this count, and are logged, as one."""


class Aborter(Protocol):
    """The part of the engine that is needed here."""

    def abort(
        self, request_id: RequestId, why: FinishReason | EngineFailure = FinishReason.CANCELLED
    ) -> None:
        """End a request; its terminal event follows through its sink."""


class Dispatcher:
    """Owns the open streams of an engine."""

    def __init__(
        self,
        engine: Aborter,
        *,
        grace_s: float,
        directory: Path | None,
        on_packet: Callable[[int], None],
        before_end: Callable[[], None],
        requests_wait: Callable[[], bool],
    ) -> None:
        """``grace_s`` is that of ``Window.is_overdue``. The channel's socket goes into
        ``directory``; ``on_packet`` gets each packet's number of tokens. ``before_end`` is called
        when a sample has ended, before its client can know. ``requests_wait`` says whether new
        requests wait to be taken in.
        """
        # one for every two cores: at least 6 packets under way keep a small machine busy, more than
        # 16 are no faster, and more than 4 senders get in each other's way
        half = (os.cpu_count() or 1) // 2
        self._engine = engine
        self._grace_s = grace_s
        self._on_packet = on_packet
        self._before_end = before_end
        self._keys: list[int] = []
        self._streams: dict[int, ResponseStream] = {}
        self._lingering: dict[int, tuple[ResponseStream, float]] = {}
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._acknowledged = Acknowledged(num_stream_lanes())
        self.num_lost = 0
        """Streams that ended because the detokenizer had gone."""
        self._outbox: Outbox[ResponseStream] = Outbox(
            max(6, min(16, half)), requests_wait=requests_wait
        )
        self._stopping = threading.Event()
        self.channel = EngineChannel(
            directory=directory,
            on_ack=self._on_ack,
            on_detokenizer_gone=self._on_detokenizer_gone,
        )
        self._senders = [
            threading.Thread(target=self._send_all, name=f"sender {number}", daemon=True)
            for number in range(min(4, max(2, half)))
        ]
        self._clock = threading.Thread(target=self._run_clock, name="clock", daemon=True)
        for thread in (*self._senders, self._clock):
            thread.start()

    def new_key(self) -> int:
        """A random 64-bit stream key; knowing it authorizes acknowledgements.

        Only the thread that takes requests in calls this. It gets random numbers from the system
        many at a time: each call for them gives up Python's lock, which other threads want.
        """
        if not self._keys:
            self._keys = list(_KEYS.unpack(secrets.token_bytes(_KEYS.size)))
        return self._keys.pop()

    def open(self, stream: ResponseStream) -> Sequence[Sink]:
        """Take a stream; the events of its samples go to the sinks returned."""
        with self._lock:
            self._streams[stream.key] = stream

        def put(sample: int, event: Event) -> None:
            try:
                if type(event) in _ENDS:
                    self._before_end()
            finally:
                if stream.put(sample, event):
                    self._outbox.put(stream, urgent=stream.is_urgent)

        sinks = [partial(put, sample) for sample in range(len(stream.sample_ids))]
        buffers = stream.buffers(lambda: self._outbox.put(stream, urgent=stream.is_urgent))
        if buffers is None:
            return sinks
        return [BufferedSink(sink, buffer) for sink, buffer in zip(sinks, buffers, strict=True)]

    def abort(
        self, stream: ResponseStream, why: FinishReason | EngineFailure = FinishReason.CANCELLED
    ) -> None:
        """End what still runs of a stream's samples in the engine."""
        for request_id in stream.sample_ids:
            self._engine.abort(request_id, why)

    def discard(self, stream: ResponseStream) -> None:
        """Drop a stream whose request was refused and has been answered already."""
        with self._lock:
            self._streams.pop(stream.key, None)
            self._empty.notify_all()
        self._outbox.arrived(stream.key)

    def labelled(self, label: str) -> list[ResponseStream]:
        """The open streams of requests to which clients gave this id."""
        with self._lock:
            return [stream for stream in self._streams.values() if stream.responder.label == label]

    def __len__(self) -> int:
        return len(self._streams)

    def end_all(self, error: MiniSGLError) -> None:
        """Answer every open stream with ``error``, without waiting for the engine's event."""
        for stream in self._snapshot():
            if stream.mute(error):
                self._outbox.put(stream, urgent=True)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until every stream has sent its final flag; False if one has not in time."""
        with self._lock:
            return self._empty.wait_for(lambda: not self._streams, timeout_s)

    def close(self) -> None:
        """End all threads. The streams should be gone by then."""
        self._stopping.set()
        self._outbox.close(len(self._senders))
        for thread in (*self._senders, self._clock):
            thread.join()
        self.channel.close()

    # --- senders -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (stream := self._outbox.get()) is not None:
            try:
                self._send(stream)
            except Exception:
                logger.exception(
                    "request %.80r: a response could not be sent", stream.responder.label
                )
                error = EngineFailure("a response could not be sent")
                stream.mute(error)
                self.abort(stream, error)
                if stream.release(-1):
                    self._outbox.put(stream, urgent=True)

    def _send(self, stream: ResponseStream) -> None:
        packet = stream.take()
        if packet is None:
            stream.end()
            self._forget(stream)
            return
        if stream.is_acknowledged and not packet.is_last:
            self._outbox.sent(stream.key)
        stream.responder.send(stream.encode(packet), final=packet.is_last)
        self._on_packet(sum(len(delta.token_ids) for delta in packet.deltas))
        if packet.is_last:
            self.discard(stream)
            if packet.error is not None and len(stream.sample_ids) > 1:
                self.abort(stream)  # the other samples, whose answer is that error
        elif stream.release(packet.index):
            self._outbox.put(stream, urgent=stream.is_urgent)

    def _forget(self, stream: ResponseStream) -> None:
        """The stream ended without a last packet, so the detokenizer must be told."""
        self.discard(stream)
        if not stream.is_acknowledged:
            return
        if stream.is_settled:
            self.channel.forget(stream.key)
        else:  # not yet: a packet on its way would find its stream unknown
            with self._lock:
                self._lingering[stream.key] = stream, time.monotonic() + _LINGER_S

    # --- acknowledgements --------------------------------------------------------------------

    def _on_ack(self, ack: Ack) -> None:
        stream = self._streams.get(ack.key)
        if stream is None:
            self._settle(ack)
            return
        self._outbox.arrived(ack.key)
        ready, sent_s = stream.acknowledge(ack)
        if sent_s is not None:
            self._acknowledged.note(ack.key, sent_s)
        if ready:
            self._outbox.put(stream, urgent=stream.is_urgent)
        if ack.verdict is Verdict.STOP:
            self.abort(stream, FinishReason.STOP)
        elif ack.verdict is Verdict.CANCELLED:
            self.abort(stream)
        elif ack.verdict is Verdict.FAILED:
            self.abort(stream, EngineFailure("the detokenizer failed"))
        elif ack.stopped:
            for sample, request_id in enumerate(stream.sample_ids):
                if ack.has_stopped(sample):
                    self._engine.abort(request_id, FinishReason.STOP)

    def _settle(self, ack: Ack) -> None:
        lingering = self._lingering.get(ack.key)
        if lingering is None:
            return
        stream, _ = lingering
        stream.acknowledge(ack)
        if stream.is_settled:
            with self._lock:
                self._lingering.pop(ack.key, None)
            self.channel.forget(ack.key)

    def _on_detokenizer_gone(self) -> None:
        lost = [stream for stream in self._snapshot() if stream.is_acknowledged]
        if lost:
            logger.warning("the detokenizer has gone, and %d requests with it", len(lost))
        self.num_lost += len(lost)
        for stream in lost:
            self._give_up(stream, "the detokenizer has gone")

    def _give_up(self, stream: ResponseStream, why: str) -> None:
        error = EngineFailure(why)
        if stream.mute(error):
            self._outbox.put(stream, urgent=True)
        self.abort(stream, error)

    # --- the clock ---------------------------------------------------------------------------

    def _run_clock(self) -> None:
        failed_s = float("-inf")
        turns = itertools.cycle(range(_TURNS))
        while not self._stopping.wait(_TICK_S):
            now_s, turn = time.monotonic(), next(turns)
            for stream in self._snapshot():
                is_turn = stream.key % _TURNS == turn
                if not stream.has_interval and not is_turn:
                    continue
                try:
                    self._check(stream, now_s)
                    if is_turn and not stream.is_acknowledged and stream.responder.is_cancelled():
                        self.abort(stream)
                except Exception:  # e.g. no room in Triton for a question; go on with other streams
                    if now_s - failed_s > _CALM_S:
                        text = "request %.80r, maybe others: its stream could not be checked"
                        logger.exception(text, stream.responder.label)
                    failed_s = now_s
            self._expire(now_s)
            self._outbox.expire(now_s)

    def _check(self, stream: ResponseStream, now_s: float) -> None:
        duty = stream.tick(now_s, self._acknowledged.newest_s(stream.key), self._grace_s)
        if duty is Duty.SEND:
            self._outbox.put(stream, urgent=stream.is_urgent)
        elif duty is Duty.GIVE_UP:
            logger.warning("request %.80r: the detokenizer does not answer", stream.responder.label)
            self._give_up(stream, "the detokenizer does not answer")

    def _expire(self, now_s: float) -> None:
        with self._lock:
            over = [key for key, (_, until_s) in self._lingering.items() if until_s <= now_s]
            for key in over:
                del self._lingering[key]
        for key in over:
            self.channel.forget(key)

    def _snapshot(self) -> list[ResponseStream]:
        with self._lock:
            return list(self._streams.values())
