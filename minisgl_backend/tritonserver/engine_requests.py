"""Triton's request -> the engine's requests, and the stream of responses.

Knows the two ways in and out of the model ``llm_engine``: the tokenizer's record, answered with
packets for the detokenizer, and token ids of a client that calls this model alone (*direct*),
answered with token ids. Must not know when anything is sent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import InvalidRequest
from minisgl_backend.generation_request import RequestTaker, request_of
from minisgl_backend.limits import Limits
from minisgl_backend.request import IntArray, Request, RequestId, samples_of
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.tritonserver.responder import Responder, error_response
from minisgl_backend.tritonserver.response_stream import ResponseStream
from minisgl_backend.tritonserver.tensors import (
    Arrays,
    checked_size,
    make_response,
    read_inputs,
    read_parameters,
)
from minisgl_backend.tritonserver.window import Window
from minisgl_backend.wire.answer import (
    NO_LOGPROBS,
    Answer,
    SampleAnswer,
    answer_arrays,
    most_likely,
    prompt_logprobs_json,
)
from minisgl_backend.wire.arrays import bytes_array
from minisgl_backend.wire.defaults import Defaults
from minisgl_backend.wire.entries import Tensor
from minisgl_backend.wire.gather import is_of_triton
from minisgl_backend.wire.generation import (
    AdapterOrder,
    Generation,
    Stopped,
    StopRequest,
    TokenPrompt,
)
from minisgl_backend.wire.packets import Packet, SampleDelta, StreamStart, encode_packet
from minisgl_backend.wire.parameters import CHUNK, INPUT_IDS, LORA_ORDER, REQUEST
from minisgl_backend.wire.parse import parse_adapter_order, parse_token_generation
from minisgl_backend.wire.record import decode_record
from minisgl_backend.wire.values import to_text

_STOP_STRINGS_EVERY_S: Final = 0.1
"""How often the tokens of a request that is answered only at its end are checked for stop strings.
"""

_DEADLINE: Final = "timeout_ms"
"""How long a client waits, which it may also tell beside an order about adapters."""


def read_request(
    request: Any, limits: Limits, defaults: Defaults
) -> tuple[Generation | StopRequest | Stopped | AdapterOrder, bool]:
    """Read Triton's request; returns it and whether it is direct: then it has these ``defaults``.
    Raises ``RequestError``."""
    arrival_time_ns = time.time_ns()
    inputs = read_inputs(request)
    parameters = read_parameters(request)
    checked_size(request, inputs, limits)
    order = _read_order(inputs, parameters)
    if order is not None:
        return order, True
    if REQUEST.name not in inputs:
        parsed = parse_token_generation(
            inputs,
            parameters,
            arrival_time_ns=arrival_time_ns,
            timeout_us=request.timeout(),
            defaults=defaults,
            limits=limits,
        )
        return parsed, True
    ids = inputs.get(INPUT_IDS.name)
    if ids is None:
        raise InvalidRequest("request goes with input_ids")
    return decode_record(_text_of(inputs, REQUEST), ids.reshape(-1), limits), False


def _read_order(inputs: Arrays, parameters: Mapping[str, Any]) -> AdapterOrder | None:
    """The order about adapters, if the request is one: then it holds nothing else."""
    given = [*inputs, *(name for name in parameters if not is_of_triton(name))]
    if LORA_ORDER.name not in given:
        return None
    if others := sorted(set(given) - {LORA_ORDER.name, _DEADLINE}):
        shown = others[0] if len(others[0]) <= 60 else "other parameter"
        raise InvalidRequest(f"{LORA_ORDER.name} takes no {shown}")
    if given.count(LORA_ORDER.name) > 1:
        raise InvalidRequest(f"{LORA_ORDER.name} is an input or a parameter, not both")
    if LORA_ORDER.name in parameters:
        return parse_adapter_order(str(parameters[LORA_ORDER.name]))
    return parse_adapter_order(_text_of(inputs, LORA_ORDER))


def _text_of(inputs: Arrays, tensor: Tensor) -> str:
    """The text in a tensor of one string. Raises ``InvalidRequest``."""
    return to_text(tensor.name, inputs[tensor.name].item(0))


class Engine(RequestTaker, Protocol):
    """The part of the engine that is needed here."""

    info: EngineInfo

    def new_id(self) -> RequestId:
        """An id for a request."""


class EngineRequests:
    """Makes the engine's requests and their streams. Belongs to the thread that takes them in."""

    def __init__(self, engine: Engine, options: EngineOptions, *, reply_to: str) -> None:
        """``reply_to`` is the path of the socket for acknowledgements."""
        self._engine = engine
        self._reply_to = reply_to
        self._interval_s = options.min_chunk_interval_ms / 1000
        self._seeds = random.Random(options.seed) if options.seed is not None else random.Random()

    def stream(
        self, generation: Generation, responder: Responder, key: int, *, direct: bool
    ) -> ResponseStream:
        """The stream of a request's responses; ``key`` names it."""
        start = StreamStart.of(
            generation,
            num_input_tokens=len(_prompt_ids(generation)),
            eos_token_ids=self._engine.info.eos_token_ids,
        )
        return ResponseStream(
            key=key,
            sample_ids=[self._engine.new_id() for _ in range(generation.best_of)],
            responder=responder,
            start=start,
            reply_to="" if direct else self._reply_to,
            encode=TokenEncoder(responder.label, start) if direct else packet_response,
            window=Window(now_s=time.monotonic(), interval_s=self._interval_of(generation)),
            arrival_time_ns=generation.arrival_time_ns,
        )

    def samples(self, generation: Generation, stream: ResponseStream) -> list[Request]:
        """The engine's requests, one for each sample."""
        request = request_of(
            generation,
            _prompt_ids(generation),
            self._engine,
            id=stream.sample_ids[0],
            seeds=self._seeds,
            deadline_s=_deadline_s(generation),
            label=stream.responder.label,
        )
        return samples_of(request, stream.sample_ids)

    def _interval_of(self, generation: Generation) -> float:
        """The least time between two packets with tokens, in seconds; infinite if all tokens wait
        for the end."""
        if not generation.stream:
            return _STOP_STRINGS_EVERY_S if generation.stop_strings else float("inf")
        asked_ms = generation.min_chunk_interval_ms
        return self._interval_s if asked_ms is None else asked_ms / 1000


def _prompt_ids(generation: Generation) -> IntArray:
    """int32[num_prompt_tokens]; here every prompt consists of token ids."""
    assert isinstance(generation.prompt, TokenPrompt)
    return generation.prompt.ids


def _deadline_s(generation: Generation) -> float | None:
    """The deadline on the clock of ``time.monotonic``; the request arrived in another process."""
    if generation.timeout_ms is None:
        return None
    age_s = max(0, time.time_ns() - generation.arrival_time_ns) / 1e9
    return time.monotonic() - age_s + generation.timeout_ms / 1000


# --- responses -----------------------------------------------------------------------------------


def packet_response(packet: Packet) -> Any:
    """The response that carries a packet to the detokenizer."""
    return make_response({CHUNK.name: bytes_array(encode_packet(packet))})


class TokenEncoder:
    """Responses of one stream for a direct client, which gets token ids: those of several samples
    one after the other, with ``num_output_tokens`` even if it was not asked for."""

    def __init__(self, label: str, start: StreamStart) -> None:
        self._label = label
        self._start = start
        self._wanted = start.wanted
        if start.n > 1:
            self._wanted = replace(start.wanted, num_output_tokens=True)
        self._num_cached_tokens = 0
        self._samples = [SampleAnswer() for _ in range(start.num_samples)]
        self._prompt_logprobs = [NO_LOGPROBS]

    def __call__(self, packet: Packet) -> Any:
        if packet.error is not None:
            return error_response(packet.error, self._label)
        if packet.num_cached_tokens is not None:
            self._num_cached_tokens = packet.num_cached_tokens
        if packet.prompt_logprobs is not None:
            self._prompt_logprobs.append(prompt_logprobs_json(packet.prompt_logprobs))
        self._samples = [replace(one, token_ids=(), logprobs=()) for one in self._samples]
        for delta in packet.deltas:
            self._samples[delta.sample] = _continued(self._samples[delta.sample], delta)
        answer = Answer(
            samples=most_likely(self._samples, self._start.n),
            num_input_tokens=self._start.num_input_tokens,
            num_cached_tokens=self._num_cached_tokens,
            times=packet.times,
            prompt_logprobs=self._prompt_logprobs,
            embedding=packet.embedding,
        )
        self._prompt_logprobs = []
        return make_response(answer_arrays(answer, self._wanted))


def _continued(sample: SampleAnswer, delta: SampleDelta) -> SampleAnswer:
    """What the next answer says about a sample about which the previous one said ``sample``."""
    finish = delta.finish
    return SampleAnswer(
        token_ids=delta.token_ids,
        finish=None if finish is None else finish.reason,
        stop_reason=None if finish is None else finish.stop_token_id,
        logprobs=delta.logprobs,
        cumulative_logprob=sample.cumulative_logprob + sum(one.logprob for one in delta.logprobs),
    )
