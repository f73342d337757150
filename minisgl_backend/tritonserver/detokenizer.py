"""The model ``detokenizer``: packets of token ids in, text out.

Knows the open streams of all engines that send it packets. The model has one instance, and the
packets of a stream are on one *lane*, a thread that answers one after another: so they stay in
order. Each packet is answered with new text, with nothing (the final flag alone), or with an error,
and acknowledged to its engine. Each answer waits for tritonserver, some tenths of a millisecond;
lanes wait in parallel, and ``execute`` waits for none of them. Must not know pages, steps or the
queue of an engine.

Invariants: every packet gets its final flag, and all but a stream's last an acknowledgement. After
a stream's last answer, or once its client is gone, its packets are answered with nothing. What is
kept of a stream is dropped with its last packet, when the engine says to forget it, or when nothing
more is heard of it; but not when the engine ends, since its last packets may arrive after that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from minisgl_backend.errors import EngineFailure
from minisgl_backend.prompt_encoder import tokenizer_folder
from minisgl_backend.text.answer_stream import AnswerStream
from minisgl_backend.text.tokenizer_files import load_vocabulary
from minisgl_backend.tritonserver.channel import DetokenizerChannel
from minisgl_backend.tritonserver.lane import Lane, num_stream_lanes
from minisgl_backend.tritonserver.responder import Responder, error_response
from minisgl_backend.tritonserver.setup import (
    engine_options,
    loading,
    runtime_directory,
)
from minisgl_backend.tritonserver.status import StatusServer
from minisgl_backend.tritonserver.tensors import make_response, read_inputs
from minisgl_backend.wire.acks import Ack, Verdict
from minisgl_backend.wire.answer import answer_arrays
from minisgl_backend.wire.packets import Packet, decode_packet
from minisgl_backend.wire.parameters import CHUNK

logger = logging.getLogger(__name__)

_POLL_EVERY_S: Final = 0.2
"""How often Triton is asked whether the client of a stream has cancelled, with few streams."""
_MOST_POLLS_PER_S: Final = 500
"""Limit for all streams together: each poll takes as long as a response."""
_EACH_ACK_S: Final = 0.000025
"""With many streams acknowledgements gather: this long for each stream, ..."""
_MOST_ACKS_S: Final = 0.006
"""... and at most this long."""
_SILENT_S: Final = 60.0
"""An engine is never silent for this long about an open stream: it would send probes."""


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream's answers; when its last packet came, and when Triton is to be asked whether its
    client has cancelled, readings of ``time.monotonic``."""

    answers: AnswerStream
    heard_s: float
    next_poll_s: float


class TritonPythonModel:
    """What Triton's Python backend loads, calls and unloads."""

    @loading
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer's table of bytes."""
        self._vocabulary = load_vocabulary(tokenizer_folder(engine_options(args)))
        self._streams: OrderedDict[int, _Stream] = OrderedDict()
        """By key; those that have been silent the longest come first."""
        self._lock = threading.Lock()
        self._channel = DetokenizerChannel(on_forget=self._forget)
        self._lanes: list[Lane[tuple[Packet, Responder]]] = [
            Lane(self._answer_or_fail, name=f"lane {number}")
            for number in range(num_stream_lanes())
        ]
        self._status = StatusServer(runtime_directory(), args["model_name"], stats=self.stats)

    def execute(self, requests: list[Any]) -> None:
        """Put packets on the lanes of their streams."""
        for request in requests:
            responder = Responder(request, self._status)
            try:
                packet = decode_packet(read_inputs(request)[CHUNK.name].tobytes())
                self._lanes[packet.key % len(self._lanes)].put((packet, responder))
            except Exception as error:
                responder.fail(error)

    def finalize(self) -> None:
        """Leave the engines, which then end the streams that this instance knows."""
        for lane in self._lanes:
            lane.close()
        self._channel.close()
        self._streams.clear()
        self._status.close()

    def stats(self) -> Mapping[str, Any]:
        """Counts of what this instance keeps."""
        return {"num_streams": len(self._streams), "num_engines": self._channel.num_peers}

    # --- the lanes ---------------------------------------------------------------------------

    def _answer_or_fail(self, waiting: tuple[Packet, Responder]) -> None:
        packet, responder = waiting
        try:
            self._take(packet, responder)
        except Exception as error:
            responder.fail(error)

    def _take(self, packet: Packet, responder: Responder) -> None:
        stream = self._stream(packet)
        try:
            verdict, response = self._answer(packet, stream, responder)
        except Exception as error:
            verdict, response = Verdict.FAILED, error_response(error, responder.label)
            if stream is not None:
                stream.answers.over = verdict
        # before the answer is sent, so that the engine can prepare the next packet in the meantime;
        # that packet waits on this lane until this call is over, so they stay in order
        self._acknowledge(packet, verdict, stream)
        if response is not None:
            responder.send(response, final=True)
        else:
            responder.finish()

    def _stream(self, packet: Packet) -> _Stream | None:
        """The stream of a packet, a new one if it is the first; None if it is not known."""
        now_s = time.monotonic()
        with self._lock:
            stream = self._streams.get(packet.key)
            if stream is None and packet.index == 0 and packet.start is not None:
                self._drop_silent(now_s)
                # a probe means that it has waited for its first token
                next_poll_s = now_s + _POLL_EVERY_S if packet.deltas else now_s
                stream = _Stream(AnswerStream(self._vocabulary, packet.start), now_s, next_poll_s)
                self._streams[packet.key] = stream
            if stream is not None:
                stream.heard_s = now_s
                self._streams.move_to_end(packet.key)
        return stream

    def _drop_silent(self, now_s: float) -> None:
        while self._streams:
            key, stream = next(iter(self._streams.items()))
            if now_s - stream.heard_s < _SILENT_S:
                return
            del self._streams[key]

    def _answer(
        self, packet: Packet, stream: _Stream | None, responder: Responder
    ) -> tuple[Verdict, Any | None]:
        """The verdict for the engine, and the response for the client, None for an empty one."""
        if stream is None:
            error = EngineFailure("the detokenizer was restarted and lost this request")
            return Verdict.FAILED, error_response(error, responder.label)
        answers = stream.answers
        if answers.over is not None:
            return answers.over, None
        if self._is_cancelled(stream, responder):
            answers.over = Verdict.CANCELLED
            return answers.over, None
        if packet.error is not None:
            answers.over = Verdict.STOP
            return answers.over, error_response(packet.error, responder.label)
        answer = answers.push(packet)
        verdict = answers.over or Verdict.CONTINUE
        if answer is None:
            return verdict, None
        wanted = answers.start.wanted
        return verdict, make_response(answer_arrays(answer, wanted, self._vocabulary.token_bytes))

    def _is_cancelled(self, stream: _Stream, responder: Responder) -> bool:
        now_s = time.monotonic()
        if now_s < stream.next_poll_s:
            return False
        stream.next_poll_s = now_s + max(_POLL_EVERY_S, len(self._streams) / _MOST_POLLS_PER_S)
        return responder.is_cancelled()

    def _acknowledge(self, packet: Packet, verdict: Verdict, stream: _Stream | None) -> None:
        if packet.is_last:
            with self._lock:  # it was the last, which needs no acknowledgement
                self._streams.pop(packet.key, None)
            return
        stopped = 0
        if stream is not None and verdict is Verdict.CONTINUE:
            stopped = stream.answers.stopped
        ack = Ack(packet.key, packet.index, verdict, stopped)
        every_s = min(_MOST_ACKS_S, _EACH_ACK_S * len(self._streams))
        self._channel.acknowledge(packet.reply_to, ack, every_s=every_s)

    # --- the channel's thread ----------------------------------------------------------------

    def _forget(self, key: int) -> None:
        with self._lock:
            self._streams.pop(key, None)
