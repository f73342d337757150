"""What `LLM` refuses, and what it does when a request or the engine fails."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_backend import LLM
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import ConfigError, EngineFailure, Overloaded, RequestError
from minisgl_backend.limits import Limits
from minisgl_backend.offline.prompts import read_prompts
from minisgl_backend.wire.defaults import NO_DEFAULTS
from minisgl_backend.wire.generation import MessagesPrompt
from minisgl_backend.wire.parse import parse_generation
from minisgl_check.processes import children_of
from tests.fakes.clock import LoopClock, passing_within_the_answer
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_pags": 3}, "unknown option 'num_pags'; did you mean 'num_pages'?"),
        ({"num_pages": "many"}, "option num_pages must be an integer, got 'many'"),
        ({"num_pages": 0}, "option num_pages must be at least 1, got 0"),
        ({"cache": "none"}, "option cache must be one of radix, naive, got 'none'"),
        ({"max_sequence_length": 10_000}, "max_sequence_length 10000 exceeds the model's context"),
        ({"model": "/no/such/folder"}, "/no/such/folder is neither a folder nor a model id"),
        ({"attention_backend": "fa", "device": "cpu"}, "option attention_backend=fa needs a GPU"),
    ],
)
def test_bad_options(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**options)
    assert complaint in str(refused.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        LLM(DEMO_MODEL, tokenizer=str(tmp_path))


@pytest.mark.parametrize(
    "parameters",
    [
        {"tempreature": 1},
        {"temperature": "hot"},
        {"temperature": math.nan},
        {"top_p": -0.5},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": "x" * 2000},
        {"num_logprobs": 21},
        {"logit_bias": '{"1": 101}'},
        {"cache_salt": "?"},
        {"suffix": "x"},
        {"n": 65},
        {"n": 2, "best_of": 1},
        {"seed": -1},
        {"ignore_eos": "perhaps"},
    ],
    ids=lambda parameters: " ".join(parameters),
)
def test_bad_parameters_are_told_in_the_words_of_the_server(
    llm: LLM, parameters: dict[str, Any]
) -> None:
    text = np.array([b"x"], dtype=np.object_)
    with pytest.raises(RequestError) as theirs:
        parse_generation({"text_input": text}, parameters, arrival_time_ns=0, limits=Limits())
    with pytest.raises(RequestError) as ours:
        llm.generate("x", parameters)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))


@pytest.mark.parametrize(
    ("prompts", "params", "complaint"),
    [
        ("", None, "text_input must not be empty"),
        ([[]], None, "input_ids must not be empty"),
        ([1, -2], None, "input_ids must be in 0 .. 2147483647"),
        ([1, 2048], None, "input_ids must be in 0 .. 2047, got 2048"),
        ([1.5], None, "input_ids must be integers, got float64"),
        ([True], None, "input_ids must be integers, got bool"),
        ([1, True], None, "input_ids must be integers, got bool"),
        (["a", (1, np.True_)], None, "prompts[1]: input_ids must be integers, got bool"),
        (list(range(2000)) * 5, None, "prompt of 10000 tokens does not fit the context of 8192"),
        (
            [1],
            {"max_tokens": 8192},
            "max_tokens 8192 with a prompt of 1 tokens exceeds the context",
        ),
        ([1], {"stop_token_ids": [2048]}, "stop_token_ids must be in 0 .. 2047, got 2048"),
        ([1], {"logit_bias": {5000: 1}}, "logit_bias must be token ids in 0 .. 2047, got 5000"),
        ([{"role": "user"}], None, "messages[0].content must be a string or a list of text parts"),
        ([{"role": {1}}], None, "messages must be valid JSON"),
        (3, None, "prompts must be a string, token ids, messages, or a list of these, got 3"),
        (np.array(3), None, "prompts must be a string, token ids, messages, or a list of these"),
        (bytearray(b"a"), None, "prompts must be a string, token ids, messages, or a list of"),
        (["a", memoryview(b"a")], None, "prompts[1]: a prompt must be a string, token ids or"),
        (["a", 3], None, "prompts[1]: a prompt must be a string, token ids or messages, got 3"),
        (["a", [1, [2]]], None, "prompts[1]: input_ids must be integers"),
        (["a", [[1, 2], [3, 4]]], None, "prompts[1]: input_ids of a prompt must be of one axis"),
        (np.ones((2, 3, 4), int), None, "prompts[0]: input_ids of a prompt must be of one axis"),
        (["a", "b"], [{}, {"top_k": -2}], "prompts[1]: top_k must be >= -1, got -2"),
        (["a", [2048]], None, "prompts[1]: input_ids must be in 0 .. 2047, got 2048"),
        (["a", ""], None, "prompts[1]: text_input must not be empty"),
        (["a", "b"], [{}], "params must be one mapping or one for each prompt, got 1 for 2"),
        ("a", 3, "params must be a mapping or a list of them, got 3"),
        ("a", [3], "params must be a mapping or a list of them, got 3"),
        ("a", {3: 4}, "unknown parameter 3"),
        ("a", {"messages": "[]"}, "messages are the prompt, which is not a parameter in process"),
        ("a", {"stream": True}, "stream is not supported in process: call LLM.stream"),
        ("a", {"timeout": 3}, "unknown parameter 'timeout'; did you mean 'timeout_ms'?"),
        ("a", {"tools": []}, "tools goes with messages"),
    ],
)
def test_bad_prompts(llm: LLM, prompts: Any, params: Any, complaint: str) -> None:
    before = llm.stats().num_prompt_tokens
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, params)
    assert str(refused.value).startswith(complaint)
    assert llm.stats().num_prompt_tokens == before  # nothing was computed


def test_a_deadline_before_the_first_token() -> None:
    with LLM(max_running_requests=1, num_pages=512) as llm:
        running = llm.stream("one", {"max_tokens": 8000, "ignore_eos": True})
        next(running)
        with pytest.raises(Overloaded, match="the deadline passed after"):
            llm.generate("two", {"timeout_ms": 1})
        assert next(running).text is not None  # the others do not notice
        running.close()


def test_a_deadline_within_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"max_tokens": 8000, "ignore_eos": True, "timeout_ms": 3_600_000}
    with passing_within_the_answer(llm, LoopClock(monkeypatch), 3601):
        (output,) = llm.generate("one", asked)
    assert output.finish_reason == "timeout"
    assert 0 < output.num_output_tokens < 8000


def test_ranks_and_what_happens_when_one_is_lost(llm: LLM) -> None:
    """With two ranks the tokens are the same; when one dies, callers learn about it."""
    before = set(children_of(os.getpid()))
    prompts = ["Count from 1 to 5.", "The capital of France is"]
    with LLM(tensor_parallel_size=2, device="cpu", num_pages=512) as ranked:
        (follower,) = set(children_of(os.getpid())) - before
        params = {"temperature": 0, "max_tokens": 30}
        expected = [output.token_ids for output in llm.generate(prompts, params)]
        assert [output.token_ids for output in ranked.generate(prompts, params)] == expected
        stream = ranked.stream("one", {"max_tokens": 4000, "ignore_eos": True})
        next(stream)
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(EngineFailure):
            list(stream)
        with pytest.raises(EngineFailure, match="the engine is down"):
            ranked.generate("one")
    assert follower not in children_of(os.getpid())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_llm_that_is_not_closed_ends_with_its_script(num_ranks: int) -> None:
    """In the middle of a step, whose thread must not outlive the interpreter."""
    code = (
        "import sys\n"
        "from minisgl_backend import LLM\n"
        f"llm = LLM(num_pages=512, tensor_parallel_size={num_ranks}, device='cpu')\n"
        "stream = llm.stream(['one'] * 16, {'max_tokens': 400, 'ignore_eos': True})\n"
        "next(stream)\n"
        "print('begun')\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "begun\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"model.norm.", b"model.form.", 1))
    with pytest.raises(ConfigError, match=r"model\.norm"):  # found when they are loaded
        LLM(tmp_path / "model", device="cpu")
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_messages_have_as_much_room_as_in_a_server() -> None:
    """Escapes of letters beyond ASCII took up to three times the bytes of the letters."""
    chat = [{"role": "user", "content": "ж" * 100}]
    (read,) = read_prompts(
        chat,
        None,
        stream=False,
        arrival_time_ns=0,
        defaults=NO_DEFAULTS,
        limits=Limits(prompt_bytes=300),
    )
    assert isinstance(read.prompt, MessagesPrompt)
    assert json.loads(read.prompt.messages) == chat
