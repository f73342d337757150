"""Sends one request as raw JSON or as a raw gRPC message, and returns how it ended.

Knows Triton's endpoints and messages. Must not use a client that would refuse a wrong request
itself.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from minisgl_client.wire import INPUTS, LISTS

from minisgl_backend.loopback import DIRECT, STREAM_INFER

GENERATE: Final = "/v2/models/minisgl/generate"
_FORMATS: Final = {"BOOL": "?", "INT32": "i", "UINT64": "Q", "FP32": "f"}
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "BOOL": (bool,),
    "INT32": (int,),
    "UINT64": (int,),
    "FP32": (float, int),
    "BYTES": (str,),
}
_NOT_CARRIED: Final = (ValueError, OverflowError, struct.error)
"""Raised if Triton's type cannot hold a value."""
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_HEADERS: Final = 4
PATIENCE_S: Final = 60.0
"""A request that takes longer counts as hanging."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: an error's message, or None for an answer.

    ``status`` is HTTP's; None over gRPC, or without any answer. The error is Triton's, or the
    message of OpenAI's error object.
    """

    error: str | None
    seconds: float
    status: int | None = None


class HttpCaller:
    """Sends bodies over HTTP."""

    def __init__(self, http_url: str) -> None:
        self._address = urlsplit(http_url).netloc

    def send(
        self,
        body: bytes | Iterable[bytes],
        *,
        path: str = GENERATE,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Ending:
        """Send a body; returns how the request ended. A body in pieces is sent in chunks."""
        started_s = time.perf_counter()
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_S)
        try:
            fields = dict(headers or {})
            if not isinstance(body, bytes):
                fields["Transfer-Encoding"] = "chunked"
                # all at once: the server is timed, and a call for each chunk would take longer
                chunks = (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in body)
                body = b"".join(chunks) + b"0\r\n\r\n"
            connection.request(method, path, body, fields)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            return Ending(f"no answer: {error!r}", time.perf_counter() - started_s)
        finally:
            connection.close()
        seconds = time.perf_counter() - started_s
        if response.status == 200:
            return Ending(None, seconds, 200)
        return Ending(_message(text), seconds, response.status)


def _message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return text


class GrpcCaller:
    """Sends messages over one gRPC connection."""

    def __init__(self, grpc_address: str) -> None:
        import grpc

        options = (
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", 2**24),
            *DIRECT,
        )
        self._channel: Any = grpc.insecure_channel(grpc_address, options=options)
        self._infer: Any = self._channel.stream_stream(STREAM_INFER)

    def send(self, message: bytes) -> Ending:
        """Send a message; returns how the request ended."""
        import grpc

        started_s = time.perf_counter()
        error: str | None = None
        try:
            for response in self.responses([message]):
                error = error or response.error_message or None
        except grpc.RpcError as failure:
            status: Any = failure
            error = f"{status.code().name}: {status.details()}"
        return Ending(error, time.perf_counter() - started_s)

    def responses(self, messages: Iterable[bytes]) -> Iterator[Any]:
        """Each ``ModelStreamInferResponse`` to the messages, until the last of them has ended.

        Raises ``grpc.RpcError``.
        """
        from tritonclient.grpc import service_pb2

        for data in self._infer(iter(messages), timeout=PATIENCE_S):
            yield service_pb2.ModelStreamInferResponse.FromString(data)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


@contextmanager
def half_a_message(grpc_address: str, num_bytes: int) -> Iterator[None]:
    """Until the block ends, a gRPC call announces ``num_bytes`` and sends only one of them."""
    host, port = grpc_address.rsplit(":", 1)
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": STREAM_INFER,
        ":authority": grpc_address,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # in HPACK, a zero and then both words, each after its length, are a field of no table
    words = (word.encode() for field in fields.items() for word in field)
    lengths = [bytes([len(word)]) + word for word in words]
    head = b"".join(b"\0" + name + value for name, value in zip(*[iter(lengths)] * 2, strict=True))
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, head, stream=1)
            + _frame(_DATA, 0, struct.pack(">BI", 0, num_bytes) + b"x", stream=1)
        )
        yield


def _frame(kind: int, flags: int, payload: bytes, *, stream: int = 0) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def grpc_message(values: Mapping[str, Any], *, request_id: str = "") -> Any:
    """The ``ModelInferRequest`` with these values; raises ``_NOT_CARRIED`` if there is none."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name="minisgl", id=request_id)
    for name, value in values.items():
        if name in INPUTS:
            items = value if name in LISTS and isinstance(value, list) else [value]
            message.inputs.add(name=name, datatype=INPUTS[name], shape=[len(items)])
            message.raw_input_contents.append(_content(INPUTS[name], items))
            continue
        parameter = message.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = str(value)
    return message


def _content(datatype: str, items: list[Any]) -> bytes:
    """The elements of a tensor as Triton lays them out; see ``_NOT_CARRIED``."""
    kinds = _KINDS[datatype]
    if any(type(item) not in kinds for item in items):
        raise ValueError(f"no {datatype}: {items}")
    if datatype == "BYTES":
        texts = [item.encode("utf-8", "surrogatepass") for item in items]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return struct.pack(f"<{len(items)}{_FORMATS[datatype]}", *items)


def grpc_of(values: Mapping[str, Any]) -> bytes | None:
    """The serialized message with these values; None if gRPC cannot carry them."""
    try:
        data: bytes = grpc_message(values).SerializeToString()
    except _NOT_CARRIED:
        return None
    return data


def json_of(values: Mapping[str, Any]) -> bytes | None:
    """The body with these values; None if one is a number that JSON does not have."""
    try:
        return json.dumps(values, allow_nan=False).encode()
    except ValueError:
        return None
