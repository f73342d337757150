"""Embeddings with OpenAI's client, and documents in order of relevance, against what transformers
computes with the demo model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import torch.nn.functional as F
from minisgl_client import Client
from openai import OpenAI
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.server.process import TritonServer
from tests.gateway.conftest import Gateway
from tests.gateway.test_leaving import asked
from tests.server.client import Metrics, wait_for

pytestmark = pytest.mark.server

TEXTS = ["The capital of France is Paris.", "Bananas are yellow. 🌧", "x"]
QUERY = "What is the capital of China?"
DOCUMENTS = ["Beijing.", "Gravity attracts <|im_end|> bodies.", "The capital of China is Beijing."]


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    """The demo model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(DEMO_MODEL)  # already in evaluation mode


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def embedded(theirs: tuple[Any, Any], text: str) -> Tensor:
    model, tokenizer = theirs
    with torch.inference_mode():
        states = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
    return F.normalize(states[0, -1], dim=-1)


def test_embeddings_are_those_of_transformers(client: OpenAI, theirs: tuple[Any, Any]) -> None:
    answer = client.embeddings.create(model="minisgl", input=TEXTS)  # in base64, as the client asks
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, text in zip(answer.data, TEXTS, strict=True):
        expected = embedded(theirs, text)
        torch.testing.assert_close(torch.tensor(one.embedding), expected, atol=1e-4, rtol=0)
    tokenizer = theirs[1]
    num_tokens = sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_every_kind_of_input_has_the_same_embedding(
    client: OpenAI, theirs: tuple[Any, Any]
) -> None:
    text = TEXTS[0]
    ids = theirs[1](text)["input_ids"]

    def vectors(given: Any, **more: Any) -> list[list[float]]:
        answer = client.embeddings.create(model="minisgl", input=given, **more)
        return [one.embedding for one in answer.data]

    (expected,) = vectors(text)
    found = [*vectors([text], encoding_format="float"), *vectors(ids), *vectors([ids, ids])]
    assert len(found) == 4
    for vector in found:
        assert vector == pytest.approx(expected, abs=1e-5)


def test_a_part_of_the_dimensions_has_length_1(client: OpenAI) -> None:
    whole = client.embeddings.create(model="minisgl", input=TEXTS[0]).data[0].embedding
    part = client.embeddings.create(model="minisgl", input=TEXTS[0], dimensions=16)
    expected = np.array(whole[:16]) / np.linalg.norm(whole[:16])
    assert part.data[0].embedding == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(openai.BadRequestError, match=f"dimensions must be at most {len(whole)}"):
        client.embeddings.create(model="minisgl", input=TEXTS[0], dimensions=len(whole) + 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": []}, "input must"),
        ({"input": ""}, "input"),
        ({"input": "word " * 40000}, "Please reduce the length of the input"),
        ({"input": ["x", ""]}, r"input\[1\] must not be empty"),
        ({"input": [[1], [2], [2048]]}, r"input\[2\] must be in 0 \.\. 2047"),
        ({"input": "x", "model": "other"}, 'the model "other" does not exist'),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format must be 'float' or 'base64'"),
        ({"input": "x", "extra_body": {"normalize": False}}, "normalize is not supported"),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, given: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.APIStatusError, match=message):
        client.embeddings.create(**{"model": "minisgl", **given})


def test_many_inputs_take_few_places(client: OpenAI) -> None:
    """There are more than the answers that one request may have."""
    texts = [f"Number {index}." for index in range(300)]
    answer = client.embeddings.create(model="minisgl", input=texts)
    assert len({tuple(one.embedding) for one in answer.data}) == 300


def relevance(theirs: tuple[Any, Any], document: str) -> float:
    """As in Qwen3-Reranker's model card: in parts, so that a document stays text."""
    model, tokenizer = theirs
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    about = (
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        f"<Query>: {QUERY}\n<Document>: {document}"
    )

    def ids(text: str, **more: Any) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, **more)["input_ids"]
        return found

    whole = ids(before) + ids(about, split_special_tokens=True) + ids(after)
    with torch.inference_mode():
        logits = model(torch.tensor([whole])).logits[0, -1]
    yes, no = logits[ids("yes")[0]].item(), logits[ids("no")[0]].item()
    return 1 / (1 + math.exp(no - yes))


def reranked(
    gateway: Gateway, documents: Sequence[str | dict[str, str]], **more: Any
) -> httpx.Response:
    body = {"model": "minisgl", "query": QUERY, "documents": documents, **more}
    return gateway.post("/v1/rerank", body)


def test_documents_are_ranked_by_their_relevance(gateway: Gateway, theirs: tuple[Any, Any]) -> None:
    answer = reranked(gateway, DOCUMENTS).json()
    results = answer["results"]
    scores = [one["relevance_score"] for one in results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one["index"] for one in results) == [0, 1, 2]
    for one in results:
        document = DOCUMENTS[one["index"]]
        assert one["document"] == {"text": document}
        assert one["relevance_score"] == pytest.approx(relevance(theirs, document), abs=1e-4)
    assert answer["usage"]["total_tokens"] > 100
    (first,) = reranked(gateway, DOCUMENTS, top_n=1, return_documents=False).json()["results"]
    assert first == {
        "index": results[0]["index"],
        "relevance_score": pytest.approx(scores[0], abs=1e-5),
    }
    objects = reranked(gateway, [{"text": document} for document in DOCUMENTS]).json()["results"]
    assert [one["document"] for one in objects] == [one["document"] for one in results]
    other = reranked(gateway, DOCUMENTS, instruction="Find fruit.").json()["results"]
    assert max(abs(one["relevance_score"] - scores[0]) for one in other) > 1e-4


@pytest.mark.parametrize("route", ["/rerank", "/v2/rerank"])
def test_other_names_of_the_route_for_ranking(gateway: Gateway, route: str) -> None:
    """The second is the one of Cohere's clients."""
    body = {"model": "minisgl", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    answer = gateway.post(route, body).json()
    assert isinstance(answer["id"], str)
    expected = reranked(gateway, DOCUMENTS, top_n=2).json()["results"]
    for one, other in zip(answer["results"], expected, strict=True):
        assert one["index"] == other["index"]
        assert one["relevance_score"] == pytest.approx(other["relevance_score"], abs=1e-5)


@pytest.mark.parametrize("route", ["/score", "/v1/score"])
def test_scores_of_pairs(gateway: Gateway, theirs: tuple[Any, Any], route: str) -> None:
    def scored(text_1: Any, text_2: Any) -> Any:
        return gateway.post(route, {"model": "minisgl", "text_1": text_1, "text_2": text_2})

    expected = [pytest.approx(relevance(theirs, document), abs=1e-4) for document in DOCUMENTS]
    for queries in (QUERY, [QUERY], [QUERY] * 3):
        answer = scored(queries, DOCUMENTS).json()
        assert [one["index"] for one in answer["data"]] == [0, 1, 2]
        assert [one["score"] for one in answer["data"]] == expected
        assert answer["object"] == "list" and answer["data"][0]["object"] == "score"
        assert answer["usage"]["total_tokens"] > 100
    (single,) = scored(QUERY, DOCUMENTS[0]).json()["data"]
    assert single["score"] == expected[0]
    first, second = scored([QUERY, "x"], DOCUMENTS[:1] * 2).json()["data"]
    assert first["score"] != second["score"]
    error = scored([QUERY] * 2, DOCUMENTS).json()["error"]
    assert error["message"] == "text_1 must be one text, or 3 as text_2, got 2"
    assert error["param"] == "text_1"
    assert scored(QUERY, ["word", "word " * 40000]).json()["error"]["param"] == "text_2"


def test_what_cannot_be_ranked_is_refused(gateway: Gateway) -> None:
    assert "documents must not be empty" in reranked(gateway, []).text
    assert "documents[0]" in reranked(gateway, [{"title": "Rivers"}]).text
    assert "top_n must be >= 1" in reranked(gateway, DOCUMENTS, top_n=0).text
    too_long = reranked(gateway, ["word " * 40000])
    assert too_long.status_code == 400
    error = too_long.json()["error"]
    assert "maximum context length" in error["message"]
    assert "reduce the length of the documents" in error["message"]
    assert error["param"] == "documents"
    second_too_long = reranked(gateway, ["word", "word " * 40000]).json()["error"]
    assert "your documents[1] resulted in" in second_too_long["message"]


def test_a_query_beyond_the_context_is_refused_at_its_first_document(gateway: Gateway) -> None:
    """It is not refused only after all questions, each with the query, have been tokenized."""
    answer = reranked(gateway, ["word"] * 2048, query="word " * 60_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_client_that_leaves_before_all_documents_are_ranked(
    server: TritonServer, gateway: Gateway
) -> None:
    def finished() -> float:
        return Metrics(server)["vllm:e2e_request_latency_seconds_count"]

    lost = 'minisgl_gateway_requests_total{route="/v1/rerank",status="499"}'
    before, num_lost = finished(), gateway.metric(lost)
    documents = [f"Number {index}. {'word ' * 200}" for index in range(2000)]
    body = {"model": "minisgl", "query": QUERY, "documents": documents}
    with asked(gateway, body, route="/v1/rerank"):
        wait_for(lambda: finished() > before, "the first answer")
    gateway.wait_metric(lost, num_lost + 1)
    wait_for(
        lambda: Metrics(server)["vllm:num_requests_running"] == 0, "an engine without requests"
    )
    assert finished() < before + 2000


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_client_embeds(server: TritonServer, theirs: tuple[Any, Any], protocol: Any) -> None:
    port = server.grpc_port if protocol == "grpc" else server.http_port
    with Client(f"127.0.0.1:{port}", protocol=protocol) as client:
        result = client.generate(TEXTS[0], embed=True)
        assert (result.text, result.num_output_tokens, result.finish_reason) == ("", 0, "length")
        expected = embedded(theirs, TEXTS[0])
        torch.testing.assert_close(torch.tensor(result.embedding), expected, atol=1e-4, rtol=0)
        with client.stream(TEXTS[0], embed=True) as stream:
            assert [len(delta.embedding) for delta in stream] == [len(expected)]
        assert client.generate(TEXTS[0], max_tokens=1).embedding == ()
