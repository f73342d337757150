"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``: what searches need, over ``Service``.

An embedding is the engine's: the hidden state of the input's last token. To rerank, the model is
asked, in the words that Qwen3-Reranker was trained on, whether each document meets the query; a
document's relevance is the probability of ``yes`` divided by that of ``yes`` or ``no``. Documents
are text to the model: nothing in them becomes a special token.
"""

from __future__ import annotations

import array
import asyncio
import base64
import math
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl_client.answer import Result, TokenLogprobs
from starlette.requests import Request
from starlette.responses import Response

from minisgl_gateway import retrieval_schema as schema
from minisgl_gateway.counts import Counts
from minisgl_gateway.engine_errors import api_error_of_finish
from minisgl_gateway.errors import internal, invalid
from minisgl_gateway.lookups import Lookups
from minisgl_gateway.retrieval_schema import (
    EmbeddingRequest,
    RelevanceRequest,
    RerankRequest,
    RetrievalRequest,
    ScoreRequest,
)
from minisgl_gateway.servers import Engine
from minisgl_gateway.service import Service
from minisgl_gateway.shared_fields import MAX_LOGPROBS

_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_FOR_SURE: Final = 100
"""A bias that makes one of the two answers certain, whatever else is likely."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is the same for all documents, as tokens: the text around a question, and the first
    tokens of both answers."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    yes: int
    no: int


class RetrievalRoutes:
    """Embeddings of texts, and documents in the order of their relevance."""

    def __init__(self, service: Service, lookups: Lookups, engine: Engine) -> None:
        self._service = service
        self._engine = engine
        self._lookups = lookups

    async def embeddings(self, http: Request) -> Response:
        """POST /v1/embeddings."""
        request = await self._service.received(EmbeddingRequest, http)
        request_id = f"embd-{uuid.uuid4().hex}"
        inputs = _inputs(request)

        async def embed(index: int) -> Result:
            asked = {**inputs[index], "embed": True, **self._shared(http, request)}
            return await self._complete(f"{request_id}.{index}", asked)

        fields = EmbeddingRequest.model_fields
        results = await self._service.each(http, embed, len(inputs), request_id, fields, "input")
        counts = Counts()
        data = []
        for index, result in enumerate(results):
            counts.add(result, prompt=True)
            vector = _shortened(result.embedding, request.dimensions)
            told = list(vector) if request.encoding_format == "float" else _in_base64(vector)
            data.append(schema.Embedding(index=index, embedding=told))
        answer = schema.EmbeddingList(data=data, model=request.model, usage=_usage(counts))
        return _json(answer)

    async def rerank(self, http: Request) -> Response:
        """POST /v1/rerank."""
        request = await self._service.received(RerankRequest, http)
        request_id = f"rerank-{uuid.uuid4().hex}"
        counts, texts = Counts(), request.texts
        pairs = [(request.query, text) for text in texts]
        scores = await self._scores(http, request, pairs, "documents", counts, request_id)
        ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = [
            schema.RerankResult(
                index=index,
                document=schema.RerankDocument(text=texts[index])
                if request.return_documents
                else None,
                relevance_score=scores[index],
            )
            for index in ranked[: request.top_n]
        ]
        answer = schema.Reranked(
            id=request_id, model=request.model, usage=_usage(counts), results=results
        )
        return _json(answer)

    async def score(self, http: Request) -> Response:
        """POST /v1/score."""
        request = await self._service.received(ScoreRequest, http)
        request_id, counts = f"score-{uuid.uuid4().hex}", Counts()
        scores = await self._scores(http, request, request.pairs, "text_2", counts, request_id)
        answer = schema.ScoreList(
            id=request_id,
            created=int(time.time()),
            model=request.model,
            data=[schema.Score(index=index, score=score) for index, score in enumerate(scores)],
            usage=_usage(counts),
        )
        return _json(answer)

    async def _frame(self, http: Request) -> _Frame:
        texts = (_BEFORE, _AFTER, "yes", "no")
        before, after, yes, no = await asyncio.gather(
            *(self._lookups.text_tokens(http, text, parse_special_tokens=True) for text in texts)
        )
        if yes[0] == no[0]:
            raise invalid("the model cannot rerank: its tokens do not tell yes from no", "model")
        return _Frame(before, after, yes[0], no[0])

    async def _prompt(
        self, http: Request, instruction: str | None, frame: _Frame, query: str, text: str
    ) -> list[int]:
        """The question about a document as token ids."""
        about = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {text}"
        return [*frame.before, *await self._lookups.text_tokens(http, about), *frame.after]

    async def _scores(
        self,
        http: Request,
        request: RelevanceRequest,
        pairs: Sequence[tuple[str, str]],
        param: str,
        counts: Counts,
        request_id: str,
    ) -> list[float]:
        """The relevance, 0 .. 1, of the document in each of the ``pairs`` to the query before it;
        ``param`` has the documents.

        A first call tells the log-probability of the likelier answer, and of the other if it is
        among the likely tokens. If it is not, a second call tells it; the prompt is cached then.
        Only the questions of documents whose turn has come are in memory: each has the whole query.
        """
        frame = await self._frame(http)
        both = {frame.yes: _FOR_SURE, frame.no: _FOR_SURE}

        async def score(index: int) -> float:
            prompt = await self._prompt(http, request.instruction, frame, *pairs[index])

            async def ask(name: str, biases: Mapping[int, float]) -> Result:
                asked = {
                    "input_ids": prompt,
                    "max_tokens": 1,
                    "temperature": 0,
                    "ignore_eos": True,
                    "num_logprobs": MAX_LOGPROBS,
                    "logit_bias": dict(biases),
                    **self._shared(http, request),
                }
                return await self._complete(f"{request_id}.{name}", asked)

            first = await ask(f"{index}", both)
            counts.add(first, prompt=True)
            told = _logprobs(first.logprobs)
            for token in both.keys() - told.keys():
                biases = {token: _FOR_SURE, _other(token, frame): -_FOR_SURE}
                second = await ask(f"other.{index}", biases)
                told[token] = _logprobs(second.logprobs)[token]
            return 1 / (1 + math.exp(min(told[frame.no] - told[frame.yes], 700)))

        fields = type(request).model_fields
        return await self._service.each(http, score, len(pairs), request_id, fields, param)

    async def _complete(self, request_id: str, asked: Mapping[str, Any]) -> Result:
        """The engine's answer, which has come to its end; raises ``ApiError`` if it has not."""
        result = await self._engine.generate(**asked, request_id=request_id)
        if result.finish_reason != "length":
            raise api_error_of_finish(result.finish_reason)
        return result

    def _shared(self, http: Request, request: RetrievalRequest) -> dict[str, Any]:
        parameters = self._service.policy(http).parameters(request.cache_salt)
        return {**parameters, "priority_level": -request.priority}


def _inputs(request: EmbeddingRequest) -> list[dict[str, Any]]:
    """The prompt of each input, as the engine's client takes it."""
    given = request.input
    if isinstance(given, str):
        given = [given]
    if isinstance(given[0], int):
        return [{"input_ids": given}]
    return [{"prompt": one} if isinstance(one, str) else {"input_ids": one} for one in given]


def _logprobs(positions: Sequence[TokenLogprobs]) -> dict[int, float]:
    """The log-probabilities by token, for the only position of an answer."""
    if len(positions) != 1:
        raise internal()
    (position,) = positions
    return {one.token_id: one.logprob for one in (position.chosen, *position.alternatives)}


def _other(token: int, frame: _Frame) -> int:
    return frame.no if token == frame.yes else frame.yes


def _shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The first dimensions, normalized again: models trained for that lose little."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise invalid(
            f"dimensions must be at most {len(vector)}, those of the model, got {dimensions}",
            "dimensions",
        )
    kept = vector[:dimensions]
    length = math.sqrt(sum(number * number for number in kept)) or 1.0
    return [number / length for number in kept]


def _in_base64(vector: Sequence[float]) -> str:
    """The numbers as little-endian float32, which OpenAI's clients read."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def _usage(counts: Counts) -> schema.RetrievalUsage:
    tokens = counts.num_input_tokens
    return schema.RetrievalUsage(prompt_tokens=tokens, total_tokens=tokens)


def _json(answer: schema.EmbeddingList | schema.Reranked | schema.ScoreList) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
