"""The answers that the gateway gives, as OpenAI's API names them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


def unless_null(description: str | None = None) -> Any:
    """A field that an answer does not have if it is null, which is the default."""
    return Field(None, exclude_if=lambda value: value is None, description=description)


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


class TopLogprob(BaseModel):
    """A likely token; ``token`` has U+FFFD for a part of a character, ``bytes`` has that part."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


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


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = unless_null()


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs | None = unless_null()


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class RetrievalUsage(BaseModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="numbers, or float32 numbers in base64")


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: RetrievalUsage


class RerankDocument(BaseModel):
    text: str


class RerankResult(BaseModel):
    index: int = Field(description="the document's place in the request")
    document: RerankDocument | None = unless_null()
    relevance_score: float = Field(description="0 .. 1")


class Reranked(BaseModel):
    """The documents, the most relevant first, as Jina and vLLM have them."""

    id: str
    model: str
    usage: RetrievalUsage
    results: list[RerankResult]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["minisgl"] = "minisgl"
    root: str = Field(description="the base model's name, or the folder of a LoRA adapter")
    parent: str | None = Field(description="the base model of a LoRA adapter")
    max_model_len: int | None = Field(
        description="tokens of a prompt and its answer; null while the engine does not answer"
    )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(BaseModel):
    """The tokens of a prompt, as vLLM has them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="as the vocabulary spells them")


class Detokenized(BaseModel):
    """The text of tokens, special ones spelled out."""

    prompt: str


class Version(BaseModel):
    version: str


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    error: Error


class Health(BaseModel):
    status: Literal["ok"] = "ok"
