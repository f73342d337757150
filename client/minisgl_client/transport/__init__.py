"""One request over one protocol: ``grpc`` and ``http``, each for threads and for asyncio.

A transport holds the connections and starts calls; a call gives deltas until None, and can be
cancelled. What is shared between the two kinds stands beside them; they hold only what waits.

Invariants: whatever goes wrong is a ``MinisglError``; a cancelled call's connection tells the
server, and a call that was read to its end is left alone.
"""

from __future__ import annotations

from typing import Protocol

from minisgl_client.answer import Delta
from minisgl_client.request import Request


class Call(Protocol):
    """One request under way."""

    def read(self) -> Delta | None:
        """The next delta, None at the end."""

    def cancel(self) -> None:
        """Give the request up; the server ends it."""


class Transport(Protocol):
    """The connections to one server."""

    def start(self, request: Request, timeout_ms: int | None) -> Call:
        """Send a request."""

    def is_ready(self, model: str) -> bool:
        """Whether the server is there and has the model loaded."""

    def close(self) -> None:
        """Close all connections; calls under way are cancelled."""


class AsyncCall(Protocol):
    """One request under way."""

    async def read(self) -> Delta | None:
        """The next delta, None at the end."""

    async def cancel(self) -> None:
        """Give the request up; the server ends it."""


class AsyncTransport(Protocol):
    """The connections to one server."""

    async def start(self, request: Request, timeout_ms: int | None) -> AsyncCall:
        """Send a request."""

    async def is_ready(self, model: str) -> bool:
        """Whether the server is there and has the model loaded."""

    async def close(self) -> None:
        """Close all connections; calls under way are cancelled."""
