"""OpenAI's schemas -> a ``Chat``, or the generations of a completion.

Knows both vocabularies, OpenAI's and that of ``minisgl_client``. Must not know answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from minisgl_client.parameters import Parameters, StructuredOutputs

from minisgl_gateway.chat import Chat
from minisgl_gateway.completions.message_schema import (
    AllowedChatTools,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    OlderFunction,
)
from minisgl_gateway.completions.schema import (
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from minisgl_gateway.content import content_of, texts_of
from minisgl_gateway.errors import invalid, unsupported
from minisgl_gateway.form_schema import form_of
from minisgl_gateway.generation import (
    Generation,
    Policy,
    sampling_parameters,
    shared_parameters,
)
from minisgl_gateway.template import Wishes
from minisgl_gateway.tools import Calls, Tool, allowed, call_of
from minisgl_gateway.turns import with_one_beginning

COMPLETION_TOKENS: Final = 16
"""Default ``max_tokens`` of a completion, as in OpenAI's API."""


def completion_generations(request: CompletionRequest, policy: Policy) -> list[Generation]:
    """One generation for each prompt, with ``n`` choices; raises ``ApiError``."""
    parameters = shared_parameters(
        policy,
        request.max_tokens,
        COMPLETION_TOKENS,
        cache_salt=request.cache_salt,
        tells_counts=_tells_counts(request),
    )
    parameters.update(_parameters(request, request.max_tokens))
    if stops := _stops(request):
        parameters["stop"] = stops
        parameters["return_stop_reason"] = request.include_stop_str_in_output
    form, _ = form_of(request)
    if form is not None:
        parameters["structured_outputs"] = cast(StructuredOutputs, form)
    if request.logprobs is not None or request.return_token_ids:
        parameters["num_logprobs"] = request.logprobs or 0  # they have the ids
    if request.echo and (request.logprobs is not None or request.max_tokens == 0):
        asked = (request.logprobs or 0, request.prompt_logprobs or 0)
        parameters["num_prompt_logprobs"] = max(asked)
    single = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
    prompts: list[Any] = [request.prompt] if single else list(request.prompt)
    counted = "n" if request.best_of is None else "best_of"
    if len(prompts) * num_samples(request) > MAX_CHOICES:
        raise invalid(
            f"{counted} times the number of prompts must be at most {MAX_CHOICES}", counted
        )
    if request.n > 1:
        parameters["n"] = request.n
    if request.best_of is not None:
        parameters["best_of"] = _best_of(request, request.best_of)
    of_text = parameters
    if not request.add_special_tokens:
        of_text = {**parameters, "add_special_tokens": False}
    return [
        Generation(of_text, prompt=prompt)
        if isinstance(prompt, str)
        else Generation(parameters, input_ids=prompt)
        for prompt in prompts
    ]


def num_samples(request: CompletionRequest) -> int:
    """Number of samples that the engine makes for each prompt."""
    return request.n if request.best_of is None else request.best_of


def _best_of(request: CompletionRequest, best_of: int) -> int:
    if best_of < request.n:
        raise invalid(f"best_of must be >= n {request.n}, got {best_of}", "best_of")
    if best_of > request.n and request.stream:
        raise unsupported(f"best_of must be n, {request.n}, with stream", "best_of")
    return best_of


def chat_of(request: ChatCompletionRequest) -> Chat:
    """The chat of a request; raises ``ApiError``."""
    given = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(given) > 1:
        raise invalid("max_tokens and max_completion_tokens differ", "max_tokens")
    max_tokens = next(iter(given), None)
    parameters = _parameters(request, max_tokens, name_of_max_tokens(request))
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs goes with logprobs", "top_logprobs")
    if request.logprobs or request.return_token_ids:
        parameters["num_logprobs"] = request.top_logprobs or 0  # they have the ids
    tools, calls = _tools(request)
    form, form_param = form_of(request)
    return Chat(
        messages=_messages(request.messages),
        tools=tools,
        calls=calls,
        form=form,
        form_param=form_param,
        tools_param="functions" if request.functions else "tools",
        wishes=Wishes(
            thinks=request.enable_thinking,
            effort=request.reasoning_effort,
            variables=_variables(request),
        ),
        separates_thoughts=request.separate_reasoning or not request.include_reasoning,
        add_generation_prompt=request.add_generation_prompt,
        parameters=parameters,
        max_tokens=max_tokens,
        stop=_stops(request),
        includes_stop=request.include_stop_str_in_output,
        cache_salt=request.cache_salt,
        tells_counts=_tells_counts(request),
        n=request.n,
        stream=request.stream,
    )


def name_of_max_tokens(request: ChatCompletionRequest) -> str:
    """Which of its two names the caller used, for errors."""
    is_newer = request.max_tokens is None and request.max_completion_tokens is not None
    return "max_completion_tokens" if is_newer else "max_tokens"


def _tools(request: ChatCompletionRequest) -> tuple[Sequence[Tool], Calls]:
    """The tools, and whether the model may or must call them."""
    if not request.tools:
        return _functions(request)
    if request.functions:
        raise invalid("functions do not go with tools", "functions")
    if request.function_call is not None:
        raise invalid("function_call goes with functions, tool_choice with tools", "function_call")
    tools = [_tool(tool.function) for tool in request.tools]
    choice, parallel = request.tool_choice, request.parallel_tool_calls
    if isinstance(choice, NamedTool):
        return tools, call_of(choice.function.name, tools, "tool_choice")
    if isinstance(choice, AllowedChatTools):
        names = [one.function.name for one in choice.allowed_tools.tools]
        is_required = choice.allowed_tools.mode == "required"
        return allowed(names, tools, "tool_choice"), Calls(required=is_required, parallel=parallel)
    return tools, Calls(choice != "none", required=choice == "required", parallel=parallel)


def _functions(request: ChatCompletionRequest) -> tuple[Sequence[Tool], Calls]:
    """The same for the older ``functions``; at most one is called."""
    changes_nothing = (None, "auto") if request.functions else (None, "none", "auto")
    if request.tool_choice not in changes_nothing:
        raise invalid("tool_choice goes with tools", "tool_choice")
    tools = [_tool(function) for function in request.functions or ()]
    choice = request.function_call
    if isinstance(choice, NamedFunction):
        return tools, call_of(choice.name, tools, "function_call")
    return tools, Calls(choice != "none", parallel=False)


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    variables = request.chat_template_kwargs or {}
    thinks = request.enable_thinking
    if thinks is not None and variables.get("enable_thinking", thinks) is not thinks:
        raise invalid("enable_thinking and chat_template_kwargs differ", "enable_thinking")
    return variables


def _parameters(
    request: GenerationRequest, max_tokens: int | None, name: str = "max_tokens"
) -> Parameters:
    """The caller's parameters by the engine's names; raises ``ApiError``, which calls
    ``max_tokens`` by ``name``."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options goes with stream", "stream_options")
    of_prompt = {"prompt_logprobs": request.prompt_logprobs is not None}
    if isinstance(request, CompletionRequest):
        of_prompt = {"echo": request.echo, **of_prompt}
    if max_tokens == 0 and not any(of_prompt.values()):
        raise invalid(f"{name} must be >= 1 without {' or '.join(of_prompt)}, got 0", name)
    if request.prompt_logprobs is not None and request.stream:
        raise unsupported("prompt_logprobs is not supported with stream", "prompt_logprobs")
    given = request.given(*_SAME)
    if request.seed is not None:
        given["seed"] = request.seed % 2**64
    if request.prompt_logprobs is not None:
        given["num_prompt_logprobs"] = request.prompt_logprobs
    if request.priority:
        given["priority_level"] = -request.priority
    return sampling_parameters(given)


def _stops(request: GenerationRequest) -> list[str]:
    if isinstance(request.stop, str):
        return [request.stop] if request.stop else []
    return request.stop or []


def _tells_counts(request: GenerationRequest) -> bool:
    return not request.stream or includes_usage(request) or continues_usage(request)


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
    "skip_special_tokens",
    "logit_bias",
)
"""Parameters with the same name and meaning on both sides."""


def includes_usage(request: GenerationRequest) -> bool:
    """Whether a stream ends with the numbers of tokens."""
    return request.stream_options is not None and request.stream_options.include_usage


def continues_usage(request: GenerationRequest) -> bool:
    """Whether each chunk of a stream has the numbers of tokens so far."""
    return request.stream_options is not None and request.stream_options.continuous_usage_stats


def lookup_of(request: TokenizeRequest) -> Chat | dict[str, Any]:
    """The chat to tokenize, or the arguments for tokenizing a text."""
    if (request.prompt is None) is (request.messages is None):
        raise invalid("give one of prompt and messages", "prompt")
    if request.messages is None:
        of_chat = {
            "tools": request.tools,
            "chat_template_kwargs": request.chat_template_kwargs,
            "add_generation_prompt": not request.add_generation_prompt,
        }
        for name, asks in of_chat.items():
            if asks:
                raise invalid(f"{name} goes with messages", name)
        return {"prompt": request.prompt, "add_special_tokens": request.add_special_tokens}
    if request.add_special_tokens:
        raise invalid("add_special_tokens goes with prompt", "add_special_tokens")
    return Chat(
        messages=_messages(request.messages),
        tools=[_tool(tool.function) for tool in request.tools or ()],
        wishes=Wishes(variables=request.chat_template_kwargs or {}),
        add_generation_prompt=request.add_generation_prompt,
    )


def _tool(function: OlderFunction) -> Tool:
    is_strict = isinstance(function, Function) and function.strict is True
    return Tool(function.name, function.description, function.parameters, is_strict)


def _messages(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The messages in the form of chat templates."""
    return with_one_beginning([_message(message) for message in messages])


def _message(message: Message) -> dict[str, Any]:
    """A message in the form of chat templates.

    The role ``developer`` becomes ``system``, and function calls become tool calls. Empty fields of
    an assistant, which callers send back, are left out, and refusals are texts. One that neither
    says nor calls anything, as if its thoughts were cut off, says "".
    """
    plain = message.model_dump(exclude_none=True)
    if plain["role"] == "assistant":
        plain = {name: value for name, value in plain.items() if value or name == "content"}
        if isinstance(content := plain.get("content"), list):
            plain["content"] = [_of_refusal(part) for part in content]
        if refusal := plain.pop("refusal", None):
            said = filter(None, texts_of(plain.get("content")))
            plain["content"] = content_of([*said, refusal])
    if thought := plain.pop("reasoning", None):
        plain.setdefault("reasoning_content", thought)
    if plain["role"] == "developer":
        plain["role"] = "system"
    elif plain["role"] == "function":
        plain["role"] = "tool"
    elif call := plain.pop("function_call", None):
        plain.setdefault("tool_calls", []).append({"type": "function", "function": call})
    if "tool_calls" not in plain:
        plain.setdefault("content", "")
    return plain


def _of_refusal(part: Mapping[str, str]) -> Mapping[str, str]:
    """A part of an answer as a text, also if it is a refusal."""
    return {"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part
