"""`n` and `best_of` over the wire, with NVIDIA's client and over HTTP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl_backend.server.process import TritonServer
from tests.server.client import Call, Metrics, generate, generate_stream
from tests.waiting import wait_until

pytestmark = pytest.mark.server

FOX = "Tell me a story about a fox."
HOT: dict[str, Any] = {"temperature": 1.8, "max_tokens": 20, "ignore_eos": True, "seed": 11}
"""Parameters that make samples differ."""


def responses(call: Call) -> list[dict[str, Any]]:
    """All non-empty responses of a stream."""
    found = []
    with call:
        while (response := call.next()) is not None:
            if response:
                found.append(response)
    return found


def alone(server: TritonServer, **values: Any) -> list[bytes]:
    """The texts of separate requests with the seeds of four samples."""
    asked = {**HOT, **values}
    texts = []
    for sample in range(4):
        asked["seed"] = HOT["seed"] + sample
        (response,) = responses(Call(server, text_input=FOX, **asked))
        texts.append(response["text_output"].item())
    return texts


def test_a_whole_answer_has_one_text_a_sample(server: TritonServer) -> None:
    flags: dict[str, Any] = {
        f"return_{name}": True
        for name in ("finish_reason", "num_output_tokens", "num_input_tokens", "cumulative_logprob")
    }
    (response,) = responses(Call(server, text_input=FOX, n=4, **HOT, **flags, num_logprobs=1))
    assert response["text_output"].tolist() == alone(server)
    assert len(set(response["text_output"].tolist())) == 4
    assert response["finish_reason"].tolist() == [b"length"] * 4
    assert response["num_output_tokens"].tolist() == [20] * 4
    assert response["cumulative_logprob"].shape == (4,)
    assert response["num_input_tokens"].shape == (1,)


@pytest.mark.parametrize("name", ["n", "num_return_sequences"])
def test_clients_of_the_tensorrt_llm_backend_get_a_batch_of_one(
    server: TritonServer, name: str
) -> None:
    asked = {**HOT, name: 4, "return_log_probs": True}
    (response,) = responses(Call(server, "minisgl_batched", text_input=FOX, **asked))
    assert response["text_output"].shape == response["cum_log_probs"].shape == (1, 4)
    assert response["text_output"][0].tolist() == alone(server)
    assert response["output_log_probs"].shape == (1, 4, 20)


def test_each_response_of_a_stream_has_a_place_for_each_sample(server: TritonServer) -> None:
    asked = {**HOT, "stop": ["zzz"], "return_finish_reason": True, "return_num_output_tokens": True}
    found = responses(Call(server, text_input=FOX, n=4, stream=True, **asked))
    assert all(response["text_output"].shape == (4,) for response in found)
    texts = [b"".join(each) for each in zip(*(r["text_output"] for r in found), strict=True)]
    assert texts == alone(server)
    assert sum(response["num_output_tokens"] for response in found).tolist() == [20] * 4
    reasons = np.array([response["finish_reason"] for response in found])
    assert reasons[-1].tolist() == [b"length"] * 4
    for of_sample in reasons.T.tolist():
        assert of_sample == sorted(of_sample), "None, and from its end on the reason"


def test_the_best_of_several(server: TritonServer) -> None:
    flag: dict[str, Any] = {"return_cumulative_logprob": True}
    (every,) = responses(Call(server, text_input=FOX, n=4, **HOT, **flag))
    (best,) = responses(Call(server, text_input=FOX, n=2, best_of=4, **HOT, **flag))
    order = np.argsort(-every["cumulative_logprob"], kind="stable")[:2]
    assert best["text_output"].tolist() == every["text_output"][order].tolist()
    np.testing.assert_allclose(
        best["cumulative_logprob"], every["cumulative_logprob"][order], rtol=1e-4
    )


def test_over_http_several_samples_are_a_list(server: TritonServer) -> None:
    texts = [text.decode() for text in alone(server)]
    asked = {**HOT, "text_input": FOX, "n": 4}
    assert generate(server, **asked)["text_output"] == texts
    inside = {**asked, "sampling_parameters": '{"n": 4}', "exclude_input_in_output": False}
    del inside["n"]
    assert generate(server, **inside)["text_output"] == [FOX + text for text in texts]
    events = generate_stream(server, **asked, stream=True)
    streamed = ["".join(each) for each in zip(*(e["text_output"] for e in events), strict=True)]
    assert streamed == texts


def test_a_stop_string_ends_one_sample(server: TritonServer) -> None:
    texts = [text.decode() for text in alone(server)]
    stop = texts[2][5:12]
    assert [stop in text for text in texts] == [False, False, True, False]
    flags: dict[str, Any] = {"return_finish_reason": True, "return_stop_reason": True}
    for stream in (False, True):
        call = Call(server, text_input=FOX, n=4, stream=stream, stop=[stop], **HOT, **flags)
        found = responses(call)
        told = [b"".join(each) for each in zip(*(r["text_output"] for r in found), strict=True)]
        assert [text.decode() for text in told] == [texts[0], texts[1], texts[2][:5], texts[3]]
        assert found[-1]["finish_reason"].tolist() == [b"length", b"length", b"stop", b"length"]


def test_a_client_of_the_engine_alone_gets_the_ids_one_sample_after_the_other(
    server: TritonServer,
) -> None:
    asked = {**HOT, "input_ids": [40, 41, 42]}
    own = []
    for sample in range(3):
        asked["seed"] = HOT["seed"] + sample
        (response,) = responses(Call(server, "llm_engine", **asked))
        own.append(response["output_ids"].tolist())
    asked["seed"] = HOT["seed"]
    (response,) = responses(Call(server, "llm_engine", n=3, **asked))
    assert response["num_output_tokens"].tolist() == [20] * 3
    assert response["output_ids"].tolist() == [token for ids in own for token in ids]
    told: list[list[int]] = [[], [], []]
    for response in responses(Call(server, "llm_engine", n=3, stream=True, **asked)):
        ends = np.cumsum(response["num_output_tokens"])
        for ids, new in zip(told, np.split(response["output_ids"], ends[:-1]), strict=True):
            ids += new.tolist()
    assert told == own


@pytest.mark.parametrize("leaves", [True, False])
def test_one_cancel_ends_all_samples(server: TritonServer, leaves: bool) -> None:
    def num_running() -> float:
        return Metrics(server)["vllm:num_requests_running"]

    asked = {**HOT, "max_tokens": 4000, "stream": True, "n": 5, "return_finish_reason": True}
    call = Call(server, text_input=FOX, request_id="many", **asked)
    with call:
        assert call.next()
        wait_until(lambda: num_running() == 5)
        if not leaves:
            with Call(server, request_id="many", stop_request=True) as stopping:
                while stopping.next() is not None:
                    pass
            last: dict[str, Any] = {}
            while (response := call.next()) is not None:
                last = response or last
            assert last["finish_reason"].tolist() == [b"cancelled"] * 5
    wait_until(lambda: num_running() == 0)
