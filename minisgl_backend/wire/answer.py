"""What a client gets: ``Answer`` -> numpy arrays by output name.

``text_output`` (or ``output_ids``, from ``llm_engine`` alone) is always there, the others only if
the request asked for them. Must not know Triton's objects, or how an answer is sent.
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
from minisgl_backend.wire.arrays import texts_array
from minisgl_backend.wire.generation import NOTHING, Wanted
from minisgl_backend.wire.packets import Times
from minisgl_backend.wire.parameters import OUTPUT_IDS

LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

_UNFINISHED: Final = "None"
"""The finish reason of an answer that goes on, as in vllm_backend."""

_encode: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswer:
    """One sample's part of a response. ``token_ids`` and ``logprobs`` are those since the last.

    ``text`` is None for a client of ``llm_engine`` alone. ``finish`` is None while the sample runs,
    and then no longer changes. ``stop_reason`` is the stop string or token id that matched.
    ``cumulative_logprob`` covers all tokens so far.
    """

    text: str | None = None
    token_ids: Sequence[TokenId] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response, with each sample in its place: all have a ``text``, or none.

    ``prompt_logprobs`` are parts of a JSON list (``prompt_logprobs_json``), which follow those of
    the answers before. ``embedding``, float32[hidden_size], is in the last answer, if it was asked
    for.
    """

    samples: Sequence[SampleAnswer]
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    times: Times | None = None
    prompt_logprobs: Sequence[str] = ()
    embedding: FloatArray | None = None


def most_likely(samples: Sequence[SampleAnswer], n: int) -> Sequence[SampleAnswer]:
    """The ``n`` samples with the highest ``cumulative_logprob``, the highest first; equal ones keep
    their order. Those cut off by a deadline come last, since fewer tokens are likelier. If there
    are no more than ``n``, all keep their places."""
    if len(samples) <= n:
        return samples

    def rank(sample: SampleAnswer) -> tuple[bool, bool, float]:
        is_whole = sample.finish in (FinishReason.STOP, FinishReason.LENGTH)
        return not is_whole, not sample.token_ids, -sample.cumulative_logprob

    return sorted(samples, key=rank)[:n]


def answer_arrays(
    answer: Answer,
    wanted: Wanted = NOTHING,
    token_bytes: Callable[[TokenId], bytes] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """The output tensors of an answer, by name; ``token_bytes`` spells a token of ``logprobs``.

    With n samples: [n], or [1] for what they share. ``output_ids`` are those of one sample after
    the other, and ``output_log_probs`` is [n, num_tokens of the longest].
    """
    samples = answer.samples
    arrays: dict[str, npt.NDArray[Any]] = {}
    if samples[0].text is not None:
        arrays["text_output"] = texts_array([one.text or "" for one in samples])
    else:
        ids = [token_id for one in samples for token_id in one.token_ids]
        arrays[OUTPUT_IDS.name] = np.array(ids, dtype=np.int32)
    if wanted is NOTHING:
        return arrays
    if wanted.finish_reason:
        arrays["finish_reason"] = texts_array(
            [one.finish.value if one.finish else _UNFINISHED for one in samples]
        )
    if wanted.stop_reason:
        arrays["stop_reason"] = texts_array([_encode(one.stop_reason) for one in samples])
    if wanted.num_input_tokens:
        arrays["num_input_tokens"] = np.array([answer.num_input_tokens], dtype=np.uint32)
    if wanted.num_output_tokens:
        counts = [len(one.token_ids) for one in samples]
        arrays["num_output_tokens"] = np.array(counts, dtype=np.uint32)
    if wanted.num_cached_tokens:
        arrays["num_cached_tokens"] = np.array([answer.num_cached_tokens], dtype=np.uint32)
    if wanted.cumulative_logprob or wanted.log_probs:
        sums = np.array([one.cumulative_logprob for one in samples], dtype=np.float32)
        if wanted.cumulative_logprob:
            arrays["cumulative_logprob"] = sums
        if wanted.log_probs:
            arrays["cum_log_probs"] = sums
            arrays["output_log_probs"] = _rows([one.logprobs for one in samples])
    if wanted.logprobs:
        arrays["logprobs"] = texts_array(
            [logprobs_json(one.token_ids, one.logprobs, token_bytes) for one in samples]
        )
    elif wanted.null_logprobs:
        arrays["logprobs"] = texts_array(["null"] * len(samples))
    if wanted.prompt_logprobs:
        arrays["prompt_logprobs"] = texts_array([f"[{','.join(answer.prompt_logprobs)}]"])
    if answer.embedding is not None:
        arrays["embedding"] = answer.embedding
    if wanted.perf_metrics and (times := answer.times) is not None:
        for name in Times.__slots__:
            arrays[name] = np.array([getattr(times, name)], dtype=np.int64)
    return arrays


def logprobs_json(
    token_ids: Sequence[TokenId],
    logprobs: Sequence[TokenLogprobs],
    token_bytes: Callable[[TokenId], bytes] | None,
) -> str:
    """A JSON list, one object per token: {token id: {logprob, rank, decoded_token, bytes}}.

    ``decoded_token`` is there only with ``token_bytes``. If the token has part of a character, for
    which the text holds U+FFFD, ``bytes`` are there, too.
    """
    # a client that writes packets by itself may leave some out
    tables = zip(token_ids, logprobs, strict=False)
    return f"[{','.join([_table(*each, token_bytes) for each in tables])}]"


NO_LOGPROBS: Final = "null"
"""In place of the first token of a prompt."""


def prompt_logprobs_json(
    scored: PromptLogprobs, token_bytes: Callable[[TokenId], bytes] | None = None
) -> str:
    """The same for a prompt, without the brackets, so that parts can be joined by commas.

    A long prompt's list is written in many parts: all at once it would take seconds, in which
    nothing else is answered.
    """
    tables = zip(scored.token_ids.tolist(), scored.tokens(), strict=True)
    return ",".join([_table(*each, token_bytes) for each in tables])


def _table(
    token_id: TokenId, one: TokenLogprobs, token_bytes: Callable[[TokenId], bytes] | None
) -> str:
    """One token's JSON object; the token itself comes first."""

    def entry(token_id: TokenId, logprob: float, rank: int) -> str:
        text = "" if token_bytes is None else _spelled(token_bytes(token_id))
        return f'"{token_id}":{{"logprob":{_at_least(logprob)!r},"rank":{rank}{text}}}'

    entries = [entry(token_id, one.logprob, one.rank)]
    for rank, (other, logprob) in enumerate(one.alternatives, 1):
        if other != token_id:
            entries.append(entry(other, logprob, rank))
    return f"{{{','.join(entries)}}}"


def _spelled(token: bytes) -> str:
    """The fields of a token's entry that give its text."""
    text = token.decode("utf-8", "replace")
    told = f',"decoded_token":{_encode(text)}'
    return f'{told},"bytes":{_encode(list(token))}' if "\ufffd" in text else told


def _at_least(logprob: float) -> float:
    """The number, but ``LEAST_LOGPROB`` for smaller ones, NaN and infinity."""
    return logprob if LEAST_LOGPROB < logprob < math.inf else LEAST_LOGPROB


def _rows(logprobs: Sequence[Sequence[TokenLogprobs]]) -> npt.NDArray[Any]:
    """The log-probabilities of chosen tokens, float32[num_samples, num_tokens of the longest]."""
    rows = np.zeros((len(logprobs), max(map(len, logprobs))), dtype=np.float32)
    for row, of_sample in zip(rows, logprobs, strict=True):
        row[: len(of_sample)] = [_at_least(one.logprob) for one in of_sample]
    return rows
