"""Requests with every kind of end on one gRPC stream: each must end once, and be silent after that.

Knows Triton's flag for the last response, which client libraries keep to themselves.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl_client.client import Client
from minisgl_client.request import build

from minisgl_check.case import Case
from minisgl_check.raw_calls import GrpcCaller
from minisgl_check.target import Target

_PROMPT: Final = {"text_input": "What is the capital of Spain?", "temperature": 0.0}
_NUM_TOKENS: Final = 12
_WHOLE: Final = {**_PROMPT, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
_PIECES: Final = {**_WHOLE, "stream": True, "min_chunk_interval_ms": 0}
_LATE: Final = {**_PROMPT, "timeout_ms": 100, "ignore_eos": True}
_STOPPED: Final = "stopped"
_FATES: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "whole": (_WHOLE, "length"),
    "in pieces": (_PIECES, "length"),
    "of one token": ({**_PIECES, "max_tokens": 1}, "length"),
    "too late": (_LATE, "timeout"),
    "too late in pieces": ({**_LATE, "stream": True}, "timeout"),
    _STOPPED: ({**_PROMPT, "stream": True, "ignore_eos": True}, "cancelled"),
    "wrong": ({**_PROMPT, "temperature": -1.0}, "INVALID_ARG"),
    "not offered": ({**_PIECES, "echo": True}, "UNSUPPORTED"),
}
"""Requests, and how each must end: with a reason, or an error's code; a full server refuses."""
_REFUSED: Final = "UNAVAILABLE"
_NUM_TRIES: Final = 5
_UNFINISHED: Final = "None"
"""The finish reason of an answer that goes on."""


@dataclass(slots=True)
class _Responses:
    """The responses to one request; ``ends`` has reasons and codes, and must have exactly one."""

    text: bytes = b""
    num_tokens: int = 0
    ends: list[str] = field(default_factory=list)
    num_last: int = 0
    num_after: int = 0

    def add(self, response: Any) -> None:
        """Add a response (a ``ModelStreamInferResponse``)."""
        self.num_after += self.num_last > 0
        inner = response.infer_response
        self.num_last += inner.parameters["triton_final_response"].bool_param
        if response.error_message:
            code = re.search(r"([A-Z_]+): ", response.error_message)
            self.ends.append(code[1] if code else response.error_message)
        names = [output.name for output in inner.outputs]
        content = dict(zip(names, inner.raw_output_contents, strict=True))
        reason = content.get("finish_reason", b"")[4:].decode()  # skips its length
        if reason not in ("", _UNFINISHED):
            self.ends.append(reason)
        self.text += content.get("text_output", b"")[4:]
        self.num_tokens += struct.unpack("<I", content.get("num_output_tokens", bytes(4)))[0]


def endings(target: Target) -> Case:
    """Requests with all ends side by side; those that ask the same must get the same."""
    case = Case("each request ends once", len(_FATES))
    stats = target.stats()
    longest = min(int(stats.info["max_sequence_length"]), stats.num_positions) // 2
    for _ in range(_NUM_TRIES):
        responses = _responses(target, longest)
        if responses[_STOPPED].ends != ["length"]:
            break  # else its answer was complete before the stop came
    for fate, one in responses.items():
        case.ended[_kind_of(one.ends)] += 1
        case.expect(len(one.ends) == 1, f"{fate}: ended {len(one.ends)} times: {one.ends}")
        case.expect(one.num_last == 1, f"{fate}: {one.num_last} responses were the last")
        case.expect(not one.num_after, f"{fate}: {one.num_after} responses after the last")
        expected = {_FATES[fate][1], _REFUSED}
        case.expect(expected.issuperset(one.ends), f"{fate}: ended with {one.ends}")
        if one.ends == ["length"]:
            num_tokens = _FATES[fate][0]["max_tokens"]
            case.expect(one.num_tokens == num_tokens, f"{fate}: {one.num_tokens} tokens")
    whole, pieces = responses["whole"], responses["in pieces"]
    if whole.ends == pieces.ends == ["length"]:
        case.expect(whole.text == pieces.text, f"{pieces.text!r} in pieces is {whole.text!r} whole")
    case.what = ", ".join(f"{fate}: {'+'.join(one.ends)}" for fate, one in responses.items())
    return case


def _responses(target: Target, longest: int) -> dict[str, _Responses]:
    responses = {fate: _Responses() for fate in _FATES}
    grpc = GrpcCaller(target.grpc_address)
    try:
        with Client(target.grpc_address) as client:
            client.is_ready()  # connects
            for response in grpc.responses(_message(fate, longest) for fate in _FATES):
                fate = response.infer_response.id
                responses[fate].add(response)
                if fate == _STOPPED and not responses[fate].ends:
                    client.cancel(fate)
    finally:
        grpc.close()
    return responses


def _message(fate: str, longest: int) -> bytes:
    flag = {"triton_enable_empty_final_response": True}
    return build("minisgl", fate, {"max_tokens": longest, **_FATES[fate][0], **flag}).to_grpc(None)


def _kind_of(ends: list[str]) -> str:
    if ends == ["length"]:
        return "answered"
    return "cut" if ends in (["timeout"], ["cancelled"]) else "refused"
