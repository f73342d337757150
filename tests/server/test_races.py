"""Sweeps for cancelled clients race with finishing requests, by night 10,000 times; the server
survives.

Asking a response sender whether its request is cancelled, while or after its final flag is sent,
crashes tritonserver; so here the engine looks at every open request each millisecond, and requests
end or are abandoned all the time. They are abandoned over HTTP: a gRPC stream that is cancelled
while one of its responses ends may crash Triton 24.10 whatever the model does.
"""

from __future__ import annotations

import queue
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from minisgl_backend.server.process import TritonServer
from minisgl_kit.repositories import repository_with
from tests.server.client import Metrics, generate, open_stream, tensors, wait_for
from tests.server.conftest import running

_EAGER = """\
import minisgl_backend.tritonserver.dispatch as dispatch
from minisgl_bench.paced import paced_model

dispatch._TICK_S = 0.001
dispatch._TURNS = 1
TritonPythonModel = paced_model(step_s=0.001)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TritonServer]:
    repository = repository_with({"llm_engine": _EAGER}, tmp_path)
    with running(repository, options={"max_running_requests": "64"}, exit_code=None) as server:
        yield server
        # Triton 24.10 does not unload a model whose requests were cancelled in its own queue,
        # whatever the model does
        server.signal(signal.SIGKILL)


def run_batch(server: TritonServer, rng: random.Random, size: int) -> None:
    """Requests over one connection that all run to their end."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    client.start_stream(lambda result, error: results.put(error or result))
    for _ in range(size):
        values = {"input_ids": [1], "max_tokens": rng.randint(1, 4), "stream": rng.random() < 0.5}
        client.async_stream_infer("llm_engine", tensors(values), enable_empty_final_response=True)
    num_ended = 0
    while num_ended < size:
        result = results.get(timeout=60)
        assert isinstance(result, grpcclient.InferResult), str(result)
        num_ended += result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    client.close()


def leave_batch(server: TritonServer, rng: random.Random, size: int) -> None:
    """Requests over separate connections, each closed somewhere in its answer."""
    with ExitStack() as streams:
        for _ in range(size):
            values = {"input_ids": [1], "max_tokens": rng.randint(1, 60), "stream": True}
            events = streams.enter_context(open_stream(server, "llm_engine", **values))
            for _ in range(rng.randint(0, 2)):
                next(events, None)


@pytest.mark.parametrize("num_requests", [2_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_sweeps_race_with_the_end_of_requests(server: TritonServer, num_requests: int) -> None:
    rng = random.Random(0)
    size = 50
    for number in range(num_requests // size):
        if number % 4 == 3:
            leave_batch(server, rng, size)
        else:
            run_batch(server, rng, size)
    assert server.poll() is None
    assert len(generate(server, input_ids=[1], max_tokens=3, temperature=0.0)["text_output"]) > 0

    def is_idle() -> bool:
        metrics = Metrics(server)
        return metrics["vllm:num_requests_running"] + metrics["vllm:kv_cache_usage_perc"] == 0

    wait_for(is_idle, "an engine that holds nothing")
    assert Metrics(server)["minisgl:requests_failed_total"] == 0
    assert Metrics(server)["minisgl:requests_cancelled_total"] > 0
