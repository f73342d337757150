"""One request over one protocol: ``grpc`` and ``http``, each for threads and for asyncio.

A transport holds the connections and starts calls; a call gives the deltas of one response at a
time until None, and can be cancelled. Code shared by the two kinds is next to them; they hold only
what waits.

Invariants: whatever goes wrong before a transport is closed is a ``MinisglError``, and
``unless_closed`` turns what goes wrong later into one. Cancelling a call tells the server through
its connection; a call that was read to its end is left alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from minisgl_client.answer import Delta, LoraAdapter, Tokens
from minisgl_client.errors import Closed
from minisgl_client.request import Request


class Call(Protocol):
    """One request under way."""

    def read(self) -> Sequence[Delta] | None:
        """The deltas of the next response, by sample; None at the end."""

    def cancel(self) -> None:
        """Give the request up; the server ends it."""


class Transport(Protocol):
    """The connections to one server."""

    closed: bool

    def start(self, request: Request, timeout_ms: int | None) -> Call:
        """Send a request."""

    def look_up(self, request: Request, timeout_ms: int | None) -> Tokens:
        """What the tokenizer answers to a request."""

    def order(self, request: Request, timeout_ms: int | None) -> tuple[LoraAdapter, ...]:
        """What the engine answers to an order about adapters: all that there are then."""

    def is_ready(self, model: str) -> bool:
        """Whether the server is there and has the model loaded."""

    def close(self) -> None:
        """Close all connections; calls under way are cancelled."""


class AsyncCall(Protocol):
    """One request under way."""

    async def read(self) -> Sequence[Delta] | None:
        """The deltas of the next response, by sample; None at the end."""

    async def cancel(self) -> None:
        """Give the request up; the server ends it."""


class AsyncTransport(Protocol):
    """The connections to one server."""

    closed: bool

    async def start(self, request: Request, timeout_ms: int | None) -> AsyncCall:
        """Send a request."""

    async def look_up(self, request: Request, timeout_ms: int | None) -> Tokens:
        """What the tokenizer answers to a request."""

    async def order(self, request: Request, timeout_ms: int | None) -> tuple[LoraAdapter, ...]:
        """What the engine answers to an order about adapters: all that there are then."""

    async def is_ready(self, model: str) -> bool:
        """Whether the server is there and has the model loaded."""

    async def close(self) -> None:
        """Close all connections; calls under way are cancelled."""


@contextmanager
def unless_closed(transport: Transport | AsyncTransport) -> Iterator[None]:
    """Turns whatever goes wrong because the transport was closed into ``Closed``.

    grpc.aio then raises ``CancelledError`` in the tasks that wait, as if they were cancelled; a
    task that really is cancelled stays so.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        if not transport.closed or (
            isinstance(error, asyncio.CancelledError) and _is_cancelled(asyncio.current_task())
        ):
            raise
        raise Closed("the client was closed") from None


def _is_cancelled(task: asyncio.Task[object] | None) -> bool:
    """Whether the task itself is being cancelled, as far as Python can tell (from 3.11 on)."""
    return sys.version_info >= (3, 11) and task is not None and task.cancelling() > 0
