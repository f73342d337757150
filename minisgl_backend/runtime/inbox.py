"""What other threads put into the inbox of the engine's loop: requests, and orders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from minisgl_backend.errors import EngineFailure, MiniSGLError
from minisgl_backend.request import Failed, Finished, Request, RequestId, Sink, TokenId
from minisgl_backend.runtime.ports import Matcher


@dataclass(slots=True)
class OpenRequest:
    """A request that was accepted at the door, and what the loop notes of it until it ends.

    Times are of ``time.monotonic``.
    """

    request: Request
    sink: Sink
    arrived_s: float
    admitted: bool = False
    tokens: list[TokenId] = field(default_factory=list)
    num_scored: int = 0
    """Log-probabilities of its prompt."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a request's grammar: a matcher, or what is wrong."""

    request_id: RequestId
    outcome: Matcher | MiniSGLError


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


Message: TypeAlias = OpenRequest | Compiled | Abort | Stop | Fail
