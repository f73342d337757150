"""Processes of a supervised server die or hang: callers learn about it, and it serves again."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.server.health import HealthServer
from minisgl_backend.server.installation import find_installation
from minisgl_backend.server.launch import ServerOptions
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.stop_event import StopEvent
from minisgl_backend.server.supervisor import Recoveries, Supervisor
from minisgl_check.processes import runs
from tests.server.client import Call, Refused, generate, wait_for, wait_returned
from tests.server.conftest import paced_repository

ENDLESS: dict[str, Any] = {"input_ids": [1, 2, 3], "max_tokens": 8000, "stream": True}
PATIENCE_S = 300.0
"""Models load slowly on a busy machine, and a hanging start is noticed after two minutes."""


class Supervised:
    """A supervised server, and its health port."""

    def __init__(self, repository: Path, engine_options: Mapping[str, str]) -> None:
        installation = find_installation()

        self.num_starts = 0

        def start(options: ServerOptions) -> TritonServer:
            self.num_starts += 1
            return TritonServer(installation, repository, engine_options, options)

        self._stopping = StopEvent()
        self._made: queue.SimpleQueue[Supervisor] = queue.SimpleQueue()
        self._health = HealthServer("127.0.0.1", 0)

        def live() -> None:
            options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=5)
            supervisor = Supervisor(start, options, first_pause_s=0.0)
            self._made.put(supervisor)
            self._health.start(supervisor.health, supervisor.stats)
            supervisor.run(self._stopping)

        # a server ends with the thread that started it
        self._thread = threading.Thread(target=live)
        self._thread.start()
        self.supervisor = self._made.get(timeout=PATIENCE_S)
        self.wait_ready()

    @property
    def server(self) -> TritonServer:
        return self.supervisor.server

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body of the health port."""
        url = f"http://127.0.0.1:{self._health.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stats(self, model: str) -> dict[str, Any]:
        """The counts of a model's only process."""
        (counts,) = [it for it in self.get("/stats")[1]["models"] if it["model"] == model]
        return dict(counts)

    def wait_ready(self) -> None:
        wait_for(lambda: self.get("/ready")[0] == 200, "a ready server", PATIENCE_S)

    def wait_not_ready(self) -> list[str]:
        """Wait until it says that it is not ready; returns why."""
        reasons: list[str] = []

        def is_not_ready() -> bool:
            status, told = self.get("/ready")
            reasons[:] = told["reasons"]
            return status == 503

        wait_for(is_not_ready, "an honest answer", PATIENCE_S)
        return reasons

    def num_recoveries(self) -> int:
        return int(self.get("/stats")[1]["num_recoveries"])

    def wait_recovered(self, num_before: int) -> None:
        """Wait until one more recovery has begun and ended."""
        wait_for(lambda: self.num_recoveries() > num_before, "a recovery", PATIENCE_S)
        self.wait_ready()

    def kill(self, model: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a model's process; returns its id."""
        pid: int = self.stats(model)["pid"]
        os.kill(pid, number)
        return pid

    def answers(self) -> bool:
        """Whether a new request is served."""
        return bool(
            generate(self.server, input_ids=[1], max_tokens=3, temperature=0.0)["text_output"]
        )

    def close(self) -> None:
        # 24.10 cannot unload a model that was lost with requests
        self.server.signal(signal.SIGKILL)
        self._stopping.set()
        self._thread.join()
        self._health.close()
        assert not self.server.directory.exists()
        assert not self.server.shared_memory_regions()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    # the paced engine takes any context, so that long texts are tokenized
    limits = {
        "drain_timeout_s": "1",
        "max_running_requests": "32",
        "max_sequence_length": "4000000",
    }
    it = Supervised(paced_repository(tmp_path_factory.mktemp("paced")), limits)
    yield it
    it.close()


@pytest.fixture(autouse=True)
def few_recoveries(world: Supervised) -> None:
    """Each test starts with a fresh number of recoveries."""
    world.supervisor._recoveries = Recoveries(first_pause_s=0.1)


def ending(call: Call) -> str:
    """The error with which a stream ends."""
    with pytest.raises(Refused) as refused:
        call.all()
    return refused.value.message


def test_a_healthy_server(world: Supervised) -> None:
    assert world.answers()
    assert world.get("/live") == (
        200,
        {"live": True, "ready": True, "phase": "serving", "reasons": []},
    )
    assert world.get("/elsewhere")[0] == 404

    def is_idle() -> bool:
        engine = world.stats("llm_engine")
        scheduler = engine["scheduler"]
        num_used = engine["info"]["num_pages"] - scheduler["free_pages"] - scheduler["cached_pages"]
        num_open = engine["num_open"] + engine["num_streams"] + engine["num_inside"]
        num_text = world.stats("tokenizer")["num_jobs"] + world.stats("detokenizer")["num_streams"]
        return bool(num_used == num_open == num_text == 0)

    wait_for(is_idle, "a server that holds nothing", PATIENCE_S)
    engine = world.stats("llm_engine")
    assert engine["num_seen"] >= 1 and engine["num_threads"] > 1 and engine["num_descriptors"] > 1
    for region in world.server.shared_memory_regions():
        assert region.stat().st_mode & 0o077 == 0


def test_an_engine_dies_with_its_requests(world: Supervised) -> None:
    """Triton would never end them, so the whole server starts again: every caller is told."""
    before = world.server
    with ThreadPoolExecutor(16) as pool:
        calls = [Call(before, **ENDLESS) for _ in range(16)]
        for call in calls:
            assert call.next()
        endings = [pool.submit(ending, call) for call in calls]
        killed_s = time.monotonic()
        world.kill("llm_engine")
        (reason, *_) = world.wait_not_ready()
        noticed_s = time.monotonic() - killed_s
        # if it is killed while it holds a lock of Triton's, it takes the server with it
        assert re.search(r"llm_engine.*ended unexpectedly|tritonserver ended with code -", reason)
        lost = [one.result(timeout=PATIENCE_S) for one in endings]
        assert [error for error in lost if "UNAVAILABLE" not in error] == []
        ended_s = time.monotonic() - killed_s
    for call in calls:
        call.client.close()
    world.wait_ready()
    assert world.answers()
    print(
        f"not ready after {noticed_s:.2f} s, 16 streams ended after {ended_s:.2f} s,"
        f" served again after {time.monotonic() - killed_s:.2f} s"
    )
    assert world.server is not before
    assert world.server.grpc_port == before.grpc_port
    assert not before.directory.exists()
    assert not before.shared_memory_regions()


@pytest.mark.parametrize("model", ["llm_engine", "tokenizer", "detokenizer"])
def test_an_idle_process_dies(world: Supervised, model: str) -> None:
    """Its model is loaded again, the server continues, and nothing of the old process is left."""
    server = world.server
    assert world.answers()
    wait_for(lambda: world.stats("llm_engine")["num_inside"] == 0, "an idle engine")
    regions = len(server.shared_memory_regions())
    names = {path.name.partition(".")[0] for path in server.directory.iterdir()}
    num_before = world.num_recoveries()
    old = world.kill(model)
    world.wait_recovered(num_before)
    assert world.answers()
    if world.server is not server:  # it aborts if the process was reporting a metric
        assert server.poll() == -signal.SIGABRT
        return
    assert world.stats(model)["pid"] != old
    assert len(server.shared_memory_regions()) == regions
    assert all(it.stat().st_mode & 0o077 == 0 for it in server.shared_memory_regions())
    assert not [it for it in server.directory.iterdir() if str(old) in re.split("[.-]", it.name)]
    assert len(list(server.directory.glob("minisgl-*"))) == 1
    assert names >= {path.name.partition(".")[0] for path in server.directory.glob("*.*")}


def test_a_detokenizer_dies_with_its_streams(world: Supervised) -> None:
    """They end with an error, and the engine gets their pages back; others continue."""
    server = world.server
    with Call(server, "llm_engine", **ENDLESS) as direct:
        assert direct.next()
        through = [Call(server, **ENDLESS) for _ in range(4)]
        for call in through:
            assert call.next()
        before, num_before = world.stats("llm_engine"), world.num_recoveries()
        world.kill("detokenizer")
        for call in through:
            ending(call)
            call.client.close()
        world.wait_recovered(num_before)
        assert world.answers()
        if world.server is server:  # it dies if the process held a lock of Triton's
            assert direct.next()

            num_failed = before["failed"].get("INTERNAL", 0) + 4

            def is_one_left() -> bool:
                engine = world.stats("llm_engine")
                is_alone = engine["num_open"] == engine["scheduler"]["num_running"] == 1
                return bool(is_alone and engine["failed"].get("INTERNAL", 0) >= num_failed)

            wait_for(is_one_left, "one request, and the errors of the others")
            after = world.stats("llm_engine")
            assert after["failed"]["INTERNAL"] == num_failed
            assert after["num_cancelled"] == before["num_cancelled"]


def test_a_tokenizer_dies_with_requests_inside(world: Supervised) -> None:
    """Their callers learn about it, too. (Over gRPC, since such a body over HTTP kills 24.10.)"""
    words = "lorem ipsum dolor sit amet " * 250_000
    num_before, pid = world.num_recoveries(), world.stats("tokenizer")["pid"]
    calls = [Call(world.server, text_input=words, max_tokens=1) for _ in range(4)]
    wait_for(lambda: world.stats("tokenizer")["num_inside"] > 0, "work for the tokenizer")
    os.kill(pid, signal.SIGKILL)
    for call in calls:
        ending(call)
        call.client.close()
    world.wait_recovered(num_before)
    assert world.answers()


def test_a_pause_is_no_hang_and_a_hang_is_no_pause(world: Supervised) -> None:
    num_before = world.num_recoveries()
    server = world.server
    with Call(server, **ENDLESS) as call:
        assert call.next()
        wait_returned(server, "llm_engine", world.stats("llm_engine")["num_seen"])
        pid = world.kill("llm_engine", signal.SIGSTOP)

        def silence_s() -> float:
            (process,) = [it for it in world.supervisor._detector.seen if it.pid == pid]
            return process.beat.silent_s(time.monotonic())

        wait_for(lambda: silence_s() > 2, "two silent seconds")
        assert world.get("/ready")[0] == 200
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: silence_s() < 1, "a heartbeat")
        assert call.next()
        assert world.num_recoveries() == num_before
        os.kill(pid, signal.SIGSTOP)
        assert any("hangs" in reason for reason in world.wait_not_ready())
        assert "UNAVAILABLE" in ending(call)
    world.wait_ready()
    assert world.answers()
    assert not runs(pid)
