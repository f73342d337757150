"""Answers that belong to no API alone: models, tokens, probes and errors.

And what the schemas of answers share.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


def unless_null(description: str | None = None) -> Any:
    """A field that an answer does not have if it is null, which is the default."""
    return Field(None, exclude_if=lambda value: value is None, description=description)


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
