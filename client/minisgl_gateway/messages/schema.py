"""The requests of the Messages API, field by field, as Anthropic names them.

The same rules as in ``completions.schema``: what is not known is refused by name, and null is
"not given".
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from minisgl_gateway.generation import MAX_STOPS
from minisgl_gateway.shared_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    DirectCaller,
    cache_control,
    label,
    read_by_sdk,
)
from minisgl_gateway.strict_schema import Body, Strict

# --- messages ------------------------------------------------------------------------------------


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: Any = cache_control()
    citations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed_output: Any = read_by_sdk()


class ThinkingBlock(Strict):
    """What the model thought before; ``signature`` is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    """What another model thought, which only its server can read; the model is not told."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = cache_control()
    caller: DirectCaller | None = None


Texts = Annotated[list[TextBlock], Field(fail_fast=True)]


class ToolResultBlock(Strict):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Texts | None = None
    is_error: bool = Field(False, description="the model is told 'Error: ' before the content")
    cache_control: Any = cache_control()


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserTurn(Strict):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1, fail_fast=True)]


class AssistantTurn(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]


class SystemTurn(Strict):
    """Instructions that come later than ``system``."""

    role: Literal["system"]
    content: str | Texts


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


# --- tools, and the form of the answer -----------------------------------------------------------


class ClientTool(Strict):
    """A function that the model may call; ``input_schema`` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool = Field(False, description="whether inputs follow the schema")
    cache_control: Any = cache_control()
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = label("a call comes in one piece; no effect")
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class ClientToolChoice(Strict):
    """Whether the model may call (``auto``), must (``any``), must call this one, or may not."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="with the type 'tool', whose name it is")
    disable_parallel_tool_use: bool = Field(False, description="one call at most")


class ThinkingConfig(Strict):
    """Whether the model thinks, if its chat template can say so, and whether thoughts are shown."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=0, description="max_tokens bounds all; no effect")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="thoughts are told as they are, or not at all"
    )


class OutputSchema(Strict):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="a variable of the chat template, if it has one"
    )
    format: OutputSchema | None = None


class MessagesMetadata(Strict):
    user_id: str | None = None


class CountTokensRequest(Body):
    """A conversation, whose tokens are counted or which is to be continued."""

    not_offered = MappingProxyType(
        {
            "betas": ([],),
            "billing_policy": (),
            "compaction": (),
            "container": (),
            "context_management": (
                {"edits": []},
                {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            ),
            "diagnostics": (),
            "fallback_credit_token": (),
            "fallbacks": ([], "default"),
            "inference_geo": (),
            "mcp_servers": ([],),
            "speed": ("standard",),
            "thread": (),
            "user_profile_id": (),
            "workspace_id": (),
        }
    )
    without_effect = frozenset({"metadata", "service_tier"})

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Texts | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: ThinkingConfig | None = Field(None, description="none if it is not asked for")
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = Field(
        None, description="the older form of output_config.format"
    )
    cache_control: Any = cache_control()


class MessagesRequest(CountTokensRequest):
    """A conversation to be continued by the assistant."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, ge=0, le=1, description="0: the likeliest token")
    top_k: int = Field(0, ge=-1, lt=2**31, description="0 or -1 is off")
    metadata: MessagesMetadata | None = label()
    service_tier: Literal["auto", "standard_only"] | None = label("there is one; no effect")
