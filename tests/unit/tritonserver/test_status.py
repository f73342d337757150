"""A model's heartbeat, and the counts that it sends to a caller."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.runtime_files import (
    Beat,
    State,
    heartbeat_files,
    heartbeat_path,
    read_beat,
    socket_path,
)
from minisgl_backend.tritonserver.status import Status, StatusServer
from tests.waiting import PATIENCE_S


class Model:
    """What a model says about itself, for tests to change."""

    def __init__(self) -> None:
        self.now = Status()
        self.counts: Mapping[str, Any] = {"num_jobs": 7}

    def status(self) -> Status:
        return self.now

    def stats(self) -> Mapping[str, Any]:
        return self.counts


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def server(tmp_path: Path, model: Model) -> Iterator[StatusServer]:
    it = StatusServer(tmp_path, "a.model", stats=model.stats, status=model.status)
    yield it
    it.close()
    assert not list(tmp_path.iterdir())
    assert "status" not in {thread.name for thread in threading.enumerate()}


def beat(directory: Path) -> Beat:
    found = read_beat(heartbeat_path(directory, "a.model", os.getpid()))
    assert found is not None
    return found


def wait_for_beat(directory: Path, **values: object) -> None:
    limit = time.monotonic() + PATIENCE_S
    while any(getattr(beat(directory), name) != value for name, value in values.items()):
        assert time.monotonic() < limit, beat(directory)
        time.sleep(0.01)


def ask(directory: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(PATIENCE_S)
        caller.connect(str(socket_path(directory, "a.model", os.getpid())))
        return b"".join(iter(lambda: caller.recv(1024), b""))


@pytest.mark.usefixtures("server")
def test_the_heartbeat_tells_how_the_process_is(tmp_path: Path, model: Model) -> None:
    before_s = time.monotonic()
    first = beat(tmp_path)
    assert (first.pid, first.state, first.num_inside) == (os.getpid(), State.SERVING, 0)
    assert first.started_s <= first.beat_s
    assert heartbeat_files(tmp_path) == [
        ("a.model", heartbeat_path(tmp_path, "a.model", os.getpid()))
    ]
    model.now = Status(12.5, State.BROKEN)
    wait_for_beat(tmp_path, tick_age_s=12.5, state=State.BROKEN)
    assert beat(tmp_path).beat_s >= before_s
    assert beat(tmp_path).silent_s(time.monotonic()) >= 12.5


def test_requests_inside_are_counted_at_once(server: StatusServer, tmp_path: Path) -> None:
    threads = [threading.Thread(target=server.entered) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.left()
    assert (beat(tmp_path).num_inside, beat(tmp_path).num_seen) == (19, 20)


def test_silence_grows_with_time() -> None:
    beat = Beat(1, State.SERVING, 0, 0, started_s=0.0, beat_s=100.0, tick_age_s=0.5)
    assert beat.silent_s(100.2) == 0.5
    assert beat.silent_s(109.0) == 9.0


@pytest.mark.usefixtures("server")
def test_counts_are_told_to_who_asks(
    tmp_path: Path, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    assert json.loads(ask(tmp_path)) == {"num_jobs": 7}
    with caplog.at_level(logging.ERROR):
        model.counts = {"set": set()}
        assert ask(tmp_path) == b""
        model.counts = {}
        assert json.loads(ask(tmp_path)) == {}  # so it is done with the previous one
    assert "could not be sent" in caplog.text


@pytest.mark.usefixtures("server")
def test_a_caller_that_goes_does_no_harm(tmp_path: Path) -> None:
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(socket_path(tmp_path, "a.model", os.getpid())))
    assert json.loads(ask(tmp_path)) == {"num_jobs": 7}


def test_without_a_directory_nothing_is_written(model: Model) -> None:
    server = StatusServer(None, "x", stats=model.stats)
    server.entered()
    server.left()
    server.close()


def test_a_heartbeat_file_that_is_gone(tmp_path: Path) -> None:
    assert read_beat(heartbeat_path(tmp_path, "x", 1)) is None
