"""The model `detokenizer`: chunks of token ids in, text out.

Knows the open streams of all engines that send it chunks. It has one instance, whose ``execute``
takes one chunk after another, so that a stream's chunks stay in order; each is answered with new
text, with nothing (the final flag alone), or with an error, and acknowledged to its engine.

Invariants: every chunk gets its final flag and its acknowledgement. After a stream's last answer,
or once its client is gone, its chunks are answered with nothing. What is kept of a stream goes with
its last chunk, with the engine's word to forget it, or with the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from minisgl_backend.errors import (
    Cancelled,
    EngineFailure,
    InvalidRequest,
    MiniSGLError,
    Overloaded,
    Unsupported,
)
from minisgl_backend.text.tokenizer import load_vocabulary
from minisgl_backend.tritonserver.channel import DetokenizerChannel
from minisgl_backend.tritonserver.packets import Ack, Verdict
from minisgl_backend.tritonserver.responder import Responder, error_response
from minisgl_backend.tritonserver.setup import (
    engine_options,
    loading,
    runtime_directory,
    tokenizer_folder,
)
from minisgl_backend.tritonserver.tensors import make_response, read_inputs
from minisgl_backend.tritonserver.vitals import Vitals
from minisgl_backend.tritonserver.wire.answer import answer_arrays
from minisgl_backend.tritonserver.wire.chunk import Chunk, decode_chunk, stream_name
from minisgl_backend.tritonserver.wire.parameters import CHUNK
from minisgl_backend.tritonserver.wire.stream import AnswerStream

logger = logging.getLogger(__name__)

_ASK_EVERY_S: Final = 0.2
"""How often the chunks of a stream are asked whether their client gave up."""

_ERRORS: Final[Mapping[str, type[MiniSGLError]]] = {
    error.code: error
    for error in (InvalidRequest, Unsupported, Overloaded, Cancelled, EngineFailure)
}


def _split(name: str) -> tuple[int, int]:
    """The epoch and the counter of a stream's name."""
    epoch, _, counter = name.partition(".")
    try:
        numbers = int(epoch, 16), int(counter, 16)
    except ValueError:
        numbers = -1, -1
    if not all(0 <= number < 2**64 for number in numbers):
        raise InvalidRequest("chunk is not one that llm_engine sends")
    return numbers


class _Open:
    """A stream, and where its acknowledgements go."""

    __slots__ = ("answers", "asked_s", "counter", "epoch", "over")

    def __init__(self, epoch: int, counter: int, answers: AnswerStream) -> None:
        self.epoch = epoch
        self.counter = counter
        self.answers = answers
        self.asked_s = 0.0
        self.over: Verdict | None = None
        """Set once nothing more is for the client."""


class TritonPythonModel:
    """What Triton's Python backend loads, calls and unloads."""

    @loading
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer's table of bytes."""
        self._vocabulary = load_vocabulary(tokenizer_folder(engine_options(args)))
        self._streams: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self._channel = DetokenizerChannel(
            on_forget=self._forget, on_engine_gone=self._forget_engine
        )
        # chunks are not counted: the engine ends the streams of a detokenizer that has gone
        self._vitals = Vitals(runtime_directory(), args["model_name"], stats=self._stats)

    def execute(self, requests: list[Any]) -> None:
        """Answer chunks, in order."""
        for request in requests:
            responder = Responder(request)
            try:
                self._take(request, responder)
            except Exception as error:
                responder.fail(error)

    def finalize(self) -> None:
        """Leave the engines, which then end the streams that this instance knows."""
        self._channel.close()
        self._streams.clear()
        self._vitals.close()

    def _stats(self) -> Mapping[str, Any]:
        return {"num_streams": len(self._streams), "num_engines": self._channel.num_peers}

    def _take(self, request: Any, responder: Responder) -> None:
        chunk = decode_chunk(read_inputs(request)[CHUNK.name].tobytes())
        stream = self._stream(chunk)
        try:
            verdict, response = self._answer(chunk, stream, responder)
        except Exception as error:
            verdict, response = Verdict.STOP, error_response(error, request.request_id())
            if stream is not None:
                stream.over = verdict
        # before it is sent, since the engine can make the next chunk ready meanwhile; that one is
        # taken only when this is done, so they stay in order
        self._acknowledge(chunk, stream, verdict)
        if response is not None:
            responder.send(response, final=True)
        else:
            responder.finish()

    def _stream(self, chunk: Chunk) -> _Open | None:
        """The stream of a chunk, a new one where it is the first; None where it is not known."""
        stream = self._streams.get(chunk.stream)
        if stream is None and chunk.index == 0 and chunk.start is not None:
            epoch, counter = _split(chunk.stream)
            stream = _Open(epoch, counter, AnswerStream(self._vocabulary, chunk.start))
            with self._lock:
                self._streams[chunk.stream] = stream
        return stream

    def _answer(
        self, chunk: Chunk, stream: _Open | None, responder: Responder
    ) -> tuple[Verdict, Any | None]:
        """What the engine and what the client gets to hear; None: nothing."""
        if stream is None:
            error = EngineFailure("the detokenizer was restarted and lost this request")
            return Verdict.LOST, error_response(error, responder.label)
        if stream.over is not None:
            return stream.over, None
        if self._is_cancelled(stream, responder):
            stream.over = Verdict.CANCELLED
            return stream.over, None
        if chunk.error is not None:
            code, message = chunk.error
            stream.over = Verdict.STOP
            return stream.over, error_response(
                _ERRORS.get(code, EngineFailure)(message), responder.label
            )
        answers = stream.answers
        answer = answers.push(chunk)
        if answers.done:
            stream.over = Verdict.STOP
        verdict = Verdict.STOP if answers.done else Verdict.CONTINUE
        if answer is None:
            return verdict, None
        wanted = answers.start.wanted
        return verdict, make_response(answer_arrays(answer, wanted, self._vocabulary.token_text))

    def _is_cancelled(self, stream: _Open, responder: Responder) -> bool:
        now_s = time.monotonic()
        if now_s - stream.asked_s < _ASK_EVERY_S:
            return False
        stream.asked_s = now_s
        return responder.is_cancelled()

    def _acknowledge(self, chunk: Chunk, stream: _Open | None, verdict: Verdict) -> None:
        if chunk.finish is not None or chunk.error is not None:
            with self._lock:  # it was the last, and no one waits for its acknowledgement
                self._streams.pop(chunk.stream, None)
            return
        if stream is not None:
            epoch, counter = stream.epoch, stream.counter
        else:
            epoch, counter = _split(chunk.stream)
        ack = Ack(counter, chunk.index, verdict)
        if not self._channel.acknowledge(chunk.reply_to, epoch, ack):
            with self._lock:
                self._streams.pop(chunk.stream, None)

    # --- the channel's thread ----------------------------------------------------------------

    def _forget(self, epoch: int, counter: int) -> None:
        with self._lock:
            self._streams.pop(stream_name(epoch, counter), None)

    def _forget_engine(self, epoch: int) -> None:
        prefix = stream_name(epoch, 0).partition(".")[0]
        with self._lock:
            for name in [name for name in self._streams if name.startswith(prefix)]:
                del self._streams[name]
