"""A client that leaves ends its request in the engine, wherever the request is.

The engine is paced at 20 ms per step and takes 16 prompt tokens per step, so that each phase lasts
long enough to be hit. The assertions are about metrics: one more cancelled request, no request
running or waiting, all pages back, and no token made after that.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from minisgl_backend.server.process import TritonServer
from tests.server.client import (
    PATIENCE_S,
    Call,
    Metrics,
    Refused,
    generate,
    open_stream,
    tensors,
    wait_for,
)
from tests.server.conftest import PACED_STEP_S

STOPS_WITHIN_S = 60.0
"""Far less than the 320 s of a whole answer, and enough for a busy machine.

How long it really takes is measured by `minisgl bench cancel`.
"""
LONG: dict[str, Any] = {"max_tokens": 16000, "stream": True}
SHORT_PROMPT = list(range(1, 9))
LONG_PROMPT = [1 + number % 500 for number in range(48_000)]  # 3000 steps of prefill, 60 s

_CHILD = """
import json, sys, time
from tests.server.client import Call
from types import SimpleNamespace
port, values = json.load(sys.stdin)
call = Call(SimpleNamespace(grpc_port=port), **values)
print(call.next(), flush=True)
time.sleep(600)
"""


class Before:
    """The counts before a request is made."""

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        wait_for(self._is_idle, "an engine without requests")
        metrics = Metrics(server)
        self.cancelled = metrics["minisgl:requests_cancelled_total"]
        self.tokens = metrics["vllm:generation_tokens_total"]

    def wait_running(self) -> None:
        """Wait until metrics show a request, so that a report without one must be a later one."""
        wait_for(
            lambda: Metrics(self.server)["vllm:num_requests_running"] == 1, "a running request"
        )

    def check_cancelled(self, most_tokens: int) -> None:
        """One more is cancelled, everything is given back, and at most that many tokens were made.

        The metrics must have shown that it was running.
        """
        wait_for(
            lambda: Metrics(self.server)["minisgl:requests_cancelled_total"] > self.cancelled,
            "one more cancelled request",
        )
        wait_for(self._is_idle, "an engine without requests")
        metrics = Metrics(self.server)
        assert metrics["minisgl:requests_cancelled_total"] == self.cancelled + 1
        made = metrics["vllm:generation_tokens_total"] - self.tokens
        assert made <= most_tokens
        generate(self.server, input_ids=SHORT_PROMPT, max_tokens=2)
        expected = self.tokens + made + 2  # those of the last request, and no more
        wait_for(
            lambda: Metrics(self.server)["vllm:generation_tokens_total"] >= expected, "a new report"
        )
        assert Metrics(self.server)["vllm:generation_tokens_total"] == expected

    def _is_idle(self) -> bool:
        metrics = Metrics(self.server)
        return (
            metrics["vllm:num_requests_running"] == 0
            and metrics["vllm:num_requests_waiting"] == 0
            and metrics["vllm:kv_cache_usage_perc"] == 0
        )


def tokens_in(seconds: float) -> int:
    """How many tokens the paced engine makes in that time, for one request."""
    return round(seconds / PACED_STEP_S)


class Client:
    """One way to ask and then leave."""

    def __init__(self, server: TritonServer, values: dict[str, Any]) -> None:
        self.call = Call(server, **values)

    def next(self) -> None:
        self.call.next()

    def leave(self) -> None:
        self.call.cancel()


class KilledClient:
    """A gRPC client in its own process, which is killed."""

    def __init__(self, server: TritonServer, values: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdin is not None
        with self.process.stdin as told:
            json.dump([server.grpc_port, values], told)

    def next(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def leave(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


CLIENTS = pytest.mark.parametrize("client", [Client, KilledClient], ids=["cancel", "kill"])
MODELS = pytest.mark.parametrize("model", ["minisgl", "minisgl_batched", "llm_engine"])


@CLIENTS
@MODELS
def test_at_a_later_token(
    paced_server: TritonServer, client: Callable[..., Client], model: str
) -> None:
    before = Before(paced_server)
    asking = client(paced_server, {"model": model, "input_ids": SHORT_PROMPT, **LONG})
    asking.next()
    before.wait_running()
    received = Metrics(paced_server)["vllm:generation_tokens_total"] - before.tokens
    asking.leave()
    before.check_cancelled(int(received) + tokens_in(STOPS_WITHIN_S))


@CLIENTS
def test_in_prefill(paced_server: TritonServer, client: Callable[..., Client]) -> None:
    before = Before(paced_server)
    asking = client(paced_server, {"input_ids": LONG_PROMPT, **LONG})
    before.wait_running()
    asking.leave()
    before.check_cancelled(0)


@CLIENTS
def test_in_the_queue(paced_server: TritonServer, client: Callable[..., Client]) -> None:
    """Two requests take all rows; a third is cancelled while it waits."""
    before = Before(paced_server)
    with (
        Call(paced_server, input_ids=SHORT_PROMPT, request_id="a", **LONG) as first,
        Call(paced_server, input_ids=SHORT_PROMPT, request_id="b", **LONG) as second,
    ):
        first.next()
        second.next()
        asking = client(paced_server, {"input_ids": LONG_PROMPT, **LONG})
        wait_for(
            lambda: Metrics(paced_server)["vllm:num_requests_waiting"] == 1, "a request in queue"
        )
        asking.leave()
        wait_for(
            lambda: Metrics(paced_server)["minisgl:requests_cancelled_total"] > before.cancelled,
            "one more cancelled request",
        )
        wait_for(lambda: Metrics(paced_server)["vllm:num_requests_waiting"] == 0, "an empty queue")
        assert Metrics(paced_server)["vllm:num_requests_running"] == 2
        # its prompt was never computed
        first.next()
        second.next()
    wait_for(
        lambda: Metrics(paced_server)["minisgl:requests_cancelled_total"] == before.cancelled + 3,
        "all three cancelled",
    )


def test_disconnect_of_an_event_stream(paced_server: TritonServer) -> None:
    before = Before(paced_server)
    with open_stream(paced_server, input_ids=SHORT_PROMPT, **LONG) as events:
        next(events)
        before.wait_running()
        received = Metrics(paced_server)["vllm:generation_tokens_total"] - before.tokens
    before.check_cancelled(int(received) + tokens_in(STOPS_WITHIN_S))


@MODELS
def test_stop_request(paced_server: TritonServer, model: str) -> None:
    """A request that cancels others by id, over another connection."""
    before = Before(paced_server)
    with (
        Call(
            paced_server,
            model,
            request_id="job 7",
            input_ids=SHORT_PROMPT,
            **LONG,
            return_finish_reason=True,
        ) as call,
    ):
        call.next()
        before.wait_running()
        received = Metrics(paced_server)["vllm:generation_tokens_total"] - before.tokens
        with Call(paced_server, model, request_id="job 7", stop_request=True) as stopping:
            (answer,) = stopping.all()
        assert answer["finish_reason"].item() == b"cancelled"
        if model != "llm_engine":
            assert answer["text_output"].item() == b""
        assert call.all()[-1]["finish_reason"].item() == b"cancelled"
    before.check_cancelled(int(received) + tokens_in(STOPS_WITHIN_S))


def test_many_stop_requests_on_one_stream(server: TritonServer) -> None:
    """Each finds its request somewhere else: in the tokenizer, in the queue, in prefill, or later.

    Wherever that is, the request ends once, with a reason and under its id, and is counted.
    """
    num_requests, num_rounds = 16, 8
    # they fill the context: none ends by itself, even if its stop comes late
    endless: dict[str, Any] = {"max_tokens": 8000, "stream": True, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"text_input": "word " * 5000, "fit_max_tokens": True},
        {"input_ids": SHORT_PROMPT},
    ]
    before = Before(server)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    client.start_stream(lambda result, error: results.put(error or result))

    def send(request_id: str, **values: Any) -> None:
        inputs = tensors({**values, "return_finish_reason": True})
        client.async_stream_infer(
            "minisgl", inputs, request_id=request_id, enable_empty_final_response=True
        )

    for number in range(num_rounds):
        ids = [f"{number}.{index}" for index in range(num_requests)]
        reasons: dict[str, list[bytes]] = {request_id: [] for request_id in ids}
        for index, request_id in enumerate(ids):
            send(request_id, **kinds[index % 2], **endless)
            if number % 2:
                send(request_id, stop_request=True)
        time.sleep(number * 0.01)
        for request_id in () if number % 2 else ids:
            send(request_id, stop_request=True)
        num_final = 0
        while num_final < 2 * num_requests:
            result = results.get(timeout=PATIENCE_S)
            assert isinstance(result, grpcclient.InferResult), str(result)
            response = result.get_response()
            num_final += response.parameters["triton_final_response"].bool_param
            reason = result.as_numpy("finish_reason")
            if reason is not None and reason.item() not in (b"", b"None"):
                reasons[response.id].append(reason.item())
        assert all(found == [b"cancelled"] * 2 for found in reasons.values()), reasons
    client.stop_stream()
    client.close()
    expected = before.cancelled + num_rounds * num_requests
    wait_for(
        lambda: Metrics(server)["minisgl:requests_cancelled_total"] >= expected, "their counts"
    )
    assert Metrics(server)["minisgl:requests_cancelled_total"] == expected
    Before(server)


def test_stop_request_for_an_unknown_id(paced_server: TritonServer) -> None:
    with Call(paced_server, request_id="unknown", stop_request=True) as call:
        assert len(call.all()) == 1
    with (
        pytest.raises(Refused, match="INVALID_ARG: stop_request needs"),
        Call(paced_server, stop_request=True) as call,
    ):
        call.all()


def test_deadline_in_the_queue_and_after(paced_server: TritonServer) -> None:
    """A deadline ends a request with what it has, or with an error if it has nothing."""
    values: dict[str, Any] = {"input_ids": SHORT_PROMPT, "max_tokens": 16000}

    def cut(timeout_ms: int) -> dict[str, Any]:
        try:
            return generate(
                paced_server, timeout_ms=timeout_ms, return_finish_reason=True, **values
            )
        except Refused as refused:  # a busy machine has nothing yet
            assert "UNAVAILABLE: the deadline passed after" in refused.message
            return cut(4 * timeout_ms)

    output = cut(500)
    assert output["finish_reason"] == "timeout"
    assert output["text_output"]
    with pytest.raises(Refused, match="UNAVAILABLE: the deadline passed after"):
        generate(paced_server, input_ids=LONG_PROMPT, max_tokens=10, timeout_ms=300)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """The clients of this file end their threads."""
    before = set(threading.enumerate())
    yield
    wait_for(
        lambda: all(t.daemon or t in before for t in threading.enumerate()), "the end of threads"
    )
