"""However many documents a request has, only a few questions are in memory at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from minisgl_client.answer import Delta, Result, TokenLogprob, TokenLogprobs, Tokens, add_up
from minisgl_client.client import AsyncClient
from minisgl_client.errors import Unavailable
from minisgl_gateway.app import create_app
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.telemetry import Telemetry

YES, NO = 1, 2
IDS = {"yes": YES, "no": NO}


class Engine:
    """Reports one of two answers at a time, as if the other were not among the likely ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_open = 0
        """Tokenized questions whose second answer has not come yet."""
        self.most_open = 0
        self.num_asked = 0
        self.fails_at: int | None = None

        async def tokenize(_: AsyncClient, prompt: str = "", **_more: Any) -> Tokens:
            if "<Document>: " in prompt:
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
            await asyncio.sleep(0)
            ids = (IDS.get(prompt, 3 + len(prompt)),)
            return Tokens(ids, ("",), prompt, 1000, None)

        async def generate(_: AsyncClient, **call: Any) -> Result:
            self.num_asked += 1
            if self.num_asked == self.fails_at:
                raise Unavailable("it drains")
            await asyncio.sleep(0)
            likelier, length = _is_first(call), call["input_ids"][1]
            token = YES if likelier else NO
            self.num_open -= not likelier
            logprob = -float(length) if likelier else -1.0
            chosen = TokenLogprob(token, "", logprob, 1)
            delta = Delta(
                finish_reason="length",
                num_input_tokens=3,
                num_output_tokens=1,
                logprobs=(TokenLogprobs(chosen),),
            )
            return add_up([delta], request_id=call["request_id"], first_delta_s=0, total_s=0)

        monkeypatch.setattr(AsyncClient, "tokenize", tokenize)
        monkeypatch.setattr(AsyncClient, "generate", generate)


def _is_first(call: dict[str, Any]) -> bool:
    return all(bias > 0 for bias in call["logit_bias"].values())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def reranked(num_documents: int) -> httpx.Response:
    documents = ["x" * (num_documents - index) for index in range(num_documents)]
    body = {"model": "minisgl", "query": "Which?", "documents": documents}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(GatewayOptions(), Telemetry()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post("/v1/rerank", json=body)

    return asyncio.run(ask())


def test_a_question_is_done_with_before_the_next_is_tokenized(engine: Engine) -> None:
    answer = reranked(100).json()
    assert [one["index"] for one in answer["results"]] == list(reversed(range(100)))
    assert answer["usage"]["prompt_tokens"] == 300
    assert (engine.num_asked, engine.num_open) == (200, 0)
    assert 1 < engine.most_open <= 16


@pytest.mark.parametrize("fails_at", [1, 30, 200])
def test_the_first_error_ends_all(engine: Engine, fails_at: int) -> None:
    engine.fails_at = fails_at
    answer = reranked(100)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "it drains")
    assert engine.num_asked <= fails_at + 32  # those whose turn had come
