"""Requests of completions, and for tokens, as OpenAI's API and vLLM's extras name their fields.

Knows types and OpenAI's own ranges; the engine checks the rest, in the same words for all its
clients. ``Body.not_offered`` is what callers may know from elsewhere but would not get here: it is
refused by name, unless it has a value that changes nothing. ``Body.without_effect`` is accepted
with any value, and named in a header of the answer.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from minisgl_gateway.completions.message_schema import (
    ChatToolChoice,
    Messages,
    OlderChoice,
    OlderFunctions,
    Tools,
)
from minisgl_gateway.form_schema import FormFields
from minisgl_gateway.generation import MAX_STOPS, NO_LIMIT
from minisgl_gateway.shared_fields import (
    MAX_LOGPROBS,
    Effort,
    PromptCacheOptions,
    ServiceTier,
    TokenId,
    TokenIds,
    label,
    salt,
)
from minisgl_gateway.strict_schema import Body, Strict

MAX_CHOICES: Final = 64
"""The most choices of one request: ``n``, or ``best_of``, times the number of prompts."""
_BOTH: Final[dict[str, tuple[Any, ...]]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": (),
    "lora_path": (),
    "mirostat": (0,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "repeat_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "tfs_z": (1,),
    "top_a": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "xtc_probability": (0,),
}
_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
}
_TOKENIZE: Final[dict[str, tuple[Any, ...]]] = {
    name: _CHAT[name] for name in ("chat_template", "continue_final_message", "mm_processor_kwargs")
}


class StreamOptions(Strict):
    """What a stream says besides the answer."""

    include_usage: bool = Field(False, description="a last chunk tells the numbers of tokens")
    continuous_usage_stats: bool = Field(
        False, description="every chunk tells the numbers of tokens of its choice so far"
    )
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(FormFields):
    """What both kinds of request share."""

    without_effect = frozenset(
        {
            "cache_prompt",
            "guided_decoding_backend",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "request_id",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="answers, made in parallel")
    max_tokens: int | None = Field(
        None,
        ge=NO_LIMIT,
        lt=2**31,
        description="-1 is as many as there is room for; 0 goes with echo or prompt_logprobs",
    )
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, ge=0, le=1, description="0: the likeliest token")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = Field(False, description="the text ends with that of stop")
    skip_special_tokens: bool = Field(
        True, description="false: the text shows special tokens, but for those that end the answer"
    )
    logit_bias: dict[str, float] | None = Field(None, description="token id: -100 .. 100")
    top_k: int = Field(0, ge=-1, lt=2**31, description="0 or -1 is off")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=2**31)
    stop_token_ids: list[TokenId] | None = Field(None, fail_fast=True)
    cache_salt: str | None = salt()
    priority: int = Field(0, gt=-(2**31), lt=2**31, description="lower goes first")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="logprobs of the prompt's tokens, with that many others; not with stream",
    )
    return_token_ids: bool = Field(False, description="ids of the prompt's and the answer's tokens")
    prompt_cache_key: str | None = label()
    prompt_cache_retention: str | None = label("prefixes stay while there is room; no effect")
    cache_prompt: bool | None = label("prefixes are always cached; no effect")
    user: str | None = label()
    safety_identifier: str | None = label()
    metadata: dict[str, str] | None = label()
    request_id: str | None = label("the header X-Request-Id has one; no effect")
    service_tier: ServiceTier | None = label("there is one; no effect")
    store: bool | None = label("nothing is stored; no effect")


class CompletionRequest(GenerationRequest):
    """A text, or token ids, to be continued; several prompts make several choices."""

    not_offered = MappingProxyType({**_BOTH, "suffix": ("",)})

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="answers to make, of which the n most likely come back; not with stream",
    )
    echo: bool = Field(False, description="the prompt stands before the answer, in logprobs too")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = Field(
        True, description="those that the tokenizer puts around a text"
    )


class ChatCompletionRequest(GenerationRequest):
    """A chat to be continued by the assistant."""

    not_offered = MappingProxyType({**_BOTH, **_CHAT})
    without_effect = GenerationRequest.without_effect | {
        "prediction",
        "prompt_cache_options",
        "stream_reasoning",
        "verbosity",
    }

    messages: Messages
    max_completion_tokens: int | None = Field(
        None, ge=NO_LIMIT, lt=2**31, description="the newer name of max_tokens"
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool = Field(True, description="false: one call at most")
    functions: OlderFunctions | None = Field(
        None, description="the older form of tools: one call at most"
    )
    function_call: OlderChoice | None = Field(None, description="the older form of tool_choice")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template, such as enable_thinking"
    )
    add_generation_prompt: bool = Field(
        True, description="the template ends with the beginning of an answer"
    )
    enable_thinking: bool | None = Field(
        None, description="whether the model thinks first, if its chat template lets it choose"
    )
    reasoning_effort: Effort | None = Field(
        None, description="how much it thinks, if its chat template knows of it; none is not at all"
    )
    separate_reasoning: bool = Field(
        True, description="thoughts are the message's reasoning_content; false: part of its content"
    )
    include_reasoning: bool = Field(True, description="false: thoughts are left out of the answer")
    prediction: dict[str, Any] | None = label("answers are not guessed by it; no effect")
    prompt_cache_options: PromptCacheOptions | None = label(
        "prefixes stay while there is room; no effect"
    )
    stream_reasoning: bool | None = label("thoughts are streamed as they come; no effect")
    verbosity: str | None = label("not known to the model; no effect")


class TokenizeRequest(Body):
    """A text or a chat whose tokens are asked for, in vLLM's form."""

    not_offered = MappingProxyType(_TOKENIZE)

    prompt: str | None = Field(None, description="a text; either this or messages")
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = Field(
        None, description="those that the tokenizer puts around a text; true for one"
    )
    add_generation_prompt: bool = Field(True, description="for messages")
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Tokens whose text is asked for."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
