"""The requests that the gateway takes, field by field, as OpenAI's API and vLLM's extras name them.

Knows types and OpenAI's own ranges; the engine checks the rest and says so in the same words to all
its clients. ``NOT_OFFERED`` lists what callers may know from elsewhere but would not get here: it
is refused by name, unless it has a value that changes nothing.

Lists are read up to the first item that is wrong (``fail_fast``): a body of a megabyte can have
hundreds of thousands, and a complaint about each would take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES: Final = 16
"""Generations of one request: ``n`` times the number of prompts."""
MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 16
NOT_ENFORCED: Final = "not_enforced"
"""The type of pydantic's error for what would need constrained decoding."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool = Field(False, description="a last chunk tells the numbers of tokens")
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(_Strict):
    """What both kinds of request share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="answers, made in parallel")
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id: -100 .. 100")
    top_k: int = Field(0, ge=-1, lt=2**31, description="0 or -1 is off")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=2**31)
    stop_token_ids: list[TokenId] | None = Field(None, fail_fast=True)
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        pattern="^[A-Za-z0-9_-]*$",
        description="prefixes are shared under equal salts only",
    )
    priority: int = Field(0, gt=-(2**31), lt=2**31, description="lower goes first")
    prompt_cache_key: str | None = Field(None, description="a label; no effect")
    user: str | None = Field(None, description="a label; no effect")
    safety_identifier: str | None = Field(None, description="a label; no effect")
    metadata: dict[str, str] | None = Field(None, description="a label; no effect")


class CompletionRequest(GenerationRequest):
    """A text, or token ids, to be continued; several prompts make several choices."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    echo: bool = Field(False, description="the prompt, if it is text, stands before the answer")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TextPart(_Strict):
    """A piece of a message; texts only."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


def _read_by_sdk() -> Any:
    """What OpenAI's SDK adds to an answer that it has parsed, and sends back; not for the model."""
    return Field(None, exclude=True, description="from OpenAI's SDK; no effect")


class FunctionCall(_Strict):
    """A call that the model made earlier; ``arguments`` is JSON in a string."""

    name: str
    arguments: str
    parsed_arguments: Any = _read_by_sdk()


class ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(_Strict):
    """Instructions; ``developer`` is the newer name of the same role."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(_Strict):
    """An earlier answer: text, calls of tools, or both. Callers send answers back with all their
    empty fields."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    reasoning_content: str | None = None
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = _read_by_sdk()


class ToolMessage(_Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(_Strict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = Field(None, description="schemas are not enforced")

    @field_validator("strict", mode="before")
    @classmethod
    def _is_not_strict(cls, strict: Any) -> Any:
        if strict is True:
            raise _not_enforced("false")
        return strict


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class ChatCompletionRequest(GenerationRequest):
    """A chat to be continued by the assistant."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template, such as enable_thinking"
    )

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _forces_no_call(cls, choice: Any) -> Any:
        if choice == "required" or isinstance(choice, dict):
            raise _not_enforced("'none' and 'auto'")
        return choice


def _not_enforced(offered: str) -> PydanticCustomError:
    return PydanticCustomError(
        NOT_ENFORCED, "cannot be enforced: only {offered} can be had", {"offered": offered}
    )


_BOTH: Final[dict[str, tuple[Any, ...]]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": (),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "function_call": (),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}

NOT_OFFERED: Final[Mapping[type[GenerationRequest], Mapping[str, tuple[Any, ...]]]] = (
    MappingProxyType(
        {
            CompletionRequest: MappingProxyType({**_BOTH, "suffix": ("",)}),
            ChatCompletionRequest: MappingProxyType({**_BOTH, **_CHAT}),
        }
    )
)
"""By kind of request: names, and the values with which each is accepted; null always is."""
