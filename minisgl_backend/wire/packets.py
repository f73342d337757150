"""llm_engine -> detokenizer: packets of a stream's tokens.

A packet is JSON in the tensor ``chunk``:

    {"r": reply_to, "s": key, "i": index, "o": [token id, ...]}    a common packet
    no "o"              no tokens, as in a probe
    "d": {...}          with index 0: what the detokenizer must know about the stream
    "c": int            once: number of prompt tokens found in the cache
    "l": [[logprob, rank, [[token id, logprob], ...]], ...]  one per token
    "p": [number of alternatives, base64]    log-probabilities of the next tokens of the prompt
    "v": base64    the embedding: little-endian float32
    "f": [reason] or [reason, stop token id]                 the sample's end
    "m": [{"n": sample, "o": ..., "l": ..., "f": ...}, ...]  the same for the other samples
    "z": 1                                                   the last packet: all samples have ended
    "e": [code, message]                                     the last packet, of a failed request
    "t": [arrival, first scheduled, first token, last token] in ns since 1970, if asked for

Outside of "m", "o", "l" and "f" are those of the first sample. Prompts can be long, so "p" has the
bytes of a ``PromptLogprobs``.

A packet is a single tensor with short keys because every response pays for it: each further tensor,
and each string in one, would cost more than this text. Clients can call the detokenizer directly,
so decoding trusts nothing. The detokenizer acknowledges packets (``acks``). Must not know when a
packet is due, or what carries it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from minisgl_backend.errors import (
    Cancelled,
    EngineFailure,
    InvalidRequest,
    MiniSGLError,
    Overloaded,
    Unsupported,
)
from minisgl_backend.request import (
    MAX_SAMPLES,
    Finished,
    FinishReason,
    FloatArray,
    PromptLogprobs,
    TokenId,
    TokenLogprobs,
)
from minisgl_backend.wire.generation import NOTHING, Generation, Wanted

_MOST_LOGPROB: Final = 1e30
"""float32 can hold this, and sums of such numbers."""
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_ERRORS: Final[Mapping[str, type[MiniSGLError]]] = {
    error.code: error
    for error in (InvalidRequest, Unsupported, Overloaded, Cancelled, EngineFailure)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStart:
    """What the detokenizer must know about a stream.

    There are ``num_samples``; the ``n`` most likely are the answer. ``stop_token_ids`` end
    the request and have no text; other special tokens have one unless ``skip_special_tokens``.
    ``prompt_text`` is set if the answer starts with the prompt.
    """

    num_input_tokens: int
    stream: bool = False
    wanted: Wanted = NOTHING
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    prompt_text: str | None = None
    skip_special_tokens: bool = True
    num_samples: int = 1
    n: int = 1

    @classmethod
    def of(
        cls,
        generation: Generation,
        *,
        num_input_tokens: int,
        eos_token_ids: tuple[TokenId, ...],
    ) -> StreamStart:
        """The start of a generation's stream; ``eos_token_ids`` are the model's own."""
        sampling = generation.sampling
        # as ``EngineBase`` does; tokens that end the request have no text, special or not
        own = () if sampling.ignore_eos else eos_token_ids
        return cls(
            num_input_tokens=num_input_tokens,
            stream=generation.stream,
            wanted=generation.wanted,
            stop_strings=generation.stop_strings,
            min_tokens=sampling.min_tokens,
            stop_token_ids=(*sampling.stop_token_ids, *own),
            prompt_text=generation.prompt_text,
            skip_special_tokens=generation.skip_special_tokens,
            num_samples=generation.best_of,
            n=generation.n,
        )


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a request's events, in ns since 1970; 0 if one has not happened."""

    arrival_time_ns: int
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """New tokens of one sample, and ``finish`` if these are its last. ``logprobs`` has one entry
    per token, if they were asked for."""

    token_ids: Sequence[TokenId] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: Finished | None = None
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Packet:
    """Tokens of a stream, with everything that belongs to them.

    ``reply_to`` is the path of the socket on which to acknowledge; it is empty in a packet for a
    direct client of ``llm_engine``, which is never encoded. ``key`` identifies the stream,
    ``index`` counts its packets from 0. ``deltas`` are of different samples. ``start`` is set if
    ``index`` is 0, ``num_cached_tokens`` once, in the first packet after it is known.
    ``prompt_logprobs`` continue those of earlier packets. In the last packet ``is_last`` is true:
    all samples have ended, or the request has failed with an ``error``. It also has the
    ``embedding``, if that was asked for.
    """

    reply_to: str
    key: int
    index: int
    deltas: Sequence[SampleDelta] = ()
    start: StreamStart | None = None
    num_cached_tokens: int | None = None
    is_last: bool = False
    error: MiniSGLError | None = None
    times: Times | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: FloatArray | None = None


def encode_packet(packet: Packet) -> bytes:
    """The JSON text of a packet."""
    body: dict[str, Any] = {"r": packet.reply_to, "s": packet.key, "i": packet.index}
    others = []
    for delta in packet.deltas:
        if delta.sample:
            others.append({"n": delta.sample, **_encode_delta(delta)})
        else:
            body |= _encode_delta(delta)
    if others:
        body["m"] = others
    if packet.start is not None:
        body["d"] = _encode_start(packet.start)
    if packet.num_cached_tokens is not None:
        body["c"] = packet.num_cached_tokens
    if (scored := packet.prompt_logprobs) is not None:
        text = base64.b64encode(scored.to_bytes()).decode()
        body["p"] = scored.alternatives.shape[1], text
    if packet.embedding is not None:
        body["v"] = base64.b64encode(packet.embedding.astype("<f4").tobytes()).decode()
    if (error := packet.error) is not None:
        body["e"] = (error.code, str(error))
    elif packet.is_last:
        body["z"] = 1
    if (times := packet.times) is not None:
        body["t"] = (
            times.arrival_time_ns,
            times.first_scheduled_time_ns,
            times.first_token_time_ns,
            times.last_token_time_ns,
        )
    return _encode(body).encode()


def _encode_delta(delta: SampleDelta) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if delta.token_ids:
        body["o"] = delta.token_ids
    if delta.logprobs:
        body["l"] = [(one.logprob, one.rank, one.alternatives) for one in delta.logprobs]
    if (finish := delta.finish) is not None:
        body["f"] = [finish.reason.value]
        if finish.stop_token_id is not None:
            body["f"].append(finish.stop_token_id)
    return body


def decode_packet(text: bytes) -> Packet:
    """The packet that a JSON text encodes; raises ``InvalidRequest`` if it encodes none."""
    try:
        body = json.loads(text.decode())
        if len(body) == 4 and body.get("o"):
            return Packet(
                _str(body["r"]),
                _unsigned(body["s"], 64),
                _unsigned(body["i"], 32),
                (SampleDelta(_ints(body["o"])),),
            )
        return _decode(body)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        raise InvalidRequest("chunk is not one that llm_engine sends") from None


def _decode(body: dict[str, Any]) -> Packet:
    deltas = [_decode_delta(body, 0)] if any(body.get(key) for key in ("o", "l", "f")) else []
    deltas += [_decode_delta(one, _sample(one["n"])) for one in body.get("m", ())]
    if len({one.sample for one in deltas}) < len(deltas):
        raise ValueError
    error = None
    if "e" in body:
        code, message = _str(body["e"][0]), _str(body["e"][1])
        error = _ERRORS.get(code, EngineFailure)(message)
    return Packet(
        reply_to=_str(body["r"]),
        key=_unsigned(body["s"], 64),
        index=_unsigned(body["i"], 32),
        deltas=deltas,
        start=_decode_start(body["d"]) if "d" in body else None,
        num_cached_tokens=_unsigned(body["c"], 32) if "c" in body else None,
        is_last=error is not None or "z" in body,
        error=error,
        times=Times(*(_int(moment) for moment in body["t"])) if "t" in body else None,
        prompt_logprobs=_decode_prompt_logprobs(*body["p"]) if "p" in body else None,
        embedding=_decode_embedding(body["v"]) if "v" in body else None,
    )


def _decode_delta(body: dict[str, Any], sample: int) -> SampleDelta:
    token_ids = _ints(body["o"]) if "o" in body else []
    logprobs = [_decode_logprobs(one) for one in body.get("l", ())]
    if logprobs and len(logprobs) != len(token_ids):
        raise ValueError
    finish = None
    if "f" in body:
        reason, *stop_token_id = body["f"]
        finish = Finished(FinishReason(reason), _int(stop_token_id[0]) if stop_token_id else None)
    return SampleDelta(token_ids, logprobs, finish, sample)


def _decode_logprobs(one: list[Any]) -> TokenLogprobs:
    logprob, rank, alternatives = one
    pairs = tuple((_int(token_id), _logprob(value)) for token_id, value in alternatives)
    return TokenLogprobs(_logprob(logprob), _int(rank), pairs)


def _decode_prompt_logprobs(num_alternatives: Any, text: Any) -> PromptLogprobs:
    raw = base64.b64decode(_str(text), validate=True)
    return PromptLogprobs.from_bytes(raw, _unsigned(num_alternatives, 16))


def _decode_embedding(text: Any) -> FloatArray:
    return np.frombuffer(base64.b64decode(_str(text), validate=True), "<f4")


def _encode_start(start: StreamStart) -> dict[str, Any]:
    body: dict[str, Any] = {"n": start.num_input_tokens}
    if start.stream:
        body["stream"] = True
    if start.wanted != NOTHING:
        body["wanted"] = start.wanted.names()
    if start.stop_strings:
        body["stop"] = start.stop_strings
    if start.min_tokens:
        body["min"] = start.min_tokens
    if start.stop_token_ids:
        body["ids"] = start.stop_token_ids
    if start.prompt_text is not None:
        body["prompt"] = start.prompt_text
    if not start.skip_special_tokens:
        body["special"] = True
    if start.num_samples != 1:
        body["samples"] = (start.num_samples, start.n)
    return body


def _decode_start(body: dict[str, Any]) -> StreamStart:
    prompt = body.get("prompt")
    num_samples, n = body.get("samples", (1, 1))
    if not 1 <= _int(n) <= _int(num_samples) <= MAX_SAMPLES:
        raise ValueError
    return StreamStart(
        num_input_tokens=_unsigned(body["n"], 32),
        stream=bool(body.get("stream", False)),
        wanted=Wanted(**{_str(name): True for name in body["wanted"]})
        if "wanted" in body
        else NOTHING,
        stop_strings=tuple(_str(text) for text in body.get("stop", ()) if text != ""),
        min_tokens=_int(body.get("min", 0)),
        stop_token_ids=tuple(_int(token_id) for token_id in body.get("ids", ())),
        prompt_text=None if prompt is None else _str(prompt),
        skip_special_tokens=not body.get("special", False),
        num_samples=num_samples,
        n=n,
    )


def _int(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError
    return value


def _unsigned(value: Any, num_bits: int) -> int:
    if type(value) is not int or not 0 <= value < 2**num_bits:
        raise TypeError
    return value


def _sample(value: Any) -> int:
    """The index of a sample, which must not be the first."""
    if not 0 < _int(value) < MAX_SAMPLES:
        raise ValueError
    return int(value)


def _logprob(value: Any) -> float:
    number = float(value)
    if not (abs(number) <= _MOST_LOGPROB or number == -math.inf):
        raise ValueError
    return number


def _ints(values: Any) -> list[int]:
    if type(values) is not list:
        raise TypeError
    return [_int(value) for value in values]


def _str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    value.encode()  # a lone surrogate is a UnicodeError, which is a ValueError
    return value
