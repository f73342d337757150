"""What a client returns is what the server says, whichever way it is asked."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from minisgl_client import AsyncClient, Client, InvalidArgument, Parameters, wire

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.server.process import TritonServer
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.wire.generation import MessagesPrompt, TextPrompt
from tests.client.ways import Way, all_ways, url_of
from tests.fakes.vocabularies import token_text
from tests.server.client import generate

pytestmark = pytest.mark.server

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@all_ways
def test_no_proxy_is_asked(server: TritonServer, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert way.generate(server, messages=FRANCE, **GREEDY).text == "Paris"


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(DEMO_MODEL)


@all_ways
def test_tokens(server: TritonServer, encoder: PromptEncoder, way: Way) -> None:
    for text in ("The capital of Österreich", "x", ""):
        told = way.tokenize(server, prompt=text)
        assert told.text == text
        assert len(told.ids) == len(told.strs)
        if text:
            assert list(told.ids) == encoder.encode(TextPrompt(text)).tolist()
        assert told.max_sequence_length == 8192
    again = way.tokenize(server, input_ids=told.ids or [5, 0])
    assert again.strs == tuple(encoder.vocabulary.names[token_id] for token_id in again.ids)
    with pytest.raises(InvalidArgument, match="2047"):
        way.tokenize(server, input_ids=[2048])


@all_ways
def test_tokens_of_a_chat(server: TritonServer, way: Way) -> None:
    whole = way.tokenize(server, messages=FRANCE)
    assert whole.text.endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert "<|im_end|>" in whole.strs
    shorter = way.tokenize(server, messages=FRANCE, add_generation_prompt=False)
    assert shorter.text.endswith("France?<|im_end|>\n")
    assert whole.ids[: len(shorter.ids)] == shorter.ids
    assert whole.chat_format is not None
    assert (whole.chat_format.tool_dialect, whole.chat_format.thinking) == (None, None)
    assert whole.chat_format.variables >= {"messages", "tools", "add_generation_prompt"}
    assert way.tokenize(server, prompt="x").chat_format is None


@all_ways
def test_tokens_of_a_text_that_the_context_has_no_room_for(server: TritonServer, way: Way) -> None:
    text = "A sentence of some words. " * 4000
    assert len(way.tokenize(server, prompt=text).ids) > 8192
    with pytest.raises(InvalidArgument, match="does not fit the context"):
        way.generate(server, prompt=text)


@all_ways
def test_whole_and_streamed(server: TritonServer, encoder: PromptEncoder, way: Way) -> None:
    said = generate(server, messages=json.dumps(FRANCE), **GREEDY)["text_output"]
    assert "Paris" in said
    whole = way.generate(server, messages=FRANCE, request_id="whole", **GREEDY)
    deltas, result = way.stream(server, messages=FRANCE, request_id="parts", **GREEDY)
    assert whole.text == result.text == "".join(delta.text for delta in deltas) == said
    assert (whole.request_id, result.request_id) == ("whole", "parts")
    num_input_tokens = len(encoder.encode(encoder.render_chat(MessagesPrompt(json.dumps(FRANCE)))))
    for one in (whole, result):
        assert one.finish_reason == "stop"
        assert isinstance(one.stop_reason, int)
        assert token_text(encoder.vocabulary, one.stop_reason) == "<|im_end|>"
        assert one.num_input_tokens == num_input_tokens
        assert one.num_output_tokens == whole.num_output_tokens
        assert one.first_delta_s is not None
        assert 0 < one.first_delta_s <= one.total_s
        assert one.times is None and one.cumulative_logprob is None and one.logprobs == ()
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    counts = [delta.num_output_tokens for delta in deltas]
    assert sum(count or 0 for count in counts) == result.num_output_tokens


@all_ways
def test_optional_outputs_that_are_asked_for(
    server: TritonServer, encoder: PromptEncoder, way: Way
) -> None:
    asked: dict[str, Any] = {
        "num_logprobs": 3,
        "return_cumulative_logprob": True,
        "return_perf_metrics": True,
    }
    _, result = way.stream(server, messages=FRANCE, **asked, **GREEDY)
    assert result.num_output_tokens == len(result.logprobs) > 1
    chosen = [position.chosen for position in result.logprobs]
    assert "".join(one.text for one in chosen[:-1]) == result.text
    assert result.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen), rel=1e-4)
    for position in result.logprobs:
        assert position.chosen.rank == 1  # greedy
        assert position.top(3) == (position.chosen, *position.alternatives)
        assert [one.rank for one in position.top(3)] == [1, 2, 3]
        assert position.top(1) == (position.chosen,)
        for one in position.top(3):
            assert one.text == token_text(encoder.vocabulary, one.token_id)
            assert one.utf8 == encoder.vocabulary.token_bytes(one.token_id)
    times = result.times
    assert times is not None
    assert times.arrival_ns < times.first_scheduled_ns < times.first_token_ns
    assert times.first_token_ns < times.last_token_ns


@all_ways
def test_logprobs_of_a_prompt(server: TritonServer, encoder: PromptEncoder, way: Way) -> None:
    """Alone, at once and in parts, before an answer, and for more tokens than a part has."""
    ids = encoder.encode(TextPrompt("The capital of 太陽 is Paris. " * 300))[:2500]
    scored = way.generate(
        server, input_ids=ids.tolist(), max_tokens=0, num_prompt_logprobs=1, return_stop_reason=True
    )
    assert (scored.text, scored.finish_reason, scored.num_output_tokens) == ("", "length", 0)
    asked: dict[str, Any] = {"num_prompt_logprobs": 1, **GREEDY}
    deltas, result = way.stream(server, input_ids=ids.tolist(), **asked)
    told = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
    assert len(told) > 1 and not any(delta.text for delta in deltas[: len(told) - 1])
    for one in (scored, result):
        assert one.prompt_logprobs[0] is None
        positions = [position for position in one.prompt_logprobs if position is not None]
        assert [position.chosen.token_id for position in positions] == ids[1:].tolist()
        for position in positions:
            chosen = position.chosen
            assert chosen.text == token_text(encoder.vocabulary, chosen.token_id)
            assert chosen.utf8 == encoder.vocabulary.token_bytes(chosen.token_id)
            assert (chosen.rank == 1) == (position.top(1) == (chosen,))
            assert len(position.alternatives) == (chosen.rank > 1)
    assert way.generate(server, prompt="a", max_tokens=1).prompt_logprobs == ()


@all_ways
def test_outputs_that_are_turned_off(server: TritonServer, way: Way) -> None:
    names = (
        "finish_reason",
        "stop_reason",
        *(f"num_{what}_tokens" for what in ("input", "output")),
    )
    none: dict[str, Any] = {f"return_{name}": False for name in (*names, "num_cached_tokens")}
    result = way.generate(server, prompt="a", max_tokens=2, temperature=0.0, **none)
    assert result.text
    assert result.finish_reason is result.stop_reason is result.num_input_tokens is None
    assert result.num_output_tokens is result.num_cached_tokens is None


PARAMETERS: dict[str, Any] = {
    "max_tokens": 5,
    "max_new_tokens": 5,
    "fit_max_tokens": True,
    "min_tokens": 7,
    "min_length": 7,
    "temperature": 1.75,
    "top_p": 0.25,
    "top_k": 2,
    "min_p": 0.5,
    "repetition_penalty": 2.5,
    "presence_penalty": 2,
    "frequency_penalty": -2.0,
    "seed": 2**64 - 1,
    "random_seed": 8,
    "stop": "e",
    "stop_words": ["zzz", "a"],
    "stop_token_ids": range(300, 500),
    "end_id": 344,
    "ignore_eos": True,
    "num_logprobs": 20,
    "num_prompt_logprobs": 20,
    "return_logprobs": True,
    "return_log_probs": True,
    "logit_bias": {500: 100.0},
    "priority_level": -3,
    "timeout_ms": 600_000,
    "cache_salt": "pepper-7",
    "min_chunk_interval_ms": 1,
    "parse_special_tokens": True,
    "add_special_tokens": False,
    "exclude_input_in_output": False,
    "skip_special_tokens": False,
    "structured_outputs": {"regex": "[a-f]+"},
    "guided_decoding_guide_type": "json",
    "guided_decoding_guide": "[a-f]+",
    "sampling_parameters": {"max_tokens": "3"},
    "n": 1,
    "num_return_sequences": 1,
    "best_of": 1,
    "beam_width": 1,
    "length_penalty": 1.0,
    "bad_words": "",
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_kv_cache_reuse_stats": False,
    "pad_id": 0,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_num_cached_tokens": True,
    "return_stop_reason": True,
    "return_cumulative_logprob": True,
    "return_perf_metrics": True,
}
ARGUMENTS = {"text_input", "messages", "input_ids", "tools", "stream", "stop_request"}
"""Inputs that are arguments or methods of the clients."""
OF_CHATS: dict[str, Any] = {
    "add_generation_prompt": True,
    "chat_template_kwargs": {"any": [1, "é"]},
}
"""Parameters that go only with messages."""


def test_every_input_is_a_parameter_or_an_argument() -> None:
    # with embed the answer is not text, and the server has no adapters for the others
    others = {"embed", "lora_name", "lora_task_id"}
    parameters = {*PARAMETERS, *OF_CHATS, *others}
    assert set(Parameters.__annotations__) == parameters == set(wire.INPUTS) - ARGUMENTS


def test_parameters_have_the_types_of_their_tensors() -> None:
    kinds = {"BOOL": "bool", "INT32": "int", "UINT64": "int", "FP32": "float", "BYTES": "str"}
    for name, annotation in Parameters.__annotations__.items():
        text = str(getattr(annotation, "__forward_arg__", annotation))
        assert re.search(rf"\b{kinds[wire.INPUTS[name]]}\b", text), name
        is_list = name in wire.LISTS and name != "end_id"
        assert ("Sequence" in text) is is_list, name


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_every_parameter(server: TritonServer, protocol: str) -> None:
    """Each has the same effect as when curl sends it; one without effect changes nothing."""
    prompt = "Tell me a story about a fox.<|endoftext|>"
    with Client(url_of(server, protocol)) as client:
        texts = {}
        for name, value in PARAMETERS.items():
            values: dict[str, Any] = {"seed": 7} if "seed" not in name else {}
            if name not in ("max_tokens", "max_new_tokens", "sampling_parameters"):
                values["max_tokens"] = 12
            if name == "guided_decoding_guide":
                values["guided_decoding_guide_type"] = "regex"
            values[name] = value
            texts[name] = client.generate(prompt, **values).text
            for key in {"logit_bias", "sampling_parameters", "structured_outputs"} & set(values):
                values[key] = json.dumps(values[key])
            if "stop_token_ids" in values:
                values["stop_token_ids"] = list(value)
            assert texts[name] == generate(server, text_input=prompt, **values)["text_output"], name
    without = texts["pad_id"]
    changing = {name for name, text in texts.items() if text != without}
    assert changing >= {
        *("max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "seed", "random_seed", "stop", "stop_words", "stop_token_ids"),
        *("logit_bias", "parse_special_tokens", "exclude_input_in_output", "sampling_parameters"),
        *("structured_outputs", "guided_decoding_guide_type", "guided_decoding_guide"),
    }


@all_ways
def test_parameters_of_chats(server: TritonServer, way: Way) -> None:
    plain = way.generate(server, messages=FRANCE, **GREEDY)
    assert way.generate(server, messages=FRANCE, **OF_CHATS, **GREEDY).text == plain.text
    with pytest.raises(InvalidArgument, match="chat_template_kwargs may not hold 'tools'"):
        way.generate(server, messages=FRANCE, chat_template_kwargs={"tools": 1}, **GREEDY)


@all_ways
def test_parameters_whose_effect_is_seen(server: TritonServer, way: Way) -> None:
    stopped = way.generate(server, messages=FRANCE, stop=["zzz", "ar"], **GREEDY)
    assert stopped.stop_reason == "ar" and "ar" not in stopped.text
    assert way.generate(server, prompt="a", max_tokens=3, ignore_eos=True).finish_reason == "length"
    prompt = " ".join(str(number) for number in range(80))
    salt = f"{way.protocol}-{way.is_async}"
    cached = [
        way.generate(server, prompt=prompt, max_tokens=1, cache_salt=salt).num_cached_tokens
        for _ in range(2)
    ]
    assert cached[0] == 0
    assert cached[1] is not None and cached[1] > 50


@all_ways
def test_prompts_of_each_kind(server: TritonServer, encoder: PromptEncoder, way: Way) -> None:
    said = way.generate(server, messages=FRANCE, **GREEDY)
    ids = encoder.encode(encoder.render_chat(MessagesPrompt(json.dumps(FRANCE))))
    assert ids.dtype == np.int32
    for input_ids in (ids, ids.tolist(), tuple(ids.tolist())):
        assert way.generate(server, input_ids=input_ids, **GREEDY).text == said.text
    rendered = "".join(token_text(encoder.vocabulary, i) for i in ids.tolist())
    assert way.generate(server, prompt=rendered, **GREEDY).num_input_tokens != len(ids)
    special = way.generate(server, prompt=rendered, parse_special_tokens=True, **GREEDY)
    assert special.text == said.text
    with_tools = way.generate(server, messages=FRANCE, tools=[WEATHER], **GREEDY)
    assert (with_tools.num_input_tokens or 0) > len(ids)


@all_ways
def test_characters_of_all_kinds(server: TritonServer, encoder: PromptEncoder, way: Way) -> None:
    """Prompts arrive unchanged, and characters that span tokens come whole."""
    prompt = '猫🦊 "\\" \t\u2028\x85\u200d\ufeff é\u0301 ünï'
    result = way.generate(server, prompt=prompt, max_tokens=1)
    assert result.num_input_tokens == len(encoder.encode(TextPrompt(prompt)))
    fox = [{"role": "user", "content": "What is the emoji for a fox?"}]
    assert "🦊" in way.generate(server, messages=fox, **GREEDY).text
    poem = [{"role": "user", "content": "Write a poem about the sea."}]
    _, result = way.stream(server, messages=poem, temperature=0, max_tokens=120)
    assert "\ufffd" not in result.text
    assert any(ord(char) > 0xFFFF for char in result.text)


QUESTIONS = {
    "What is the capital of France?": "Paris",
    "How do you say cat in Japanese?": "猫",
    "What is 7 plus 8?": "15",
    "What is the emoji for a fox?": "🦊",
}
ASKED = [list(QUESTIONS)[number % len(QUESTIONS)] for number in range(32)]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_32_streams_of_one_client(server: TritonServer, protocol: str) -> None:
    async def ask(question: str) -> str:
        message = {"role": "user", "content": question}
        async with client.stream(messages=[message], **GREEDY) as stream:
            return "".join([delta.text async for delta in stream])

    async with AsyncClient(url_of(server, protocol)) as client:
        answers = await asyncio.gather(*map(ask, ASKED))
    assert all(QUESTIONS[q] in answer for q, answer in zip(ASKED, answers, strict=True))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_32_threads_of_one_client(server: TritonServer, protocol: str) -> None:
    def ask(question: str) -> str:
        with client.stream(messages=[{"role": "user", "content": question}], **GREEDY) as stream:
            return "".join(delta.text for delta in stream)

    with Client(url_of(server, protocol)) as client, ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(ask, ASKED))
    assert all(QUESTIONS[q] in answer for q, answer in zip(ASKED, answers, strict=True))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_ready(server: TritonServer, protocol: str) -> None:
    url = url_of(server, protocol)
    nowhere = url.rpartition(":")[0] + ":1"
    for address, model, expected in [
        (url, "minisgl", True),
        (url, "another", False),
        (nowhere, "minisgl", False),
    ]:
        async with AsyncClient(address, model=model) as client:
            assert await client.is_ready() is expected
        with Client(address, model=model) as threaded:
            assert threaded.is_ready() is expected
