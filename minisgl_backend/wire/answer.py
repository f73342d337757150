"""What a client gets: ``Answer`` -> numpy arrays by output name.

``text_output`` (or ``output_ids``, from ``llm_engine`` alone) is always there, the others only
if the request asked for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from minisgl_backend.request import FinishReason, FloatArray, PromptLogprobs, TokenId, TokenLogprobs
from minisgl_backend.wire.generation import NOTHING, Wanted
from minisgl_backend.wire.packets import Times

LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

_UNFINISHED: Final = "None"
"""The finish reason of an answer that goes on, as vllm_backend has it."""

_encode: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response. ``num_output_tokens``, ``logprobs`` and ``token_ids`` are those since the last.

    ``text`` is None for a client of ``llm_engine`` alone, which gets ``token_ids``. ``finish`` is
    None while the request runs. ``stop_reason`` is the stop string or token id that matched.
    ``cumulative_logprob`` covers all tokens so far. ``prompt_logprobs`` are parts of a JSON list
    (``prompt_logprobs_json``), which follow those of the answers before. ``embedding``,
    float32[hidden_size], is in the last answer, if it was asked for.
    """

    text: str | None = None
    token_ids: Sequence[TokenId] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: Sequence[TokenLogprobs] = ()
    cumulative_logprob: float = 0.0
    times: Times | None = None
    prompt_logprobs: Sequence[str] = ()
    embedding: FloatArray | None = None


def answer_arrays(
    answer: Answer,
    wanted: Wanted = NOTHING,
    token_text: Callable[[TokenId], str] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """The output tensors of an answer, by name; ``token_text`` decodes a token of ``logprobs``."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    if answer.text is not None:
        arrays["text_output"] = _string(answer.text)
    else:
        arrays["output_ids"] = np.asarray(answer.token_ids, dtype=np.int32)
    if wanted is NOTHING:
        return arrays
    if wanted.finish_reason:
        arrays["finish_reason"] = _string(answer.finish.value if answer.finish else _UNFINISHED)
    if wanted.stop_reason:
        arrays["stop_reason"] = _string(_encode(answer.stop_reason))
    if wanted.num_input_tokens:
        arrays["num_input_tokens"] = np.array([answer.num_input_tokens], dtype=np.uint32)
    if wanted.num_output_tokens:
        arrays["num_output_tokens"] = np.array([answer.num_output_tokens], dtype=np.uint32)
    if wanted.num_cached_tokens:
        arrays["num_cached_tokens"] = np.array([answer.num_cached_tokens], dtype=np.uint32)
    if wanted.cumulative_logprob:
        arrays["cumulative_logprob"] = np.array([answer.cumulative_logprob], dtype=np.float32)
    if wanted.log_probs:
        chosen = [_at_least(one.logprob) for one in answer.logprobs]
        arrays["cum_log_probs"] = np.array([answer.cumulative_logprob], dtype=np.float32)
        arrays["output_log_probs"] = np.array([chosen], dtype=np.float32)  # [1, num_tokens]
    if wanted.logprobs:
        arrays["logprobs"] = _string(logprobs_json(answer.token_ids, answer.logprobs, token_text))
    elif wanted.null_logprobs:
        arrays["logprobs"] = _string("null")
    if wanted.prompt_logprobs:
        arrays["prompt_logprobs"] = _string(f"[{','.join(answer.prompt_logprobs)}]")
    if answer.embedding is not None:
        arrays["embedding"] = answer.embedding
    if wanted.perf_metrics and (times := answer.times) is not None:
        for name in Times.__slots__:
            arrays[name] = np.array([getattr(times, name)], dtype=np.int64)
    return arrays


def logprobs_json(
    token_ids: Sequence[TokenId],
    logprobs: Sequence[TokenLogprobs],
    token_text: Callable[[TokenId], str] | None = None,
) -> str:
    """A JSON list, one object a token: {token id: {logprob, rank, decoded_token}}."""

    tables = zip(token_ids, logprobs, strict=True)
    return f"[{','.join([_table(*each, token_text) for each in tables])}]"


NO_LOGPROBS: Final = "null"
"""In place of the first token of a prompt."""


def prompt_logprobs_json(
    scored: PromptLogprobs, token_text: Callable[[TokenId], str] | None = None
) -> str:
    """The same without the brackets, so that parts can be joined by commas.

    A long prompt's is written in many parts: all at once it would take seconds, in which nothing
    else is answered.
    """
    tables = zip(scored.token_ids.tolist(), scored.tokens(), strict=True)
    return ",".join([_table(*each, token_text) for each in tables])


def _table(
    token_id: TokenId, one: TokenLogprobs, token_text: Callable[[TokenId], str] | None
) -> str:
    """One token's JSON object; the token itself comes first."""

    def entry(token_id: TokenId, logprob: float, rank: int) -> str:
        text = "" if token_text is None else f',"decoded_token":{_encode(token_text(token_id))}'
        return f'"{token_id}":{{"logprob":{_at_least(logprob)!r},"rank":{rank}{text}}}'

    entries = [entry(token_id, one.logprob, one.rank)]
    for rank, (other, logprob) in enumerate(one.alternatives, 1):
        if other != token_id:
            entries.append(entry(other, logprob, rank))
    return f"{{{','.join(entries)}}}"


def _at_least(logprob: float) -> float:
    """At least ``LEAST_LOGPROB``; the comparison makes that of a NaN, too, and of infinity."""
    return logprob if LEAST_LOGPROB < logprob < math.inf else LEAST_LOGPROB


def _string(text: str) -> npt.NDArray[Any]:
    return np.array([text.encode()], dtype=np.object_)
