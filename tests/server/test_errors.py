"""Wrong requests are refused at once, with one sentence that starts with an error code."""

from __future__ import annotations

import http.client
import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from minisgl_backend.server.process import TritonServer
from tests.server.client import Call, Metrics, Refused, generate, tensors, wait_for

TEXT = {"text_input": "Hello"}
SURROGATE_CALL = {"function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
SURROGATE_CHAT = [{"role": "assistant", "content": "", "tool_calls": [SURROGATE_CALL]}]

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "INVALID_ARG: give one of text_input, messages and input_ids, got none of them"),
    ({**TEXT, "input_ids": [1]}, "INVALID_ARG: give one of"),
    ({"text_input": ""}, "INVALID_ARG: text_input must not be empty"),
    ({"input_ids": [-1]}, "INVALID_ARG: input_ids must be in 0 .. "),
    ({"input_ids": [5, 2**31 - 1]}, "INVALID_ARG: input_ids must be in 0 .. 2047, got 2147483647"),
    ({"messages": "[]"}, "INVALID_ARG: messages"),
    ({"messages": "no JSON"}, "INVALID_ARG: messages"),
    ({"messages": json.dumps(SURROGATE_CHAT)}, "INVALID_ARG: messages must be valid Unicode"),
    ({**TEXT, "temperature": -1.0}, "INVALID_ARG: temperature must be finite and >= 0, got -1"),
    ({**TEXT, "top_p": 1.5}, "INVALID_ARG: top_p"),
    ({**TEXT, "max_tokens": 0}, "INVALID_ARG: max_tokens"),
    ({**TEXT, "max_tokens": 1_000_000}, "INVALID_ARG: max_tokens 1000000 with a prompt of"),
    ({**TEXT, "tempreature": 1.0}, "INVALID_ARG: unknown parameter 'tempreature'; did you mean"),
    ({**TEXT, "min_tokens": 20}, "INVALID_ARG: min_tokens must be <= max_tokens 16, got 20"),
    ({**TEXT, "suffix": "x"}, "UNSUPPORTED: suffix is not supported, got 'x'"),
    ({**TEXT, "n": 65}, "INVALID_ARG: n must be in 1 .. 64, got 65"),
    ({**TEXT, "n": 3, "best_of": 2}, "INVALID_ARG: best_of must be >= n 3, got 2"),
    ({**TEXT, "best_of": 2, "stream": True}, "UNSUPPORTED: best_of must be n, 1, with stream"),
    ({**TEXT, "sampling_parameters": '{"top_k": -3}'}, "INVALID_ARG: top_k"),
    ({**TEXT, "stop_token_ids": [4000]}, "INVALID_ARG: stop_token_ids must be in 0 .. 2047"),
    (
        {**TEXT, "logit_bias": '{"9999": 1}'},
        "INVALID_ARG: logit_bias must be token ids in 0 .. 2047",
    ),
    ({**TEXT, "stream": True, "exclude_input_in_output": False}, "UNSUPPORTED: exclude_input"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_values(server: TritonServer, values: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as caught:
        generate(server, **values)
    assert caught.value.status == 400
    assert caught.value.message.startswith(f"in ensemble 'minisgl', {message}")
    assert_is_clean(caught.value.message)


def test_a_value_given_twice(server: TritonServer) -> None:
    assert generate(server, **TEXT, max_tokens=3, max_new_tokens=3)["text_output"]
    with pytest.raises(Refused, match=r"INVALID_ARG: max_(new_)?tokens is given twice"):
        generate(server, **TEXT, max_tokens=3, max_new_tokens=4)


@pytest.mark.parametrize("max_tokens", [0, 1_000_000], ids=["tokenizer", "engine"])
def test_refusals_are_counted(server: TritonServer, max_tokens: int) -> None:
    """By either model. There are enough that unreported ones of other tests do not matter."""

    def count() -> float:
        return Metrics(server).labelled("minisgl:requests_rejected_total", "reason", "invalid")

    expected = count() + 50
    for _ in range(50):
        with pytest.raises(Refused):
            generate(server, **TEXT, max_tokens=max_tokens)
    wait_for(lambda: count() >= expected, "the refused requests")


def assert_is_clean(message: str) -> None:
    """No traceback, path or shared-memory name reaches a client."""
    for secret in ("Traceback", "At:", "/", "shm", ".py", "\n"):
        assert secret not in message.removeprefix("in ensemble")


def test_neutral_values_of_what_is_not_offered_pass(server: TritonServer) -> None:
    output = generate(server, **TEXT, max_tokens=2, n=1, best_of=1, use_beam_search=False)
    assert output["text_output"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": "x"}, "UNSUPPORTED: stop needs the text models"),
        ({"text_input": "x"}, "UNSUPPORTED: text_input needs the text models"),
        ({"max_tokens": 0}, "INVALID_ARG: max_tokens"),
    ],
)
def test_wrong_values_to_the_engine_alone(
    server: TritonServer, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused) as caught:
        generate(server, "llm_engine", input_ids=[1], **values)
    assert message in caught.value.message
    assert_is_clean(caught.value.message)


@pytest.mark.parametrize(
    "record", ["{}", "[" * 10_000, '{"v": 1, "arrival": 0, "given": {"max_tokens": -1}}']
)
def test_a_forged_record(server: TritonServer, record: str) -> None:
    """A client that writes the tokenizer's record itself gains nothing."""
    with (
        Call(server, "llm_engine", input_ids=[1], inputs=[text_tensor("request", record)]) as call,
        pytest.raises(Refused, match="INVALID_ARG: ") as caught,
    ):
        call.all()
    assert_is_clean(caught.value.message)


@pytest.mark.parametrize(
    "chunk",
    [
        "{}",
        "null",
        '{"r": "/etc/passwd", "s": "00", "i": 0, "d": {"n": 1}}',
        '{"r": "/tmp/x", "s": "ffffffffffffffffffff.1", "i": 0, "d": {"n": 1}}',
        '{"r": "/tmp/x", "s": "1.1", "i": 7}',
        '{"r": "/tmp/x", "s": "1.1", "i": 0, "e": ["INTERNAL", "oops"], "d": {"n": 1}}',
    ],
)
def test_a_forged_chunk(server: TritonServer, chunk: str) -> None:
    """A client that calls the detokenizer directly gets an error and does no harm."""
    with (
        Call(server, "detokenizer", inputs=[bytes_tensor("chunk", chunk)]) as call,
        pytest.raises(Refused) as caught,
    ):
        call.all()
    assert caught.value.message.startswith(("INVALID_ARG: ", "INTERNAL: "))
    assert_is_clean(caught.value.message)


def test_a_forged_chunk_with_tokens(server: TritonServer) -> None:
    """It becomes text like any other, but no engine gets an acknowledgement."""
    chunk = '{"r": "/tmp/x", "s": 1, "i": 0, "d": {"n": 1, "stream": true}, "o": [500]}'
    with Call(server, "detokenizer", inputs=[bytes_tensor("chunk", chunk)]) as call:
        assert len(call.all()) == 1


def bytes_tensor(name: str, text: str) -> grpcclient.InferInput:
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    tensor = grpcclient.InferInput(name, list(data.shape), "UINT8")
    tensor.set_data_from_numpy(data)
    return tensor


def text_tensor(name: str, text: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


def test_codes_as_grpc_status(server: TritonServer) -> None:
    """With the header, a stream ends with the code itself."""
    caught: list[InferenceServerException] = []
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    client.start_stream(
        lambda result, error: caught.append(error), headers={"triton_grpc_error": "true"}
    )
    client.async_stream_infer("minisgl", tensors({"text_input": "x", "temperature": -2.0}))
    client.stop_stream()
    client.close()
    assert caught[0].status() == "StatusCode.INVALID_ARGUMENT"


def test_prompts_of_all_kinds_are_survived(server: TritonServer) -> None:
    for text in ("\ud83d".encode("utf-8", "surrogatepass"), b"\x00", "\ufeff".encode(), b"\xff"):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
        body = b'{"max_tokens": 1, "text_input": "' + text + b'"}'
        connection.request("POST", "/v2/models/minisgl/generate", body)
        response = connection.getresponse()
        answer = json.loads(response.read().decode("utf-8", "replace"))
        if response.status != 200:
            assert_is_clean(answer["error"])
        connection.close()


@pytest.mark.parametrize("model", ["minisgl", "minisgl_batched", "llm_engine"])
@pytest.mark.parametrize("name", ["id", "user"])
def test_ids_and_parameters_that_are_not_utf_8(server: TritonServer, model: str, name: str) -> None:
    """Triton's JSON parser lets any bytes through; the log does not mention them."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    body = b'{"input_ids": [1], "max_tokens": 1, "%b": "\xff"}' % name.encode()
    num_lines = len(server.log)
    connection.request("POST", f"/v2/models/{model}/generate", body)
    response = connection.getresponse()
    message: str = json.load(response)["error"]
    connection.close()
    assert response.status == 400
    what = "the request id" if name == "id" else "request parameters"
    assert message.endswith(f"INVALID_ARG: {what} must be valid UTF-8")
    assert_is_clean(message)
    assert "Traceback" not in "".join(list(server.log)[num_lines:])


def test_a_long_prompt_is_refused_by_its_numbers(server: TritonServer) -> None:
    with pytest.raises(Refused, match="INVALID_ARG: prompt of 8500 tokens does not fit"):
        generate(server, input_ids=[5] * 8500, max_tokens=1)


def test_queue_full(paced_server: TritonServer) -> None:
    """Requests that may neither run nor wait are refused at once, with numbers; others succeed."""
    server = paced_server

    def counts() -> tuple[float, float]:
        metrics = Metrics(server)
        return metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]

    wait_for(lambda: counts() == (0, 0), "an idle engine")
    values: dict[str, Any] = {"input_ids": [1, 2], "max_tokens": 2000, "stream": True}
    calls = [Call(server, **values) for _ in range(3)]
    wait_for(lambda: counts() == (2, 1), "a full queue")
    for model in ("llm_engine", "minisgl"):
        with Call(server, model, **values) as call, pytest.raises(Refused) as caught:
            call.all()
        assert "UNAVAILABLE: queue full: " in caught.value.message
        assert_is_clean(caught.value.message)
    for call in calls:
        call.cancel()
    wait_for(lambda: counts() == (0, 0), "an idle engine")
    assert len(generate(server, input_ids=[1, 2], max_tokens=2, temperature=0.0)["text_output"]) > 0
