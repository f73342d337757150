"""What other threads may tell the engine's loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from minisgl_backend.errors import EngineFailure, MiniSGLError
from minisgl_backend.request import Failed, Finished, Request, RequestId, Sink


@dataclass(frozen=True, slots=True)
class Add:
    """A request that was accepted at the door."""

    request: Request
    sink: Sink
    arrived_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request with ``event``; ignored where it is not open any more."""

    request_id: RequestId
    event: Finished | Failed


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; requests still open fail with ``error``."""

    error: MiniSGLError


@dataclass(frozen=True, slots=True)
class Fail:
    """The executor is lost: raise ``error`` in the loop, which ends it."""

    error: EngineFailure


Message: TypeAlias = Add | Abort | Stop | Fail
