"""Requests for embeddings, in OpenAI's API, for reranking, in Jina's and Cohere's, and for scores,
in vLLM's; and their answers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from minisgl_gateway.answer_schema import unless_null
from minisgl_gateway.errors import invalid
from minisgl_gateway.shared_fields import TokenIds, label, salt
from minisgl_gateway.strict_schema import Body, Strict

MAX_INPUTS: Final = 2048
"""The most texts to embed, or documents to rank, in one request."""


class RetrievalRequest(Body):
    """What requests of searches share."""

    without_effect = frozenset({"user"})

    model: str
    cache_salt: str | None = salt()
    priority: int = Field(0, gt=-(2**31), lt=2**31, description="lower goes first")
    user: str | None = label()


class EmbeddingRequest(RetrievalRequest):
    """Texts, or token ids, whose embeddings are asked for."""

    not_offered = MappingProxyType(
        {"add_special_tokens": (True,), "truncate_prompt_tokens": (), "normalize": (True,)}
    )

    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="the first ones alone, again of length 1"
    )


class TextDocument(Strict):
    """A document, which Jina's API accepts besides plain texts."""

    text: str


class RelevanceRequest(RetrievalRequest):
    """What requests for the relevance of documents share."""

    not_offered = MappingProxyType({"max_tokens_per_doc": (), "truncate_prompt_tokens": ()})

    instruction: str | None = Field(None, description="what the search is for, in a sentence")


class RerankRequest(RelevanceRequest):
    """Documents to be put in the order in which they meet a query."""

    query: str
    documents: Annotated[
        list[str | TextDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    top_n: int | None = Field(None, ge=1, lt=2**31, description="at most that many results")
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        """Of the documents."""
        return [of if isinstance(of, str) else of.text for of in self.documents]


Scored = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class ScoreRequest(RelevanceRequest):
    """Queries and documents, pair by pair, or one query for all documents."""

    text_1: Scored = Field(description="one query, or as many as there are documents")
    text_2: Scored = Field(description="documents")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each query with its document; raises ``ApiError``."""
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        documents = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise invalid(
                f"text_1 must be one text, or {len(documents)} as text_2, got {len(queries)}",
                "text_1",
            )
        return list(zip(queries, documents, strict=True))


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
    """The documents, the most relevant first, as Jina, Cohere and vLLM have them."""

    id: str
    model: str
    usage: RetrievalUsage
    results: list[RerankResult]


class Score(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float = Field(description="0 .. 1")


class ScoreList(BaseModel):
    """The relevance of each pair, in the order of the request, as vLLM has it."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: RetrievalUsage
