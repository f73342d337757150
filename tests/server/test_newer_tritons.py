"""Behaviour seen in Triton releases after 24.10, provoked with the release at hand.

Processes are stopped and killed, and stand-ins do what this release does not: answer ``ready``
late, hold back errors, and never send responses although the server says that it is ready.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.server import asking
from minisgl_backend.server.installation import find_installation
from minisgl_backend.tritonserver.unload_watcher import Readiness, ask
from minisgl_kit.repositories import repository_with
from tests.server.client import Call, generate, wait_for, wait_returned
from tests.server.conftest import paced_repository, running
from tests.server.test_lifecycle import stubs
from tests.server.test_supervision import ENDLESS, PATIENCE_S, Supervised, ending
from tests.waiting import wait_until

STUCK = """\
import time

from minisgl_backend.tritonserver.detokenizer import TritonPythonModel as Detokenizer
from minisgl_backend.tritonserver.setup import runtime_directory


class TritonPythonModel(Detokenizer):
    def execute(self, requests):
        while (runtime_directory() / "stuck").exists():
            time.sleep(0.05)
        super().execute(requests)
"""
LATE_ERRORS = """\
import threading

from minisgl_backend.tritonserver.response_stream import ResponseStream
from minisgl_bench.paced import paced_model

end = ResponseStream.end


def late(self):
    timer = threading.Timer({after_s}, end, [self])
    timer.daemon = True
    timer.start()


ResponseStream.end = late
TritonPythonModel = paced_model(step_s=0.02)
"""
ASKING_ELSEWHERE = """\
import os

os.environ["MINISGL_HTTP_URL"] = "{url}"

from minisgl_bench.paced import paced_model

TritonPythonModel = paced_model(step_s=0.02)
"""
IS_READY_S = 3.0
"""How long a newer server waits for a model that it asks: 5 s in release 26.07. It must be longer
than the 2 s that the watcher waits for the server."""


@contextmanager
def supervised(repository: Path) -> Iterator[Supervised]:
    world = Supervised(repository, {"drain_timeout_s": "1", "max_running_requests": "32"})
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that asks soon, and does not wait long once an answer is due."""
    monkeypatch.setattr(asking, "ASK_AFTER_S", 1.0)
    monkeypatch.setattr(asking, "OVERDUE_S", 3.0)


def test_a_server_that_answers_nothing_is_started_again_though_it_says_it_is_ready(
    tmp_path: Path, impatient: None
) -> None:
    """Otherwise no request would end: packets stay in the detokenizer, errors in the engine."""
    models = {"detokenizer": STUCK, "llm_engine": LATE_ERRORS.format(after_s=3600)}
    with supervised(repository_with(models, tmp_path)) as world:
        before = world.server
        with ThreadPoolExecutor(4) as pool:
            calls = [Call(before, **ENDLESS) for _ in range(4)]
            for call in calls:
                assert call.next()
            (before.directory / "stuck").touch()
            assert before.is_ready(timeout_s=PATIENCE_S)
            endings = [pool.submit(ending, call) for call in calls]
            (reason, *_) = world.wait_not_ready()
            assert reason.startswith("tritonserver answers no request over gRPC and HTTP")
            for one in endings:
                assert "UNAVAILABLE" in one.result(timeout=PATIENCE_S)
        for call in calls:
            call.client.close()
        world.wait_ready()
        assert world.server is not before
        assert world.answers()


def test_an_engine_that_computes_for_long_is_left_alone(tmp_path: Path, impatient: None) -> None:
    """Its steps take longer than the supervisor waits for an answer that is due."""
    with supervised(paced_repository(tmp_path, step_s=6.0)) as world:
        with Call(world.server, input_ids=[1, 2, 3], max_tokens=2, stream=True) as call:
            answers = call.all()
        assert answers
        assert world.stats("llm_engine")["num_seen"] > 1, "nothing was asked"
        assert world.num_recoveries() == 0


def test_callers_of_a_detokenizer_that_died_are_told_though_errors_are_held_back(
    tmp_path: Path,
) -> None:
    models = {"llm_engine": LATE_ERRORS.format(after_s=3600)}
    with supervised(repository_with(models, tmp_path)) as world:
        before = world.server
        with ThreadPoolExecutor(4) as pool:
            calls = [Call(before, **ENDLESS) for _ in range(4)]
            for call in calls:
                assert call.next()
            num_before = world.num_recoveries()
            endings = [pool.submit(ending, call) for call in calls]
            killed_s = time.monotonic()
            world.kill("detokenizer")
            for one in endings:  # the engine's own errors would come an hour later
                assert "the detokenizer has gone" not in one.result(timeout=PATIENCE_S)
            print(f"told after {time.monotonic() - killed_s:.2f} s")
        for call in calls:
            call.client.close()
        world.wait_recovered(num_before)
        assert world.server is not before
        assert world.answers()


def test_another_tritonserver_is_run_if_the_environment_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete one: the one at hand, put together like a custom build."""
    at_hand = find_installation()
    at_hand.make_backend_directory(tmp_path)
    if at_hand.backends is not None:
        (tmp_path / "backends").symlink_to(at_hand.backends)
    libraries = at_hand.environment({}).get("LD_LIBRARY_PATH", "")
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {at_hand.binary} --id=another "$@"\n'
    )
    binary.chmod(0o755)
    monkeypatch.setenv("MINISGL_TRITONSERVER", str(binary))
    with running() as server:
        with urllib.request.urlopen(server.url("/v2"), timeout=PATIENCE_S) as response:
            assert json.load(response)["name"] == "another"
        assert generate(server, input_ids=[1], max_tokens=2, temperature=0.0)["text_output"]


class LateServer(ThreadingHTTPServer):
    """Says whether a process runs: at once if it does, else after release 26.07's wait."""

    pid = 0

    def is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: a watcher does not wait for its answer."""


class LateHandler(BaseHTTPRequestHandler):
    server: LateServer

    def do_GET(self) -> None:
        until_s = time.monotonic() + IS_READY_S
        while (is_stopped := self.server.is_stopped()) and time.monotonic() < until_s:
            time.sleep(0.01)
        self.send_response(400 if is_stopped else 200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_an_engine_that_was_paused_serves_on(tmp_path: Path) -> None:
    """It was paused for longer than a newer server waits before it says that it is not ready."""
    with LateServer(("127.0.0.1", 0), LateHandler) as front:
        thread = threading.Thread(target=front.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{front.server_port}"
        repository = repository_with({"llm_engine": ASKING_ELSEWHERE.format(url=url)}, tmp_path)
        try:
            with running(repository) as server, Call(server, **ENDLESS) as call:
                assert call.next()
                (front.pid,) = stubs(server, "llm_engine")
                for num_requests in (1, 2):
                    wait_returned(server, "llm_engine", num_requests)
                    os.kill(front.pid, signal.SIGSTOP)
                    wait_until(front.is_stopped)
                    assert ask(url, timeout_s=PATIENCE_S) is Readiness.NOT_READY
                    os.kill(front.pid, signal.SIGCONT)
                    assert ask(url, timeout_s=PATIENCE_S) is Readiness.READY
                    wait_for(lambda: bool(call.next()), "a token")
                    time.sleep(1.0)  # it would drain within that time
                    assert call.next()
                    assert generate(server, input_ids=[1], max_tokens=2, temperature=0.0)[
                        "text_output"
                    ]
        finally:
            front.shutdown()
            thread.join()
