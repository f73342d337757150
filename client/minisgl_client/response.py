"""The server's responses -> ``Delta``: tensors of gRPC, JSON events of HTTP.

Both become values by output name first. On the path of every response: gRPC's messages are read in
place. Raises the error that a response holds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from minisgl_client.answer import (
    ChatFormat,
    Delta,
    Times,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
)
from minisgl_client.errors import ServerError, error_from
from minisgl_client.wire import OUTPUTS, TOKENIZER_OUTPUTS


def delta_of_message(message: Any) -> Delta:
    """The delta of a ``ModelStreamInferResponse``."""
    if message.error_message:
        raise error_from(message.error_message)
    response = message.infer_response
    values = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        name = output.name
        if (read := _READ.get(name)) is not None:
            values[name] = read(raw)
    return _delta(values)


def delta_of_event(event: Mapping[str, Any]) -> Delta:
    """The delta of an event of ``/generate_stream``, as its JSON says."""
    if "error" in event:
        raise error_from(str(event["error"]))
    return _delta(event)


_TYPES: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "BYTES": lambda raw: raw[4:].decode(),  # behind its length
    "UINT32": lambda raw: int.from_bytes(raw, "little"),
    "INT64": lambda raw: int.from_bytes(raw, "little", signed=True),
    "FP32": lambda raw: struct.unpack("<f", raw)[0],
}
_UNFINISHED: Final = "None"
"""The finish reason of an answer that goes on."""
_TWICE: Final = frozenset({"cum_log_probs", "output_log_probs"})
"""Outputs that say what others say too."""
_READ: Final[Mapping[str, Callable[[bytes], Any]]] = {
    **{name: _TYPES[datatype] for name, datatype in OUTPUTS.items() if name not in _TWICE},
    "embedding": lambda raw: struct.unpack(f"<{len(raw) // 4}f", raw),
}
"""By output: how its one element is read, or how all of its elements are."""


def _delta(values: Mapping[str, Any]) -> Delta:
    if "text_output" not in values:
        raise ServerError("the model answered without text_output, so it is none for texts")
    get = values.get
    finish_reason, stop_reason, logprobs = get("finish_reason"), get("stop_reason"), get("logprobs")
    prompt_logprobs = get("prompt_logprobs")
    return Delta(
        values["text_output"],
        None if finish_reason == _UNFINISHED else finish_reason,
        json.loads(stop_reason) if stop_reason else None,
        get("num_input_tokens"),
        get("num_output_tokens"),
        get("num_cached_tokens"),
        tuple(map(_position, json.loads(logprobs))) if logprobs else (),
        get("cumulative_logprob"),
        _times(values) if "arrival_time_ns" in values else None,
        tuple(one and _position(one) for one in json.loads(prompt_logprobs))
        if prompt_logprobs
        else (),
        tuple(get("embedding") or ()),
    )


def _position(table: Mapping[str, Mapping[str, Any]]) -> TokenLogprobs:
    """One token's entry: {token id: {logprob, rank, decoded_token}}, the chosen one first."""
    chosen, *others = (
        TokenLogprob(int(token_id), entry["decoded_token"], entry["logprob"], entry["rank"])
        for token_id, entry in table.items()
    )
    return TokenLogprobs(chosen, tuple(others))


def _times(values: Mapping[str, int]) -> Times:
    return Times(
        arrival_ns=values["arrival_time_ns"],
        first_scheduled_ns=values["first_scheduled_time_ns"],
        first_token_ns=values["first_token_time_ns"],
        last_token_ns=values["last_token_time_ns"],
    )


def tokens_of_message(message: Any) -> Tokens:
    """What the tokenizer says in a ``ModelStreamInferResponse``."""
    if message.error_message:
        raise error_from(message.error_message)
    response = message.infer_response
    found: dict[str, list[Any]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if (datatype := TOKENIZER_OUTPUTS.get(output.name)) is not None:
            found[output.name] = list(_strings(raw) if datatype == "BYTES" else _integers(raw))
    return _tokens(found)


def tokens_of_json(fields: Mapping[str, Any]) -> Tokens:
    """What the tokenizer says to ``/generate``; Triton writes a list of one item as the item."""
    if "error" in fields:
        raise error_from(str(fields["error"]))
    return _tokens(
        {
            name: value if isinstance(value, list) else [value]
            for name, value in fields.items()
            if name in TOKENIZER_OUTPUTS
        }
    )


def _tokens(found: Mapping[str, list[Any]]) -> Tokens:
    if found.keys() != TOKENIZER_OUTPUTS.keys():
        raise ServerError("the model that was asked for tokens is no tokenizer of this version")
    return Tokens(
        ids=tuple(found["input_ids"]),
        strs=tuple(found["token_strs"]),
        text=found["text"][0],
        max_sequence_length=found["max_sequence_length"][0],
        chat_format=_chat_format(json.loads(found["chat_format"][0])),
    )


def _chat_format(fields: Mapping[str, Any] | None) -> ChatFormat | None:
    if fields is None:
        return None
    begin_and_end = fields["thinking"]
    return ChatFormat(
        tool_dialect=fields["tool_dialect"],
        tool_marks=frozenset(fields["tool_marks"]),
        thinking=None if begin_and_end is None else (begin_and_end[0], begin_and_end[1]),
        begins_thinking=fields["begins_thinking"],
        variables=frozenset(fields["variables"]),
    )


def _integers(raw: bytes) -> Iterator[int]:
    return (number for (number,) in struct.iter_unpack("<i", raw))


def _strings(raw: bytes) -> Iterator[str]:
    """Each stands behind its length."""
    begin = 0
    while begin < len(raw):
        end = begin + 4 + int.from_bytes(raw[begin : begin + 4], "little")
        yield raw[begin + 4 : end].decode()
        begin = end


class EventReader:
    """Server-sent events of Triton out of bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The JSON of the events that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object that Triton sent; raises ``ServerError`` if it is none."""
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError("what the server sent is not the JSON of Triton")
    return found
