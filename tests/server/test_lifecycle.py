"""Models and the server come and go while requests are in flight: all end, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.server.directory import SHARED_MEMORY
from minisgl_backend.server.process import TritonServer
from minisgl_check.processes import runs
from minisgl_kit.repositories import repository_with
from tests.server.client import Call, Metrics, Refused, generate, post, wait_for
from tests.server.conftest import paced_repository, running

ENDLESS: dict[str, Any] = {"input_ids": [1, 2, 3], "max_tokens": 8000, "stream": True}
SHORT: dict[str, Any] = {"input_ids": [1, 2, 3], "max_tokens": 20, "stream": True}
MODELS = ("minisgl", "minisgl_batched", "llm_engine")


BRIEF = {"drain_timeout_s": "2"}
STUCK = """\
import ctypes
from pathlib import Path

from minisgl_backend.tritonserver.setup import loading


class TritonPythonModel:
    @loading
    def initialize(self, args):
        Path("{sign}").touch()
        ctypes.PyDLL(None).pause()  # and keeps the interpreter's lock
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with a paced engine that gives open requests two seconds when it has to end."""
    with running(paced_repository(tmp_path_factory.mktemp("paced")), options=BRIEF) as server:
        yield server


def stubs(server: TritonServer, model: str) -> list[int]:
    """The processes that run a model."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == server.pid and any(f"/{model}/".encode() in word for word in words):
            found.append(int(process.name))
    return found


def regions(server: TritonServer) -> int:
    """The number of shared-memory files."""
    return len(server.shared_memory_regions())


class InFlight:
    """Requests to all three models; some end soon, others do not."""

    def __init__(self, server: TritonServer) -> None:
        self._pool = ThreadPoolExecutor(16)
        self._calls = ExitStack()
        self._endless = [self._start(server, model, ENDLESS) for model in MODELS]
        self._short = [self._start(server, model, SHORT) for model in MODELS]

    def _start(
        self, server: TritonServer, model: str, values: dict[str, Any]
    ) -> Future[list[dict[str, Any]]]:
        call = self._calls.enter_context(Call(server, model, **values))
        assert call.next() is not None
        return self._pool.submit(call.all)

    def check_short_finish_and_endless_fail(self) -> None:
        """Every request has ended; those that had the time ended by themselves."""
        for short in self._short:
            assert short.result(timeout=60)
        for endless in self._endless:
            with pytest.raises(Refused, match="UNAVAILABLE: the server is shutting down"):
                endless.result(timeout=60)
        self._pool.shutdown()
        self._calls.close()


@pytest.mark.parametrize("model", ["tokenizer", "detokenizer", "llm_engine"])
def test_the_process_of_a_model_holds_both_locks(server: TritonServer, model: str) -> None:
    """So what the server leaves is not removed as long as one of its models lives."""
    (pid,) = stubs(server, model)
    held = {link.resolve() for link in Path(f"/proc/{pid}/fd").iterdir()}
    assert {server.directory, SHARED_MEMORY / f"{server.shared_memory_prefix}lock"} <= held


def test_unload_and_load_again(server: TritonServer) -> None:
    num_regions = regions(server)
    (old,) = stubs(server, "llm_engine")
    requests = InFlight(server)
    post(server, "/v2/repository/models/llm_engine/unload")
    requests.check_short_finish_and_endless_fail()
    wait_for(lambda: not runs(old), "the end of the model's process")
    wait_for(lambda: regions(server) == num_regions - 1, "the end of its shared memory")
    assert not list(server.directory.glob("minisgl-*")), "the channel's directory is left"
    for model in MODELS:
        with pytest.raises(Refused):
            generate(server, model, input_ids=[1], max_tokens=1)
    for model in ("llm_engine", "minisgl", "minisgl_batched"):
        post(server, f"/v2/repository/models/{model}/load")
    assert generate(server, input_ids=[1], max_tokens=3, temperature=0.0)["text_output"]
    wait_for(lambda: regions(server) == num_regions, "as much shared memory as before")


def test_reload_with_requests_in_flight(server: TritonServer) -> None:
    """The new instance serves while the old one ends its requests and goes."""
    num_regions = regions(server)
    (old,) = stubs(server, "llm_engine")
    requests = InFlight(server)
    (server.repository / "llm_engine" / "1" / "model.py").touch()
    post(server, "/v2/repository/models/llm_engine/load")
    assert generate(server, input_ids=[1], max_tokens=3, temperature=0.0)["text_output"]
    requests.check_short_finish_and_endless_fail()
    wait_for(lambda: not runs(old), "the end of the old process")
    wait_for(lambda: regions(server) == num_regions, "the end of its shared memory")
    assert len(list(server.directory.glob("minisgl-*"))) == 1
    assert generate(server, input_ids=[1], max_tokens=3, temperature=0.0)["text_output"]


@pytest.mark.parametrize("model", ["detokenizer", "tokenizer"])
def test_reload_of_a_text_model(server: TritonServer, model: str) -> None:
    """Requests in flight keep the old instance until they end; new ones get the new one."""
    (old,) = stubs(server, model)
    with Call(server, **ENDLESS) as through, Call(server, "llm_engine", **ENDLESS) as direct:
        assert through.next() and direct.next()
        (server.repository / model / "1" / "model.py").touch()
        post(server, f"/v2/repository/models/{model}/load")
        assert through.next() and direct.next()
        assert generate(server, input_ids=[1], max_tokens=3, temperature=0.0)["text_output"]
        assert len(stubs(server, model)) == 2
    wait_for(lambda: not runs(old), "the end of the old process")
    wait_for(lambda: Metrics(server)["vllm:num_requests_running"] == 0, "an idle engine")


def test_kill_of_the_detokenizer(tmp_path: Path) -> None:
    """Requests that need it end with an error, and the engine stops working for them.

    They get their answers at the end, so that the detokenizer is idle when it is killed: if it held
    a lock in shared memory, tritonserver itself would go down.
    """
    repository = paced_repository(tmp_path)
    with (
        running(repository, options=BRIEF, exit_code=None) as server,
        Call(server, **{**ENDLESS, "stream": False}) as through,
        Call(server, "llm_engine", **ENDLESS) as direct,
    ):
        assert direct.next()
        wait_for(lambda: Metrics(server)["vllm:num_requests_running"] == 2, "two requests")
        (detokenizer,) = stubs(server, "detokenizer")
        os.kill(detokenizer, signal.SIGKILL)
        with pytest.raises(Refused):
            through.all()
        assert direct.next()
        wait_for(lambda: Metrics(server)["vllm:num_requests_running"] == 1, "one request fewer")
        server.signal(signal.SIGKILL)  # it cannot unload a model whose process is gone


def test_sigterm_drains(tmp_path: Path) -> None:
    """What fits into the granted time finishes, the rest gets an error, and the exit is clean."""
    with running(paced_repository(tmp_path), options=BRIEF) as server:
        requests = InFlight(server)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        requests.check_short_finish_and_endless_fail()
        stopping.join()


def test_a_long_step_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Its requests get their errors while the step still runs, and the exit is clean."""
    with (
        running(
            paced_repository(tmp_path, step_s=3600), options=BRIEF, exit_timeout_s=3600
        ) as server,
        ExitStack() as calls,
        ThreadPoolExecutor(len(MODELS)) as pool,
    ):
        endless = [
            pool.submit(calls.enter_context(Call(server, model, **ENDLESS)).all) for model in MODELS
        ]

        def are_all_inside() -> bool:
            metrics = Metrics(server)
            running = metrics["vllm:num_requests_running"]
            return running > 0 and running + metrics["vllm:num_requests_waiting"] == len(MODELS)

        wait_for(are_all_inside, "a step, and all requests")
        server.stop()
        for one in endless:
            with pytest.raises(Refused, match="UNAVAILABLE: the server is shutting down"):
                one.result(timeout=60)


def test_streams_cancelled_after_their_end_do_not_keep_the_server(tmp_path: Path) -> None:
    """Triton 24.10 leaks such requests and would wait forever to unload their model."""
    with running(paced_repository(tmp_path), options=BRIEF) as server:
        for _ in range(20):
            call = Call(server, "llm_engine", **{**SHORT, "max_tokens": 1})
            call.all()
            call.cancel()


def test_kill_of_the_server_leaves_no_process(tmp_path: Path) -> None:
    with running(paced_repository(tmp_path), exit_code=None) as server:
        pids = [
            pid
            for model in ("tokenizer", "detokenizer", "llm_engine")
            for pid in stubs(server, model)
        ]
        assert len(pids) == 3
        with Call(server, **ENDLESS) as call:
            assert call.next()
            server.signal(signal.SIGKILL)
            wait_for(lambda: not any(runs(pid) for pid in pids), "the end of the models' processes")


def test_kill_of_the_server_ends_a_model_that_is_stuck_while_it_is_loaded(tmp_path: Path) -> None:
    """As when tritonserver owes it an answer: none of its Python threads can run."""
    sign = tmp_path / "stuck"
    repository = repository_with({"llm_engine": STUCK.format(sign=sign)}, tmp_path)
    with running(repository, exit_code=None, is_ready=False) as server:
        wait_for(sign.exists, "the model's process")
        (pid,) = stubs(server, "llm_engine")
        server.signal(signal.SIGKILL)
        wait_for(lambda: not runs(pid), "the end of the model's process")
