"""gRPC: one HTTP/2 connection, on which each request is a ``ModelStreamInfer`` of its own.

A stream that carries one request can be cancelled by itself, and its end is the answer's end. Since
the client's side of it is one message, the call is made as one with a single request, which needs
no thread or task to feed it.

Triton 24.10 never lets go of a request whose stream is cancelled after all its responses have been
sent; so an answer known to be complete is read to the end of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from minisgl_client.answer import Delta, LoraAdapter, Tokens
from minisgl_client.attempts import wait_s
from minisgl_client.errors import (
    Cancelled,
    ConnectionFailed,
    ConnectionLost,
    MinisglError,
    ServerError,
    Timeout,
)
from minisgl_client.request import Request
from minisgl_client.response import adapters_of_message, deltas_of_message, tokens_of_message

_SERVICE: Final = "/inference.GRPCInferenceService"
_PING_EVERY_MS: Final = 310_000
"""Triton cuts a connection on which pings come more often than every 300 s while it has nothing to
send, and with it every answer that is not streamed and takes longer."""
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),  # an answer with logprobs may be large
    ("grpc.initial_reconnect_backoff_ms", 100),  # pauses are made by ``attempts``
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", _PING_EVERY_MS),  # a network that went away is noticed
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # as over HTTP: a server is on this machine or in its network
)
_READY_S: Final = 5.0
_NEVER_CONNECTED: Final = (
    "failed to connect",
    "DNS resolution failed",
    "errors resolving",
    "connections to all",
)


class GrpcTransport:
    """For threads; safe to share between them."""

    def __init__(self, target: str, headers: Mapping[str, str]) -> None:
        self._metadata = _metadata(headers)
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._infer = self._channel.unary_stream(**_INFER)
        self._ready = self._channel.unary_unary(**_READY)
        self.closed = False

    def start(self, request: Request, timeout_ms: int | None) -> GrpcCall:
        return GrpcCall(self._called(request, timeout_ms))

    def look_up(self, request: Request, timeout_ms: int | None) -> Tokens:
        return tokens_of_message(self._only(request, timeout_ms))

    def order(self, request: Request, timeout_ms: int | None) -> tuple[LoraAdapter, ...]:
        return adapters_of_message(self._only(request, timeout_ms))

    def _only(self, request: Request, timeout_ms: int | None) -> Any:
        """The only message of an answer."""
        try:
            # to the end, which a cancel must not meet
            messages = list(self._called(request, timeout_ms))
        except grpc.RpcError as error:
            raise _error_of(error) from None
        return _first(messages)

    def _called(self, request: Request, timeout_ms: int | None) -> Any:
        message = request.to_grpc(timeout_ms)
        return self._infer(message, timeout=wait_s(timeout_ms), metadata=self._metadata)

    def is_ready(self, model: str) -> bool:
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            return bool(self._ready(request, timeout=_READY_S, metadata=self._metadata).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        self.closed = True
        self._channel.close()


class GrpcCall:
    def __init__(self, call: Any) -> None:
        self._call = call

    def read(self) -> Sequence[Delta] | None:
        try:
            message = next(self._call, None)
        except grpc.RpcError as error:
            raise _error_of(error) from None
        if message is None:
            return None
        if message.error_message:
            with suppress(grpc.RpcError):
                next(self._call, None)  # the end, which a cancel must not meet
        return deltas_of_message(message)

    def cancel(self) -> None:
        self._call.cancel()


class AsyncGrpcTransport:
    """For one event loop: that of the first request."""

    def __init__(self, target: str, headers: Mapping[str, str]) -> None:
        self._target = target
        self._metadata = _metadata(headers)
        self._channel: Any = None
        self._infer: Any = None
        self.closed = False

    def _connect(self) -> None:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
            self._infer = self._channel.unary_stream(**_INFER)

    async def start(self, request: Request, timeout_ms: int | None) -> AsyncGrpcCall:
        return AsyncGrpcCall(self._called(request, timeout_ms))

    async def look_up(self, request: Request, timeout_ms: int | None) -> Tokens:
        return tokens_of_message(await self._only(request, timeout_ms))

    async def order(self, request: Request, timeout_ms: int | None) -> tuple[LoraAdapter, ...]:
        return adapters_of_message(await self._only(request, timeout_ms))

    async def _only(self, request: Request, timeout_ms: int | None) -> Any:
        """The only message of an answer."""
        try:
            messages = [message async for message in self._called(request, timeout_ms)]
        except grpc.RpcError as error:
            raise _error_of(error) from None
        return _first(messages)

    def _called(self, request: Request, timeout_ms: int | None) -> Any:
        self._connect()
        message = request.to_grpc(timeout_ms)
        return self._infer(message, timeout=wait_s(timeout_ms), metadata=self._metadata)

    async def is_ready(self, model: str) -> bool:
        self._connect()
        ask = self._channel.unary_unary(**_READY)
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            return bool((await ask(request, timeout=_READY_S, metadata=self._metadata)).ready)
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        self.closed = True
        self._connect()
        await self._channel.close()


class AsyncGrpcCall:
    def __init__(self, call: Any) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call.cancel()  # grpcio's own call would wait for the garbage collector

    async def read(self) -> Sequence[Delta] | None:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise _error_of(error) from None
        if message is grpc.aio.EOF:
            return None
        if message.error_message:
            with suppress(grpc.RpcError):
                await self._call.read()  # the end, which a cancel must not meet
        return deltas_of_message(message)

    async def cancel(self) -> None:
        self._call.cancel()


_INFER: Final = {
    "method": f"{_SERVICE}/ModelStreamInfer",
    "request_serializer": None,  # bytes already
    "response_deserializer": service_pb2.ModelStreamInferResponse.FromString,
}
_READY: Final = {
    "method": f"{_SERVICE}/ModelReady",
    "request_serializer": service_pb2.ModelReadyRequest.SerializeToString,
    "response_deserializer": service_pb2.ModelReadyResponse.FromString,
}


def _first(messages: Sequence[Any]) -> Any:
    if not messages:
        raise ConnectionLost("the answer ended before it was whole")
    return messages[0]


def _metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in headers.items())


def _error_of(error: Any) -> MinisglError:
    """The exception for a call that ended with a status.

    The server's own errors come inside responses; a status is about the connection.
    """
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Timeout("no answer in time, and none from the server after it")
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(details or "cancelled")
    if code is not grpc.StatusCode.UNAVAILABLE:
        return ServerError(f"gRPC status {code.name}: {details}")
    if details.startswith(_NEVER_CONNECTED):
        return ConnectionFailed(details)
    return ConnectionLost(details)
