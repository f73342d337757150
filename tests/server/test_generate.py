"""What a client gets through each way in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as aio

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.server.process import TritonServer
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.wire.generation import MessagesPrompt
from tests.fakes.vocabularies import token_text
from tests.server.client import (
    Call,
    Metrics,
    Refused,
    chat,
    generate,
    generate_stream,
    tensors,
    text_of,
    wait_for,
)
from tests.server.conftest import running

QUESTION = chat("What is the capital of France?")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(DEMO_MODEL)


@pytest.fixture(scope="module")
def answer(server: TritonServer) -> str:
    """What the demo model says; all ways in must agree."""
    text = generate(server, messages=QUESTION, **GREEDY)["text_output"]
    assert isinstance(text, str)
    return text


def test_generate_answers_the_question(answer: str) -> None:
    assert "Paris" in answer


def test_generate_stream_adds_up_to_the_same(server: TritonServer, answer: str) -> None:
    events = generate_stream(server, messages=QUESTION, stream=True, **GREEDY)
    assert "".join(event["text_output"] for event in events) == answer


def test_who_does_not_say_how_many_tokens_gets_what_there_is_room_for(
    server: TritonServer,
) -> None:
    """Through the ensemble and from the engine alone; a number that is too large is refused."""
    context = 8192
    asked: dict[str, Any] = {
        "input_ids": [5 + number % 7 for number in range(context - 3)],
        "ignore_eos": True,
        "return_num_output_tokens": True,
    }
    ways: list[dict[str, Any]] = [{}, {"max_tokens": 100, "fit_max_tokens": True}]
    for more in ways:
        assert generate(server, **asked, **more)["num_output_tokens"] == 3
        with Call(server, "llm_engine", **asked, **more) as call:
            (response,) = call.all()
        assert response["num_output_tokens"] == [3]
    with pytest.raises(Refused, match="max_tokens 16 with a prompt of 8189 tokens exceeds"):
        generate(server, **asked, max_tokens=16)
    with pytest.raises(Refused, match="max_tokens 10 with a prompt of 8189 tokens exceeds"):
        generate(server, **asked, min_tokens=10)


def test_variables_of_the_chat_template(server: TritonServer) -> None:
    answer = generate(server, messages=QUESTION, chat_template_kwargs='{"any": 1}', **GREEDY)
    assert "Paris" in answer["text_output"]
    with pytest.raises(Refused, match="chat_template_kwargs may not hold 'messages'"):
        generate(server, messages=QUESTION, chat_template_kwargs='{"messages": []}')


def test_without_stream_there_is_exactly_one_response(server: TritonServer, answer: str) -> None:
    with Call(server, messages=QUESTION, **GREEDY) as call:
        responses = call.all()
    assert len(responses) == 1
    assert text_of(responses) == answer


def test_grpc_stream(server: TritonServer, answer: str) -> None:
    with Call(server, messages=QUESTION, stream=True, **GREEDY) as call:
        assert text_of(call.all()) == answer


def test_batched_ensemble(server: TritonServer, answer: str) -> None:
    with Call(server, "minisgl_batched", messages=QUESTION, stream=True, **GREEDY) as call:
        responses = call.all()
    assert responses[0]["text_output"].shape == (1, 1)
    assert text_of(responses) == answer


def test_batched_ensemble_takes_lists(server: TritonServer) -> None:
    values: dict[str, Any] = {"stop": ["zzz", "is"], **GREEDY}
    with Call(server, "minisgl_batched", messages=QUESTION, **values) as call:
        assert "is" not in text_of(call.all())


async def test_grpc_asyncio(server: TritonServer, answer: str) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        inputs = tensors({"messages": QUESTION, "stream": True, **GREEDY})
        yield {"model_name": "minisgl", "inputs": inputs}

    texts = []
    async with aio.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            texts.append(result.as_numpy("text_output").item())
    assert b"".join(texts).decode() == answer


def test_engine_alone(server: TritonServer, encoder: PromptEncoder, answer: str) -> None:
    ids = encoder.encode(encoder.render_chat(MessagesPrompt(QUESTION))).tolist()
    values: dict[str, Any] = {"return_finish_reason": True, "return_num_output_tokens": True}
    with Call(server, "llm_engine", input_ids=ids, stream=True, **values, **GREEDY) as call:
        responses = call.all()
    token_ids = np.concatenate([response["output_ids"] for response in responses])
    # the engine's answer has the token that ended it, which has no text
    assert token_text(encoder.vocabulary, int(token_ids[-1])) == "<|im_end|>"
    text = "".join(token_text(encoder.vocabulary, i) for i in token_ids[:-1].tolist())
    assert text == answer
    assert responses[-1]["finish_reason"].item() == b"stop"
    assert sum(int(r["num_output_tokens"].item()) for r in responses) == len(token_ids)


def test_engine_alone_without_stream(server: TritonServer, encoder: PromptEncoder) -> None:
    ids = encoder.encode(encoder.render_chat(MessagesPrompt(QUESTION))).tolist()
    output = generate(server, "llm_engine", input_ids=ids, **GREEDY)
    assert len(output["output_ids"]) > 1


def test_prompts_as_token_ids_and_as_messages_agree(
    server: TritonServer, encoder: PromptEncoder, answer: str
) -> None:
    ids = encoder.encode(encoder.render_chat(MessagesPrompt(QUESTION))).tolist()
    assert generate(server, input_ids=ids, **GREEDY)["text_output"] == answer


def test_parameters_may_come_in_three_ways(server: TritonServer, answer: str) -> None:
    """As tensors (above), as request parameters, and as strings inside sampling_parameters."""
    inside = json.dumps({"temperature": "0", "max_tokens": "40"})
    assert generate(server, messages=QUESTION, sampling_parameters=inside)["text_output"] == answer
    with Call(
        server, messages=QUESTION, temperature=0.0, parameters={"max_new_tokens": 40}
    ) as call:
        assert text_of(call.all()) == answer


def test_prompt_in_front_of_the_answer(server: TritonServer) -> None:
    values: dict[str, Any] = {"text_input": "The capital of France is", **GREEDY}
    alone = generate(server, **values)["text_output"]
    both = generate(server, exclude_input_in_output=False, **values)["text_output"]
    assert both == values["text_input"] + alone


def test_same_seed_same_tokens(server: TritonServer) -> None:
    values: dict[str, Any] = {
        "text_input": "Once",
        "temperature": 1.5,
        "max_tokens": 24,
        "ignore_eos": True,
    }
    first = generate(server, seed=7, **values)["text_output"]
    assert generate(server, random_seed=7, **values)["text_output"] == first
    assert generate(server, seed=8, **values)["text_output"] != first


ALL_OUTPUTS: dict[str, Any] = {
    "return_finish_reason": True,
    "return_stop_reason": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_log_probs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_num_cached_tokens": True,
    "return_perf_metrics": True,
    "num_logprobs": 3,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["minisgl", "minisgl_batched"])
def test_every_output(
    server: TritonServer, encoder: PromptEncoder, model: str, stream: bool
) -> None:
    values = {"messages": QUESTION, "stream": stream, **ALL_OUTPUTS, **GREEDY}
    with Call(server, model, **values) as call:
        responses = call.all()
    last = {name: value.reshape(-1) for name, value in responses[-1].items()}
    assert last["finish_reason"].tolist() == [b"stop"]
    assert token_text(encoder.vocabulary, json.loads(last["stop_reason"].item())) == "<|im_end|>"
    ids = encoder.encode(encoder.render_chat(MessagesPrompt(QUESTION)))
    assert last["num_input_tokens"].tolist() == [len(ids)]
    num_tokens = sum(int(response["num_output_tokens"].item()) for response in responses)
    logprobs = [one for r in responses for one in json.loads(r["logprobs"].item())]
    chosen = np.concatenate([r["output_log_probs"].reshape(-1) for r in responses])
    assert len(logprobs) == len(chosen) == num_tokens
    for entry, logprob in zip(logprobs, chosen.tolist(), strict=True):
        ranks = sorted(alternative["rank"] for alternative in entry.values())
        assert ranks == [1, 2, 3]
        greedy = next(iter(entry.values()))
        assert greedy["rank"] == 1
        assert greedy["logprob"] == pytest.approx(logprob, rel=1e-6)
        assert all("decoded_token" in alternative for alternative in entry.values())
    assert last["cumulative_logprob"].item() == pytest.approx(chosen.sum(), rel=1e-4, abs=1e-6)
    assert last["cum_log_probs"].item() == last["cumulative_logprob"].item()
    times = [
        last[f"{name}_time_ns"].item()
        for name in ("arrival", "first_scheduled", "first_token", "last_token")
    ]
    assert times == sorted(times) and times[0] > 0


def test_outputs_are_absent_unless_asked_for(server: TritonServer) -> None:
    with Call(server, messages=QUESTION, **GREEDY) as call:
        assert [list(response) for response in call.all()] == [["text_output"]]


def test_cached_tokens(server: TritonServer) -> None:
    prompt = " ".join(str(number) for number in range(100))
    values: dict[str, Any] = {"text_input": prompt, "return_num_cached_tokens": True, **GREEDY}

    def num_cached(**more: Any) -> int:
        return int(generate(server, **values, **more)["num_cached_tokens"])

    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="a") > 50
    assert num_cached(cache_salt="b") == 0


def test_cached_tokens_of_main_memory() -> None:
    """The pages hold three of the six prompts."""
    prompts = [f"{number} " + "word " * 200 for number in range(6)]
    options = {"num_pages": "40", "max_sequence_length": "600", "host_cache_gib": "0.1"}
    with running(options=options) as server:
        first, second = (
            [
                generate(server, text_input=prompt, return_num_cached_tokens=True, **GREEDY)
                for prompt in prompts
            ]
            for _ in range(2)
        )
        loaded = "minisgl:host_cache_loaded_tokens_total"
        wait_for(lambda: Metrics(server)[loaded] > 500, "tokens that are loaded")
    assert [one["text_output"] for one in second] == [one["text_output"] for one in first]
    assert all(one["num_cached_tokens"] > 100 for one in second)


def test_stop_strings_across_tokens(server: TritonServer, encoder: PromptEncoder) -> None:
    """Every substring of an answer, as a stop string, cuts it where it first begins."""
    values: dict[str, Any] = {
        "messages": chat("Count from 1 to 5."),
        "return_finish_reason": True,
        "return_stop_reason": True,
        **GREEDY,
    }
    whole = generate(server, **values)["text_output"]
    assert len(whole) > 5
    for begin in range(0, len(whole) - 3, 2):
        stop = whole[begin : begin + 3]
        for stream in (False, True):
            with Call(server, stop=[stop, "never"], stream=stream, **values) as call:
                responses = call.all()
            assert text_of(responses) == whole[: whole.index(stop)]
            assert responses[-1]["finish_reason"].item() == b"stop"
            assert json.loads(responses[-1]["stop_reason"].item()) == stop


def test_length(server: TritonServer) -> None:
    output = generate(
        server, text_input="a", max_tokens=3, ignore_eos=True, return_finish_reason=True
    )
    assert output["finish_reason"] == "length"


async def test_concurrent_streams_with_emoji_and_cjk(server: TritonServer) -> None:
    """Texts whose characters span tokens, 12 at once, each the same as alone."""
    questions = [
        "How do you say 'cat' in Japanese?",
        "How do you say 'water' in Chinese?",
        "Which emoji means a dog?",
        "What is the capital of France?",
    ]
    values: dict[str, Any] = {"max_tokens": 48, "temperature": 1.3, "ignore_eos": True}

    async def ask(client: aio.InferenceServerClient, number: int) -> str:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            said = {"messages": chat(questions[number % 4]), "seed": number, "stream": True}
            yield {"model_name": "minisgl", "inputs": tensors({**said, **values})}

        texts = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            # each delta consists of whole characters
            texts.append(result.as_numpy("text_output").item().decode())
        return "".join(texts)

    async with aio.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        together = await asyncio.gather(*(ask(client, number) for number in range(12)))
    for number, text in enumerate(together):
        said = {"messages": chat(questions[number % 4]), "seed": number}
        assert generate(server, **said, **values)["text_output"] == text
    assert any(ord(char) > 0x2000 for text in together for char in text)


def test_metrics_tell_what_happened(server: TritonServer) -> None:
    before = Metrics(server)
    generate(server, messages=QUESTION, **GREEDY)
    names = (
        "vllm:e2e_request_latency_seconds_count",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_prompt_tokens_sum",
        "minisgl:step_seconds_count",
        "minisgl:step_seconds_bucket",
        "minisgl:batch_size_sum",
        "minisgl:chunk_tokens_sum",
    )

    def have_risen() -> bool:
        after = Metrics(server)
        return all(after[name] > before[name] for name in names)

    wait_for(have_risen, "a request and its steps in the metrics")
    after = Metrics(server)
    wait_for(lambda: Metrics(server)["vllm:num_requests_running"] == 0, "an idle engine")
    assert after.labelled("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max") > 0
    assert 'version="1"' in after.text and 'model="demo_model"' in after.text
