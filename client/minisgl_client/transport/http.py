"""HTTP: each request is a POST to ``/generate_stream``, answered by server-sent events.

An answer in one piece comes as one event, so all requests are handled alike. Triton notices that a
client has gone only when it writes to it: a request without ``stream`` runs to its end.

A deadline bounds each wait, and is checked whenever something arrives.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote

import httpx

from minisgl_client.answer import Delta, LoraAdapter, Tokens
from minisgl_client.attempts import wait_s
from minisgl_client.errors import (
    ConnectionFailed,
    ConnectionLost,
    InvalidArgument,
    MinisglError,
    Timeout,
    Unavailable,
    error_from,
)
from minisgl_client.request import Request
from minisgl_client.response import (
    EventReader,
    adapters_of_json,
    deltas_of_event,
    json_object,
    tokens_of_json,
)

_CONNECT_S: Final = 20.0
_READY_S: Final = 5.0
_NO_TRITON: Final = "no Triton HTTP server answers there"
_NOT_HTTP: Final = ("illegal request line", "illegal status line")
"""How httpx's errors about answers that are not HTTP, such as a gRPC port's, begin."""


class _Events:
    """What both kinds of calls know: bytes in, deltas out, and the deadline."""

    def __init__(self, timeout_ms: int | None) -> None:
        left_s = wait_s(timeout_ms)
        self._deadline_s = None if left_s is None else left_s + time.monotonic()
        self._reader = EventReader()
        self._waiting: deque[bytes] = deque()

    def feed(self, data: bytes) -> None:
        self._waiting.extend(self._reader.feed(data))
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            raise Timeout("no end in time, and none from the server after it")

    def next(self) -> list[Delta] | None:
        """The deltas of the next event that has already come."""
        return deltas_of_event(json_object(self._waiting.popleft())) if self._waiting else None


class HttpTransport:
    """For threads; safe to share between them."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._http = httpx.Client(**_settings(url, headers))
        self.closed = False

    def start(self, request: Request, timeout_ms: int | None) -> HttpCall:
        with _as_client_errors():
            message = self._http.build_request(**_post(request, timeout_ms))
            response = self._http.send(message, stream=True)
            if response.status_code != httpx.codes.OK:
                response.read()
                raise _refusal(response)
        return HttpCall(response, _Events(timeout_ms))

    def look_up(self, request: Request, timeout_ms: int | None) -> Tokens:
        with _as_client_errors():
            return tokens_of_json(_object(self._http.request(**_ask(request, timeout_ms))))

    def order(self, request: Request, timeout_ms: int | None) -> tuple[LoraAdapter, ...]:
        with _as_client_errors():
            return adapters_of_json(_object(self._http.request(**_ask(request, timeout_ms))))

    def is_ready(self, model: str) -> bool:
        try:
            return self._http.get(_ready_path(model), timeout=_READY_S).is_success
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self.closed = True
        self._http.close()


class HttpCall:
    def __init__(self, response: httpx.Response, events: _Events) -> None:
        self._response = response
        self._bytes = response.iter_bytes()
        self._events = events

    def read(self) -> Sequence[Delta] | None:
        with _as_client_errors():
            while (deltas := self._events.next()) is None:
                if (data := next(self._bytes, None)) is None:
                    return None
                self._events.feed(data)
        return deltas

    def cancel(self) -> None:
        self._response.close()


class AsyncHttpTransport:
    """For one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._http = httpx.AsyncClient(**_settings(url, headers))
        self.closed = False

    async def start(self, request: Request, timeout_ms: int | None) -> AsyncHttpCall:
        with _as_client_errors():
            message = self._http.build_request(**_post(request, timeout_ms))
            response = await self._http.send(message, stream=True)
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _refusal(response)
        return AsyncHttpCall(response, _Events(timeout_ms))

    async def look_up(self, request: Request, timeout_ms: int | None) -> Tokens:
        with _as_client_errors():
            return tokens_of_json(_object(await self._http.request(**_ask(request, timeout_ms))))

    async def order(self, request: Request, timeout_ms: int | None) -> tuple[LoraAdapter, ...]:
        with _as_client_errors():
            return adapters_of_json(_object(await self._http.request(**_ask(request, timeout_ms))))

    async def is_ready(self, model: str) -> bool:
        try:
            return (await self._http.get(_ready_path(model), timeout=_READY_S)).is_success
        except httpx.TransportError:
            return False

    async def close(self) -> None:
        self.closed = True
        await self._http.aclose()


class AsyncHttpCall:
    def __init__(self, response: httpx.Response, events: _Events) -> None:
        self._response = response
        self._bytes = response.aiter_bytes()
        self._events = events

    async def read(self) -> Sequence[Delta] | None:
        with _as_client_errors():
            while (deltas := self._events.next()) is None:
                if (data := await anext(self._bytes, None)) is None:
                    return None
                self._events.feed(data)
        return deltas

    async def cancel(self) -> None:
        await self._response.aclose()


def _settings(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        base_url = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidArgument(f"{url} is not an address for http: {error}") from None
    return {
        "base_url": base_url,
        "headers": {"Accept": "text/event-stream", **headers},
        "limits": httpx.Limits(max_connections=None),  # as many streams as there are requests
        "trust_env": False,
    }


def _object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer that is not an error."""
    if response.status_code != httpx.codes.OK:
        raise _refusal(response)
    return json_object(response.content)


def _ask(request: Request, timeout_ms: int | None) -> dict[str, Any]:
    return _post(request, timeout_ms, "generate")


def _post(
    request: Request, timeout_ms: int | None, method: str = "generate_stream"
) -> dict[str, Any]:
    """The arguments of ``build_request``."""
    left_s = wait_s(timeout_ms)
    return {
        "method": "POST",
        "url": f"/v2/models/{quote(request.model, safe='')}/{method}",
        "content": request.to_json(timeout_ms),
        "timeout": httpx.Timeout(left_s, connect=_CONNECT_S if left_s is None else left_s),
    }


def _ready_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/ready"


def _refusal(response: httpx.Response) -> MinisglError:
    """The exception for a status that is not 200, by its text: Triton's is nearly always 400.

    The text is JSON, or an event with that JSON.
    """
    try:
        error = json_object(response.content.removeprefix(b"data: "))["error"]
        if isinstance(error, str):  # OpenAI's servers send an object
            return error_from(error)
    except (MinisglError, KeyError):
        pass
    sentence = f"HTTP status {response.status_code}"
    if response.status_code in (404, 405, 501):  # the last for POST, as from the port for health
        sentence = f"{_NO_TRITON}: {sentence}"
    return Unavailable(sentence) if response.status_code == 503 else InvalidArgument(sentence)


@contextmanager
def _as_client_errors() -> Iterator[None]:
    """Turns httpx's errors into ours."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
        raise ConnectionFailed(str(error)) from None
    except httpx.TimeoutException:
        raise Timeout("no answer in time, and none from the server after it") from None
    except (httpx.TransportError, httpx.StreamError) as error:
        sentence = str(error) or type(error).__name__
        if sentence.startswith(_NOT_HTTP):
            sentence = f"{_NO_TRITON}: {sentence}"
        raise ConnectionLost(sentence) from None
