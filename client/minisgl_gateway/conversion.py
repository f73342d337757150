"""A checked request -> the generations that it asks the engine for.

Knows both vocabularies, OpenAI's and that of ``minisgl_client``; never the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl_client.parameters import Parameters

from minisgl_gateway.errors import invalid, unsupported
from minisgl_gateway.schema import (
    MAX_CHOICES,
    MAX_STOPS,
    NO_LIMIT,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from minisgl_gateway.tool_calls import CLOSING, CallForm

COMPLETION_TOKENS: Final = 16
"""``max_tokens`` of a completion that does not say, as OpenAI has it."""
_MOST_TOKENS: Final = 2**31 - 1
"""The largest ``max_tokens`` that the engine takes."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice: a prompt in one of three forms, and the parameters."""

    parameters: Parameters
    prompt: str | None = None
    input_ids: Sequence[int] | None = None
    messages: Sequence[dict[str, Any]] | None = None
    tools: Sequence[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator and the caller's key add to each request.

    ``chat_tokens`` is the ``max_tokens`` of a chat that does not say. With ``shortens``, one that
    the context has no room for is lowered instead of refused. ``salt`` keeps the prefixes of one
    key apart from those of others.
    """

    timeout_s: float
    chat_tokens: int
    shortens: bool = False
    salt: str = ""


def completion_generations(request: CompletionRequest, policy: Policy) -> list[Generation]:
    """``n`` generations for each prompt, those of the first prompt first."""
    parameters = _parameters(request, policy, request.max_tokens, COMPLETION_TOKENS)
    if request.logprobs is not None:
        parameters["num_logprobs"] = request.logprobs
    if request.echo and (request.logprobs is not None or request.max_tokens == 0):
        asked = (request.logprobs or 0, request.prompt_logprobs or 0)
        parameters["num_prompt_logprobs"] = max(asked)
    single = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
    prompts: list[Any] = [request.prompt] if single else list(request.prompt)
    if len(prompts) * request.n > MAX_CHOICES:
        raise invalid(f"n times the number of prompts must be at most {MAX_CHOICES}", "n")
    generations = []
    for prompt in prompts:
        for choice in range(request.n):
            each = _seeded(parameters, choice)
            if isinstance(prompt, str):
                if not request.add_special_tokens:
                    each = {**each, "add_special_tokens": False}
                generations.append(Generation(each, prompt=prompt))
            else:
                generations.append(Generation(each, input_ids=prompt))
    return generations


def chat_generations(request: ChatCompletionRequest, policy: Policy) -> list[Generation]:
    """``n`` generations."""
    given = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(given) > 1:
        raise invalid("max_tokens and max_completion_tokens differ", "max_tokens")
    parameters = _parameters(request, policy, next(iter(given), None), policy.chat_tokens)
    if variables := _variables(request):
        parameters["chat_template_kwargs"] = variables
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs goes with logprobs", "top_logprobs")
    if request.logprobs:
        parameters["num_logprobs"] = request.top_logprobs or 0
    if request.functions and request.tools:
        raise invalid("functions do not go with tools", "functions")
    reads_calls = call_form(request) is not None
    if reads_calls and not (request.parallel_tool_calls and request.tools):
        stops = parameters.get("stop") or ()
        if len(stops) == MAX_STOPS:
            raise invalid(
                f"stop must have fewer than {MAX_STOPS} entries, as the end of a tool "
                "call is one with parallel_tool_calls false, and with functions",
                "stop",
            )
        parameters["stop"] = [*stops, CLOSING]
        parameters["return_stop_reason"] = True
    if not request.add_generation_prompt:
        parameters["add_generation_prompt"] = False
    messages = [_message(message) for message in request.messages]
    tools = _tools(request) if reads_calls else None
    return [
        Generation(_seeded(parameters, choice), messages=messages, tools=tools)
        for choice in range(request.n)
    ]


def call_form(request: ChatCompletionRequest) -> CallForm | None:
    """How the answer tells calls; None if the model is told of nothing that it may call."""
    if request.tools and request.tool_choice != "none":
        return "tool_calls"
    if request.functions and request.function_call != "none":
        return "function_call"
    return None


def _tools(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """What the model may call, in the form that chat templates know."""
    if request.tools:
        return _plain_tools(request.tools)
    functions = [function.model_dump(exclude_none=True) for function in request.functions or ()]
    return [{"type": "function", "function": function} for function in functions]


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    variables = request.chat_template_kwargs or {}
    if request.enable_thinking is None:
        return variables
    if variables.get("enable_thinking", request.enable_thinking) is not request.enable_thinking:
        raise invalid("enable_thinking and chat_template_kwargs differ", "enable_thinking")
    return {**variables, "enable_thinking": request.enable_thinking}


def _parameters(
    request: GenerationRequest, policy: Policy, max_tokens: int | None, default_tokens: int
) -> Parameters:
    """What the caller said; the engine's defaults are OpenAI's."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options goes with stream", "stream_options")
    echoes = isinstance(request, CompletionRequest) and request.echo
    if max_tokens == 0 and request.prompt_logprobs is None and not echoes:
        raise invalid(
            "max_tokens must be >= 1 without echo or prompt_logprobs, got 0", "max_tokens"
        )
    if request.prompt_logprobs is not None and request.stream:
        raise unsupported("prompt_logprobs is not supported with stream", "prompt_logprobs")
    counts = not request.stream or includes_usage(request) or continues_usage(request)
    is_bounded = max_tokens is not None and max_tokens != NO_LIMIT
    if max_tokens is None:
        max_tokens = default_tokens
    parameters = Parameters(
        max_tokens=_MOST_TOKENS if max_tokens == NO_LIMIT else max_tokens,
        fit_max_tokens=policy.shortens or not is_bounded,
        cache_salt=_salt(policy.salt, request.cache_salt),
        timeout_ms=max(1, round(policy.timeout_s * 1000)),
        return_stop_reason=False,
        return_num_input_tokens=counts,
        return_num_output_tokens=counts,
        return_num_cached_tokens=counts,
    )
    given: dict[str, Any] = {
        name: getattr(request, name) for name in _SAME if name in request.model_fields_set
    }
    if request.seed is not None:
        given["seed"] = request.seed % 2**64
    if request.stop:
        given["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.prompt_logprobs is not None:
        given["num_prompt_logprobs"] = request.prompt_logprobs
    if request.priority:
        given["priority_level"] = -request.priority
    return {**parameters, **given}  # type: ignore[typeddict-item]  # by the schema


_SAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "logit_bias",
)
"""Parameters that have one name and one meaning on both sides."""


def includes_usage(request: GenerationRequest) -> bool:
    """Whether a stream ends with the numbers of tokens."""
    return request.stream_options is not None and request.stream_options.include_usage


def continues_usage(request: GenerationRequest) -> bool:
    """Whether each chunk of a stream tells the numbers of tokens so far."""
    return request.stream_options is not None and request.stream_options.continuous_usage_stats


def _seeded(parameters: Parameters, choice: int) -> Parameters:
    """With a seed, each choice gets its own: choices must differ, but be the same each time."""
    seed = parameters.get("seed")
    return parameters if seed is None else {**parameters, "seed": (seed + choice) % 2**64}


def _salt(of_key: str, of_request: str | None) -> str | None:
    if not of_key or not of_request:
        return of_key or of_request
    return hashlib.sha256(f"{of_key} {of_request}".encode()).hexdigest()


def lookup_arguments(request: TokenizeRequest) -> dict[str, Any]:
    """What the tokenizer is asked."""
    if (request.prompt is None) is (request.messages is None):
        raise invalid("give one of prompt and messages", "prompt")
    if request.messages is None:
        if request.tools:
            raise invalid("tools go with messages", "tools")
        return {"prompt": request.prompt, "add_special_tokens": request.add_special_tokens}
    if request.add_special_tokens:
        raise invalid("add_special_tokens goes with prompt", "add_special_tokens")
    return {
        "messages": [_message(message) for message in request.messages],
        "tools": _plain_tools(request.tools or ()) or None,
        "chat_template_kwargs": request.chat_template_kwargs or None,
        "add_generation_prompt": request.add_generation_prompt,
    }


def _plain_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _message(message: Message) -> dict[str, Any]:
    """A message as chat templates know it.

    ``developer`` is what they call ``system``, and the older form of calls becomes that of tools.
    """
    plain = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    elif plain["role"] == "function":
        plain["role"] = "tool"
    elif call := plain.pop("function_call", None):
        plain.setdefault("tool_calls", []).append({"type": "function", "function": call})
    return plain
