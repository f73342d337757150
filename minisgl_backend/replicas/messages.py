"""What a replica and its parent tell each other: JSON objects, each preceded by its length.

From the parent, the process that starts the replicas:

    {"options": {...}}                     at the start
    {"p": prompt, "s": {...}, ...}         a request, with the ids of all its samples and the
                                           sampling parameters that are not as usual
    {"abort": ["f" or "e", id, ...]}       end a request with this event, which is as in updates
    {"load": [id, name, path]}             make an adapter known; the answer is an update
    {"unload": name}                       forget it

From the replica:

    {"info": {...}, "stats": {...}} or {"error": text}   whether it has started
    {"updates": [...], "stats": {...}}     what has happened, in order
    {"pulse": age, "stats": {...}}         a sign of life, a few times a second without updates

Either has "observations", what histograms are made of, a few times a second.

Updates are lists. Most of them are about tokens, and must be small: the tokens of many requests
are one update.

    ["t", ids, [tokens, ...]]              common tokens of each of these requests
    ["g", id, token, last, logprobs]       a token that is the last, or has log-probabilities
    ["a", id, cached]  ["p", id, ...]  ["v", id, ...]  ["f", id, ...]  ["e", id, ...]
                                           the other events: ``Admitted``, ``PromptLogprobs``,
                                           ``Embedded``, ``Finished``, ``Failed``
    ["+", keys, pages]  ["-", pages]  ["0"]   the replica's cache: ``TreeReports``
    ["h+", keys, slots]  ["h-", slots]     ... and main memory
    ["l", id, facts]  ["l", id, error]     an adapter is loaded, or cannot be

Arrays are base64 of their bytes, except keys, pages and slots. Both sides are of the same release,
run on the same machine and trust each other: decoding checks nothing. Of sockets it knows only how
messages are framed; must not know who sends what, or when.
"""

from __future__ import annotations

import base64
import json
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from minisgl_backend import errors
from minisgl_backend.errors import EngineFailure, MiniSGLError
from minisgl_backend.request import (
    Adapter,
    AdapterFacts,
    Admitted,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    Grammar,
    GrammarKind,
    PromptLogprobs,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.runtime.recorder import EngineStats, Observations
from minisgl_backend.scheduling.report import SchedulerStats

Message: TypeAlias = Mapping[str, Any]
Update: TypeAlias = list[Any]

_USUAL: Final = MappingProxyType({spec.name: spec.default for spec in fields(SamplingParams)})
"""The values of sampling parameters that a request leaves out."""
_LENGTH: Final = struct.Struct("<Q")
_AT_ONCE: Final = 2**16
"""The most bytes read at a time."""
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_ERRORS: Final[Mapping[str, type[MiniSGLError]]] = MappingProxyType(
    {
        error.__name__: error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, MiniSGLError)
    }
)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message. Raises ``OSError`` if the other side is gone."""
    content = _encode(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


class Incoming:
    """The messages that come from the other side of a connection, which must be blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._bytes = bytearray()
        self._arrived = memoryview(bytearray(_AT_ONCE))

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None if the other side is gone.

        Raises ``TimeoutError`` if nothing comes for ``timeout_s``.
        """
        while (message := self._taken()) is None:
            if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
                raise TimeoutError
            try:
                num_received = self._connection.recv_into(self._arrived)
            except OSError:
                return None
            if not num_received:
                return None
            self._bytes += self._arrived[:num_received]
        return message

    def _taken(self) -> Message | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        message: Message = json.loads(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return message


# --- requests --------------------------------------------------------------------------------


def encode_request(request: Request, ids: Sequence[RequestId]) -> Message:
    """A request, and the ids of all its samples, its own first."""
    adapter, sampling = request.adapter, request.sampling
    said = {
        name: value
        for name, default in _USUAL.items()
        if (value := getattr(sampling, name)) != default
    }
    if sampling.grammar is not None:
        said["grammar"] = asdict(sampling.grammar)
    return {
        "ids": list(ids),
        "p": _bytes(request.prompt),
        "s": said,
        "priority": request.priority,
        "deadline_s": request.deadline_s,
        "salt": request.cache_salt,
        "label": request.label,
        "adapter": None if adapter is None else astuple(adapter),
    }


def decode_request(message: Message) -> tuple[Request, list[RequestId]]:
    """What ``encode_request`` was given."""
    sampling = dict(message["s"])
    if (grammar := sampling.get("grammar")) is not None:
        sampling["grammar"] = Grammar(**{**grammar, "kind": GrammarKind(grammar["kind"])})
    if "logit_bias" in sampling:
        sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
    if "stop_token_ids" in sampling:
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    adapter = None
    if message["adapter"] is not None:
        adapter_id, name, path, facts = message["adapter"]
        adapter = Adapter(adapter_id, name, path, AdapterFacts(*facts))
    request = Request(
        id=message["ids"][0],
        prompt=_array(message["p"], np.int32),
        sampling=SamplingParams(**sampling),
        priority=message["priority"],
        deadline_s=message["deadline_s"],
        cache_salt=message["salt"],
        label=message["label"],
        adapter=adapter,
    )
    return request, list(map(RequestId, message["ids"]))


# --- events ----------------------------------------------------------------------------------


def encode_event(request_id: RequestId, event: Event) -> Update:
    """The update about an event; the ``Gatherer`` makes smaller ones of common tokens."""
    if isinstance(event, Generated):
        one = event.logprobs
        logprobs = None if one is None else [one.logprob, one.rank, one.alternatives]
        return ["g", request_id, event.token_id, event.is_last, logprobs]
    if isinstance(event, Admitted):
        return ["a", request_id, event.num_cached_tokens]
    if isinstance(event, PromptLogprobs):
        text = base64.b64encode(event.to_bytes()).decode()
        return ["p", request_id, event.alternatives.shape[1], text]
    if isinstance(event, Embedded):
        return ["v", request_id, _bytes(event.vector)]
    if isinstance(event, Finished):
        return ["f", request_id, event.reason.value, event.stop_token_id]
    return ["e", request_id, type(event.error).__name__, str(event.error)]


def decode_event(update: Update) -> Event:
    """What ``encode_event`` was given."""
    return _EVENTS[update[0]](*update[2:])


def _decode_token(token_id: int, is_last: bool, logprobs: list[Any] | None) -> Generated:
    if logprobs is None:
        return Generated(token_id, is_last=is_last)
    logprob, rank, alternatives = logprobs
    found = TokenLogprobs(logprob, rank, tuple((token, value) for token, value in alternatives))
    return Generated(token_id, found, is_last)


def _decode_prompt_logprobs(num_alternatives: int, text: str) -> PromptLogprobs:
    return PromptLogprobs.from_bytes(base64.b64decode(text), num_alternatives)


def _decode_finished(reason: str, stop_token_id: int | None) -> Finished:
    return Finished(FinishReason(reason), stop_token_id)


def _decode_failed(kind: str, text: str) -> Failed:
    return Failed(_ERRORS.get(kind, EngineFailure)(text))


_EVENTS: Final[Mapping[str, Callable[..., Event]]] = MappingProxyType(
    {
        "g": _decode_token,
        "a": Admitted,
        "p": _decode_prompt_logprobs,
        "v": lambda text: Embedded(_array(text, np.float32)),
        "f": _decode_finished,
        "e": _decode_failed,
    }
)


# --- how the replica is ----------------------------------------------------------------------


def encode_info(info: EngineInfo) -> Message:
    """To be decoded by ``decode_info``."""
    return asdict(info)


def decode_info(message: Message) -> EngineInfo:
    """What ``encode_info`` was given."""
    return EngineInfo(**{**message, "eos_token_ids": tuple(message["eos_token_ids"])})


def encode_stats(stats: EngineStats) -> Message:
    """To be decoded by ``decode_stats``."""
    return {**_shallow(stats), "scheduler": _shallow(stats.scheduler)}


def decode_stats(message: Message) -> EngineStats:
    """What ``encode_stats`` was given."""
    counts = message["scheduler"]
    by_right = tuple(counts["num_checks_by_right"])
    scheduler = SchedulerStats(**{**counts, "num_checks_by_right": by_right})
    return EngineStats(**{**message, "scheduler": scheduler})


def encode_observations(observations: Observations) -> Message:
    """To be decoded by ``decode_observations``."""
    return {spec.name: list(getattr(observations, spec.name)) for spec in fields(observations)}


def decode_observations(message: Message) -> Observations:
    """What ``encode_observations`` was given."""
    observations = Observations()
    for spec in fields(observations):
        values = message[spec.name]
        getattr(observations, spec.name).extend(
            tuple(value) if isinstance(value, list) else value for value in values
        )
    return observations


def _shallow(value: EngineStats | SchedulerStats) -> dict[str, Any]:
    """Like ``asdict``, but without copies, since each step needs it."""
    return {spec.name: getattr(value, spec.name) for spec in fields(value)}


def _bytes(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _array(text: str, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), kind)
