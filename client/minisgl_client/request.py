"""A request: its values by name, and its encoding in each protocol.

``build`` refuses what the wire cannot represent (a bool for a number, a number of too many bits,
text that is not UTF-8) and leaves all other checks to the server. Must not know connections.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tritonclient.grpc import service_pb2

from minisgl_client.errors import InvalidArgument, short
from minisgl_client.wire import INPUTS, LISTS

ASKED: Final = {
    "return_finish_reason": True,
    "return_stop_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_num_cached_tokens": True,
}
"""What the clients ask for by default."""

_FORMATS: Final = {"BOOL": "?", "INT32": "i", "UINT64": "Q", "FP32": "f"}
"""The formats of ``struct`` by data type."""
_JSON: Final = frozenset(
    {
        "messages",
        "tools",
        "chat_template_kwargs",
        "logit_bias",
        "sampling_parameters",
        "structured_outputs",
    }
)
"""Inputs that hold JSON in a string."""


@dataclass(frozen=True, slots=True)
class Request:
    """``values`` are inputs of the ensemble by name; ``others`` have names unknown here."""

    model: str
    id: str
    values: Mapping[str, Any]
    others: Mapping[str, bool | int | float | str]

    def to_grpc(self, timeout_ms: int | None) -> bytes:
        """A serialized ``ModelInferRequest``; the deadline overrides the request's own."""
        message = service_pb2.ModelInferRequest(model_name=self.model, id=self.id)
        for name, value in _with_timeout(self.values, timeout_ms).items():
            items = value if name in LISTS else [value]
            message.inputs.add(name=name, datatype=INPUTS[name], shape=[len(items)])
            message.raw_input_contents.append(_raw(INPUTS[name], items))
        for name, other in self.others.items():
            parameter = message.parameters[name]
            if isinstance(other, bool):
                parameter.bool_param = other
            elif isinstance(other, int):
                parameter.int64_param = other
            elif isinstance(other, float):
                parameter.double_param = other
            else:
                parameter.string_param = other
        data: bytes = message.SerializeToString()
        return data

    def to_json(self, timeout_ms: int | None) -> bytes:
        """The body for ``/generate_stream``; the deadline overrides the request's own."""
        body = {**self.others, **_with_timeout(self.values, timeout_ms)}
        if self.id:
            body["id"] = self.id
        return json.dumps(body, ensure_ascii=False).encode()


def build(
    model: str, request_id: str, given: Mapping[str, Any], asked: Mapping[str, bool] = ASKED
) -> Request:
    """The request with these values by input name; None means absent, and so does an empty list,
    except for a prompt.

    It asks for ``asked``, unless the values say otherwise, and for logprobs if any of their names
    is given. Raises ``InvalidArgument``.
    """
    check_text("model", model)
    check_text("request_id", request_id)
    values: dict[str, Any] = {}
    others: dict[str, bool | int | float | str] = {}
    for name, value in {**asked, **given, **_asked_logprobs(given)}.items():
        if value is None or (value is False and name in ASKED):
            continue
        if name not in INPUTS:
            others[name] = _other(name, value)
        elif name not in LISTS:
            values[name] = _value(name, value)
        elif (items := [_value(name, item) for item in _items(value)]) or name == "input_ids":
            values[name] = items
    if values.get("timeout_ms", 1) < 1:
        raise InvalidArgument(f"timeout_ms must be >= 1, got {values['timeout_ms']}")
    return Request(model, request_id, values, others)


def _asked_logprobs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """On the wire ``return_logprobs`` asks for logprobs, ``num_logprobs`` sets their number."""
    number, flag = given.get("num_logprobs"), given.get("return_logprobs")
    if number is None and not flag and not given.get("return_log_probs"):
        return {}
    return {
        "num_logprobs": 0 if number is None else number,
        "return_logprobs": True if flag is None else flag,
    }


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _other(name: str, value: Any) -> bool | int | float | str:
    """The value of a name that only the server may know; a Triton parameter must be able to hold
    it."""
    check_text(f"the name {name!r}", name)
    if "\x00" in name:  # Triton would cut it off there, over HTTP
        raise InvalidArgument(f"unknown parameter {short(name)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidArgument(f"{name} must be an integer of 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"{name} must be finite, got {short(value)}")
    if isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else _json(name, value)
    check_text(name, text)
    return text


def _value(name: str, value: Any) -> Any:
    """The value in the Python type for its data type: str, bool, int or float."""
    datatype = INPUTS[name]
    if datatype == "BYTES":
        text = _json(name, value) if name in _JSON and not isinstance(value, str) else value
        check_text(name, text)
        return text
    if isinstance(value, bool) is (datatype == "BOOL"):
        try:
            number = float(value) if datatype == "FP32" else value
            struct.pack(f"<{_FORMATS[datatype]}", number)
            if not math.isfinite(number):
                raise InvalidArgument(f"{name} must be finite, got {short(value)}")
            return number if datatype in ("BOOL", "FP32") else int(number)
        except (TypeError, ValueError, OverflowError, struct.error):
            pass  # raises below
    raise InvalidArgument(f"{name} must be {_NOUNS[datatype]}, got {short(value)}")


def check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidArgument(f"{name} must be a string, got {short(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} must be valid UTF-8") from None


_NOUNS: Final = {
    "BOOL": "True or False",
    "INT32": "an integer of 32 bits",
    "UINT64": "an integer in 0 .. 2**64 - 1",
    "FP32": "a number of 32 bits",
}


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name} must be JSON: {error}") from None


def _with_timeout(values: Mapping[str, Any], timeout_ms: int | None) -> Mapping[str, Any]:
    return values if timeout_ms is None else {**values, "timeout_ms": timeout_ms}


def _raw(datatype: str, items: Sequence[Any]) -> bytes:
    """The elements as Triton lays them out: little-endian, each string after its length."""
    if datatype == "BYTES":
        texts = [item.encode() for item in items]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return struct.pack(f"<{len(items)}{_FORMATS[datatype]}", *items)
