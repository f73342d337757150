"""Triton's own HTTP client: health, metadata, configs and counts work; inference cannot."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from minisgl_backend.server.process import TritonServer
from tests.server.client import generate
from tests.waiting import wait_until

MODELS = ("tokenizer", "llm_engine", "detokenizer", "minisgl", "minisgl_batched")
TEXT = np.array([b"Hello"], dtype=np.object_)


@pytest.fixture
def client(server: TritonServer) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(server.url().removeprefix("http://")) as client:
        yield client


def text_input(shape: tuple[int, ...]) -> httpclient.InferInput:
    tensor = httpclient.InferInput("text_input", list(shape), "BYTES")
    tensor.set_data_from_numpy(TEXT.reshape(shape))
    return tensor


def test_server_and_models_are_ready(client: httpclient.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert all(map(client.is_model_ready, MODELS))
    assert not client.is_model_ready("no_such_model")


def test_metadata_name_the_tensors(client: httpclient.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("minisgl")
    inputs = {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
    assert inputs["text_input"] == "BYTES" and inputs["max_tokens"] == "INT32"
    outputs = {tensor["name"]: tensor["datatype"] for tensor in metadata["outputs"]}
    assert outputs["text_output"] == "BYTES" and outputs["num_output_tokens"] == "UINT32"


def test_the_config_says_which_models_are_decoupled(
    client: httpclient.InferenceServerClient,
) -> None:
    """The inner models say so, and Triton infers it for the ensembles."""
    decoupled = {
        name: client.get_model_config(name).get("model_transaction_policy", {}).get("decoupled")
        for name in ("tokenizer", "llm_engine", "detokenizer")
    }
    assert decoupled == {"tokenizer": True, "llm_engine": True, "detokenizer": True}


def test_statistics_count_requests(
    client: httpclient.InferenceServerClient, server: TritonServer
) -> None:
    def count() -> int:
        (stats,) = client.get_inference_statistics("minisgl")["model_stats"]
        successes: int = stats["inference_stats"]["success"]["count"]
        return successes

    before = count()
    assert generate(server, text_input="Hello", max_tokens=2, temperature=0.0)["text_output"]
    wait_until(lambda: count() > before)


@pytest.mark.parametrize(("model", "shape"), [("minisgl", (1,)), ("minisgl_batched", (1, 1))])
def test_an_inference_is_refused_by_triton(
    client: httpclient.InferenceServerClient, model: str, shape: tuple[int, ...]
) -> None:
    """``/infer`` gives one response per request; decoupled models need ``/generate`` or gRPC."""
    with pytest.raises(InferenceServerException, match="decoupled"):
        client.infer(model, [text_input(shape)])
