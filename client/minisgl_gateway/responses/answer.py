"""The answers of the Responses API, as OpenAI names them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from minisgl_gateway.answer_schema import unless_null
from minisgl_gateway.logprobs import TokenLogprob
from minisgl_gateway.responses.schema import AllowedTools, FunctionChoice, Mode, Status


class AnsweredText(BaseModel):
    """A piece of the answer. ``logprobs`` is empty if they were not asked for."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class AnsweredMessage(BaseModel):
    """What the assistant says."""

    id: str
    type: Literal["message"] = "message"
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[AnsweredText]


class Thoughts(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class AnsweredReasoning(BaseModel):
    """What the model thought before it answered."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Any] = []
    content: list[Thoughts]


class AnsweredCall(BaseModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    namespace: str | None = unless_null()
    arguments: str = Field(description="a JSON object in a string")


AnsweredItem = AnsweredReasoning | AnsweredMessage | AnsweredCall


class InputTokensDetails(BaseModel):
    cached_tokens: int = Field(description="taken from the prefix cache")
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    code: str
    message: str


class Response(BaseModel):
    """An answer; it repeats the parameters of its request. Null stands for a temperature or a top_p
    that the request left out: only the server knows which it has by default."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = unless_null()
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[AnsweredItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Mode | FunctionChoice | AllowedTools
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = unless_null()


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class CountedInput(BaseModel):
    """The length of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
