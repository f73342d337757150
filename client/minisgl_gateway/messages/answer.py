"""The answers of the Messages API, as Anthropic names them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class AnsweredTextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str


class AnsweredThinkingBlock(BaseModel):
    """What the model thought before it answered; nothing is signed here."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class AnsweredToolUseBlock(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = AnsweredThinkingBlock | AnsweredTextBlock | AnsweredToolUseBlock


class ThinkingTokens(BaseModel):
    thinking_tokens: int


class MessagesUsage(BaseModel):
    """Tokens. Those of the prompt are ``input_tokens`` and ``cache_read_input_tokens`` together."""

    input_tokens: int = Field(description="not taken from the prefix cache")
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int = Field(description="taken from the prefix cache")
    output_tokens: int
    output_tokens_details: ThinkingTokens


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesAnswer(BaseModel):
    """An answer; the first event of a stream has it without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class CountedTokens(BaseModel):
    """The length of a prompt."""

    input_tokens: int


class MessagesError(BaseModel):
    type: str
    message: str


class MessagesErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    type: Literal["error"] = "error"
    error: MessagesError
    request_id: str
