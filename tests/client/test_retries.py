"""When a request is sent again and when not, against servers that fail on purpose."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import httpx
import pytest
from minisgl_client import (
    Client,
    ConnectionFailed,
    ConnectionLost,
    InvalidArgument,
    MinisglError,
    ServerError,
    Timeout,
    Unavailable,
    attempts,
)
from minisgl_client.attempts import Attempts
from minisgl_client.transport import http as http_transport
from tritonclient.grpc import service_pb2

from tests.client.ways import Way, all_ways

BUSY = "error: in ensemble 'minisgl', UNAVAILABLE: queue full"
"""A response that is an error; others are texts, and ``LAST`` begins one with a finish reason."""
LAST = "last: "
HANG, BREAK, STATUS = "hang", "break", "status"
"""Steps that keep the client waiting, break the connection, or answer with another status."""


@dataclass
class Script:
    """What a server does with each request in turn; the last entry applies to all later ones."""

    answers: Sequence[Sequence[str]]
    deadlines_ms: list[int | None] = field(default_factory=list)
    """The ``timeout_ms`` of each request."""
    ids: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    status: int = 503

    def begin(self, timeout_ms: int | None, request_id: str) -> Sequence[str]:
        self.ids.append(request_id)
        self.deadlines_ms.append(timeout_ms)
        return self.answers[min(len(self.deadlines_ms), len(self.answers)) - 1]

    @property
    def num_requests(self) -> int:
        return len(self.deadlines_ms)


@contextmanager
def grpc_server(script: Script) -> Iterator[str]:
    """A Triton that has only ModelStreamInfer."""

    def infer(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        request = next(requests)
        names = [tensor.name for tensor in request.inputs]
        raw = dict(zip(names, request.raw_input_contents, strict=True)).get("timeout_ms")
        timeout_ms = None if raw is None else int.from_bytes(raw, "little")
        for step in script.begin(timeout_ms, request.id):
            if step == HANG:
                script.over.wait()
            elif step == BREAK:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            elif step == STATUS:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
            elif step.startswith("error: "):
                message = step.removeprefix("error: ")
                yield service_pb2.ModelStreamInferResponse(error_message=message)
            else:
                yield _response(step)

    handler = grpc.stream_stream_rpc_method_handler(
        infer,
        request_deserializer=service_pb2.ModelInferRequest.FromString,
        response_serializer=service_pb2.ModelStreamInferResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelStreamInfer": handler}
    )
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads, handlers=[service])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            script.over.set()
            server.stop(0).wait()


def _response(text: str) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    values = {"text_output": text, "finish_reason": "stop" if text.startswith(LAST) else "None"}
    for name, value in values.items():
        message.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        data = value.encode()
        message.infer_response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
    return message


@contextmanager
def http_server(script: Script) -> Iterator[str]:
    """A Triton that has only generate_stream."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.close_connection = True
            steps = script.begin(body.get("timeout_ms"), body.get("id", ""))
            if steps[0] == STATUS:
                self.send_error(script.status)
                return
            if steps[0] != BREAK:
                self.send_response(400 if steps[0].startswith("error: ") else 200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            for step in steps:
                if step == HANG:
                    script.over.wait()
                elif step == BREAK:
                    return
                elif step.startswith("error: "):
                    self._send({"error": step.removeprefix("error: ")})
                else:
                    reason = "stop" if step.startswith(LAST) else "None"
                    self._send({"text_output": step, "finish_reason": reason})
            self.wfile.write(b"0\r\n\r\n")

        def _send(self, event: dict[str, str]) -> None:
            data = f"data: {json.dumps(event)}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        script.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def serving(way: Way, script: Script) -> AbstractContextManager[str]:
    serve: Callable[[Script], AbstractContextManager[str]]
    serve = http_server if way.protocol == "http" else grpc_server
    return serve(script)


GOOD = ["a", "b", f"{LAST}c"]
TEXT = f"ab{LAST}c"


@all_ways
def test_busy_at_first(way: Way) -> None:
    script = Script([[BUSY], [BUSY], GOOD])
    with serving(way, script) as url:
        deltas, result = way.stream(url, prompt="x")
    assert result.text == TEXT
    assert [delta.text for delta in deltas] == GOOD
    assert script.num_requests == 3


@all_ways
@pytest.mark.parametrize("retries", [0, 2])
def test_busy_for_ever(way: Way, retries: int) -> None:
    script = Script([[BUSY]])
    with serving(way, script) as url, pytest.raises(Unavailable, match=r"^queue full$"):
        way.generate(url, {"retries": retries}, prompt="x")
    assert script.num_requests == retries + 1


@all_ways
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (["error: INVALID_ARG: no"], MinisglError),
        (["error: INTERNAL: oops"], ServerError),
        (["error: UNAVAILABLE: the deadline passed after 3 ms"], Timeout),
        (["a", BUSY], Unavailable),
        (["a", BREAK], ConnectionLost),
        ([BREAK], ConnectionLost),
    ],
    ids=["invalid", "internal", "deadline", "later", "broken later", "broken"],
)
def test_no_second_try(way: Way, answer: list[str], kind: type[MinisglError]) -> None:
    """If it would be useless, if text has already come, or if the server may have begun."""
    script = Script([answer, GOOD])
    with serving(way, script) as url, pytest.raises(kind):
        way.stream(url, prompt="x")
    assert script.num_requests == 1


@all_ways
def test_an_answer_that_ends_early(way: Way) -> None:
    """It is not an answer, unless the finish reason, which would show it, was not requested."""
    script = Script([["a", "b"]])
    with serving(way, script) as url:
        for ask in (way.generate, way.stream):
            with pytest.raises(ConnectionLost, match="the answer ended before it was whole"):
                ask(url, prompt="x")
        assert script.num_requests == 2
        assert way.generate(url, prompt="x", return_finish_reason=False).text == "ab"


@all_ways
def test_something_that_is_not_triton(way: Way) -> None:
    """A proxy, or another server."""
    kinds: dict[int, type[MinisglError]] = {503: Unavailable, 405: InvalidArgument}
    for status, kind in kinds.items():
        script = Script([[STATUS]], status=status)
        expected = f"HTTP status {status}"
        if way.protocol == "grpc":
            kind, expected = ServerError, "gRPC status UNIMPLEMENTED: no such method"
        with serving(way, script) as url, pytest.raises(kind, match=expected):
            way.generate(url, prompt="x")
        assert script.num_requests == (3 if kind is Unavailable else 1)


@pytest.mark.parametrize("status", [404, 405, 501])
def test_an_error_in_the_form_of_another_server(status: int) -> None:
    response = httpx.Response(status, json={"error": {"message": "Not Found", "param": None}})
    sentence = f"no Triton HTTP server answers there: HTTP status {status}"
    assert str(http_transport._refusal(response)) == sentence


def test_http_to_the_port_of_grpc() -> None:
    told = "no Triton HTTP server answers there: illegal"
    with (
        grpc_server(Script([["a"]])) as address,
        Client(f"http://{address}") as client,
        pytest.raises(ConnectionLost, match=told),
    ):
        client.generate("x")


def test_an_endless_answer_ends_with_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although something comes again and again; gRPC has this built in."""
    monkeypatch.setattr(attempts, "GRACE_S", -1.0)
    events = http_transport._Events(timeout_ms=500)
    with pytest.raises(Timeout, match="no end in time"):
        events.feed(b"data: {}")


def test_threads_that_ask_at_once_share_one_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    made = []

    class Slow(http_transport.HttpTransport):
        def __init__(self, url: str, headers: Mapping[str, str]) -> None:
            made.append(url)
            with suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            super().__init__(url, headers)

    monkeypatch.setattr(http_transport, "HttpTransport", Slow)
    with Client("http://127.0.0.1:1") as client, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(client.is_ready) for _ in range(2)]
        assert not any(answer.result() for answer in asked)
    assert len(made) == 1


@all_ways
@pytest.mark.parametrize("answer", [[HANG], ["a", HANG]], ids=["at once", "later"])
def test_a_server_that_says_nothing(
    way: Way, answer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "GRACE_S", 0.1)
    script = Script([answer])
    with serving(way, script) as url, pytest.raises(Timeout):
        way.stream(url, {"timeout_s": 1.0}, prompt="x")
    assert script.num_requests == 1


@all_ways
def test_one_deadline_over_all_tries(way: Way) -> None:
    script = Script([[BUSY], [BUSY], GOOD])
    with serving(way, script) as url:
        way.generate(url, {"timeout_s": 600.0}, prompt="x")
        way.generate(url, {"timeout_s": 600.0}, prompt="x", timeout_ms=300_000)
    first, second, third, fourth = (deadline or 0 for deadline in script.deadlines_ms)
    assert 600_000 >= first > second > third > 400_000
    assert 200_000 < fourth <= 300_000


@all_ways
def test_refused_connections_are_tried_again(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no process listens there
        url = f"{'http://' if way.protocol == 'http' else ''}127.0.0.1:{taken.getsockname()[1]}"
        with caplog.at_level(logging.INFO, "minisgl_client"), pytest.raises(ConnectionFailed):
            way.generate(url, {"retries": 3}, prompt="x", request_id="job 7")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all(line.startswith("request 'job 7': again in 0.") for line in lines)


def test_pauses_grow_and_differ() -> None:
    attempts = Attempts("", 8, None)
    pauses = [attempts.pause_after(Unavailable("busy")) for _ in range(8)]
    for number, pause in enumerate(pauses):
        longest = min(0.1 * 2**number, 5.0)
        assert longest / 2 <= pause <= longest
    assert len({pause / min(0.1 * 2**n, 5.0) for n, pause in enumerate(pauses)}) > 1
    with pytest.raises(Unavailable, match="busy"):
        attempts.pause_after(Unavailable("busy"))


def test_no_pause_beyond_the_deadline() -> None:
    attempts = Attempts("", 8, 0.02)
    with pytest.raises(Unavailable):
        attempts.pause_after(Unavailable("busy"))
    while time.perf_counter() < attempts.started_s + 0.02:
        time.sleep(0.001)
    with pytest.raises(Timeout, match=r"no answer within 0\.02 s"):
        attempts.remaining_ms()
    assert Attempts("", 0, 1e9).remaining_ms() == 2**31 - 1
    assert Attempts("", 0, None).remaining_ms() is None
