"""HTTP as uvicorn speaks it, with bounds on clients that are not, or no more, a route's concern.

A route finds a way to cut the connection in ``scope["extensions"]["minisgl.abort"]``.

Invariant: while no route has a request, a timer runs: uvicorn's between requests, ours otherwise.
"""

from __future__ import annotations

import asyncio
import json
import re
from http import HTTPStatus
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl_gateway.errors import ApiError
from minisgl_gateway.options import GatewayOptions


def protocol_of(options: GatewayOptions) -> type[BoundedProtocol]:
    """The protocol of a gateway with these options."""

    class Protocol(BoundedProtocol):
        patience_s = options.patience_s
        head_bytes = options.max_header_bytes + 2**16  # beside the headers there is the URL

    return Protocol


_UPGRADE: Final = re.compile(rb"\nUpgrade(?=:)", re.IGNORECASE)
"""An offer to speak something else, which Java's client makes to all. Nothing else is spoken here,
and with the offer in sight the parser would not read the body. So the name gets longer, just before
its colon, which works too where the name came in pieces of which the parser has some."""


class BoundedProtocol(HttpToolsProtocol):
    """A head must come within ``patience_s``; so must the rest of a body that nobody reads.

    ``head_bytes`` bounds heads that do not end; what is complete the application refuses.
    """

    patience_s: ClassVar[float]
    head_bytes: ClassVar[int]

    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes: int | None = None
    """Of a head that is coming."""
    _tail: bytes = b""
    """The end of what has come of a head, with which a name may begin."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._is_idle():
            seen = len(self._tail)
            joined = _UPGRADE.sub(rb"\g<0>-Offer", self._tail + data)
            data, self._tail = joined[seen:], joined[-len(b"\nUpgrade") :]
        else:
            self._tail = b""
        super().data_received(data)
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.head_bytes:
                self._refuse(ApiError(431, "the head is too large", code="headers_too_large"))
        elif self._is_idle() and self._timer is None and self.timeout_keep_alive_task is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()
        extensions: dict[str, Any] = {"minisgl.abort": self.transport.abort}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that is not used again."""
        self._close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._stop_timer()
        self._num_head_bytes = 0
        self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.patience_s, self._close)

    def _stop_timer(self) -> None:
        self._num_head_bytes = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer in the application's stead."""
        if self._is_idle() or not self.cycle.response_started:
            body = json.dumps(error.body).encode()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._close()

    def _close(self, num_unread: int = -1) -> None:
        """Close when all is sent; cut where of the last answer nothing was read for that long."""
        self._stop_timer()
        self.transport.close()
        left = self.transport.get_write_buffer_size()
        if left == num_unread:
            self.transport.abort()
        elif left:
            self._timer = self.loop.call_later(self.patience_s, self._close, left)
