"""tokenizer -> llm_engine: the validated request as versioned JSON, sent with its token ids.

    {"v": 1, "arrival": ns since 1970, "given": {name: value}, "prompt": text, "stopped": true,
     "thinking": [begins_after, opened_by], "channels": true}

``given`` holds the values that differ from the table's defaults, under its names. The engine checks
them by the same rules as the tokenizer, so a client that forges a record gains nothing. ``prompt``
is there if the answer starts with it, ``stopped`` if the request was ended in the tokenizer,
``thinking`` if its grammar begins after the model's thoughts, ``channels`` if the answer is in
channels.

Must not know who writes a record, or how it gets to its reader.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from types import NoneType
from typing import Any, Final

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.limits import Limits
from minisgl_backend.request import IntArray, SamplingParams
from minisgl_backend.wire import values
from minisgl_backend.wire.generation import Generation, Stopped, StopRequest
from minisgl_backend.wire.grammars import object_of
from minisgl_backend.wire.parameters import BY_NAME, DEFAULTS
from minisgl_backend.wire.parse import build
from minisgl_backend.wire.values import parse_json

VERSION: Final = 1

_APART: Final = ("seed", "stop_token_ids", "logit_bias", "num_logprobs", "grammar")
"""Sampling parameters whose values are unlike those in the table."""
_SAMPLING: Final = tuple(spec.name for spec in fields(SamplingParams) if spec.name not in _APART)


def encode_record(request: Generation | StopRequest | Stopped) -> str:
    """The record of a request, without its token ids."""
    record: dict[str, Any] = {"v": VERSION, "arrival": 0, "given": _given(request)}
    if isinstance(request, Generation):
        record["arrival"] = request.arrival_time_ns
        if request.prompt_text is not None:
            record["prompt"] = request.prompt_text
        grammar = request.sampling.grammar
        if grammar is not None and grammar.begins_after is not None:
            record["thinking"] = (grammar.begins_after, grammar.opened_by)
        if grammar is not None and grammar.channels:
            record["channels"] = True
    elif isinstance(request, Stopped):
        record["stopped"] = True
    return json.dumps(record, separators=(",", ":"))


def decode_record(
    text: str, input_ids: IntArray, limits: Limits
) -> Generation | StopRequest | Stopped:
    """The request that a record and its token ids, int32[num_prompt_tokens], describe.

    Raises ``InvalidRequest`` or ``Unsupported`` for a record that no tokenizer of this version
    would write.
    """
    record = parse_json("request", text)
    if not isinstance(record, dict) or record.get("v") != VERSION:
        raise InvalidRequest(f"request must be a record of version {VERSION}")
    given, arrival = record.get("given"), record.get("arrival")
    prompt_text, is_stopped = record.get("prompt"), record.get("stopped", False)
    if (
        not isinstance(given, dict)
        or type(arrival) is not int
        or not 0 <= arrival < 2**63
        or not isinstance(prompt_text, str | None)
        or type(is_stopped) is not bool
    ):
        raise InvalidRequest("request must hold arrival, given and, if any, prompt and stopped")
    found: dict[str, Any] = {}
    for name, value in given.items():
        entry = BY_NAME.get(name)
        if entry is None or entry.name != name or entry.top_level:
            raise InvalidRequest(f"request holds an unknown name, {values.quoted(name)}")
        found[name] = values.from_json(name, entry, value)
    if is_stopped:
        found["stop_request"] = True
    if not found.get("stop_request"):
        found["input_ids"] = values.token_ids("input_ids", input_ids)
    request = build(found, arrival_time_ns=arrival, limits=limits)
    if is_stopped:
        return Stopped(wanted=request.wanted, n=found.get("n", 1))
    if isinstance(request, StopRequest):
        return request
    sampling = _after_thinking(request.sampling, record.get("thinking"))
    channels = record.get("channels", False)
    if type(channels) is not bool:
        raise InvalidRequest("request must hold true or false as channels")
    if channels and sampling.grammar is not None:
        sampling = replace(sampling, grammar=replace(sampling.grammar, channels=True))
    return replace(request, prompt_text=prompt_text, sampling=sampling)


def _after_thinking(sampling: SamplingParams, thinking: Any) -> SamplingParams:
    if thinking is None or sampling.grammar is None:
        return sampling
    if not (
        isinstance(thinking, list)
        and [type(token_id) for token_id in thinking] in ([int, int], [int, NoneType])
        and all(0 <= token_id <= values.INT32_MAX for token_id in thinking if token_id is not None)
    ):
        raise InvalidRequest("request must hold two token ids as thinking, the second may be null")
    begins_after, opened_by = thinking
    grammar = replace(sampling.grammar, begins_after=begins_after, opened_by=opened_by)
    return replace(sampling, grammar=grammar)


def _given(request: Generation | StopRequest | Stopped) -> dict[str, Any]:
    given: dict[str, Any] = dict.fromkeys(request.wanted.flags(), True)
    if isinstance(request, Stopped):
        return given if request.n == 1 else {**given, "n": request.n}
    if isinstance(request, StopRequest):
        return {**given, "stop_request": True}
    sampling = request.sampling
    said = {name: getattr(sampling, name) for name in _SAMPLING} | {
        "fit_max_tokens": request.fit_max_tokens,
        "seed": request.seed,
        "stop": request.stop_strings,
        "stop_token_ids": sampling.stop_token_ids,
        "num_logprobs": sampling.num_logprobs if request.wanted.logprobs else None,
        "stream": request.stream,
        "exclude_input_in_output": request.exclude_input_in_output,
        "skip_special_tokens": request.skip_special_tokens,
        "priority_level": request.priority,
        "timeout_ms": request.timeout_ms,
        "cache_salt": request.cache_salt,
        "lora_name": request.lora_name,
        "lora_task_id": request.lora_task_id,
        "min_chunk_interval_ms": request.min_chunk_interval_ms,
        "n": request.n,
        "best_of": request.best_of if request.best_of != request.n else None,
    }
    given.update((name, value) for name, value in said.items() if value != DEFAULTS[name])
    if sampling.grammar is not None:
        given["structured_outputs"] = object_of(sampling.grammar)
    if sampling.logit_bias:
        given["logit_bias"] = dict(sampling.logit_bias)
    return given
