"""HTTP as uvicorn speaks it, with bounds on how long clients may neither send nor read, and with
answers that clients of HTTP/1.0 understand.

Must not know routes, or what is sent.

Invariants: while no route has a request, a timer runs: uvicorn's between requests, ours otherwise.
While an answer waits for its client to read, another runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from http import HTTPStatus
from typing import ClassVar, Final

from prometheus_client import Counter
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl_gateway.errors import ApiError
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.request_state import id_in_log
from minisgl_gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)


def protocol_of(options: GatewayOptions, telemetry: Telemetry) -> type[BoundedProtocol]:
    """The protocol of a gateway with these options, which counts there."""

    class Protocol(BoundedProtocol):
        patience_s = options.patience_s
        head_bytes = options.max_header_bytes + 2**16  # a head also has the URL
        slow_readers = telemetry.slow_readers

    return Protocol


_WITHOUT_CHUNKS: Final = ("0.9", "1.0")
_UPGRADE: Final = re.compile(rb"^Upgrade(?=:)", re.IGNORECASE)
"""An offer to speak another protocol, which Java's client makes to every server. No other protocol
is spoken here, but if the parser sees the offer, it does not read the body. So the header's name is
made longer, just before its colon; this works even if the name comes in pieces, some of which the
parser already has. (If a head comes in the same packet as the body before it, its beginning passes
unchanged.)"""


class BoundedProtocol(HttpToolsProtocol):
    """A head must come within ``patience_s``; so must the rest of a body that is not read. In each
    such period the client must read at least some of its answer.

    ``head_bytes`` bounds heads that do not end; a complete head that is too large is refused by the
    application.
    """

    patience_s: ClassVar[float]
    head_bytes: ClassVar[int]
    slow_readers: ClassVar[Counter]

    _timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None
    _num_head_bytes: int | None = None
    """How much of a head has come, if one is coming."""
    _in_head: bool = True
    """Whether the next bytes belong to a head; only the parser knows where a head ends."""
    _line: bytes = b""
    """The bytes so far of a line of the head."""
    _answered: RequestResponseCycle | None = None
    """The request being answered, or answered last; ``cycle`` is the newest, which may wait."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._app, self.app = self.app, self._answer
        self._await_head()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. Clients of HTTP/1.0 know neither chunks nor "100 Continue": to them
        an answer of unknown length ends with its connection."""
        cycle = self._answered
        is_measured = True

        async def send_plainly(message: Message) -> None:
            nonlocal is_measured
            assert cycle is not None
            if message["type"] == "http.response.start":
                is_measured = any(name == b"content-length" for name, _ in message["headers"])
                if not is_measured:
                    cycle.chunked_encoding = False
            elif not is_measured:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        if cycle is None or scope["http_version"] not in _WITHOUT_CHUNKS:
            await self._app(scope, receive, send)
        else:
            cycle.waiting_for_100_continue = False
            await self._app(scope, receive, send_plainly)

    def data_received(self, data: bytes) -> None:
        begin = 0
        while begin < len(data) and self._in_head and not self.transport.is_closing():
            end = data.find(b"\n", begin) + 1 or len(data)
            super().data_received(self._without_offer(data[begin:end]))
            begin = end
        if begin < len(data) and not self.transport.is_closing():
            super().data_received(data[begin:])
            if self._in_head:  # of the next request
                self._line = data[begin:].rpartition(b"\n")[2]
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.head_bytes:
                self._refuse(ApiError(431, "the head is too large", code="headers_too_large"))
        elif self._is_idle() and self._timer is None and self.timeout_keep_alive_task is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._line = b""

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered, _ = self.pipeline[-1]
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():  # else the client must still read everything
            self._stop_reading_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_reading_timer()
        super().connection_lost(exc)
        if self._answered is not None:  # uvicorn itself tells only the newest request
            self._answered.disconnected = True
            self._answered.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that is not used again."""
        self._close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _without_offer(self, piece: bytes) -> bytes:
        """A piece of the head, up to the end of a line at most, as the parser should see it."""
        line = _UPGRADE.sub(rb"\g<0>-Offer", self._line + piece)
        shown = line[len(self._line) :]
        self._line = b"" if line.endswith(b"\n") else line
        return shown

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

    def _await_reader(self) -> None:
        self._stop_reading_timer()
        num_unread = self.transport.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(
            self.patience_s, self._look_at_reader, num_unread
        )

    def _look_at_reader(self, num_unread: int) -> None:
        if self.transport.get_write_buffer_size() < num_unread:
            self._await_reader()
        else:
            self._cut()

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _cut(self) -> None:
        state = {} if self._answered is None else self._answered.scope["state"]
        logger.warning("%s: the answer is not read; cut", id_in_log(state))
        self.slow_readers.inc()
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application."""
        if self._is_idle() or not self.cycle.response_started:
            body = json.dumps(error.body).encode()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._close()

    def _close(self) -> None:
        """Close once everything is sent."""
        self._stop_timer()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._await_reader()
