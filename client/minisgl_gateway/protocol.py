"""HTTP as uvicorn speaks it, with bounds on the head of a request and a way to cut a connection.

A route finds the latter in ``scope["extensions"]["minisgl.abort"]``.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """``head_bytes`` and ``head_s`` bound what comes before a body. Longer heads are refused here
    only where they do not end; what is complete the application refuses, with an error object."""

    head_bytes: ClassVar[int] = 64 * 2**10
    head_s: ClassVar[float] = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.head_bytes:
                self.transport.write(_TOO_LARGE)
                self._cut()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()
        extensions: dict[str, Any] = {"minisgl.abort": self.transport.abort}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._head_has_come()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_has_come()
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_s, self._cut)

    _head_timer: asyncio.TimerHandle | None = None

    def _head_has_come(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cut(self) -> None:
        self._head_has_come()
        self.transport.close()
