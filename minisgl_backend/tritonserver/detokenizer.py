"""The model `detokenizer`: chunks of token ids in, text out.

Knows the open streams of all engines that send it chunks. It has one instance, whose ``execute``
takes one chunk after another, so that a stream's chunks stay in order; each is answered with new
text, with nothing (the final flag alone), or with an error, and acknowledged to its engine.

Invariants: every chunk gets its final flag, and all but a stream's last an acknowledgement. After a
stream's last answer, or once its client is gone, its chunks are answered with nothing. What is kept
of a stream goes with its last chunk, with the engine's word to forget it, or when nothing more is
heard of it; not with the engine, whose last chunks may arrive after its end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
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
from minisgl_backend.tritonserver.answer_stream import AnswerStream
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
from minisgl_backend.tritonserver.wire.chunk import Chunk, decode_chunk
from minisgl_backend.tritonserver.wire.parameters import CHUNK

logger = logging.getLogger(__name__)

_ASK_EVERY_S: Final = 0.2
"""How often the chunks of a stream are asked whether their client gave up."""
_SILENT_S: Final = 60.0
"""An engine is never silent for that long about a stream that it has: it would send probes."""

_ERRORS: Final[Mapping[str, type[MiniSGLError]]] = {
    error.code: error
    for error in (InvalidRequest, Unsupported, Overloaded, Cancelled, EngineFailure)
}


class _Open:
    """A stream, as far as it has been heard."""

    __slots__ = ("answers", "asked_s", "heard_s", "over")

    def __init__(self, answers: AnswerStream) -> None:
        self.answers = answers
        self.asked_s = 0.0
        self.heard_s = 0.0
        self.over: Verdict | None = None
        """Set once nothing more is for the client."""


class TritonPythonModel:
    """What Triton's Python backend loads, calls and unloads."""

    @loading
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer's table of bytes."""
        self._vocabulary = load_vocabulary(tokenizer_folder(engine_options(args)))
        self._streams: OrderedDict[int, _Open] = OrderedDict()
        """By key; those of which nothing was heard for longest come first."""
        self._lock = threading.Lock()
        self._channel = DetokenizerChannel(on_forget=self._forget)
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
            verdict, response = Verdict.FAILED, error_response(error, responder.label)
            if stream is not None:
                stream.over = verdict
        # before the answer is sent, so that the engine can make the next chunk ready meanwhile;
        # that chunk is taken only when this call is over, so they stay in order
        self._acknowledge(chunk, verdict)
        if response is not None:
            responder.send(response, final=True)
        else:
            responder.finish()

    def _stream(self, chunk: Chunk) -> _Open | None:
        """The stream of a chunk, a new one where it is the first; None where it is not known."""
        now_s = time.monotonic()
        with self._lock:
            stream = self._streams.get(chunk.key)
            if stream is None and chunk.index == 0 and chunk.start is not None:
                self._drop_silent(now_s)
                stream = _Open(AnswerStream(self._vocabulary, chunk.start))
                self._streams[chunk.key] = stream
            if stream is not None:
                stream.heard_s = now_s
                self._streams.move_to_end(chunk.key)
        return stream

    def _drop_silent(self, now_s: float) -> None:
        while self._streams:
            key, stream = next(iter(self._streams.items()))
            if now_s - stream.heard_s < _SILENT_S:
                return
            del self._streams[key]

    def _answer(
        self, chunk: Chunk, stream: _Open | None, responder: Responder
    ) -> tuple[Verdict, Any | None]:
        """The verdict for the engine, and the response for the client, None for an empty one."""
        if stream is None:
            error = EngineFailure("the detokenizer was restarted and lost this request")
            return Verdict.FAILED, error_response(error, responder.label)
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

    def _acknowledge(self, chunk: Chunk, verdict: Verdict) -> None:
        if chunk.finish is not None or chunk.error is not None:
            with self._lock:  # it was the last, and no one waits for its acknowledgement
                self._streams.pop(chunk.key, None)
            return
        self._channel.acknowledge(chunk.reply_to, Ack(chunk.key, chunk.index, verdict))

    # --- the channel's thread ----------------------------------------------------------------

    def _forget(self, key: int) -> None:
        with self._lock:
            self._streams.pop(key, None)
