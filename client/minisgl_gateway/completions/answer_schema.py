"""Answers of chat completions and completions, as OpenAI's API names them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from minisgl_gateway.answer_schema import unless_null
from minisgl_gateway.logprobs import TokenLogprob


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(0, description="taken from the prefix cache")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = Field(0, description="of thoughts that are split off, as estimated")


class Usage(BaseModel):
    """Tokens of all choices; those of a prompt count once, however many answers it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails(cached_tokens=0)
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails(reasoning_tokens=0)


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """One element a token in each list; offsets are characters from the answer's beginning.

    The first token of a prompt that is echoed has no logprob.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """A token that stands, or is likely, at a place of the prompt, as vLLM has it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One element a token: by token id that token's, which comes first, and others. None for the first,
which has no logprob."""


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="a JSON object in a string")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = unless_null("what the model thought before it answered")
    refusal: None = None
    tool_calls: list[ToolCall] | None = unless_null()
    function_call: CalledFunction | None = unless_null()


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]
    token_ids: list[int] | None = unless_null()


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = unless_null()
    prompt_token_ids: list[int] | None = unless_null()


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs | None = unless_null()
    prompt_token_ids: list[int] | None = unless_null()
    token_ids: list[int] | None = unless_null()


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
