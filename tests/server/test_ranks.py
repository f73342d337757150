"""A server whose engine has two ranks: its tokens, and what happens to it when one is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.request import Request, SamplingParams
from minisgl_backend.server.repository import shipped_repository
from minisgl_backend.server.supervisor import Recoveries
from minisgl_check.processes import runs
from tests.parallel.engines import Answer, wait_for_all
from tests.server.client import Call, Metrics, Refused
from tests.server.test_supervision import PATIENCE_S, Supervised
from tests.waiting import wait_until

OF_ANY_ENGINE = {"dtype": "float64", "num_pages": "512", "drain_timeout_s": "1"}
OPTIONS = {**OF_ANY_ENGINE, "tensor_parallel_size": "2", "distributed_timeout_s": "5"}
PROMPTS = [list(range(3, 60, 2)), list(range(100, 130)), [*range(3, 60, 2), 7, 8, 9]]
SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": 16, "temperature": 0.0},
    {"max_tokens": 16, "temperature": 0.8, "seed": 5},
    {"max_tokens": 16, "temperature": 1.1, "top_p": 0.9, "seed": 6},
]
ENDLESS: dict[str, Any] = {
    "input_ids": [1, 2, 3],
    "max_tokens": 4000,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def world() -> Iterator[Supervised]:
    it = Supervised(shipped_repository(), OPTIONS)
    try:
        yield it
        last = rank_1(it)
    finally:
        it.close()
    wait_until(lambda: not runs(last))


def ranks_of(parent: int) -> list[int]:
    """The processes of an engine's other ranks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            its_parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if its_parent == parent and b"minisgl_backend.tensor_parallel" in words:
            found.append(int(process.name))
    return found


def rank_1(world: Supervised) -> int:
    (pid,) = ranks_of(world.stats("llm_engine")["pid"])
    return pid


def expected_tokens() -> list[list[int]]:
    """What a one-rank engine in this process answers to the prompts."""
    engine = build_engine(EngineOptions.from_mapping({**OF_ANY_ENGINE, "device": "cpu"}))
    answers = []
    for prompt, values in zip(PROMPTS, SAMPLING, strict=True):
        answer = Answer(engine.new_id())
        ids = np.array(prompt, np.int32)
        engine.submit(
            Request(id=answer.request_id, prompt=ids, sampling=SamplingParams(**values)), answer
        )
        answers.append(answer)
    wait_for_all(answers)
    engine.close(drain_s=0)
    return [answer.tokens for answer in answers]


def tokens_of(world: Supervised, prompt: list[int], values: dict[str, Any]) -> list[int]:
    with Call(world.server, "llm_engine", input_ids=prompt, **values) as call:
        return [int(token) for response in call.all() for token in response["output_ids"]]


def test_tokens_are_those_of_one_rank(world: Supervised) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(
            pool.map(lambda args: tokens_of(world, *args), zip(PROMPTS, SAMPLING, strict=True))
        )
    assert found == expected_tokens()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_every_stream_and_the_engine_comes_back(
    world: Supervised, number: signal.Signals
) -> None:
    """Streams through the ensemble, and one to the engine itself; each ends with one error.

    Since no stream is lost, the engine's model is loaded again and the server stays.
    """
    world.supervisor._recoveries = Recoveries(first_pause_s=0.1)
    server, before = world.server, world.num_recoveries()
    lost = rank_1(world)
    models = ("minisgl", "minisgl", "llm_engine")
    calls = [Call(world.server, model, **ENDLESS) for model in models]
    try:
        for call in calls:
            assert call.next(PATIENCE_S) is not None
        os.kill(lost, number)
        for call in calls:
            with pytest.raises(
                Refused, match="INTERNAL: the engine stopped after an internal error"
            ):
                call.all()
    finally:
        for call in calls:
            call.cancel()
    world.wait_recovered(before)
    assert world.answers()
    assert rank_1(world) != lost
    wait_until(lambda: not runs(lost))
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    wait_until(lambda: not any(Metrics(world.server)[name] for name in gauges))
    if world.server is not server:  # it may abort or hang if the process held a lock of its backend
        assert server.poll() in (-signal.SIGABRT, -signal.SIGKILL)
