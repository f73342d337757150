"""`LLM.generate`, with the demo model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pexpect
import pytest
import torch
from transformers import AutoModelForCausalLM

import minisgl_backend
from minisgl_backend import LLM, Output
from minisgl_backend.build import build_engine
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import ConfigError, InvalidRequest
from minisgl_backend.request import Event, Failed, Finished, Generated, Request, SamplingParams
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.wire.generation import MessagesPrompt, Prompt, TextPrompt
from tests.waiting import wait_until

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Tell me a story about a fox, please, and make it a rather long one."
COUNT = "Count from 1 to 5."


def test_a_prompts_logprobs_are_those_of_transformers(llm: LLM) -> None:
    """Alone and with others, with and without an answer; the prompt may be cached or not."""
    text = "The capital of France is Paris, and the capital of Spain is Madrid."
    ids = PromptEncoder.load(DEMO_MODEL).encode(TextPrompt(text))
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids).long().unsqueeze(0)).logits[0, :-1]
    expected = logits.log_softmax(dim=-1)  # [num_prompt_tokens - 1, vocab_size]
    of_tokens = expected.gather(1, torch.from_numpy(ids[1:]).long()[:, None]).squeeze(1)
    scored = {"max_tokens": 0, "prompt_logprobs": 2}
    answered = {**GREEDY, "max_tokens": 3, "num_prompt_logprobs": 0}
    prompts: list[str | list[int]] = [text, text, ids.tolist()]
    for output in llm.generate(prompts, [scored, answered, scored]):
        first, *others = output.prompt_logprobs
        assert first is None
        found = torch.tensor([one.logprob for one in others if one is not None])
        torch.testing.assert_close(found, of_tokens, rtol=1e-5, atol=2e-5)
        if output.index == 1:
            assert output.num_output_tokens == 3
            continue
        assert (output.text, output.finish_reason) == ("", "length")
        assert output.num_output_tokens == 0 and output.token_ids == []
        for one, row in zip(others, expected, strict=True):
            assert one is not None
            best = row.topk(2)
            assert [token for token, _ in one.alternatives] == best.indices.tolist()
            assert [logprob for _, logprob in one.alternatives] == pytest.approx(
                best.values.tolist(), rel=1e-5, abs=2e-5
            )
    (output,) = llm.generate(text, {"max_tokens": 1})
    assert output.prompt_logprobs == []
    pieces = list(llm.stream(text, answered))
    assert len(pieces[0].prompt_logprobs) == len(ids)
    assert not any(piece.prompt_logprobs for piece in pieces[1:])


def test_no_tokens_at_all_need_logprobs_of_the_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be >= 1 without num_prompt_logprobs"):
        llm.generate("x", {"max_tokens": 0})
    with pytest.raises(InvalidRequest, match="min_tokens must be <= max_tokens 0, got 1"):
        llm.generate("x", {"max_tokens": 0, "min_tokens": 1, "prompt_logprobs": 0})
    (output,) = llm.generate([[5]], {"max_tokens": 0, "prompt_logprobs": 3})
    assert output.prompt_logprobs == [None]
    assert output.finish_reason == "length"


def texts(outputs: Sequence[Output]) -> list[str]:
    return [output.text for output in outputs]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, minisgl_backend; "
        "heavy = {'torch', 'transformers', 'triton_python_backend_utils', 'numpy'}; "
        "assert not heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        getattr(minisgl_backend, "LMM")  # noqa: B009 - mypy refuses the plain attribute


def test_every_form_of_a_prompt(llm: LLM) -> None:
    text = "The capital of France is"
    (alone,) = llm.generate(text, GREEDY)
    assert alone.text == " Paris"
    ids = PromptEncoder.load(DEMO_MODEL).encode(TextPrompt(text))
    assert alone.num_input_tokens == len(ids)
    assert texts(llm.generate(ids.tolist(), GREEDY)) == [" Paris"]
    assert texts(llm.generate(ids, GREEDY)) == [" Paris"]
    assert texts(llm.generate(np.stack([ids, ids]), GREEDY)) == [" Paris", " Paris"]
    assert texts(llm.generate(CAPITAL, GREEDY)) == ["Paris"]
    mixed = llm.generate([CAPITAL, text, ids.tolist(), tuple(ids.tolist())], GREEDY)
    assert texts(mixed) == ["Paris", " Paris", " Paris", " Paris"]
    assert [output.index for output in mixed] == [0, 1, 2, 3]
    assert llm.generate([], GREEDY) == []


def test_parameters_may_be_numbers_of_numpy(llm: LLM) -> None:
    (capital,) = llm.generate("The capital of France is", GREEDY)
    first, second = np.array(capital.token_ids[:2])
    asked: list[dict[str, Any]] = [
        {"max_tokens": np.int64(1)},
        {"stop_token_ids": np.array([second])},
        {"stop_token_ids": [second]},
        {"logit_bias": {second: np.float32(-100), first: 1}, "max_tokens": np.int32(1)},
    ]
    for params in asked:
        assert texts(llm.generate("The capital of France is", {**GREEDY, **params})) == [" P"]


def engine_tokens(prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]) -> list[list[int]]:
    """The tokens that the engine itself gives for these prompts, from its requests' events."""
    encoder = PromptEncoder.load(DEMO_MODEL)
    engine = build_engine(EngineOptions())
    tokens: list[list[int]] = [[] for _ in prompts]
    ended = [threading.Event() for _ in prompts]

    def sink(index: int, event: Event) -> None:
        assert not isinstance(event, Failed)
        if isinstance(event, Generated):
            tokens[index].append(event.token_id)
        elif isinstance(event, Finished):
            ended[index].set()

    try:
        for index, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
            request = Request(
                id=engine.new_id(), prompt=encoder.encode(encoder.rendered(prompt)), sampling=own
            )
            engine.submit(request, lambda event, index=index: sink(index, event))  # type: ignore[misc]
        for event in ended:
            assert event.wait(60)
    finally:
        engine.close(drain_s=0)
    return tokens


def test_tokens_are_those_of_the_engine(llm: LLM) -> None:
    prompts = [f"{number} and {number + 1} are numbers." for number in range(12)]
    expected = engine_tokens(
        [TextPrompt(prompt) for prompt in prompts],
        [SamplingParams(max_tokens=20, temperature=2.0, top_k=50, seed=n) for n in range(12)],
    )
    params = [{"max_tokens": 20, "temperature": 2.0, "top_k": 50, "seed": n} for n in range(12)]
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) > 6  # they distinguish the prompts


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    with LLM(num_pages=256) as llm:
        params = {"temperature": 0, "max_tokens": 4000, "ignore_eos": True, "stop": ["3", "zz"]}
        (output,) = llm.generate(COUNT, params)
        assert output.text == " 1, 2, "
        assert (output.finish_reason, output.stop_reason) == ("stop", "3")
        assert output.num_output_tokens == len(output.token_ids) < 20
        wait_until(lambda: llm.stats().num_open == 0)
        stats = llm.stats()
        assert stats.num_cancelled == 1
        assert stats.num_generated_tokens < 1000


def test_min_tokens_hold_a_stop_string_back(llm: LLM) -> None:
    short, longer = llm.generate(
        [COUNT] * 2, [{**GREEDY, "stop": ","} | more for more in ({}, {"min_tokens": 5})]
    )
    assert short.text == " 1"
    assert longer.text == " 1, 2"


def test_what_an_output_holds(llm: LLM) -> None:
    first, second = llm.generate(
        [STORY] * 2,
        [
            {"max_tokens": 3, "temperature": 0, "cache_salt": "own"},
            {"cache_salt": "own", "seed": 5},
        ],
    )
    assert (first.finish_reason, first.stop_reason) == ("length", None)
    assert first.num_output_tokens == len(first.token_ids) == 3
    assert first.num_cached_tokens == 0
    assert first.logprobs == () and first.cumulative_logprob is None and first.times is None
    assert second.num_output_tokens <= 16  # the server's default
    (third,) = llm.generate(
        STORY,
        {
            "max_tokens": 3,
            "temperature": 0,
            "cache_salt": "own",
            "num_logprobs": 2,
            "return_perf_metrics": True,
            "exclude_input_in_output": False,
        },
    )
    assert third.token_ids == first.token_ids
    assert third.text == STORY + first.text
    assert 0 < third.num_cached_tokens < third.num_input_tokens
    assert len(third.logprobs) == 3
    for token_id, one in zip(third.token_ids, third.logprobs, strict=True):
        assert one.rank == 1 and len(one.alternatives) == 2
        assert one.alternatives[0] == (token_id, one.logprob)
    assert third.cumulative_logprob == sum(one.logprob for one in third.logprobs)
    times = third.times
    assert times is not None
    assert (
        0
        < times.arrival_time_ns
        <= times.first_scheduled_time_ns
        <= times.first_token_time_ns
        <= times.last_token_time_ns
    )


def test_seeds_that_are_drawn_follow_the_option() -> None:
    params = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    found = []
    for seed in (7, 7, 8):
        with LLM(seed=seed, num_pages=64) as llm:
            found.append([output.token_ids for output in llm.generate(["x", "x"], params)])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_tools_and_template_variables(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    (plain,) = llm.generate(CAPITAL, GREEDY)
    (tooled,) = llm.generate(CAPITAL, {**GREEDY, "tools": [tool]})
    assert tooled.num_input_tokens > plain.num_input_tokens
    encoder = PromptEncoder.load(DEMO_MODEL)
    chat = MessagesPrompt('[{"role": "user", "content": "What is the capital of France?"}]')
    ids = encoder.encode(encoder.render_chat(chat))
    assert plain.num_input_tokens == len(ids)


def test_special_tokens_are_parsed_if_the_operator_says_so() -> None:
    with LLM(num_pages=64, parse_special_tokens=True) as llm:
        parsed, plain = llm.generate(
            ["<|im_end|>", "<|im_end|>"],
            [{"max_tokens": 1}, {"max_tokens": 1, "parse_special_tokens": False}],
        )
    assert parsed.num_input_tokens == 1 < plain.num_input_tokens


def test_what_parameters_leave_out_may_be_as_the_model_recommends(tmp_path: Path) -> None:
    """With ``top_k`` 1 all answers are the greedy one."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    advice = tmp_path / "model" / "generation_config.json"
    advice.write_text(json.dumps({"top_k": 1, "temperature": 0.7, "eos_token_id": 2}))
    with LLM(tmp_path / "model", num_pages=64, sampling_defaults="model") as llm:
        own = {"max_tokens": 12, "ignore_eos": True}
        asked: list[dict[str, Any]] = [{"temperature": 0}, {}, {}, {"top_k": 0, "temperature": 5.0}]
        greedy, one, other, warm = llm.generate(
            ["The capital of France is"] * 4, [{**own, "seed": 3, **more} for more in asked]
        )
    assert greedy.token_ids == one.token_ids == other.token_ids != warm.token_ids
    advice.write_text(json.dumps({"top_p": 2.0}))
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p must be"):
        LLM(tmp_path / "model", sampling_defaults="model")


def test_300_prompts_go_through_a_queue_that_has_no_room_for_them() -> None:
    with LLM(max_running_requests=8, max_queued_requests=4, max_queued_tokens=60) as llm:
        prompts = [f"What is {n % 10} plus {n // 30}?" for n in range(300)]
        outputs = llm.generate(prompts, {"temperature": 0, "max_tokens": 4})
        assert [output.index for output in outputs] == list(range(300))
        once = {prompt: output.text for prompt, output in zip(prompts, outputs, strict=True)}
        assert texts(outputs) == [once[prompt] for prompt in prompts]
        assert once["What is 7 plus 8?"].strip() == "15"
        assert llm.stats().rejected == {}


def test_threads_share_an_llm() -> None:
    """Together they ask for more than the queue has room for; each gets its own answers."""
    found: dict[int, list[str]] = {}
    with LLM(max_running_requests=2, max_queued_requests=1, num_pages=256) as llm:

        def ask(thread: int) -> None:
            prompts = [f"What is {thread} plus {n}?" for n in range(6)]
            found[thread] = texts(llm.generate(prompts, {"temperature": 0, "max_tokens": 4}))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [text.strip() for text in found[3]] == [str(3 + n) for n in range(6)]
    assert sorted(found) == [0, 1, 2, 3]


def test_two_in_one_process(llm: LLM) -> None:
    with LLM(num_pages=64, cache="naive") as other:
        assert other.info.num_pages == 64 != llm.info.num_pages
        assert texts(other.generate(COUNT, GREEDY)) == texts(llm.generate(COUNT, GREEDY))
        assert other.stats().num_prompt_tokens == 8
    assert texts(llm.generate(COUNT, GREEDY)) == [" 1, 2, 3, 4, 5"]


@pytest.mark.parametrize("progress", [True, False])
def test_a_progress_bar_on_a_terminal(progress: bool) -> None:
    code = (
        "from minisgl_backend import LLM\n"
        "with LLM(num_pages=64) as llm:\n"
        "    print('begun')\n"
        f"    llm.generate(['one', 'two', 'three'], progress={progress})\n"
        "    print('ended')\n"
    )
    with pexpect.spawn(
        sys.executable,
        ["-c", code],
        encoding="utf-8",
        timeout=120,
        env={**os.environ, "TERM": "xterm"},
    ) as terminal:
        terminal.expect("begun")
        terminal.expect("ended")
        assert ("3/3" in (terminal.before or "")) is progress
        assert ("tokens/s" in (terminal.before or "")) is progress


def test_embeddings_are_those_of_transformers(llm: LLM) -> None:
    """Several prompts at once, cached or not; nothing is generated."""
    prompts = ["The capital of France is", STORY, STORY]
    encoder = PromptEncoder.load(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    for vector, prompt in zip(llm.embed(prompts), prompts, strict=True):
        ids = torch.from_numpy(encoder.encode(TextPrompt(prompt))).long()[None]
        with torch.inference_mode():
            states = model.model(ids).last_hidden_state[0, -1]
        expected = states / states.norm()
        torch.testing.assert_close(torch.from_numpy(vector), expected, rtol=0, atol=1e-5)
    (output,) = llm.generate(COUNT, {"embed": True})
    assert output.embedding is not None and np.linalg.norm(output.embedding) == pytest.approx(1.0)
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert llm.generate(COUNT, GREEDY)[0].embedding is None
    with pytest.raises(InvalidRequest, match="max_tokens must be 0 with embed, got 40"):
        llm.embed(COUNT, GREEDY)
    salted = llm.embed(prompts, [{"cache_salt": "a"}, {}, {}])
    assert [vector.shape for vector in salted] == [(240,)] * 3
    with pytest.raises(InvalidRequest, match="got 1 for 3 prompts"):
        llm.embed(prompts, [{}])
    with pytest.raises(InvalidRequest, match="params must be a mapping or a list of them, got 'x'"):
        llm.embed(COUNT, "x")  # type: ignore[arg-type]
