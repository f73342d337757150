"""The supervisor's decisions, with a fake tritonserver whose processes have real heartbeats."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisgl_backend.errors import ConfigError, EngineFailure, NotNow
from minisgl_backend.runtime_files import Heartbeat, write_adapters
from minisgl_backend.server import faults, triton_http
from minisgl_backend.server.health import _MOST_CALLERS as MOST
from minisgl_backend.server.health import HealthServer
from minisgl_backend.server.installation import Installation
from minisgl_backend.server.launch import ServerOptions
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.repository import shipped_repository
from minisgl_backend.server.stop_event import StopEvent
from minisgl_backend.server.supervisor import (
    FEW_WAIT,
    MAX_RECOVERIES,
    Health,
    Phase,
    Supervisor,
)
from minisgl_check.processes import runs
from tests.fakes.answers import answering
from tests.waiting import PATIENCE_S

MODELS = ("detokenizer", "llm_engine", "tokenizer")

FAKE = """\
#!{python}
import http.server, os, pathlib, signal, subprocess, sys, threading
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
place = pathlib.Path(os.environ["MINISGL_RUNTIME_DIR"])
MODEL = '''
import pathlib, sys, time
sys.path.insert(0, {root!r})
from minisgl_backend.runtime_files import Heartbeat, State
place, name = pathlib.Path(sys.argv[1]), sys.argv[2]
heart = Heartbeat(place, name)
for _ in range(int(sys.argv[3])):
    heart.entered()
while True:
    broken = (place / ("broken-" + name)).exists()
    heart.beat(state=State.BROKEN if broken else State.SERVING)
    time.sleep(0.02)
'''
def load(name):
    (place / ("broken-" + name)).unlink(missing_ok=True)
    command = [sys.executable, "-c", MODEL, str(place), name, "{num_inside}"]
    subprocess.Popen(command)
    while not list(place.glob("heartbeat.*." + name)):
        pass
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        if (place / "die").exists():
            os.set_inheritable(self.connection.fileno(), True)
            subprocess.Popen(["sleep", "600"], close_fds=False)
            os.kill(os.getpid(), signal.SIGKILL)
        while (place / "hang").exists():
            signal.pause()
        if (place / "stop").exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        good = self.headers["minisgl-admin-key"] and not (place / "refuse").exists()
        if good:
            load(self.path.split("/")[-2])
        self.send_response(200 if good else 400)
        self.end_headers()
    def log_message(self, *args):
        pass
hangs = pathlib.Path({hangs!r})
if hangs.is_file():
    hangs.unlink()
    signal.pause()
for name in {models!r}:
    load(name)
class Metrics(Handler):
    def do_GET(self):
        super().do_GET()
        for path in place.glob("waiting.*"):
            labels = '{{model="' + path.suffix[1:] + '",version="1"}}'
            line = "nv_inference_pending_request_count" + labels + " " + path.read_text()
            self.wfile.write(line.encode() + b"\\n")
metrics = options["metrics-address"], int(options["metrics-port"])
metrics = http.server.ThreadingHTTPServer(metrics, Metrics)
threading.Thread(target=metrics.serve_forever, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
address = options["http-address"], int(options["http-port"])
http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""


class World:
    """A supervisor at work on its own thread."""

    def __init__(
        self,
        folder: Path,
        *,
        num_inside: int = 0,
        hangs: Path | None = None,
        num_recoveries: int = 0,
    ) -> None:
        """If there is a file ``hangs``, the next start removes it and hangs forever."""
        root = str(Path(__file__).parents[3])
        self.binary = binary = folder / "tritonserver"
        program = FAKE.format(
            python=sys.executable,
            root=root,
            models=MODELS,
            num_inside=num_inside,
            hangs=str(hangs or ""),
        )
        binary.write_text(program)
        binary.chmod(0o755)
        self.servers: list[TritonServer] = []
        self.num_refusals = 0
        self.refuses_to_start = False
        self.error: Exception | None = None
        self.stopping = StopEvent()

        def start(options: ServerOptions) -> TritonServer:
            if self.refuses_to_start:
                self.num_refusals += 1
                raise NotNow("the port is taken")
            self.servers.append(
                TritonServer(Installation(binary), shipped_repository(), {}, options)
            )
            return self.servers[-1]

        made = threading.Event()
        options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=1)

        def live() -> None:
            self.supervisor = Supervisor(start, options, first_pause_s=0.01)
            made.set()
            try:
                self.supervisor.run(self.stopping)
            except EngineFailure as error:
                self.error = error

        self._thread = threading.Thread(target=live)
        self._thread.start()
        assert made.wait(PATIENCE_S)
        self.wait_ready(num_recoveries)

    def wait(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < limit, self.supervisor.health()
            time.sleep(0.005)

    def wait_ready(self, num_recoveries: int) -> None:
        """Wait until it serves, after this number of recoveries."""
        self.wait(lambda: self.supervisor.stats()["num_recoveries"] == num_recoveries)
        self.wait(lambda: self.supervisor.health().ready)

    def pids(self) -> dict[str, int]:
        return {it["model"]: it["pid"] for it in self.supervisor.stats()["models"]}

    def newest(self, model: str) -> int:
        """The id of the process that has a heartbeat file now."""
        (file,) = self.supervisor.server.directory.glob(f"heartbeat.*.{model}")
        return int(file.name.split(".")[1])

    def serving_models(self) -> list[str]:
        """The models that have a heartbeat file, in order."""
        paths = self.supervisor.server.directory.glob("heartbeat.*")
        return sorted(path.name.split(".")[2] for path in paths)

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert not any(server.directory.exists() for server in self.servers)

    def close(self) -> None:
        self.stopping.set()
        self.join()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    it = World(tmp_path)
    yield it
    it.close()


def test_models_that_died_idle_are_loaded_again(world: World) -> None:
    for count, model in enumerate(MODELS, start=1):
        old = world.pids()
        os.kill(old[model], signal.SIGKILL)
        world.wait_ready(count)
        new = world.pids()
        assert [name for name in MODELS if new[name] != old[name]] == [model]
    assert len(world.servers) == 1
    assert world.serving_models() == sorted(MODELS)
    world.close()
    assert world.supervisor.health().reasons == ()  # what has been repaired is no reason


@pytest.mark.parametrize("models", [("tokenizer", "detokenizer"), MODELS])
def test_models_that_die_together_are_one_recovery(world: World, models: tuple[str, ...]) -> None:
    old = world.pids()
    for model in models:
        os.kill(old[model], signal.SIGKILL)
    world.wait(lambda: not set(world.pids().values()) & {old[model] for model in models})
    world.wait_ready(1)
    new = world.pids()
    assert {name for name in MODELS if new[name] != old[name]} == set(models)
    assert len(world.servers) == 1
    os.kill(new[models[0]], signal.SIGKILL)
    world.wait_ready(2)


def test_who_dies_during_a_recovery_is_part_of_it(world: World) -> None:
    """A model that was loaded in the recovery and dies again needs another recovery."""
    supervisor, reload = world.supervisor, world.supervisor._reload
    dying = iter(("detokenizer", "detokenizer"))

    def reload_while_another_dies(model: str, stopping: StopEvent) -> None:
        reload(model, stopping)
        if victim := next(dying, None):
            pid = world.newest(victim)
            os.kill(pid, signal.SIGKILL)
            world.wait(lambda: not runs(pid))

    supervisor._reload = reload_while_another_dies  # type: ignore[method-assign]
    os.kill(world.pids()["tokenizer"], signal.SIGKILL)
    world.wait_ready(2)
    assert len(world.servers) == 1
    assert world.serving_models() == sorted(MODELS)
    assert world.supervisor.stats()["num_recoveries"] == 2


def test_a_process_that_dies_with_requests_inside_costs_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path, num_inside=3)
    old = world.pids()
    os.kill(old["tokenizer"], signal.SIGKILL)
    world.wait_ready(1)
    first, second = world.servers
    assert (first.http_port, first.grpc_port) == (second.http_port, second.grpc_port)
    assert not first.directory.exists()
    assert not any(runs(pid) for pid in old.values())
    world.close()


def test_a_server_that_is_started_again_is_told_of_the_adapters(world: World) -> None:
    assert world.supervisor.server.adapters() is None
    write_adapters(world.supervisor.server.directory, {"sheep": "/sheep"})
    for num_recoveries in (1, 2):
        os.kill(world.supervisor.server.pid, signal.SIGKILL)
        world.wait_ready(num_recoveries)
        assert len(world.servers) == num_recoveries + 1
        assert world.supervisor.server.adapters() == {"sheep": "/sheep"}


def test_many_that_wait_for_a_process_that_has_gone_cost_a_restart(world: World) -> None:
    """Tritonserver would end one per second. A few may wait, and any number for other models."""

    def waiting(**models: int) -> None:
        for model, number in models.items():
            (world.supervisor.server.directory / f"waiting.{model}").write_text(str(number))

    waiting(tokenizer=FEW_WAIT, detokenizer=500)
    os.kill(world.pids()["tokenizer"], signal.SIGKILL)
    world.wait_ready(1)
    assert len(world.servers) == 1
    waiting(tokenizer=FEW_WAIT + 1)
    os.kill(world.pids()["tokenizer"], signal.SIGKILL)
    world.wait_ready(2)
    assert len(world.servers) == 2


def test_those_that_wait_are_weighed_against_those_that_are_served(tmp_path: Path) -> None:
    world = World(tmp_path, num_inside=FEW_WAIT + 5)
    server = world.supervisor.server
    (server.directory / "waiting.tokenizer").write_text(str(FEW_WAIT + 5))
    assert world.supervisor._who_waits(frozenset({"tokenizer"})) is None
    (server.directory / "waiting.tokenizer").write_text(str(FEW_WAIT + 6))
    assert (
        world.supervisor._who_waits(frozenset({"tokenizer"}))
        == "14 requests wait for the tokenizer that has gone"
    )
    world.close()


def test_models_are_not_loaded_again_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load, tritonserver leaks some threads with each reload."""
    monkeypatch.setattr("minisgl_backend.server.supervisor.MAX_RELOADS", 1)
    for num_recoveries, num_servers in ((1, 1), (2, 2), (3, 2)):
        os.kill(world.pids()["tokenizer"], signal.SIGKILL)
        world.wait_ready(num_recoveries)
        assert len(world.servers) == num_servers


def test_a_process_that_is_broken_is_ended(world: World) -> None:
    old = world.pids()["llm_engine"]
    (world.supervisor.server.directory / "broken-llm_engine").touch()
    world.wait_ready(1)
    assert not runs(old)
    assert world.pids()["llm_engine"] != old
    assert len(world.servers) == 1


@pytest.mark.parametrize("model", ["llm_engine", "tritonserver"])
def test_silence_beyond_a_pause_is_a_hang(
    world: World, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minisgl_backend.server.faults.HANG_AFTER_S", 4.0)
    monkeypatch.setattr("minisgl_backend.server.faults.TRITON_HANG_AFTER_S", 4.0)
    server = world.supervisor.server
    pid = server.pid if model == "tritonserver" else world.pids()[model]
    os.kill(pid, signal.SIGSTOP)
    world.wait_ready(1)
    assert any("hangs" in record.message for record in caplog.records)
    assert not runs(pid)
    assert (world.supervisor.server is server) == (model != "tritonserver")


class Healthy:
    """What the detector sees of a healthy server."""

    def __init__(self, directory: Path) -> None:
        self.directory = self.repository = directory

    def model_names(self) -> set[str]:
        return {"tokenizer"}

    answers: bool | None = True

    def is_ready(self, *, timeout_s: float) -> bool | None:
        return self.answers if timeout_s > 0 else None

    def num_failed(self, *, timeout_s: float) -> None:
        return None

    def poll(self) -> None:
        return None


def test_a_pause_of_the_whole_machine_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heartbeat(tmp_path, "tokenizer")  # of this process, and silent from now on
    now_s = time.monotonic()
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: now_s))
    detector = faults.FaultDetector(cast(TritonServer, Healthy(tmp_path)))
    detector.serves()
    now_s += 3600.0
    assert detector.look() is None
    for _ in range(7):
        now_s += 1.0
        assert detector.look() is None
    now_s += 1.0
    fault = detector.look()
    assert fault is not None and fault.what.endswith("hangs: silent for 8.0 s")


@pytest.mark.parametrize("answers", [True, None])
def test_a_pause_while_tritonserver_is_asked_is_no_hang(
    answers: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heartbeat(tmp_path, "tokenizer")  # of this process, and silent from now on
    pause_s = 0.0
    now_s = time.monotonic()
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Slow(Healthy):
        def is_ready(self, *, timeout_s: float) -> bool | None:
            nonlocal now_s
            now_s += pause_s
            return answers

    detector = faults.FaultDetector(cast(TritonServer, Slow(tmp_path)))
    detector.serves()
    now_s += 2.0
    pause_s = 30.0
    assert detector.look() is None
    pause_s = 0.0
    now_s += 2.0
    assert detector.look() is None
    for _ in range(20):
        now_s += 1.0
        fault = detector.look()
    assert fault is not None and "hangs: silent for" in fault.what
    detector.close()


def test_who_is_silent_with_tritonserver_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent process may be waiting for a tritonserver that hangs; a dead one is not."""
    Heartbeat(tmp_path, "tokenizer")  # of this process, and silent from now on
    now_s = time.monotonic()
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: now_s))
    server = Healthy(tmp_path)
    detector = faults.FaultDetector(cast(TritonServer, server))
    detector.serves()
    server.answers = None
    for _ in range(6):
        now_s += 1.0
        assert detector.look() is None
    now_s += 1.0
    fault = detector.look()
    assert fault is not None and not fault.processes
    assert fault.what.startswith("tritonserver hangs: it does not answer over HTTP; tokenizer ")
    monkeypatch.setattr(detector.processes, "_is_alive", lambda path, pid: False)
    fault = detector.look()
    assert fault is not None and fault.models == {"tokenizer"}
    detector.close()


def test_a_start_that_hangs_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be the first start, or one in a recovery."""
    monkeypatch.setattr("minisgl_backend.server.process.STUCK_AFTER_S", 4.0)
    hangs = tmp_path / "hangs"
    hangs.touch()
    world = World(tmp_path, hangs=hangs, num_recoveries=1)
    assert len(world.servers) == 2
    hangs.touch()
    world.supervisor.server.signal(signal.SIGKILL)
    world.wait_ready(3)
    assert caplog.text.count("hangs in its start") == 2
    assert len(world.servers) == 4
    assert not any(server.directory.exists() for server in world.servers[:-1])
    world.close()


@pytest.mark.parametrize(
    ("fate", "why"),
    [
        ("refuse", "recovery failed: tokenizer: "),
        ("hang", "recovery failed: tokenizer: Triton did not load it in "),
        ("stop", "recovery failed: tokenizer: tritonserver hangs while it loads it"),
        # a process that outlives it also holds the connection
        ("die", "recovery failed: tokenizer: tritonserver ended while it loaded it"),
    ],
)
def test_a_reload_that_fails_becomes_a_restart(
    world: World,
    fate: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if fate == "hang":
        monkeypatch.setattr("minisgl_backend.server.supervisor.RELOAD_S", 0.5)
    monkeypatch.setattr("minisgl_backend.server.faults.TRITON_HANG_AFTER_S", 4.0)
    (world.supervisor.server.directory / fate).touch()
    os.kill(world.pids()["tokenizer"], signal.SIGKILL)
    world.wait_ready(2)
    assert len(world.servers) == 2
    assert any(record.message.startswith(why) for record in caplog.records)


def test_nobody_waits_for_a_reload_to_stop(world: World) -> None:
    """Nor for one that never ends."""
    (world.supervisor.server.directory / "hang").touch()
    os.kill(world.pids()["tokenizer"], signal.SIGKILL)
    world.wait(lambda: world.supervisor.health().phase is Phase.RECOVERING)
    world.close()
    assert not world.supervisor.server.directory.exists()


def test_it_gives_up_after_too_many_recoveries_and_says_so(world: World) -> None:
    world.binary.write_text("#!/bin/sh\necho no device; exit 1\n")
    world.supervisor.server.signal(signal.SIGKILL)
    world.join()
    assert isinstance(world.error, EngineFailure)
    error = str(world.error)
    assert error.startswith(f"given up after {MAX_RECOVERIES} recoveries in 10 minutes: ")
    assert "no device" in error
    assert world.supervisor.stats()["num_recoveries"] == MAX_RECOVERIES
    assert world.supervisor.stats()["tritonserver"] == {"pid": None}
    assert not world.pids()


def test_what_keeps_a_server_from_being_started_may_last_without_an_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a full disk: it is tried again within one recovery."""
    monkeypatch.setattr("minisgl_backend.server.supervisor._LONGEST_PAUSE_S", 0.01)
    world.refuses_to_start = True
    world.supervisor.server.signal(signal.SIGKILL)
    world.wait(lambda: world.num_refusals > 2 * MAX_RECOVERIES)
    health = world.supervisor.health()
    assert health.phase is Phase.RECOVERING
    assert health.reasons == ("the recovery waits: the port is taken",)
    assert not world.pids()
    world.refuses_to_start = False
    world.wait_ready(1)
    assert len(world.servers) == 2


def test_after_a_wait_it_says_that_the_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_backend.server.supervisor._LONGEST_PAUSE_S", 0.01)
    world = World(tmp_path, hangs=tmp_path / "hangs")
    (tmp_path / "hangs").touch()
    world.refuses_to_start = True
    world.supervisor.server.signal(signal.SIGKILL)
    world.wait(lambda: world.num_refusals > 1)
    world.refuses_to_start = False
    world.wait(lambda: len(world.servers) == 2)
    world.wait(lambda: world.supervisor.health().reasons == ("the models are being loaded",))
    world.close()


def test_a_tritonserver_that_was_removed_is_not_waited_for(world: World) -> None:
    world.binary.unlink()
    world.supervisor.server.signal(signal.SIGKILL)
    world.join()
    error = str(world.error)
    assert error.startswith(f"given up after {MAX_RECOVERIES} recoveries in 10 minutes: ")
    assert "tritonserver cannot be started: " in error
    assert world.supervisor.stats()["num_recoveries"] == MAX_RECOVERIES


def test_a_recovery_that_waits_does_not_hold_up_a_stop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.supervisor, "_first_pause_s", 3600.0)
    world.refuses_to_start = True
    world.supervisor.server.signal(signal.SIGKILL)
    world.wait(lambda: world.num_refusals == 1)
    world.close()
    assert world.error is None


def test_recoveries_of_long_ago_do_not_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.server.supervisor.WINDOW_S", 0.0)
    for count in range(1, MAX_RECOVERIES + 2):
        os.kill(world.pids()["tokenizer"], signal.SIGKILL)
        world.wait_ready(count)


def test_a_stop_during_a_recovery_is_not_held_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.supervisor._recoveries, "_first_pause_s", 3600.0)
    os.kill(world.pids()["tokenizer"], signal.SIGKILL)
    world.wait_ready(1)
    os.kill(world.pids()["tokenizer"], signal.SIGKILL)
    world.wait(lambda: world.supervisor.stats()["num_recoveries"] == 2)
    assert world.supervisor.health().phase is Phase.RECOVERING


def test_a_server_that_somebody_else_stops_is_left_alone(world: World) -> None:
    world.supervisor.server.signal(signal.SIGTERM)
    world.join()
    assert "told to end by another process" in str(world.error)


def test_files_that_somebody_removed_are_a_fault(world: World) -> None:
    shutil.rmtree(world.supervisor.server.directory)
    world.wait_ready(1)
    assert len(world.servers) == 2
    shutil.rmtree(world.supervisor.server.directory)
    world.close()  # without a drain, and without an error
    assert world.error is None


def test_a_model_that_is_unloaded_is_missed_but_no_fault(world: World) -> None:
    (file,) = world.supervisor.server.directory.glob("heartbeat.*.tokenizer")
    file.unlink()
    world.wait(lambda: world.supervisor.health().reasons == ("tokenizer: not loaded",))
    assert world.supervisor.health().phase is Phase.SERVING
    assert world.supervisor.stats()["num_recoveries"] == 0


# --- the health port ---------------------------------------------------------------------------


def get(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S
        ) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


NO_IPV6 = not Path("/proc/net/if_inet6").exists()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::", marks=pytest.mark.skipif(NO_IPV6, reason="no IPv6"))]
)
def test_the_health_port(host: str) -> None:
    health = Health(ready=False, phase=Phase.STARTING, reasons=("loading",))
    server = HealthServer(host, 0)
    server.start(lambda: health, lambda: {"models": []})
    body = {"live": True, "ready": False, "phase": "starting", "reasons": ["loading"]}
    assert get(server.port, "/live") == (200, body)
    assert get(server.port, "/ready") == (503, body)
    assert get(server.port, "/stats") == (200, {"models": []})
    assert get(server.port, "/")[0] == 404
    assert get(server.port, "/live?from=a-balancer") == (200, body)
    assert get(server.port, "/ready?") == (503, body)
    asked = urllib.request.Request(f"http://127.0.0.1:{server.port}/live", method="HEAD")
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
        assert int(response.headers["Content-Length"]) == len(json.dumps(body))
        assert response.read() == b""
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_silent_callers_do_not_shut_out_others() -> None:
    server = HealthServer("127.0.0.1", 0)
    server.start(lambda: Health(ready=True, phase=Phase.SERVING), dict)
    address = ("127.0.0.1", server.port)
    silent = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(2 * MOST)]
    assert get(server.port, "/ready")[0] == 200
    for caller in silent[:MOST]:
        assert caller.recv(1) == b""  # turned away
    assert len(server._server._callers) <= MOST
    for caller in silent:
        caller.close()
    server.close()


def test_a_caller_that_leaves_is_no_word_in_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    has_left, tried = threading.Event(), threading.Event()

    def stats() -> dict[str, str]:
        if has_left.wait(PATIENCE_S) and not tried.is_set():
            tried.set()
            raise BrokenPipeError
        raise KeyError("of our own")

    server = HealthServer("127.0.0.1", 0)
    server.start(lambda: Health(ready=True, phase=Phase.SERVING), stats)
    with socket.create_connection(("127.0.0.1", server.port)) as caller:
        caller.sendall(b"GET /stats HTTP/1.0\r\n\r\n")
    has_left.set()
    assert tried.wait(PATIENCE_S)
    with pytest.raises(http.client.RemoteDisconnected):
        get(server.port, "/stats")
    server.close()
    assert [it.message for it in caplog.records] == ["no answer to a caller of the health port"]
    assert not capsys.readouterr().err


def test_an_answer_of_tritonserver_that_breaks_off_tells_nothing() -> None:
    answers = (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nnv_inf", b"\0\0no HTTP\r\n")
    with answering(*answers) as url:
        assert [triton_http.num_waiting(url, "tokenizer") for _ in answers] == [0, 0]
        assert triton_http.is_ready(url, timeout_s=PATIENCE_S) is None
        assert triton_http.num_failed(url, ["minisgl"], timeout_s=PATIENCE_S) is None


@pytest.mark.parametrize(
    ("num_lost", "num_failed", "are_told"), [(0, 0, True), (2, 1, False), (2, 2, True)]
)
def test_callers_are_told_of_streams_that_were_lost_if_any_were(
    num_lost: int, num_failed: int, are_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There were requests, failures and lost streams before."""
    server = SimpleNamespace(
        directory=tmp_path,
        model_names=lambda: {"detokenizer"},
        num_failed=lambda timeout_s: 7 + num_failed,
    )
    monkeypatch.setattr(faults, "_TOLD_WITHIN_S", 0.05)
    detector = faults.FaultDetector(cast(TritonServer, server))
    detector._noted = faults.RequestsSeen(9, are_inside=True)
    detector._failed_before, detector._lost_before = 7, {1: 3}
    monkeypatch.setattr(detector, "_lost_streams", lambda: {1: 3 + num_lost})
    assert detector.are_callers_told() is are_told
    detector.close()


def test_failed_requests_are_those_of_the_ensembles_that_were_not_cancelled() -> None:
    counts = {
        ("minisgl", "OTHER"): 4,
        ("minisgl", "CANCELED"): 50,
        ("minisgl_batched", "BACKEND"): 2,
    }
    counts |= {("llm_engine", "OTHER"): 700, ("x_minisgl", "OTHER"): 8000}
    lines = [
        f'nv_inference_request_failure{{model="{model}",reason="{reason}",version="1"}} {count}'
        for (model, reason), count in counts.items()
    ]
    with answering("\n".join(["HTTP/1.0 200 OK", "", *lines, ""]).encode()) as url:
        models = ["minisgl", "minisgl_batched"]
        assert triton_http.num_failed(url, models, timeout_s=PATIENCE_S) == 6


def test_a_health_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--health-port {port} on 127.0.0.1 cannot be used"):
            HealthServer("127.0.0.1", port)
    HealthServer("127.0.0.1", 0).close()
