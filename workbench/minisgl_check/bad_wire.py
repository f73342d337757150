"""The catalogue of malformed messages: bodies that are not JSON, tensors that are not valid.

Knows bytes of HTTP and messages of gRPC. Everything here must be refused, by Triton or by a model.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl_check.bad_inputs import Expected
from minisgl_check.raw_calls import GENERATE, grpc_message

_GOOD: Final = {"text_input": "Hello", "max_tokens": 2}
_GOOD_BODY: Final = json.dumps(_GOOD).encode()
_JSON: Final = {"Content-Type": "application/json"}
_TEXT_TENSOR: Final = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hello"]}
_NUMBER_TENSOR: Final = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [2]}
_TENSORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "no values": {"data": []},
    "two values for one": {"data": [2, 3]},
    "a value in three lists": {"data": [[[2]]], "shape": [1, 1, 1]},
    "a text for a number": {"data": ["2"]},
    "2^63": {"data": [2**63]},
    "a dimension of -1": {"shape": [-1]},
    "a dimension of 2^62": {"shape": [2**62]},
    "a dimension of 2^64": {"shape": [2**64]},
    "dimensions of 2^66": {"shape": [2**33, 2**33]},
    "a negative size in bytes": {"parameters": {"binary_data_size": -4}},
    "2^62 bytes": {"parameters": {"binary_data_size": 2**62}},
    "shared memory": {"parameters": {"shared_memory_region": "x", "shared_memory_byte_size": 4}},
}
"""Inputs in JSON, as Triton's own clients send them."""


@dataclass(frozen=True, slots=True)
class Body:
    """An HTTP request, byte by byte; a body in pieces is sent in chunks."""

    name: str
    content: bytes | Iterable[bytes]
    path: str = GENERATE
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    expected: Expected = Expected.TRITON


def bodies() -> Iterator[Body]:
    """All HTTP requests that must be refused, or survived."""
    for name, content in BODIES.items():
        yield Body(name, content)
    packed = {"Content-Encoding": "gzip"}
    bomb = gzip.compress(b'{"text_input": "' + b"a" * 2**25 + b'"}')
    yield Body("a body that says it is gzip", _GOOD_BODY, headers=packed)
    yield Body("33 MB in a small gzip", bomb, headers=packed)
    yield Body("a wrong method", b"", method="PUT")
    yield Body("a length beyond the body's JSON", _GOOD_BODY, headers={"Content-Length": "10"})
    closed = Expected.CLOSED
    yield Body("a negative length", b"", headers={"Content-Length": "-1"}, expected=closed)
    yield Body("a length that is a word", b"", headers={"Content-Length": "x"}, expected=closed)
    yield Body("a header of a megabyte", _GOOD_BODY, headers={"x": "y" * 2**20}, expected=closed)
    pieces = [_GOOD_BODY, *[b" "] * 20_000]
    yield Body("20,000 chunks of one byte", pieces, expected=Expected.SURVIVED)
    for name, label in (("of a megabyte", "x" * 2**20), ("of two lines", "a\n\x1b[31m../b")):
        body = json.dumps({**_GOOD, "id": label}).encode()
        yield Body(f"a request id {name}", body, expected=Expected.ANSWER)
    yield largest()
    infer = "/v2/models/minisgl/infer"
    for name, change in _TENSORS.items():
        body = json.dumps({"inputs": [_TEXT_TENSOR, {**_NUMBER_TENSOR, **change}]}).encode()
        yield Body(f"a tensor of {name}", body, path=infer)
    long = {"Inference-Header-Content-Length": "99999999999"}
    yield Body("a JSON part longer than the body", _GOOD_BODY, path=infer, headers=long)
    for model in ("unknown", "", "..%2f..%2fx", "%00", "x" * 200, "minisgl%3Bls"):
        yield Body(f"the model {model[:16]}", _GOOD_BODY, path=f"/v2/models/{model}/generate")
    for version in ("7", "-1", "x"):
        path = f"/v2/models/minisgl/versions/{version}/generate"
        yield Body(f"the version {version}", _GOOD_BODY, path=path)
    for path in _OPERATORS:
        yield Body(f"an operator's {path}", b"{}", path=path)


def largest() -> Body:
    """The request that takes the most memory in Triton."""
    return Body("65 MB", b'{"text_input": "' + b"a" * 65_000_000 + b'"}', headers=_JSON)


BODIES: Final[Mapping[str, bytes]] = {
    "an empty body": b"",
    "no JSON": b"{",
    "a list": b"[1]",
    "a number": b"7",
    "junk after the JSON": _GOOD_BODY + b"junk",
    "UTF-16": _GOOD_BODY.decode().encode("utf-16"),
    "a key twice": b'{"text_input": "a", "text_input": "b"}',
    "NaN": b'{"text_input": "x", "temperature": NaN}',
    "Infinity": b'{"text_input": "x", "temperature": Infinity}',
    "1e999": b'{"text_input": "x", "temperature": 1e999}',
    "a number of 5,000 digits": b'{"text_input": "x", "seed": ' + b"9" * 5000 + b"}",
    "no UTF-8": b'{"text_input": "\xff\xfe"}',
    "half a surrogate": b'{"text_input": "\\ud800"}',
    "nested 100,000 deep": b'{"a": ' * 10**5 + b"1" + b"}" * 10**5,
}
"""Malformed JSON."""
_OPERATORS: Final = (
    "/v2/repository/index",
    "/v2/repository/models/minisgl/unload",
    "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/x/register",
    "/v2/trace/setting",
    "/v2/logging",
)
"""Paths that need the operator's key."""


Change = Callable[[Any], Any]


def messages() -> Iterator[tuple[str, bytes]]:
    """All gRPC messages that must be refused."""
    for name, change in _CHANGES.items():
        message = grpc_message(_GOOD)
        change(message)
        yield name, message.SerializeToString()
    yield "no message at all", b""
    yield "a message without tensors", _named("minisgl")
    yield "an unknown model", _named("unknown")
    yield "a model outside", _named("../x")
    yield "a model's name of 300 letters", _named("x" * 300)
    for version in ("7", "-1", "x"):
        yield f"the version {version}", _named("minisgl", version)


def odd_messages() -> Iterator[tuple[str, bytes]]:
    """gRPC messages that are odd but valid: ids are the callers' own, and Triton's timeout is
    unsigned."""
    labels = {"of a megabyte": "x" * 2**20, "of two lines": "a\n\x1b[31m../b", "a zero": "\0"}
    for name, label in labels.items():
        yield f"a request id {name}", grpc_message(_GOOD, request_id=label).SerializeToString()
    message = grpc_message(_GOOD)
    message.parameters["timeout"].int64_param = -1
    yield "a negative timeout", message.SerializeToString()


def _named(model: str, version: str = "") -> bytes:
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    data: bytes = message.SerializeToString()
    return data


def _tensor(index: int, **fields: Any) -> Change:
    def change(message: Any) -> None:
        tensor = message.inputs[index]
        for name, value in fields.items():
            if name == "shape":
                del tensor.shape[:]
                tensor.shape.extend(value)
            else:
                setattr(tensor, name, value)

    return change


def _content(index: int, content: bytes) -> Change:
    def change(message: Any) -> None:
        message.raw_input_contents[index] = content

    return change


def _add(name: str, datatype: str, shape: list[int], content: bytes) -> Change:
    def change(message: Any) -> None:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(content)

    return change


def _shared_memory(message: Any) -> None:
    del message.raw_input_contents[:]
    parameters = message.inputs[0].parameters
    parameters["shared_memory_region"].string_param = "triton_python_backend_shm_region_0"
    parameters["shared_memory_byte_size"].int64_param = 16


def _without_contents(message: Any) -> None:
    del message.raw_input_contents[:]


def _parameter(name: str) -> Change:
    def change(message: Any) -> None:
        message.parameters[name].int64_param = 1

    return change


_ONE: Final = struct.pack("<i", 1)
_CHANGES: Final[Mapping[str, Change]] = {
    "an unknown tensor": _add("nonsense", "INT32", [1], _ONE),
    "a tensor twice": _add("max_tokens", "INT32", [1], _ONE),
    "a tensor between the models": _add("_request", "BYTES", [1], _ONE),
    "the wrong type": _tensor(0, datatype="INT32"),
    "no such type": _tensor(0, datatype="FP128"),
    "two dimensions": _tensor(0, shape=[1, 1]),
    "no dimension": _tensor(0, shape=[]),
    "a dimension of 0": _tensor(1, shape=[0]),
    "a dimension of -1": _tensor(1, shape=[-1]),
    "a dimension of 2^62": _tensor(1, shape=[2**62]),
    "two values for one": _tensor(1, shape=[2]),
    "fewer bytes than the shape": _content(1, b"\x01"),
    "more bytes than the shape": _content(1, _ONE * 2),
    "no bytes": _content(1, b""),
    "a string longer than its tensor": _content(0, struct.pack("<I", 2**31) + b"x"),
    "a string without its length": _content(0, b"x"),
    "two strings for one": _content(0, (struct.pack("<I", 1) + b"x") * 2),
    "a string that is no UTF-8": _content(0, struct.pack("<I", 2) + b"\xff\xfe"),
    "no contents": _without_contents,
    "a parameter of Triton's": _parameter("triton_nonsense"),
    "a parameter between the models": _parameter("_request"),
    "a region of shared memory": _shared_memory,
}
