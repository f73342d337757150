"""`LLM.stream`, with the demo model."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict

import pytest

from minisgl_backend import LLM
from minisgl_backend.errors import Cancelled, InvalidRequest, Unsupported
from tests.waiting import wait_until

EMOJI = "Write a poem about the sea."


def test_deltas_add_up(llm: LLM) -> None:
    prompts = [EMOJI, "What is the emoji for a fox?", "Count from 1 to 5."]
    params = {"temperature": 0, "max_tokens": 100, "num_logprobs": 1}
    wholes = llm.generate(prompts, params)
    streamed = defaultdict(list)
    for output in llm.stream(prompts, params):
        streamed[output.index].append(output)
    assert sorted(streamed) == [0, 1, 2]
    for whole in wholes:
        deltas = streamed[whole.index]
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [one for delta in deltas for one in delta.token_ids] == whole.token_ids
        logprobs = [one for delta in deltas for one in delta.logprobs]
        assert [one.alternatives[0][0] for one in logprobs] == whole.token_ids
        assert [one.logprob for one in logprobs] == pytest.approx(
            [one.logprob for one in whole.logprobs],
            abs=1e-4,  # steps of other sizes round differently
        )
        assert sum(delta.num_output_tokens for delta in deltas) == whole.num_output_tokens
        assert deltas[-1].cumulative_logprob == pytest.approx(whole.cumulative_logprob)
        assert deltas[-1].finish_reason == whole.finish_reason
        assert all(delta.finish_reason is None for delta in deltas[:-1])
        assert all("\ufffd" not in delta.text for delta in deltas)  # emoji are several tokens
    assert len(streamed[0]) > 10


def test_a_stop_string_never_shows(llm: LLM) -> None:
    deltas = list(llm.stream("Count from 1 to 5.", {"temperature": 0, "stop": [", 3, 4", "x"]}))
    assert "".join(delta.text for delta in deltas) == " 1, 2"
    assert deltas[-1].stop_reason == ", 3, 4"


def test_closing_a_stream_frees_its_rows_and_pages() -> None:
    with LLM(num_pages=512, cache="naive") as llm:
        endless = {"max_tokens": 4000, "ignore_eos": True}
        stream = llm.stream(["one", "two", "three"], endless)
        assert llm.stats().num_open == 0  # submitted when the first output is requested
        assert next(stream).index in (0, 1, 2)
        assert llm.stats().num_open == 3
        stream.close()
        wait_until(lambda: llm.stats().num_open == 0)
        wait_until(lambda: llm.stats().scheduler.free_pages == 512)
        assert llm.stats().num_cancelled == 3
        assert llm.generate("The capital of France is", {"temperature": 0})[0].text == " Paris"


def test_leaving_the_block_ends_what_is_streamed() -> None:
    with LLM(num_pages=512) as llm:
        stream = llm.stream("one", {"max_tokens": 4000, "ignore_eos": True})
        next(stream)
    with pytest.raises(Cancelled, match="this LLM is closed"):
        list(stream)
    llm.close()
    with pytest.raises(Cancelled, match="this LLM is closed"):
        llm.generate("one")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_closed_llm_loads_no_adapters(num_replicas: int) -> None:
    with LLM(enable_lora=True, num_pages=64, data_parallel_size=num_replicas) as llm:
        pass
    with pytest.raises(Cancelled, match="this LLM is closed"):
        llm.load_adapter("sql", "/loras/sql")
    with pytest.raises(Cancelled, match="this LLM is closed"):
        llm.unload_adapter("sql")


def test_a_stream_keeps_its_llm() -> None:
    outputs = list(LLM(num_pages=64).stream("The capital of France is", {"temperature": 0}))
    assert "".join(output.text for output in outputs) == " Paris"


def test_an_llm_that_is_dropped_ends() -> None:
    def num_engines() -> int:
        return sum(thread.name == "engine" for thread in threading.enumerate())

    gc.collect()  # engines of other tests
    before = num_engines()
    llm = LLM(num_pages=64)
    assert num_engines() == before + 1
    del llm
    gc.collect()
    wait_until(lambda: num_engines() == before)


def test_errors_come_with_the_call_not_with_the_first_output(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="temperature must be finite and >= 0, got -1"):
        llm.stream("x", {"temperature": -1})
    with pytest.raises(Unsupported, match="exclude_input_in_output must be true with stream"):
        llm.stream("x", {"exclude_input_in_output": False})
