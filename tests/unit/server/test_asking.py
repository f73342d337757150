"""Asking for a token, from servers that take connections and do not answer all of them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisgl_backend.server import asking
from minisgl_backend.server.asking import Asker
from minisgl_backend.server.model_processes import ModelProcesses
from minisgl_backend.server.process import TritonServer
from minisgl_backend.tritonserver.status import StatusServer
from tests.fakes.answers import answering
from tests.waiting import wait_until


class World:
    """An engine's process, which is this one, and a server that an asker watches."""

    def __init__(self, directory: Path, *, http_url: str, grpc_address: str) -> None:
        self.counts: dict[str, Any] = {"num_open": 0, "num_steps": 0}
        self.engine = StatusServer(directory, "llm_engine", stats=lambda: self.counts)
        self.processes = ModelProcesses(directory)
        server = SimpleNamespace(
            directory=directory, grpc_address=grpc_address, url=lambda: http_url
        )
        self.asker = Asker(cast(TritonServer, server))

    def look(self) -> str | None:
        return self.asker.look(self.processes.look())

    def looks_for(self, seconds: float) -> list[str]:
        """What the asker finds within that time."""
        until_s = time.monotonic() + seconds
        found = []
        while time.monotonic() < until_s:
            found += [what for what in (self.look(),) if what is not None]
            time.sleep(0.02)
        return found

    def finds(self) -> str:
        """What the asker finds in the end."""
        found: list[str] = []

        def look() -> bool:
            found.extend(filter(None, [self.look()]))
            return bool(found)

        wait_until(look)
        return found[0]

    def close(self) -> None:
        self.asker.close()
        self.processes.close()
        self.engine.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "ASK_AFTER_S": 0.2,
        "TIMEOUT_S": 0.5,
        "OVERDUE_S": 1.0,
        "_LOOK_EVERY_S": 0.1,
    }.items():
        monkeypatch.setattr(asking, name, seconds)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def world_of(directory: Path, http_url: str, grpc_address: str) -> Iterator[World]:
    world = World(directory, http_url=http_url, grpc_address=grpc_address)
    try:
        yield world
    finally:
        world.close()


def test_an_answer_that_does_not_come_is_held_against_the_server(
    tmp_path: Path, impatient: None, silent: str
) -> None:
    with world_of(tmp_path, f"http://{silent}", silent) as world:
        assert world.looks_for(1.0) == []
        assert world.asker._question is None, "asked though nothing was inside"
        world.engine.entered()
        assert world.finds().startswith("tritonserver answers no request over gRPC and HTTP")


def test_an_engine_in_a_long_step_is_not_taken_for_a_server_that_hangs(
    tmp_path: Path, impatient: None, silent: str
) -> None:
    with world_of(tmp_path, f"http://{silent}", silent) as world:
        world.engine.entered()
        world.counts["num_open"] = 1

        def has_asked() -> bool:
            assert world.look() is None
            question = world.asker._question
            return question is not None and bool(question._target)

        wait_until(has_asked)  # and the deadline is over
        assert world.looks_for(3.0) == []
        world.counts["num_steps"] += 3  # by now it has met the deadline
        assert world.finds()


def test_steps_of_another_replica_are_not_held_against_the_server(
    tmp_path: Path, impatient: None, silent: str
) -> None:
    """The replica that may have the token is in a long step, or hardly gets time on its core."""
    with world_of(tmp_path, f"http://{silent}", silent) as world:
        slow, fast = ({"num_open": 1, "num_steps": 0} for _ in range(2))
        world.counts |= {"num_open": 2, "replicas": [{"stats": slow}, {"stats": fast}]}
        world.engine.entered()

        def has_asked() -> bool:
            assert world.look() is None
            question = world.asker._question
            return question is not None and bool(question._target)

        wait_until(has_asked)  # and the deadline is over
        world.counts["num_steps"] = fast["num_steps"] = 100
        assert world.looks_for(3.0) == []
        slow["num_steps"] = 3
        assert world.finds()


def test_one_way_that_answers_is_not_enough(tmp_path: Path, impatient: None, silent: str) -> None:
    with (
        answering(b"HTTP/1.0 200 OK\r\n\r\n{}") as http_url,
        world_of(tmp_path, http_url, silent) as world,
    ):
        world.engine.entered()
        assert world.finds().startswith("tritonserver answers no request over gRPC, ")


class Answered:
    """A question with an immediate answer."""

    num_asked = 0
    has_failed = False

    def __init__(self, server: TritonServer) -> None:
        type(self).num_asked += 1

    def missing(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def test_questions_become_fewer_while_a_request_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    with world_of(tmp_path, "", "") as world:
        world.engine.entered()
        processes = world.processes.look()
        monkeypatch.setattr(asking, "_Question", Answered)
        monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: now_s))
        asked_s: list[float] = []
        for tick in range(6000):
            now_s += 0.1
            num_before = Answered.num_asked
            assert world.asker.look(processes) is None
            if Answered.num_asked > num_before:
                asked_s.append(tick / 10)
        pauses = [b - a for a, b in itertools.pairwise(asked_s)]
        assert 14 < asked_s[0] < 16
        assert [round(pause / 10) for pause in pauses] == [3, 6, 12, 12, 12, 12]


def test_a_question_that_cannot_be_asked_is_no_fault(
    tmp_path: Path,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = threading.Event()

    def fails(*_: Any, **__: Any) -> None:
        asked.set()
        raise OSError("no memory")

    monkeypatch.setattr("subprocess.Popen", fails)
    with world_of(tmp_path, "", "") as world:
        world.engine.entered()

        def has_asked() -> bool:
            assert world.look() is None
            return asked.is_set()

        wait_until(has_asked)
        assert world.looks_for(1.0) == []
    assert "cannot be asked for a token: no memory" in caplog.text
