"""The requests of Triton's own OpenAI frontend, as its two converters make them.

Its vllm converter goes to `minisgl`, its tensorrtllm converter to `minisgl_batched`. The frontend
renders the chat template itself, so a server behind it has the option ``parse_special_tokens``. It
hands tensors over in process; here they go over gRPC, which carries the same names, types and
shapes. The tests look at what the frontend reads of the answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient

from minisgl_backend.server.process import TritonServer
from tests.server.client import Call, Refused, text_of
from tests.server.conftest import running

pytestmark = pytest.mark.server

Responses = list[dict[str, Any]]
FRANCE = "What is the capital of France?"
COUNT = "Count from 1 to 10."


@pytest.fixture(scope="module")
def behind_frontend() -> Iterator[TritonServer]:
    """A server set up as behind the frontend."""
    with running(options={"parse_special_tokens": "true"}) as server:
        yield server


def rendered(question: str) -> str:
    """A chat as the frontend's tokenizer renders it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def tensor(name: str, array: npt.NDArray[Any]) -> grpcclient.InferInput:
    kind = "BYTES" if array.dtype == np.object_ else grpcclient.np_to_triton_dtype(array.dtype)
    made = grpcclient.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def texts(*values: str) -> npt.NDArray[Any]:
    return np.array([value.encode() for value in values], dtype=np.object_)


def infer(server: TritonServer, model: str, tensors: dict[str, npt.NDArray[Any]]) -> Responses:
    """All responses, each with the flag that marks the last one for the frontend."""
    inputs = [tensor(name, array) for name, array in tensors.items()]
    with Call(server, model, inputs=inputs) as call:
        return call.all()


# --- the vllm converter -------------------------------------------------------------------------

SCHEMA = {
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "n": 1,
    "presence_penalty": 0.0,
    "temperature": 0.0,
    "top_p": 1.0,
}
"""What the frontend's schema adds if the caller gives nothing but the temperature."""
OLDER_COMPLETION = {**SCHEMA, "best_of": 1}
OLDER_CHAT = {**SCHEMA, "logprobs": False}


def vllm(
    server: TritonServer,
    prompt: str,
    sampling: dict[str, Any],
    *,
    stream: bool = False,
    echo: bool = False,
    return_logprobs: bool | None = None,
) -> Responses:
    tensors = {
        "text_input": texts(prompt),
        "stream": np.array([stream]),
        "exclude_input_in_output": np.array([not echo]),
        "sampling_parameters": texts(json.dumps({"max_tokens": 32, **sampling})),
        "return_num_input_tokens": np.array([True]),
        "return_num_output_tokens": np.array([True]),
    }
    if return_logprobs is not None:  # newer releases always send it
        tensors["return_logprobs"] = np.array([return_logprobs])
    return infer(server, "minisgl", tensors)


@pytest.mark.parametrize(
    ("sampling", "return_logprobs"),
    [(OLDER_COMPLETION, None), (OLDER_CHAT, None), (SCHEMA, False)],
    ids=["older completion", "older chat", "newer"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_vllm_answers(
    behind_frontend: TritonServer,
    sampling: dict[str, Any],
    return_logprobs: bool | None,
    stream: bool,
) -> None:
    """One response, or two of which the last is final; a stream may have any number."""
    prompt = rendered(FRANCE)
    responses = vllm(
        behind_frontend, prompt, sampling, stream=stream, return_logprobs=return_logprobs
    )
    assert text_of(responses) == "Paris"
    assert stream or len(responses) == 1
    for response in responses:
        assert response["text_output"].shape == (1,)
        assert response["num_input_tokens"].dtype == np.uint32
    assert responses[0]["num_input_tokens"].item() == 17
    assert sum(response["num_output_tokens"].item() for response in responses) == 4


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"stop": ["5"]}, "1, 2, 3, 4, "),
        ({"stop": "5"}, "1, 2, 3, 4, "),
        ({"max_tokens": 3}, "1, "),
        ({"seed": 7, "temperature": 1.0, "top_p": 0.01}, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
        ({"min_tokens": 0}, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ],
)
def test_vllm_parameters(behind_frontend: TritonServer, more: dict[str, Any], text: str) -> None:
    assert text_of(vllm(behind_frontend, rendered(COUNT), {**SCHEMA, **more})) == text


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_logprobs(behind_frontend: TritonServer, stream: bool) -> None:
    """A JSON list with an object per token; the frontend reads logprob, rank and decoded_token."""
    sampling = {**SCHEMA, "logprobs": 2}
    responses = vllm(
        behind_frontend, rendered(FRANCE), sampling, stream=stream, return_logprobs=True
    )
    tables = [table for r in responses for table in json.loads(r["logprobs"].item())]
    best = [min(table.values(), key=lambda one: one["rank"]) for table in tables]
    assert "".join(one["decoded_token"] for one in best) == "Paris<|im_end|>"
    assert all(one["rank"] == 1 and one["logprob"] <= 0 for one in best)


def test_vllm_echo(behind_frontend: TritonServer) -> None:
    responses = vllm(behind_frontend, FRANCE, OLDER_COMPLETION, echo=True)
    assert text_of(responses).startswith(FRANCE)
    assert text_of(responses).endswith("Paris")


def test_vllm_what_is_not_offered(behind_frontend: TritonServer) -> None:
    with pytest.raises(Refused, match="LoRA feature is not enabled"):
        vllm(behind_frontend, rendered(FRANCE), {**SCHEMA, "lora_name": "mine"})


CALL = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"const": 3}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
)
"""The parameters of the function that a caller's tool_choice names."""
UNSET = dict.fromkeys(
    ("regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag")
)
OF_VLLM = {**UNSET, "disable_any_whitespace": False, "disable_additional_properties": False}
"""The other fields of vLLM's parameters, all of which the frontend sends."""


def check_call(text: str) -> None:
    call = json.loads(text)
    assert call["city"] in ("Paris", "Rome")
    assert call == {"city": call["city"], "days": 3}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("guided_decoding", {**OF_VLLM, "backend": None, "disable_fallback": False}),
        ("structured_outputs", {**OF_VLLM, "_backend": None, "_backend_was_auto": False}),
    ],
    ids=["older", "newer"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_vllm_a_tool_that_the_caller_chose(
    behind_frontend: TritonServer, name: str, fields: dict[str, Any], stream: bool
) -> None:
    sampling = {**SCHEMA, "max_tokens": 100, name: json.dumps({**fields, "json": CALL})}
    check_call(text_of(vllm(behind_frontend, rendered(FRANCE), sampling, stream=stream)))


def test_vllm_tools_with_a_schema_that_is_not_offered(behind_frontend: TritonServer) -> None:
    schema = json.dumps({"properties": {"days": {"contains": {}}}})
    sampling = {**SCHEMA, "structured_outputs": json.dumps({**OF_VLLM, "json": schema})}
    with pytest.raises(Refused, match=r"INVALID_ARG: .*contains.*#/properties/days/contains"):
        vllm(behind_frontend, rendered(FRANCE), sampling)


# --- the tensorrtllm converter ------------------------------------------------------------------


def trtllm(
    server: TritonServer, prompt: str, *, stream: bool = False, **more: npt.NDArray[Any]
) -> Responses:
    tensors: dict[str, npt.NDArray[Any]] = {
        "text_input": texts(prompt)[None],
        "stream": np.array([[stream]]),
        "max_tokens": np.array([[32]], dtype=np.int32),
        "top_p": np.array([[1.0]], dtype=np.float32),
        "frequency_penalty": np.array([[0.0]], dtype=np.float32),
        "presence_penalty": np.array([[0.0]], dtype=np.float32),
        "temperature": np.array([[0.0]], dtype=np.float32),
        **more,
    }
    return infer(server, "minisgl_batched", tensors)


@pytest.mark.parametrize("stream", [False, True])
def test_trtllm_answers(behind_frontend: TritonServer, stream: bool) -> None:
    responses = trtllm(behind_frontend, rendered(FRANCE), stream=stream)
    assert text_of(responses) == "Paris"
    assert stream or len(responses) == 1
    assert all(response["text_output"].size == 1 for response in responses)


@pytest.mark.parametrize("stream", [False, True])
def test_trtllm_of_newer_releases_counts(behind_frontend: TritonServer, stream: bool) -> None:
    flag = np.array([[True]])
    responses = trtllm(
        behind_frontend,
        rendered(FRANCE),
        stream=stream,
        exclude_input_in_output=flag,
        return_num_input_tokens=flag,
        return_num_output_tokens=flag,
    )
    assert responses[0]["num_input_tokens"].item() == 17
    assert sum(response["num_output_tokens"].item() for response in responses) == 4


def test_trtllm_stop_words_and_seed(behind_frontend: TritonServer) -> None:
    responses = trtllm(
        behind_frontend,
        rendered(COUNT),
        stop_words=texts("never", "5")[None],
        seed=np.array([[7]], dtype=np.uint64),
    )
    assert text_of(responses) == "1, 2, 3, 4, "


def test_trtllm_echo(behind_frontend: TritonServer) -> None:
    responses = trtllm(behind_frontend, FRANCE, exclude_input_in_output=np.array([[False]]))
    assert text_of(responses).startswith(FRANCE)


@pytest.mark.parametrize("stream", [False, True])
def test_trtllm_a_tool_that_the_caller_chose(behind_frontend: TritonServer, stream: bool) -> None:
    responses = trtllm(
        behind_frontend,
        rendered(FRANCE),
        stream=stream,
        max_tokens=np.array([[100]], dtype=np.int32),
        guided_decoding_guide_type=texts("json_schema")[None],
        guided_decoding_guide=texts(CALL)[None],
    )
    check_call(text_of(responses))
