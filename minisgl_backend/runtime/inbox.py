"""The messages by which other threads tell the engine's loop what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from minisgl_backend.errors import EngineFailure, MiniSGLError
from minisgl_backend.request import Failed, Finished, Request, RequestId, Sink


@dataclass(frozen=True, slots=True)
class Add:
    """Serve a request, which was accepted at the door at ``arrived_s``."""

    request: Request
    sink: Sink
    arrived_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request with ``event``; ignored if the request is not open any more."""

    request_id: RequestId
    event: Finished | Failed


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; requests that are still open fail with ``error``."""

    error: MiniSGLError


@dataclass(frozen=True, slots=True)
class Fail:
    """End the loop by raising ``error`` in it: the executor is lost."""

    error: EngineFailure


Message: TypeAlias = Add | Abort | Stop | Fail
