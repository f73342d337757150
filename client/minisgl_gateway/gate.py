"""What every request passes before it reaches a route: counters, and the checks of the size of its
headers, its key, and the size of its body. Answers get the headers that identify their request.

Pure ASGI, so that nothing stands between a route and the socket while an answer streams. Must not
know what a route does, or what a body contains.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_gateway.errors import GONE, ApiError, error_response, is_anthropic, shutting_down
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.keys import Keys
from minisgl_gateway.request_state import RequestState
from minisgl_gateway.telemetry import Telemetry

logger = logging.getLogger(__name__)

PAGE_FILES: Final = {
    "/": "page.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/answer.js": "answer.js",
    "/markdown.js": "markdown.js",
}
OPEN_PATHS: Final = frozenset({*PAGE_FILES, "/health", "/ping"})
"""Paths that need no key: the page, which asks for one, and the probes."""
REQUEST_ID: Final = "X-Request-Id"
ANTHROPIC_REQUEST_ID: Final = "request-id"
"""The name of the same header in Anthropic's API."""
WITHOUT_EFFECT: Final = "X-Minisgl-Without-Effect"
"""The header with the names of parameters that had no effect."""

_SANE_ID: Final = re.compile(rb"[!-~]{1,128}")


class Gate:
    """Wraps the application, whose routes find a ``RequestState`` in the scope."""

    def __init__(
        self, app: ASGIApp, options: GatewayOptions, keys: Keys, telemetry: Telemetry
    ) -> None:
        self._app = app
        self._options = options
        self._keys = keys
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # a HEAD is treated as a GET; the server drops the body
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
        state = RequestState(
            time.monotonic() + self._options.timeout_s,
            _callers_id(scope["headers"]),
            f"req_{uuid.uuid4().hex}",
        )
        state.enter(scope)
        status = GONE

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message["headers"])
                request_id = state.told_id.encode()
                headers.append((REQUEST_ID.lower().encode(), request_id))
                if is_anthropic(scope["path"]):
                    headers.append((ANTHROPIC_REQUEST_ID.encode(), request_id))
                if names := state.without_effect:
                    headers.append((WITHOUT_EFFECT.lower().encode(), ", ".join(names).encode()))
                message = {**message, "headers": headers}
            await send(message)

        started_s = time.perf_counter()
        with self._telemetry.open_requests.track_inprogress():
            try:
                await self._pass(scope, state, receive, watched_send)
            except ApiError as error:
                await error_response(error, scope)(scope, receive, watched_send)
            except asyncio.CancelledError:
                if status == GONE:
                    await error_response(shutting_down(), scope)(scope, receive, watched_send)
            finally:
                seconds = time.perf_counter() - started_s
                route = getattr(scope.get("route"), "path", "other")
                status = status if state.outcome is None else state.outcome
                self._telemetry.requests.labels(route, str(status)).inc()
                self._telemetry.request_seconds.labels(route).observe(seconds)
                ids = [state.request_id]
                if state.callers_id:
                    ids.append(f"({state.callers_id})")
                logger.info("%s: %s %d in %.3f s", " ".join(ids), route, status, seconds)

    async def _pass(self, scope: Scope, state: RequestState, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        if (
            sum(len(name) + len(value) + 4 for name, value in headers)
            > self._options.max_header_bytes
        ):
            raise ApiError(
                431,
                f"headers must be at most {self._options.max_header_bytes} bytes",
                code="headers_too_large",
            )
        if scope["path"] not in OPEN_PATHS:
            state.caller = self._keys.caller(headers)
        most_body = self._options.max_body_bytes
        num_bytes = 0
        whole = False

        async def bounded_receive() -> Message:
            nonlocal num_bytes, whole
            if whole:
                return await receive()
            patience_s = min(self._options.patience_s, state.left_s)
            try:
                message = await asyncio.wait_for(receive(), patience_s)
            except asyncio.TimeoutError:
                raise ApiError(408, "the body does not arrive", code="timeout") from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > most_body:
                raise ApiError(
                    413, f"the body must be at most {most_body} bytes", code="body_too_large"
                )
            whole = not message.get("more_body", False)
            return message

        await self._app(scope, bounded_receive, send)


def _callers_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The id that the caller gives its request; "" if there is none fit for a log."""
    given = [value for name, value in headers if name == b"x-request-id"]
    return given[0].decode() if len(given) == 1 and _SANE_ID.fullmatch(given[0]) else ""
