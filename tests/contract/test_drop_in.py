"""What clients of Triton's vLLM and TensorRT-LLM backends get: the outputs that they asked for.

Each output comes if and only if its flag was given and true, in the shape and type of its backend.
The cases of the first part are those of vllm_backend's own test of its additional outputs, with the
same prompt, parameters and judgement of every response; as there, the server has the option that
makes an answer begin with its prompt. Those of the second part are the requests of the TensorRT-LLM
backend's client for its ensemble.
"""

from __future__ import annotations

import itertools
import json
import queue
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as grpcclient
from minisgl_client import Client

from minisgl_backend.server.process import TritonServer
from tests.server.client import PATIENCE_S, Call, Refused, generate, tensors
from tests.server.conftest import running

pytestmark = pytest.mark.server

Arrays = dict[str, npt.NDArray[Any]]

PROMPT: Final = "In this example,"
OUTPUTS: Final[dict[str, dict[str, tuple[tuple[int, ...], Any]]]] = {
    "return_finish_reason": {"finish_reason": ((1,), np.object_)},
    "return_stop_reason": {"stop_reason": ((1,), np.object_)},
    "return_cumulative_logprob": {"cumulative_logprob": ((1,), np.float32)},
    "return_logprobs": {"logprobs": ((1,), np.object_)},
    "return_num_input_tokens": {"num_input_tokens": ((1,), np.uint32)},
    "return_num_output_tokens": {"num_output_tokens": ((1,), np.uint32)},
    "return_num_cached_tokens": {"num_cached_tokens": ((1,), np.uint32)},
    "return_log_probs": {
        "cum_log_probs": ((1,), np.float32),
        "output_log_probs": ((1, -1), np.float32),
    },
    "return_perf_metrics": {
        f"{name}_time_ns": ((1,), np.int64)
        for name in ("arrival", "first_scheduled", "first_token", "last_token")
    },
}
"""The outputs of each flag, with their shapes and types; -1 is the number of new tokens."""


# --- vllm_backend --------------------------------------------------------------------------------

VLLM_FLAGS: Final = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)


@pytest.fixture(scope="module")
def like_vllm() -> Iterator[TritonServer]:
    """A server whose answers begin with the prompt unless they are streams."""
    with running(options={"exclude_input_in_output": "false"}) as server:
        yield server


def ask_all(
    server: TritonServer, asked: Sequence[dict[str, Any]], parameters: dict[str, Any]
) -> list[list[Arrays]]:
    """All responses to each of the requests, sent at once; ``parameters`` go in both ways."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers: list[list[Arrays]] = [[] for _ in asked]
    left = set(range(len(asked)))
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: told.put(error or result))
        for number, values in enumerate(asked):
            client.async_stream_infer(
                "minisgl",
                tensors({**values, "sampling_parameters": json.dumps(parameters)}),
                request_id=str(number),
                parameters=parameters,
                enable_empty_final_response=True,
            )
        while left:
            result = told.get(timeout=PATIENCE_S)
            assert not isinstance(result, Exception), str(result)
            response = result.get_response()
            if response.outputs:
                names = [output.name for output in response.outputs]
                arrays = {name: result.as_numpy(name) for name in names}
                answers[int(response.id)].append(arrays)
            if response.parameters["triton_final_response"].bool_param:
                left.remove(int(response.id))
        client.stop_stream()
    return answers


@pytest.mark.parametrize("num_logprobs", [None, 0, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_vllm_outputs_come_if_and_only_if_asked_for(
    like_vllm: TritonServer, stream: bool, num_logprobs: int | None
) -> None:
    """Each flag is unset, true and false, in all combinations with the others."""
    parameters: dict[str, Any] = {"temperature": "0", "top_p": "1"}
    if num_logprobs is not None:
        parameters["logprobs"] = num_logprobs
    cases = [
        {name: value for name, value in zip(VLLM_FLAGS, flags, strict=True) if value is not None}
        for flags in itertools.product((None, True, False), repeat=len(VLLM_FLAGS))
    ]
    asked = [{"text_input": PROMPT, "stream": stream, **case} for case in cases]
    answers = ask_all(like_vllm, asked, parameters)
    # not each of them: on a busy machine all tokens of a stream may gather in its first packet
    assert any(len(responses) > 1 for responses in answers) == stream
    for case, responses in zip(cases, answers, strict=True):
        assert responses and (stream or len(responses) == 1)
        check_names_and_types(responses, {name for name, value in case.items() if value})
        text = b"".join(one["text_output"][0] for one in responses).decode()
        assert text.count(" ") > 4
        assert stream or text.startswith(PROMPT)
        reasons = [one["finish_reason"][0] for one in responses if "finish_reason" in one]
        assert reasons in ([], [b"None"] * (len(responses) - 1) + [b"length"])
        sums = [one["cumulative_logprob"][0] for one in responses if "cumulative_logprob" in one]
        assert all(one != other for one, other in itertools.pairwise([0, *sums]))
        for one in responses:
            check_counts(one)
            if "logprobs" in one:
                check_logprobs(one, num_logprobs, "" if stream else PROMPT)


def check_names_and_types(responses: Sequence[Arrays], flags: set[str]) -> None:
    expected: dict[str, tuple[tuple[int, ...], Any]] = {"text_output": ((1,), np.object_)}
    for flag in flags:
        expected |= OUTPUTS[flag]
    for response in responses:
        found = {name: (array.shape, array.dtype.type) for name, array in response.items()}
        if "output_log_probs" in found:
            (_, num_tokens), dtype = found["output_log_probs"]
            assert num_tokens > 0
            found["output_log_probs"] = ((1, -1), dtype)
        assert found == expected


def check_counts(response: Arrays) -> None:
    if "num_input_tokens" in response:
        assert 0 < response["num_input_tokens"] <= len(PROMPT)
    if "num_output_tokens" in response:
        assert response["num_output_tokens"][0] > 0


def check_logprobs(response: Arrays, num_logprobs: int | None, before: str) -> None:
    """Greedy decoding, so the tokens of rank 1 are those of the text."""
    told = json.loads(response["logprobs"][0])
    if num_logprobs is None:
        assert told is None
        return
    assert len(told) >= 1
    if "num_output_tokens" in response:
        assert len(told) == response["num_output_tokens"][0]
    text = before
    for table in told:
        assert 1 <= len(table) <= num_logprobs + 1
        for entry in table.values():
            assert {name: type(value) for name, value in entry.items()} == {
                "logprob": float,
                "rank": int,
                "decoded_token": str,
            }
        (first,) = (entry for entry in table.values() if entry["rank"] == 1)
        text += first["decoded_token"]
    assert text == response["text_output"][0].decode()


def test_the_prompt_stands_before_the_text_of_what_is_no_stream(like_vllm: TritonServer) -> None:
    asked: dict[str, Any] = {"text_input": PROMPT, "temperature": 0.0}
    plain = generate(like_vllm, exclude_input_in_output=True, **asked)["text_output"]
    assert generate(like_vllm, **asked)["text_output"] == PROMPT + plain
    chat = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
    assert generate(like_vllm, messages=chat, temperature=0.0)["text_output"] == "Paris"
    with pytest.raises(Refused, match="exclude_input_in_output must be true with stream"):
        generate(like_vllm, exclude_input_in_output=False, stream=True, **asked)
    with Client(f"127.0.0.1:{like_vllm.grpc_port}") as client:
        assert client.generate(PROMPT, temperature=0).text == plain
        both = client.generate(PROMPT, temperature=0, exclude_input_in_output=False)
        assert both.text == PROMPT + plain


# --- all flags, both ensembles -------------------------------------------------------------------

FLAGS: Final[list[dict[str, bool]]] = [
    {},
    dict.fromkeys(OUTPUTS, False),
    *({flag: True} for flag in OUTPUTS),
    dict.fromkeys(OUTPUTS, True),
]


@pytest.mark.parametrize("num_logprobs", [None, 1])
@pytest.mark.parametrize("stream", [True, False])
def test_flags_one_by_one(server: TritonServer, stream: bool, num_logprobs: int | None) -> None:
    """A number of logprobs alone does not ask for the output."""
    parameters: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    if num_logprobs is not None:
        parameters["num_logprobs"] = num_logprobs
    asked = [{"text_input": PROMPT, "stream": stream, **flags} for flags in FLAGS]
    for flags, responses in zip(FLAGS, ask_all(server, asked, parameters), strict=True):
        check_names_and_types(responses, {name for name, value in flags.items() if value})


# --- the TensorRT-LLM backend ---------------------------------------------------------------------


def ask_trtllm(
    server: TritonServer,
    more: Mapping[str, npt.NDArray[Any]],
    *,
    outputs: Sequence[str] = ("text_output",),
    stream: bool = False,
) -> list[Arrays]:
    """Send the request of that backend's client, which also names the outputs that it wants."""
    arrays: Arrays = {
        "text_input": np.array([[PROMPT.encode()]], dtype=object),
        "max_tokens": np.array([[8]], dtype=np.int32),
        "stream": np.array([[stream]]),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[0.0]], dtype=np.float32),
        "num_return_sequences": np.array([[1]], dtype=np.int32),
        "exclude_input_in_output": np.array([[True]]),
        **more,
    }
    inputs = []
    for name, array in arrays.items():
        kind = "BYTES" if array.dtype == object else grpcclient.np_to_triton_dtype(array.dtype)
        inputs.append(grpcclient.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    wanted = [grpcclient.InferRequestedOutput(name) for name in outputs]
    with Call(server, "minisgl_batched", inputs=inputs, outputs=wanted) as call:
        return call.all()


LOG_PROBS: Final = ("text_output", "cum_log_probs", "output_log_probs")


@pytest.mark.parametrize("stream", [True, False])
def test_trtllm_log_probs(server: TritonServer, stream: bool) -> None:
    """They are [batch, beams] and [batch, beams, tokens].

    The text is [batch, beams], too: an ensemble with a batch dimension cannot omit it as the
    TensorRT-LLM backend does.
    """
    asked = {"return_log_probs": np.array([[True]])}
    responses = ask_trtllm(server, asked, outputs=LOG_PROBS, stream=stream)
    assert len(responses) > 1 if stream else len(responses) == 1
    total, count = 0.0, 0
    for response in responses:
        assert set(response) == set(LOG_PROBS)
        assert response["text_output"].shape == (1, 1)
        batch, beams, num_tokens = response["output_log_probs"].shape
        assert (batch, beams) == (1, 1)
        total += float(response["output_log_probs"].sum())
        count += num_tokens
        assert response["cum_log_probs"].shape == (1, 1)
        assert response["cum_log_probs"].item() == pytest.approx(total, rel=1e-5)
        assert {response[name].dtype for name in LOG_PROBS[1:]} == {np.dtype(np.float32)}
    assert count == 8 and total < 0


@pytest.mark.parametrize("flag", [None, False])
def test_trtllm_log_probs_that_are_not_asked_for(server: TritonServer, flag: bool | None) -> None:
    """Even if the client names the outputs: one that is not there reads as None."""
    more = {} if flag is None else {"return_log_probs": np.array([[flag]])}
    (response,) = ask_trtllm(server, more, outputs=LOG_PROBS)
    assert list(response) == ["text_output"]


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("return_context_logits", False, True),
        ("return_generation_logits", False, True),
        ("return_kv_cache_reuse_stats", False, True),
        ("beam_width", np.int32(1), np.int32(2)),
        ("length_penalty", np.float32(1), np.float32(2)),
        ("bad_words", b"", b"no"),
    ],
)
def test_trtllm_what_is_not_offered_is_refused_by_name(
    server: TritonServer, name: str, neutral: Any, other: Any
) -> None:
    def array(value: Any) -> npt.NDArray[Any]:
        return np.array([[value]], dtype=object if isinstance(value, bytes) else None)

    assert ask_trtllm(server, {name: array(neutral)})
    with pytest.raises(Refused, match=f"UNSUPPORTED: {name} is not supported, got"):
        ask_trtllm(server, {name: array(other)})


@pytest.mark.parametrize(
    ("guide_type", "guide", "pattern"),
    [
        ("json", None, r"[\[{].*"),
        ("json_schema", '{"const": 2025}', "2025"),
        ("regex", "[0-9]{4}", "[0-9]{4}"),
        ("ebnf_grammar", "root ::= [0-9] [a-c]", "[0-9][a-c]"),
    ],
)
def test_trtllm_guided_decoding(
    server: TritonServer, guide_type: str, guide: str | None, pattern: str
) -> None:
    """As that backend's client sends it, and as its documentation sends it to /generate."""
    given = {"guided_decoding_guide_type": guide_type}
    if guide is not None:
        given["guided_decoding_guide"] = guide
    arrays = {name: np.array([[text.encode()]], dtype=object) for name, text in given.items()}
    (response,) = ask_trtllm(server, arrays)
    text = response["text_output"][0][0].decode()
    asked = {"text_input": PROMPT, "max_tokens": 8, "bad_words": "", "stop_words": "", "pad_id": 2}
    posted = generate(server, "minisgl_batched", **asked, **given, temperature=0.0)["text_output"]
    assert posted == text
    assert re.fullmatch(pattern, text, re.DOTALL)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("structured_outputs", '{"choice": ["ja", "nein"]}'),
        ("guided_decoding", '{"choice": ["ja", "nein"]}'),
        ("guided_choice", '["ja", "nein"]'),
        ("guided_regex", "ja|nein"),
        ("guided_json", '{"enum": ["ja", "nein"]}'),
        ("guided_grammar", 'root ::= "ja" | "nein"'),
    ],
)
def test_vllm_structured_outputs(server: TritonServer, name: str, text: str) -> None:
    """As request parameters over both protocols, and in ``sampling_parameters``."""
    parameters = {"temperature": 0.0, name: text}
    asked = {"text_input": PROMPT, "stream": False}
    ((by_grpc,),) = ask_all(server, [asked], parameters)
    answer = by_grpc["text_output"].item().decode()
    assert answer.strip('"') in ("ja", "nein")
    assert generate(server, **asked, **parameters)["text_output"] == answer
    both = json.dumps(parameters)
    assert generate(server, **asked, sampling_parameters=both)["text_output"] == answer


@pytest.mark.parametrize("name", ["context_logits", "generation_logits", "batch_index"])
def test_trtllm_outputs_that_do_not_exist_are_refused_by_name(
    server: TritonServer, name: str
) -> None:
    with pytest.raises(Refused, match=f"unexpected inference output '{name}'"):
        ask_trtllm(server, {}, outputs=("text_output", name))


def test_trtllm_counts_and_times(server: TritonServer) -> None:
    """Those shared with vllm_backend have a value for each beam of each request."""
    flags = ("return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics")
    names = [name for flag in flags for name in OUTPUTS[flag]]
    given = {flag: np.array([[True]]) for flag in flags}
    (response,) = ask_trtllm(server, given, outputs=("text_output", *names))
    assert set(response) == {"text_output", *names}
    assert all(response[name].shape == (1, 1) for name in names)
    assert response["num_output_tokens"][0][0] == 8
