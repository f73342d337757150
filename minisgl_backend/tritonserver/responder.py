"""The only way to a request's response sender: one lock, and exactly one final flag.

Knows Triton's response sender. Must not know what a response means.

Invariants: nothing is sent after the final flag. The sender is never asked whether it is cancelled
once its final flag is sent or being sent, since that crashes tritonserver; hence one lock covers
all three. ``send`` may take as long as Triton needs, so it is never called on the engine's thread.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from minisgl_backend.errors import EngineFailure, MiniSGLError

logger = logging.getLogger(__name__)


class Ledger(Protocol):
    """Counts the requests that are inside the process."""

    def entered(self) -> None:
        """A request came in."""

    def left(self) -> None:
        """A request got its final flag."""


class Responder:
    """Sends the responses of one request; safe to use from any thread."""

    __slots__ = ("_ledger", "_lock", "_sender", "label")

    def __init__(self, request: Any, ledger: Ledger | None = None) -> None:
        self._lock = threading.Lock()
        self._ledger = ledger
        if ledger is not None:
            ledger.entered()
        self._sender: Any = request.get_response_sender()
        try:
            self.label: str = request.request_id()
        except UnicodeDecodeError:  # the models refuse such a request, through this object
            self.label = ""

    def send(self, response: Any, *, final: bool = False) -> bool:
        """Send a response, the last one if ``final``; False if the last one was sent before."""
        with self._lock:
            sender = self._sender
            if sender is None:
                return False
            if not final:
                sender.send(response)
                return True
            self._sender = None
            try:
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception:
                # without a final flag the request would stay in flight forever
                logger.exception("request %.80r: the last response could not be sent", self.label)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self._leave()
            return True

    def finish(self) -> None:
        """Send the final flag alone, unless it was sent."""
        with self._lock:
            sender, self._sender = self._sender, None
            if sender is not None:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                self._leave()

    def fail(self, error: BaseException) -> None:
        """Send an error and the final flag. An error that is not ours goes to the log, not to the
        client."""
        self.send(error_response(error, self.label), final=True)

    def is_cancelled(self) -> bool:
        """Whether the client has given up the request; False while a response is being sent."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._sender is not None and bool(self._sender.is_cancelled())
        finally:
            self._lock.release()

    def _leave(self) -> None:
        if self._ledger is not None:
            self._ledger.left()


def error_response(error: BaseException, label: str) -> Any:
    """The response that carries ``error`` to a client: one sentence that starts with its code.

    Triton would end it at a NUL, which the client may have sent.
    """
    if not isinstance(error, MiniSGLError):
        logger.error("request %.80r failed", label, exc_info=error)
        error = EngineFailure("internal error; the server's log has the details")
    code = getattr(pb_utils.TritonError, error.code)
    text = f"{error.code}: {error}".replace("\0", "\\0")
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))
