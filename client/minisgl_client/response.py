"""The server's responses -> ``Delta``, one for each sample: tensors of gRPC, JSON events of HTTP.

Both first become lists of values by output name. Every response passes through here, so gRPC's
messages are read in place. Raises the error that a response holds. Must not know connections, or
what a caller does with an answer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final

from minisgl_client.answer import (
    ChatFormat,
    Delta,
    LoraAdapter,
    Times,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
)
from minisgl_client.errors import ServerError, error_from
from minisgl_client.wire import ADAPTER_LIST, OUTPUTS, TOKENIZER_OUTPUTS


def deltas_of_message(message: Any) -> list[Delta]:
    """The deltas of a ``ModelStreamInferResponse``, by sample."""
    values = {}
    for name, raw in _outputs(message):
        if (read := _READ.get(name)) is not None:
            values[name] = read(raw)
    return _deltas(values)


def deltas_of_event(event: Mapping[str, Any]) -> list[Delta]:
    """The deltas of an event of ``/generate_stream``, given as JSON."""
    return _deltas(_lists(_checked(event), _READ))


def _outputs(message: Any) -> Iterable[tuple[str, bytes]]:
    """The tensors of a message by name. Raises the error that it holds."""
    if message.error_message:
        raise error_from(message.error_message)
    response = message.infer_response
    names = [output.name for output in response.outputs]
    return zip(names, response.raw_output_contents, strict=True)


def _checked(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of an answer in JSON. Raises the error that they hold."""
    if "error" in fields:
        raise error_from(str(fields["error"]))
    return fields


def _lists(fields: Mapping[str, Any], names: Container[str]) -> dict[str, list[Any]]:
    """The outputs among ``fields``. Triton writes a list of one item as just the item."""
    return {
        name: value if isinstance(value, list) else [value]
        for name, value in fields.items()
        if name in names
    }


def _strings(raw: bytes) -> Sequence[str]:
    """The strings in a tensor; each follows its length."""
    found = []
    begin = 0
    while begin < len(raw):
        end = begin + 4 + int.from_bytes(raw[begin : begin + 4], "little")
        found.append(raw[begin + 4 : end].decode())
        begin = end
    return found


_TYPES: Final[Mapping[str, Callable[[bytes], Sequence[Any]]]] = {
    "BYTES": _strings,
    "INT32": lambda raw: struct.unpack(f"<{len(raw) // 4}i", raw),
    "UINT32": lambda raw: struct.unpack(f"<{len(raw) // 4}I", raw),
    "INT64": lambda raw: struct.unpack(f"<{len(raw) // 8}q", raw),
    "FP32": lambda raw: struct.unpack(f"<{len(raw) // 4}f", raw),
}
_UNFINISHED: Final = "None"
"""The finish reason of an answer that goes on."""
_TWICE: Final = frozenset({"cum_log_probs", "output_log_probs"})
"""Outputs that repeat what others say."""
_READ: Final = {name: _TYPES[datatype] for name, datatype in OUTPUTS.items() if name not in _TWICE}
"""By output: how its elements are read."""


def _deltas(values: Mapping[str, Sequence[Any]]) -> list[Delta]:
    """One delta per sample. What is about the prompt, which they share, is in all of them."""
    texts = values.get("text_output", ())
    if not texts:
        raise ServerError("the model answered without text_output, so it is none for texts")
    nothing = (None,) * len(texts)
    get = values.get
    try:
        (num_input_tokens,) = get("num_input_tokens", (None,))
        (num_cached_tokens,) = get("num_cached_tokens", (None,))
        (prompt_logprobs,) = get("prompt_logprobs", ("[]",))
        of_prompt = tuple(one and _position(one) for one in json.loads(prompt_logprobs))
        times = _times(values) if "arrival_time_ns" in values else None
        return [
            Delta(
                text,
                None if finish_reason == _UNFINISHED else finish_reason,
                json.loads(stop_reason) if stop_reason else None,
                num_input_tokens,
                num_output_tokens,
                num_cached_tokens,
                tuple(map(_position, json.loads(logprobs) or ())) if logprobs else (),
                cumulative_logprob,
                times,
                of_prompt,
                tuple(get("embedding") or ()),
                sample,
            )
            for sample, (
                text,
                finish_reason,
                stop_reason,
                num_output_tokens,
                logprobs,
                cumulative_logprob,
            ) in enumerate(
                zip(
                    texts,
                    get("finish_reason", nothing),
                    get("stop_reason", nothing),
                    get("num_output_tokens", nothing),
                    get("logprobs", nothing),
                    get("cumulative_logprob", nothing),
                    strict=True,
                )
            )
        ]
    except ValueError:
        raise ServerError("the model's outputs do not fit each other") from None


def _position(table: Mapping[str, Mapping[str, Any]]) -> TokenLogprobs:
    """One token's entry: {token id: {logprob, rank, decoded_token, bytes}}, the chosen one first.
    Only texts with U+FFFD come with their bytes."""
    chosen, *others = (
        TokenLogprob(
            int(token_id),
            text := entry["decoded_token"],
            entry["logprob"],
            entry["rank"],
            bytes(told) if (told := entry.get("bytes")) else _utf8(text),
        )
        for token_id, entry in table.items()
    )
    return TokenLogprobs(chosen, tuple(others))


def _utf8(text: str) -> bytes | None:
    return None if "\ufffd" in text else text.encode()


def _times(values: Mapping[str, Sequence[int]]) -> Times:
    return Times(
        arrival_ns=values["arrival_time_ns"][0],
        first_scheduled_ns=values["first_scheduled_time_ns"][0],
        first_token_ns=values["first_token_time_ns"][0],
        last_token_ns=values["last_token_time_ns"][0],
    )


def tokens_of_message(message: Any) -> Tokens:
    """What the tokenizer says in a ``ModelStreamInferResponse``."""
    return _tokens(
        {
            name: _TYPES[TOKENIZER_OUTPUTS[name]](raw)
            for name, raw in _outputs(message)
            if name in TOKENIZER_OUTPUTS
        }
    )


def tokens_of_json(fields: Mapping[str, Any]) -> Tokens:
    """The same in its answer to ``/generate``."""
    return _tokens(_lists(_checked(fields), TOKENIZER_OUTPUTS))


def adapters_of_message(message: Any) -> tuple[LoraAdapter, ...]:
    """What the engine answers to an order about adapters in a ``ModelStreamInferResponse``."""
    found = [_strings(raw)[0] for name, raw in _outputs(message) if name == ADAPTER_LIST]
    return _adapters(found[0] if found else None)


def adapters_of_json(fields: Mapping[str, Any]) -> tuple[LoraAdapter, ...]:
    """The same in the answer of ``/generate``."""
    return _adapters(_checked(fields).get(ADAPTER_LIST))


def _adapters(text: str | None) -> tuple[LoraAdapter, ...]:
    if text is None:
        raise ServerError("the model that was asked for adapters is no engine of this version")
    return tuple(LoraAdapter(entry["name"], entry["path"]) for entry in json.loads(text))


def _tokens(found: Mapping[str, Sequence[Any]]) -> Tokens:
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


class EventReader:
    """Reads Triton's server-sent events from bytes as they come."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """The beginning of a line, in pieces: an event with logprobs may have hundreds of them."""

    def feed(self, data: bytes) -> list[bytes]:
        """The JSON of the events that are complete with these bytes."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest.clear()
        self._rest.append(rest)
        return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object that Triton sent; raises ``ServerError`` if it is not one."""
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError("what the server sent is not the JSON of Triton")
    return found
