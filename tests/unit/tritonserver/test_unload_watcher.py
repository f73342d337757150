"""What the watcher makes of a server's answers, over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from minisgl_backend.runtime_files import QueueMarker
from minisgl_backend.tritonserver.unload_watcher import Readiness, UnloadWatcher, ask
from tests.waiting import PATIENCE_S, wait_until

SHORT_S = 0.2


class Server(HTTPServer):
    """Answers requests with the entries of ``next`` first, and then with ``status``.

    Each entry is a status and how many seconds it takes. ``num_answers`` counts.
    """

    status = 200
    next: Iterator[tuple[int, float]] = iter(())
    num_answers = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: a watcher that was closed does not wait for its answer."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        status, after_s = next(self.server.next, (self.server.status, 0.0))
        time.sleep(after_s)
        self.send_response(status)
        self.end_headers()
        self.server.num_answers += 1

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(address: tuple[str, int]) -> str:
    return f"http://{address[0]}:{address[1]}/v2/models/m/versions/1/ready"


def test_ready_and_not(server: Server) -> None:
    url = url_of(("127.0.0.1", server.server_port))
    assert ask(url) is Readiness.READY
    server.status = 400
    assert ask(url) is Readiness.NOT_READY


def test_a_proxy_is_not_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert ask(url_of(("127.0.0.1", server.server_port))) is Readiness.READY


def test_a_closed_port_refuses() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # no process listens there
        assert ask(url_of(unused.getsockname())) is Readiness.REFUSED


def test_a_paused_server_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections, answers none
        assert ask(url_of(listener.getsockname()), timeout_s=SHORT_S) is Readiness.NONE


def test_a_server_with_too_many_connections_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = []
        try:
            for _ in range(8):  # more than it queues: the kernel drops the others
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(listener.getsockname())
            assert ask(url_of(listener.getsockname()), timeout_s=SHORT_S) is Readiness.NONE
        finally:
            for connection in waiting:
                connection.close()


@pytest.mark.parametrize("fails", [False, True], ids=["", "though reports fail"])
def test_a_model_that_was_ready_and_is_not_any_more_drains(
    server: Server, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    drained, reported = threading.Event(), threading.Semaphore(0)

    def report() -> None:
        reported.release()
        if fails:
            raise RuntimeError("no metrics")

    watcher = UnloadWatcher(
        ready_url=url_of(("127.0.0.1", server.server_port)),
        marker=QueueMarker(None, "m", 64),
        report=report,
        drain=drained.set,
    )
    try:
        for _ in range(3):  # the server is asked before each report
            assert reported.acquire(timeout=PATIENCE_S)
        assert not drained.is_set()
        server.status = 400
        assert drained.wait(PATIENCE_S)
    finally:
        watcher.close()
    assert caplog.text.count("cannot report") == fails


@pytest.mark.parametrize(
    "answers",
    [
        [(400, 0.0)],
        [(400, 0.0), (400, 0.0)],
        [(400, 1.2)] * 4,
        [(400, 2.5), (400, 0.0), (400, 0.0)],
        [(400, 0.0), (400, 0.0), (200, 0.0)] * 3,
    ],
    ids=["once", "twice", "late", "after silence", "now and then"],
)
def test_a_model_that_is_said_not_to_be_ready_after_a_pause_serves_on(
    server: Server, answers: list[tuple[int, float]]
) -> None:
    """As a server of release 26.07 reports a model that was paused."""
    drained = threading.Event()
    watcher = UnloadWatcher(
        ready_url=url_of(("127.0.0.1", server.server_port)),
        marker=QueueMarker(None, "m", 64),
        report=lambda: None,
        drain=drained.set,
    )
    try:
        wait_until(lambda: server.num_answers > 0)
        server.next = iter(answers)
        expected = server.num_answers + len(answers) + 3
        wait_until(lambda: server.num_answers >= expected)
        assert not drained.is_set()
    finally:
        watcher.close()


def test_a_marker_is_not_taken_for_removed_while_it_is_renamed(tmp_path: Path) -> None:
    """The queue of a busy engine is full and open by turns."""
    marker = QueueMarker(tmp_path, "m.1", 64)

    def turn() -> None:
        for number in range(4000):
            marker.show(number % 2 == 0)

    thread = threading.Thread(target=turn)
    thread.start()
    while thread.is_alive():
        assert not marker.is_replaced()
    thread.join()
    QueueMarker(tmp_path, "m.1", 64)
    assert marker.is_replaced()
