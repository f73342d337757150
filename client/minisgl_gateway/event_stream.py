"""Server-sent events straight to the socket, and what ends them before their time.

``EventStream`` sends bytes as they are made, without a layer in between. Its status is decided when
the first event, or an error in its place, is there. While it runs, it notices if the client leaves.
Must not know what an event says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl_gateway.errors import GONE, ApiError, error_response, shutting_down
from minisgl_gateway.request_state import state_of
from minisgl_gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)
_Value = TypeVar("_Value")

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


to_json: Final = json.JSONEncoder(separators=(",", ":")).encode
"""Writes ASCII, so that no client takes a character such as U+2028 for the end of a line."""


def named_event(name: str, data: Mapping[str, Any]) -> str:
    """An event of an API whose events have names."""
    return f"event: {name}\ndata: {to_json(data)}\n\n"


class Disconnected(Exception):
    """The client went away."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _Value]) -> _Value:
    """The value of ``work``. It is cancelled if the client leaves; raises ``Disconnected``."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        await ended(task, gone)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that still run, and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gathered(work: Callable[[int], Awaitable[_Value]], num: int) -> list[_Value]:
    """What comes of ``work`` for each index, all at once; the first error ends them all."""
    tasks = [asyncio.ensure_future(work(index)) for index in range(num)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await ended(*tasks)


async def merged(sources: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    """What the sources yield, as it comes; each source waits until its last piece is taken."""
    pending = {asyncio.ensure_future(anext(source, None)): source for source in sources}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = pending.pop(task)
                if (piece := task.result()) is not None:
                    pending[asyncio.ensure_future(anext(source, None))] = source
                    yield piece
    finally:
        await ended(*pending)
        for source in sources:
            await source.aclose()


class EventStream(Response):
    """Sends the events that an iterator yields, at least one.

    ``events`` may raise ``ApiError``, which ``failing`` turns into the last event. If it ends
    without an error, the events of ``closing`` follow, in one write with the end of the body.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        closing: Callable[[], bytes],
        failing: Callable[[ApiError], bytes],
        *,
        request_id: str,
        telemetry: Telemetry,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._closing = closing
        self._failing = failing
        self._request_id = request_id
        self._telemetry = telemetry
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; when this returns, nothing of the answer is under way.

        If cancelled because the gateway ends, it tells the client so.
        """
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            with self._telemetry.open_streams.track_inprogress():
                await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            else:
                logger.info("%s: the client went away", self._request_id)
                state_of(scope).outcome = GONE
        except asyncio.CancelledError:
            await ended(pump, gone)
            await self._fail(shutting_down(), scope, receive, send)
        finally:
            await ended(pump, gone)

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun_s = time.perf_counter()
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not self._started:
                        self._started = True
                        seconds = time.perf_counter() - begun_s
                        self._telemetry.first_event_seconds.observe(seconds)
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                        )
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": self._closing()})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Report an error: by the status, if that has not been sent yet, else as the last event."""
        logger.info("%s: %s", self._request_id, error.story)
        if self._started:
            state_of(scope).outcome = error.status
            await send({"type": "http.response.body", "body": self._failing(error)})
        else:
            await error_response(error, scope)(scope, receive, send)
