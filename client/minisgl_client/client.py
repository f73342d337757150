"""``Client`` and ``AsyncClient``: ask a MiniSGL server, over gRPC or HTTP.

    with Client("localhost:8001") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        with client.stream(messages=[{"role": "user", "content": "Count from 1 to 5."}]) as stream:
            for delta in stream:
                print(delta.text, end="")

    async with AsyncClient("localhost:8001") as client:
        async for delta in client.stream("The capital of France is"):
            print(delta.text, end="")

A client keeps its connection, over which any number of requests can run at the same time. A request
gives one of ``prompt`` (plain text), ``messages`` (a chat, to which the model's template is
applied, with ``tools``) and ``input_ids``. ``errors`` lists all errors. Must not know the engine,
nor defaults and ranges of parameters, which the server checks.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from minisgl_client.answer import LoraAdapter, Result, Tokens
from minisgl_client.attempts import Attempts
from minisgl_client.errors import InvalidArgument, MinisglError, short
from minisgl_client.request import Request, build, check_text
from minisgl_client.stream import AsyncStream, Stream
from minisgl_client.transport import AsyncTransport, Transport, unless_closed
from minisgl_client.wire import ADAPTER_ORDER, ENGINE, TOKENIZER

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from minisgl_client.parameters import Parameters

Message: TypeAlias = Mapping[str, Any]
"""A message of a chat: ``role``, ``content``, and other fields that the model's template knows."""
Protocol: TypeAlias = Literal["grpc", "http"]

_SCHEMES: Final = {"grpc": ("", "grpc"), "http": ("", "http", "https")}
_HEADER_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)
_HEADER_VALUE: Final = re.compile(r"[ -~]*")


class _Caller:
    """The address and settings of a client of either kind."""

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        protocol: Protocol | None = None,
        model: str = "minisgl",
        timeout_s: float | None = None,
        retries: int = 2,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not (timeout_s is None or _is_time(timeout_s)):
            raise InvalidArgument(f"timeout_s must be finite and > 0, got {short(timeout_s)}")
        if isinstance(retries, bool) or not (isinstance(retries, int) and retries >= 0):
            raise InvalidArgument(f"retries must be an integer >= 0, got {short(retries)}")
        check_text("url", url)
        scheme, _, address = url.rpartition("://")
        if protocol is None:
            protocol = "http" if scheme in ("http", "https") else "grpc"
        if scheme not in _SCHEMES.get(protocol, ()) or not address:
            raise InvalidArgument(f"{url} is not an address for {protocol}")
        _check_address(address, url, protocol)
        for name, value in (headers or {}).items():
            _check_header(name, value, protocol)
        self.model = model
        self.protocol = protocol
        self._address = address if protocol == "grpc" else f"{scheme or 'http'}://{address}"
        self._headers = dict(headers or {})
        self._timeout_s = timeout_s
        self._retries = retries
        self._opening = threading.Lock()
        self._opened: Transport | None = None  # set by the first request of a ``Client``

    def _attempts(self, request: Request) -> Attempts:
        timeout_ms = request.values.get("timeout_ms")
        timeout_s = self._timeout_s if timeout_ms is None else timeout_ms / 1000
        return Attempts(request.id, self._retries, timeout_s)


class Client(_Caller):
    """A blocking client, safe to share between threads.

    ``url`` is HOST:PORT, or an http:// or https:// address, which implies ``protocol``. ``model``
    is the ensemble. ``timeout_s`` bounds each request as a whole, including retries; the server
    gets it too, and ends in time with the text so far. ``retries`` is how many times a request is
    sent again if the server refused it for now or never got it. ``headers`` go with each request.
    """

    @property
    def _transport(self) -> Transport:
        with self._opening:  # threads that call at the same time share one
            if self._opened is None:
                self._opened = self._connect()
            return self._opened

    def _connect(self) -> Transport:
        if self.protocol == "http":
            from minisgl_client.transport.http import HttpTransport

            return HttpTransport(self._address, self._headers)
        from minisgl_client.transport.grpc import GrpcTransport

        return GrpcTransport(self._address, self._headers)

    def generate(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: str = "",
        **parameters: Unpack[Parameters],
    ) -> Result:
        """The whole answer; raises ``MinisglError``."""
        given = _given(prompt, messages, input_ids, tools, parameters, stream=False)
        with self._open(request_id, given) as stream:
            for _ in stream:
                pass
        return stream.result

    def stream(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: str = "",
        **parameters: Unpack[Parameters],
    ) -> Stream:
        """The answer as it comes; sent when the first delta is asked for. Closing it cancels."""
        given = _given(prompt, messages, input_ids, tools, parameters, stream=True)
        return self._open(request_id, given)

    def tokenize(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **parameters: Unpack[Parameters],
    ) -> Tokens:
        """The prompt's tokens, also if they are none or too many; raises ``MinisglError``."""
        given = _given(prompt, messages, input_ids, tools, parameters, stream=False)
        request = build(TOKENIZER, "", given, asked={})
        attempts = self._attempts(request)
        while True:
            try:
                with unless_closed(self._transport):
                    return self._transport.look_up(request, attempts.remaining_ms())
            except MinisglError as error:
                pause_s = attempts.pause_after(error)
            time.sleep(pause_s)

    def adapters(self) -> tuple[LoraAdapter, ...]:
        """The LoRA adapters that ``lora_name`` may be; raises ``MinisglError``."""
        return self._order({})

    def load_adapter(self, name: str, path: str) -> tuple[LoraAdapter, ...]:
        """Let requests name the adapter in a folder on the server; returns all adapters. Raises
        ``MinisglError``: ``InvalidArgument`` names the tensor that does not fit."""
        return self._order({"load": {"name": name, "path": path}})

    def unload_adapter(self, name: str) -> tuple[LoraAdapter, ...]:
        """Let no more requests name an adapter; those that use it go on. Returns all adapters.
        Raises ``MinisglError``."""
        return self._order({"unload": name})

    def _order(self, order: Mapping[str, Any]) -> tuple[LoraAdapter, ...]:
        request = build(ENGINE, "", {ADAPTER_ORDER: order}, asked={})
        attempts = self._attempts(request)
        with unless_closed(self._transport):
            return self._transport.order(request, attempts.remaining_ms())

    def cancel(self, request_id: str) -> None:
        """Cancel all requests of that id, those of other clients too; raises ``MinisglError``."""
        with self._open(request_id, {"stop_request": True}) as stream:
            for _ in stream:
                pass

    def _open(self, request_id: str, given: Mapping[str, Any]) -> Stream:
        request = build(self.model, request_id, given)
        return Stream(self._transport, request, self._attempts(request))

    def is_ready(self) -> bool:
        """Whether the server answers, and has the model; raises ``Cancelled`` once closed."""
        with unless_closed(self._transport):
            return self._transport.is_ready(self.model)

    def close(self) -> None:
        """Close the connection: who waits for an answer, or asks later, gets ``Cancelled``."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Caller):
    """``Client`` for asyncio, with ``aclose``; belongs to the event loop of its first request."""

    @cached_property
    def _transport(self) -> AsyncTransport:
        if self.protocol == "http":
            from minisgl_client.transport.http import AsyncHttpTransport

            return AsyncHttpTransport(self._address, self._headers)
        from minisgl_client.transport.grpc import AsyncGrpcTransport

        return AsyncGrpcTransport(self._address, self._headers)

    async def generate(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: str = "",
        **parameters: Unpack[Parameters],
    ) -> Result:
        """The whole answer; raises ``MinisglError``."""
        given = _given(prompt, messages, input_ids, tools, parameters, stream=False)
        async with self._open(request_id, given) as stream:
            async for _ in stream:
                pass
        return stream.result

    def stream(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: str = "",
        **parameters: Unpack[Parameters],
    ) -> AsyncStream:
        """The answer as it comes; sent when the first delta is asked for. Closing it cancels."""
        given = _given(prompt, messages, input_ids, tools, parameters, stream=True)
        return self._open(request_id, given)

    async def tokenize(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **parameters: Unpack[Parameters],
    ) -> Tokens:
        """The prompt's tokens, also if they are none or too many; raises ``MinisglError``."""
        given = _given(prompt, messages, input_ids, tools, parameters, stream=False)
        request = build(TOKENIZER, "", given, asked={})
        attempts = self._attempts(request)
        while True:
            try:
                with unless_closed(self._transport):
                    return await self._transport.look_up(request, attempts.remaining_ms())
            except MinisglError as error:
                pause_s = attempts.pause_after(error)
            await asyncio.sleep(pause_s)

    async def adapters(self) -> tuple[LoraAdapter, ...]:
        """The LoRA adapters that ``lora_name`` may be; raises ``MinisglError``."""
        return await self._order({})

    async def load_adapter(self, name: str, path: str) -> tuple[LoraAdapter, ...]:
        """Let requests name the adapter in a folder on the server; returns all adapters. Raises
        ``MinisglError``: ``InvalidArgument`` names the tensor that does not fit."""
        return await self._order({"load": {"name": name, "path": path}})

    async def unload_adapter(self, name: str) -> tuple[LoraAdapter, ...]:
        """Let no more requests name an adapter; those that use it go on. Returns all adapters.
        Raises ``MinisglError``."""
        return await self._order({"unload": name})

    async def _order(self, order: Mapping[str, Any]) -> tuple[LoraAdapter, ...]:
        request = build(ENGINE, "", {ADAPTER_ORDER: order}, asked={})
        attempts = self._attempts(request)
        with unless_closed(self._transport):
            return await self._transport.order(request, attempts.remaining_ms())

    async def cancel(self, request_id: str) -> None:
        """Cancel all requests of that id, those of other clients too; raises ``MinisglError``."""
        async with self._open(request_id, {"stop_request": True}) as stream:
            async for _ in stream:
                pass

    def _open(self, request_id: str, given: Mapping[str, Any]) -> AsyncStream:
        request = build(self.model, request_id, given)
        return AsyncStream(self._transport, request, self._attempts(request))

    async def is_ready(self) -> bool:
        """Whether the server answers, and has the model; raises ``Cancelled`` once closed."""
        with unless_closed(self._transport):
            return await self._transport.is_ready(self.model)

    async def aclose(self) -> None:
        """Close the connection: who waits for an answer, or asks later, gets ``Cancelled``."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _check_address(address: str, url: str, protocol: Protocol) -> None:
    """Check that ``address`` is HOST:PORT; for HTTP, a path may follow."""
    try:
        parts = urlsplit(f"//{address}")
        _ = parts.port  # raises ValueError if it is not a port
        (parts.hostname or "").encode("idna")
    except UnicodeError:
        raise InvalidArgument(
            f"{url} is not an address for {protocol}: no host has such a name"
        ) from None
    except ValueError as error:
        raise InvalidArgument(f"{url} is not an address for {protocol}: {error}") from None
    if "@" in parts.netloc:  # not in the error, since it may be logged
        raise InvalidArgument(
            "the url has a user or a password: give them in headers, as Authorization"
        )
    if protocol == "grpc" and (parts.netloc != address or parts.port is None):
        raise InvalidArgument(f"{url} is not an address for {protocol}: it must be HOST:PORT")


def _check_header(name: str, value: str, protocol: Protocol) -> None:
    check_text("the name of a header", name)
    check_text(f"the header {name!r}", value)
    if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
        raise InvalidArgument(f"the name or value of the header {name!r} is not valid")
    if protocol == "grpc" and name.lower().endswith("-bin"):
        raise InvalidArgument(f"the header {name!r} would be binary in gRPC, by its ending -bin")


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= sys.float_info.max


def _given(
    prompt: str | None,
    messages: Sequence[Message] | None,
    input_ids: Sequence[int] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    parameters: Parameters,
    *,
    stream: bool,
) -> dict[str, Any]:
    """The arguments of a call, by the names of the ensemble's inputs."""
    arguments = {
        "text_input": prompt,
        "messages": messages,
        "input_ids": input_ids,
        "tools": tools,
        "stream": stream,
    }
    if mistaken := {*arguments, "stop_request"} & parameters.keys():
        raise InvalidArgument(
            f"{min(mistaken)} is not a parameter: see the arguments and methods of the client"
        )
    # the server may have another default, as vllm_backend does
    own = {"exclude_input_in_output": True} if prompt is not None and not stream else {}
    return {**own, **arguments, **parameters}
