"""A client that leaves ends its request in the engine, whatever it was waiting for."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl_backend.server.process import TritonServer
from tests.gateway.conftest import Gateway, gateway_of
from tests.server.client import PATIENCE_S, Metrics, wait_for

pytestmark = pytest.mark.server

LONG: dict[str, Any] = {
    "model": "minisgl",
    "messages": [{"role": "user", "content": "Go on."}],
    "max_tokens": 7000,
}
LOST = 'minisgl_gateway_requests_total{route="/v1/chat/completions",status="499"}'

_CHILD = """
import sys, httpx
with httpx.stream("POST", sys.argv[1], content=sys.argv[2], timeout=60,
                  headers={"Content-Type": "application/json"}) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


class Engine:
    """The engine's counts before a test."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        wait_for(self._is_idle, "an engine without requests")
        metrics = Metrics(server)
        self._used = metrics["vllm:kv_cache_usage_perc"]
        self._cancelled = metrics["minisgl:requests_cancelled_total"]

    def check_cancelled(self, number: int = 1) -> None:
        """``number`` more are cancelled, and everything is given back."""
        expected = self._cancelled + number
        wait_for(
            lambda: Metrics(self._server)["minisgl:requests_cancelled_total"] == expected,
            f"{number} more cancelled",
        )
        wait_for(self._is_idle, "an engine without requests")
        wait_for(
            lambda: Metrics(self._server)["vllm:kv_cache_usage_perc"] == self._used,
            "all pages back",
        )

    def wait_busy(self, number: int = 1) -> None:
        wait_for(
            lambda: Metrics(self._server)["vllm:num_requests_running"] == number,
            f"{number} requests running",
        )

    def wait_waiting(self, number: int) -> None:
        wait_for(
            lambda: Metrics(self._server)["vllm:num_requests_waiting"] == number,
            f"{number} requests waiting",
        )

    def _is_idle(self) -> bool:
        metrics = Metrics(self._server)
        return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0


@pytest.fixture
def engine(talker: TritonServer) -> Engine:
    return Engine(talker)


def some_of(answer: httpx.Response) -> Iterator[str]:
    """The rest of an answer that has begun; the answer is closed with it."""
    lines = answer.iter_lines()
    assert next(lines).startswith("data: ")
    return lines


@contextmanager
def asked(
    gateway: Gateway,
    fields: dict[str, Any],
    *,
    behind: bytes = b"",
    route: str = "/v1/chat/completions",
) -> Iterator[None]:
    """A request whose answer is not read; the connection is closed at the end of the block.

    ``behind`` is sent after it.
    """
    request = httpx.Request("POST", f"{gateway.url}{route}", json=fields)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection(gateway.address, timeout=PATIENCE_S) as connection:
        connection.sendall(
            f"POST {route} HTTP/1.1\r\n{head}\r\n".encode() + request.read() + behind
        )
        yield


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_stream_that_is_closed(wide: Gateway, engine: Engine, num_choices: int) -> None:
    body = {**LONG, "stream": True, "n": num_choices}
    before = wide.metric(LOST)
    with httpx.stream(
        "POST", f"{wide.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ) as answer:
        _rest = some_of(answer)
        engine.wait_busy(num_choices)
    engine.check_cancelled(num_choices)
    wide.wait_metric(LOST, before + 1)
    wide.wait_metric("minisgl_gateway_open_streams", 0)


def test_a_stream_that_fails_is_counted_as_a_failure(talker: TritonServer, tmp_path: Path) -> None:
    """Its status, 200, was already sent. Each API has its own last event."""
    address = f"127.0.0.1:{talker.grpc_port}"
    sampled = {"model": "minisgl", "stream": True}
    responses = {**sampled, "input": "Go on.", "max_output_tokens": 7000}
    messages = {**sampled, "messages": LONG["messages"], "max_tokens": 7000}
    asked = {
        "/v1/chat/completions": ({**LONG, "stream": True}, '"code": "timeout"'),
        "/v1/responses": (responses, "event: response.failed"),
        "/v1/messages": (messages, '"type":"timeout_error"'),
    }
    for timeout_s in ("1", "10"):
        with gateway_of(address, tmp_path / "log", "--timeout-s", timeout_s) as hasty:
            answers = {route: hasty.post(route, body) for route, (body, _) in asked.items()}
            for route in asked:
                late = f'minisgl_gateway_requests_total{{route="{route}",status="504"}}'
                hasty.wait_metric(late, 1)
                hasty.wait_logged(f"{route} 504 in")
        if all(answer.status_code == 200 for answer in answers.values()):
            break  # otherwise a busy machine had nothing to stream yet
    for route, (_, last) in asked.items():
        assert answers[route].status_code == 200
        assert last in answers[route].text.rstrip().rpartition("\n\n")[2]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_whole_answer_that_nobody_waits_for(
    wide: Gateway, engine: Engine, num_choices: int
) -> None:
    before = wide.metric(LOST)
    with asked(wide, {**LONG, "n": num_choices}):
        engine.wait_busy(num_choices)
    engine.check_cancelled(num_choices)
    wide.wait_metric(LOST, before + 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_with_a_request_behind(
    wide: Gateway, engine: Engine, stream: bool
) -> None:
    """The second came on the same connection before the first was answered."""
    behind = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with asked(wide, {**LONG, "stream": stream}, behind=behind):
        engine.wait_busy()
    engine.check_cancelled()
    wide.wait_metric("minisgl_gateway_open_requests", 1)  # this one


def test_a_client_that_is_killed(wide: Gateway, engine: Engine) -> None:
    url = f"{wide.url}/v1/chat/completions"
    body = httpx.Request("POST", url, json={**LONG, "stream": True}).read().decode()
    client = subprocess.Popen(
        [sys.executable, "-c", _CHILD, url, body], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    with client.stdout:
        assert client.stdout.readline().startswith("data: ")
        client.send_signal(signal.SIGKILL)
        client.wait()
    engine.check_cancelled()


def test_a_client_that_leaves_while_its_request_waits(wide: Gateway, engine: Engine) -> None:
    """Four run and a fifth waits; it has no status yet."""
    url = f"{wide.url}/v1/chat/completions"
    with httpx.stream(
        "POST", url, json={**LONG, "stream": True, "n": 4}, timeout=PATIENCE_S
    ) as running:
        _rest = some_of(running)
        engine.wait_busy(4)
        with asked(wide, {**LONG, "stream": True}):
            engine.wait_waiting(1)
        engine.wait_waiting(0)
    engine.check_cancelled(5)


def test_a_gateway_that_is_killed(talker: TritonServer, engine: Engine, tmp_path: Any) -> None:
    with gateway_of(f"127.0.0.1:{talker.grpc_port}", tmp_path / "log") as gateway:
        body = {**LONG, "stream": True, "n": 2}
        with httpx.stream(
            "POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
        ) as answer:
            _rest = some_of(answer)
            engine.wait_busy(2)
            gateway.process.send_signal(signal.SIGKILL)
            gateway.process.wait(PATIENCE_S)
    engine.check_cancelled(2)


@pytest.mark.parametrize("asked_twice", [False, True])
def test_a_gateway_that_is_stopped(
    talker: TritonServer, engine: Engine, tmp_path: Path, asked_twice: bool
) -> None:
    """It waits for answers as long as it may, and then says why it does not continue."""
    triton, log = f"127.0.0.1:{talker.grpc_port}", tmp_path / "log"
    patience = ("--drain-timeout-s", "600" if asked_twice else "1")
    with gateway_of(triton, log, *patience) as gateway, ThreadPoolExecutor(1) as pool:
        url = f"{gateway.url}/v1/chat/completions"
        whole = pool.submit(httpx.post, url, json=LONG, timeout=PATIENCE_S)
        with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=PATIENCE_S) as answer:
            lines = some_of(answer)
            engine.wait_busy(2)
            gateway.process.send_signal(signal.SIGINT)
            if asked_twice:
                wait_for(lambda: "Shutting down" in log.read_text(), "the first to be heard")
                gateway.process.send_signal(signal.SIGINT)
            *_, last = filter(None, lines)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "shutting_down"
        assert gateway.process.wait(PATIENCE_S) == 0
    engine.check_cancelled(2)
