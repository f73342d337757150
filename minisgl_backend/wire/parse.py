"""A request from Triton or from a caller in this process -> ``Generation``.

``gather`` collects the values; ``build`` here applies the rules about several values, and the
limits. ``record`` carries the values between the models, and both sides apply the same checks.

Raises nothing but ``InvalidRequest`` and ``Unsupported``, whatever comes in. Must not know Triton's
objects, nor the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy.typing as npt

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.limits import Limits
from minisgl_backend.request import IntArray, SamplingParams
from minisgl_backend.wire import values
from minisgl_backend.wire.defaults import NO_DEFAULTS, Defaults
from minisgl_backend.wire.entries import Input, Kind
from minisgl_backend.wire.gather import gather, gather_values
from minisgl_backend.wire.generation import (
    AdapterOrder,
    Generation,
    MessagesPrompt,
    Prompt,
    StopRequest,
    TextPrompt,
    TokenPrompt,
    Wanted,
)
from minisgl_backend.wire.grammars import grammar_of
from minisgl_backend.wire.parameters import BY_NAME, DEFAULTS

PROMPTS: Final = ("text_input", "messages", "input_ids")
"""A request has one of these, or is a ``stop_request``."""

_TIMEOUT: Final = Input(
    name="timeout", kind=Kind.INTEGER, meaning="microseconds", minimum=0, maximum=2**63 - 1
)
_SALT: Final = re.compile(r"[A-Za-z0-9_-]*")


def parse_generation(
    inputs: Mapping[str, npt.NDArray[Any]],
    parameters: Mapping[str, Any],
    *,
    arrival_time_ns: int,
    timeout_us: int = 0,
    defaults: Defaults = NO_DEFAULTS,
    limits: Limits,
) -> Generation | StopRequest:
    """A request to an ensemble, as the tokenizer gets it.

    ``inputs`` are the tensors by name, strings as objects; ``parameters``, the request parameters.
    ``timeout_us`` is Triton's own request timeout, 0 for none.
    """
    found = defaults.beside(_completed(gather(inputs, parameters, limits)))
    timeout_us = _timeout_us(parameters, timeout_us)
    return build(found, arrival_time_ns=arrival_time_ns, timeout_us=timeout_us, limits=limits)


def parse_values(
    given: Mapping[str, Any],
    *,
    arrival_time_ns: int,
    defaults: Defaults = NO_DEFAULTS,
    limits: Limits,
) -> Generation | StopRequest:
    """A request in this process: JSON values by name, ``input_ids`` as an array.

    Here log-probabilities have only one output, and any of their names asks for it.
    """
    ids = given.get("input_ids")
    found = gather_values({name: value for name, value in given.items() if name != "input_ids"})
    if ids is not None:
        found["input_ids"] = values.token_ids("input_ids", ids)
    if found.pop("return_log_probs", False) or "num_logprobs" in found:
        found.setdefault("return_logprobs", True)
    if found.get("return_logprobs"):
        found.setdefault("num_logprobs", 0)
    found = defaults.beside(_completed(found))
    return build(found, arrival_time_ns=arrival_time_ns, limits=limits)


def parse_token_generation(
    inputs: Mapping[str, npt.NDArray[Any]],
    parameters: Mapping[str, Any],
    *,
    arrival_time_ns: int,
    timeout_us: int = 0,
    defaults: Defaults = NO_DEFAULTS,
    limits: Limits,
) -> Generation | StopRequest:
    """A direct request to ``llm_engine``, by token ids: parameters about text are refused."""
    found = _completed(gather(inputs, parameters, limits))
    for name, value in found.items():
        if BY_NAME[name].text_only and value != DEFAULTS[name]:
            raise Unsupported(f"{name} needs the text models; send it to an ensemble")
    timeout_us = _timeout_us(parameters, timeout_us)
    found = defaults.beside(found)
    return build(found, arrival_time_ns=arrival_time_ns, timeout_us=timeout_us, limits=limits)


def parse_adapter_order(text: str) -> AdapterOrder:
    """An order about adapters to ``llm_engine``. Raises ``InvalidRequest``."""
    order = values.parse_json("lora_order", text)
    if isinstance(order, dict) and len(order) <= 1:
        load, unload = order.get("load"), order.get("unload")
        if not order:
            return AdapterOrder()
        if isinstance(unload, str):
            return AdapterOrder(unload=unload)
        if (
            isinstance(load, dict)
            and load.keys() == {"name", "path"}
            and all(isinstance(value, str) for value in load.values())
        ):
            return AdapterOrder(load=(load["name"], load["path"]))
    raise InvalidRequest(
        'lora_order must be {"load": {"name": ..., "path": ...}}, {"unload": ...} or {}, '
        f"got {values.quoted(text)}"
    )


def _completed(found: dict[str, Any]) -> dict[str, Any]:
    """The values that a request gives, and those that are implied by absent ones."""
    found.setdefault("fit_max_tokens", "max_tokens" not in found)
    return found


def build(
    found: Mapping[str, Any], *, arrival_time_ns: int, timeout_us: int = 0, limits: Limits
) -> Generation | StopRequest:
    """The request that these values describe."""
    given = {**DEFAULTS, **found}
    if given["embed"]:
        given["max_tokens"] = found.get("max_tokens", 0)
    wanted = _wanted(given)
    prompts = [name for name in PROMPTS if given[name] is not None]
    if given["stop_request"]:
        if prompts:
            raise InvalidRequest(f"stop_request takes no {prompts[0]}")
        return StopRequest(wanted=wanted)
    if len(prompts) != 1:
        got = " and ".join(prompts) or "none of them"
        raise InvalidRequest(f"give one of text_input, messages and input_ids, got {got}")
    _check_limits(given, limits)
    if given["stream"] and not given["exclude_input_in_output"]:
        raise Unsupported("exclude_input_in_output must be true with stream")
    if prompts == ["messages"] and not given["exclude_input_in_output"]:
        raise Unsupported("exclude_input_in_output must be true with messages")
    if given["lora_name"] is not None and given["lora_task_id"] is not None:
        raise InvalidRequest("give one of lora_name and lora_task_id")
    n, best_of = _num_samples(given)
    return Generation(
        prompt=_prompt(given, limits),
        arrival_time_ns=arrival_time_ns,
        sampling=_sampling(given, wanted, is_ranked=best_of > n),
        fit_max_tokens=given["fit_max_tokens"],
        seed=given["seed"],
        stop_strings=tuple(dict.fromkeys(given["stop"])),
        stream=given["stream"],
        exclude_input_in_output=given["exclude_input_in_output"],
        skip_special_tokens=given["skip_special_tokens"],
        priority=given["priority_level"],
        timeout_ms=_earliest(given["timeout_ms"], timeout_us),
        cache_salt=given["cache_salt"],
        lora_name=given["lora_name"],
        lora_task_id=given["lora_task_id"],
        min_chunk_interval_ms=given["min_chunk_interval_ms"],
        wanted=wanted,
        n=n,
        best_of=best_of,
    )


def _wanted(given: Mapping[str, Any]) -> Wanted:
    return Wanted(
        finish_reason=given["return_finish_reason"],
        stop_reason=given["return_stop_reason"],
        cumulative_logprob=given["return_cumulative_logprob"],
        num_input_tokens=given["return_num_input_tokens"],
        num_output_tokens=given["return_num_output_tokens"],
        num_cached_tokens=given["return_num_cached_tokens"],
        perf_metrics=given["return_perf_metrics"],
        log_probs=given["return_log_probs"],
        logprobs=given["return_logprobs"] and given["num_logprobs"] is not None,
        null_logprobs=given["return_logprobs"] and given["num_logprobs"] is None,
        prompt_logprobs=given["num_prompt_logprobs"] is not None,
        embedding=given["embed"],
    )


def _num_samples(given: Mapping[str, Any]) -> tuple[int, int]:
    """Number of samples to return, and to generate."""
    n = given["n"]
    best_of = n if given["best_of"] is None else given["best_of"]
    if best_of < n:
        raise InvalidRequest(f"best_of must be >= n {n}, got {best_of}")
    if best_of > n and given["stream"]:
        raise Unsupported(f"best_of must be n, {n}, with stream, got {best_of}")
    return n, best_of


def _timeout_us(parameters: Mapping[str, Any], timeout_us: int) -> int:
    """Triton's request timeout. Triton itself leaves that of /generate among the parameters."""
    given = parameters.get(_TIMEOUT.name)
    if timeout_us or given is None:
        return timeout_us
    read_us: int = values.from_parameter(_TIMEOUT.name, _TIMEOUT, given)
    return read_us


def _earliest(timeout_ms: int | None, timeout_us: int) -> int | None:
    deadlines = [timeout_ms] if timeout_ms is not None else []
    if timeout_us > 0:  # in 64 bits a client may ask for centuries
        deadlines.append(min(-(-timeout_us // 1000), values.INT32_MAX))
    return min(deadlines, default=None)


def _prompt(given: Mapping[str, Any], limits: Limits) -> Prompt:
    if given["parse_special_tokens"] and given["text_input"] is None:
        raise InvalidRequest("parse_special_tokens goes with text_input")
    if not given["add_special_tokens"] and given["text_input"] is None:
        raise InvalidRequest("add_special_tokens goes with text_input")
    if not given["add_generation_prompt"] and given["messages"] is None:
        raise InvalidRequest("add_generation_prompt goes with messages")
    for name in ("tools", "chat_template_kwargs"):
        if given[name] is not None and given["messages"] is None:
            raise InvalidRequest(f"{name} goes with messages")
    for name in ("text_input", "messages", "tools", "chat_template_kwargs"):
        text = given[name]
        if text is not None and len(text.encode()) > limits.prompt_bytes:
            raise InvalidRequest(
                f"{name} must be at most {limits.prompt_bytes} bytes, got {len(text.encode())}"
            )
    if given["text_input"] is not None:
        return TextPrompt(
            given["text_input"], given["parse_special_tokens"], given["add_special_tokens"]
        )
    if given["messages"] is not None:
        return MessagesPrompt(
            given["messages"],
            given["tools"],
            given["chat_template_kwargs"],
            given["add_generation_prompt"],
        )
    ids: IntArray = given["input_ids"]
    if not ids.size:
        raise InvalidRequest("input_ids must not be empty")
    return TokenPrompt(ids)


def _sampling(given: Mapping[str, Any], wanted: Wanted, *, is_ranked: bool) -> SamplingParams:
    if given["min_tokens"] > given["max_tokens"]:
        raise InvalidRequest(
            f"min_tokens must be <= max_tokens {given['max_tokens']}, got {given['min_tokens']}"
        )
    grammar = grammar_of(given)
    if given["embed"] and given["max_tokens"]:
        raise InvalidRequest(f"max_tokens must be 0 with embed, got {given['max_tokens']}")
    if given["embed"] and max(given["n"], given["best_of"] or 1) > 1:
        raise InvalidRequest("n and best_of must be 1 with embed, which generates nothing")
    if given["embed"] and grammar is not None:
        raise InvalidRequest("a form of the answer does not go with embed, which generates nothing")
    is_for_prompt = given["embed"] or given["num_prompt_logprobs"] is not None
    if given["max_tokens"] == 0 and not is_for_prompt:
        raise InvalidRequest("max_tokens must be >= 1 without num_prompt_logprobs or embed, got 0")
    num_logprobs: int | None = None
    if wanted.logprobs:
        num_logprobs = given["num_logprobs"]
    elif wanted.log_probs or wanted.cumulative_logprob or is_ranked:
        num_logprobs = 0
    return SamplingParams(
        max_tokens=given["max_tokens"],
        min_tokens=given["min_tokens"],
        temperature=given["temperature"],
        top_p=given["top_p"] or 1.0,
        top_k=max(given["top_k"], 0),
        min_p=given["min_p"],
        repetition_penalty=given["repetition_penalty"],
        presence_penalty=given["presence_penalty"],
        frequency_penalty=given["frequency_penalty"],
        seed=given["seed"] or 0,
        stop_token_ids=tuple(dict.fromkeys(given["stop_token_ids"])),
        ignore_eos=given["ignore_eos"],
        logit_bias=given["logit_bias"],
        num_logprobs=num_logprobs,
        num_prompt_logprobs=given["num_prompt_logprobs"],
        embed=given["embed"],
        grammar=grammar,
    )


def _check_limits(given: Mapping[str, Any], limits: Limits) -> None:
    counts = {
        "stop": limits.stop_strings,
        "stop_token_ids": limits.stop_token_ids,
        "logit_bias": limits.logit_bias_entries,
    }
    for name, most in counts.items():
        if len(given[name]) > most:
            raise InvalidRequest(f"{name} must have at most {most} entries, got {len(given[name])}")
    for text in given["stop"]:
        if len(text.encode()) > limits.stop_string_bytes:
            raise InvalidRequest(
                f"stop must be strings of at most {limits.stop_string_bytes} bytes, "
                f"got {len(text.encode())}"
            )
    for name in ("num_logprobs", "num_prompt_logprobs"):
        if (given[name] or 0) > limits.logprobs:
            raise InvalidRequest(f"{name} must be <= {limits.logprobs}, got {given[name]}")
    salt = given["cache_salt"]
    if len(salt) > limits.cache_salt_characters or not _SALT.fullmatch(salt):
        raise InvalidRequest(
            f"cache_salt must be at most {limits.cache_salt_characters} of the characters A-Z, "
            f"a-z, 0-9, _ and -, got {values.quoted(salt)}"
        )
