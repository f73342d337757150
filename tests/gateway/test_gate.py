"""Keys, limits, and mistakes that are found before a request is complete."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl_backend.runtime_files import DRAIN_MARKER
from minisgl_backend.server.process import TritonServer
from tests.gateway.conftest import KEYS, SCRIPT, Gateway, gateway_of
from tests.server.client import PATIENCE_S, Metrics, wait_for
from tests.server.conftest import paced_repository, running

pytestmark = pytest.mark.server

AUTHORIZED = {"Authorization": f"Bearer {KEYS[0]}"}
LONG: dict[str, Any] = {
    "model": "minisgl",
    "prompt": "Go on.",
    "max_tokens": 2000,
    "temperature": 0,
}


def raw(gateway: Gateway, data: bytes) -> bytes:
    """What the gateway answers to these bytes."""
    with socket.create_connection(gateway.address, timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        found = b""
        while b"\r\n\r\n" not in found and (piece := connection.recv(65536)):
            found += piece
        return found


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return (
        "\r\n".join([*lines, f"Authorization: Bearer {KEYS[0]}", *headers, "", ""]).encode() + body
    )


# --- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer wrong")],
        [("Authorization", f"Bearer {KEYS[0][:-1]}")],
        [("Authorization", f"Bearer {KEYS[0]}x")],
        [("Authorization", f"Basic {KEYS[0]}")],
        [("Authorization", KEYS[0])],
        [("Authorization", "Bearer ключ".encode())],
        [("Authorization", f"Bearer {KEYS[0]}"), ("Authorization", f"Bearer {KEYS[0]}")],
        [("X-Api-Key", "wrong")],
        [("X-Api-Key", KEYS[0]), ("X-Api-Key", KEYS[0])],
        [("X-Api-Key", KEYS[0]), ("Authorization", "Bearer wrong")],
        [("Api-Key", KEYS[0])],
    ],
)
def test_without_a_known_key_nothing_is_told(guarded: Gateway, headers: Any) -> None:
    for method, path in [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/minisgl"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/version"),
        ("POST", "/tokenize"),
        ("GET", "/nothing"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/models/minisgl"),
    ]:
        answer = guarded.request(method, path, headers=headers)
        assert answer.status_code == 401, path
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_every_key_opens_and_the_page_and_the_probe_need_none(guarded: Gateway) -> None:
    for key in KEYS:
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} {key}"}
            assert guarded.get("/v1/models", headers=headers).status_code == 200
        assert guarded.get("/v1/models", headers={"X-Api-Key": key}).status_code == 200
    for path in ("/", "/page.js", "/page.css", "/answer.js", "/markdown.js", "/health", "/ping"):
        assert guarded.get(path).status_code == 200


def test_keys_do_not_share_prefixes(guarded: Gateway) -> None:
    prompt = "A prefix that is long enough to fill some pages of the cache. " * 4

    def cached(key: str) -> int:
        answer = guarded.post(
            "/v1/completions",
            {**LONG, "prompt": prompt, "max_tokens": 1},
            headers={"Authorization": f"Bearer {key}"},
        )
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0


# --- heads and bodies -------------------------------------------------------------------------


def test_a_body_may_not_be_too_large(guarded: Gateway) -> None:
    body = json.dumps({**LONG, "prompt": "x" * 100_001}).encode()
    answer = guarded.post("/v1/completions", body, headers=AUTHORIZED)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    chunks = b"1\r\nx\r\n" * 100_001 + b"0\r\n\r\n"
    assert b" 413 " in raw(guarded, post(chunks, "Transfer-Encoding: chunked"))
    assert b" 413 " in raw(guarded, post(b"x" * 200_000, "Content-Length: 999999999999"))


def test_a_body_must_come(guarded: Gateway) -> None:
    assert b" 408 " in raw(guarded, post(b'{"model":', "Content-Length: 1000"))


def test_a_head_may_not_be_too_large(guarded: Gateway) -> None:
    answer = guarded.get("/v1/models", headers={**AUTHORIZED, "X-Long": "x" * 20_000})
    assert answer.status_code == 431
    for endless in (post(b"", "X-Long: " + "x" * 2**20), b"GET / HTTP/1.1\r\nX: " + b"x" * 2**20):
        with suppress(ConnectionError):  # cut while more was on its way
            assert raw(guarded, endless).startswith(b"HTTP/1.1 431 ")
    assert guarded.get("/health").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_requests_that_are_not_http(guarded: Gateway, data: bytes) -> None:
    head, _, body = raw(guarded, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


SLOW = {
    b"": b"",
    b"GET /health HTTP/1.1\r\nX-Slow: ": b"x",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n": b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n": b"x",
}
"""How clients begin and then dawdle: silent, in a head, with blank lines, in an unread body."""


def test_clients_that_send_slowly_are_cut(guarded: Gateway) -> None:
    with ExitStack() as stack:
        open_ones: dict[socket.socket, bytes] = {}
        for begun, more in SLOW.items():
            connection = stack.enter_context(socket.create_connection(guarded.address))
            connection.sendall(begun)
            connection.setblocking(False)
            open_ones[connection] = more

        def is_cut(connection: socket.socket) -> bool:
            try:
                connection.send(open_ones[connection])
                return connection.recv(65536) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        def are_all_cut() -> bool:
            for connection in filter(is_cut, list(open_ones)):
                del open_ones[connection]
            return not open_ones

        wait_for(are_all_cut, "the end of connections that dawdle")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded", "Origin": "http://localhost"},
        {"Content-Type": "", "Origin": "http://localhost"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Encoding": "gzip"},
    ],
)
def test_only_plain_json_is_read(guarded: Gateway, headers: dict[str, str]) -> None:
    """So that a page of another origin cannot ask unless the browser asks first."""
    body = json.dumps({**LONG, "max_tokens": 1}).encode()
    answer = guarded.post("/v1/completions", body, headers={**AUTHORIZED, **headers})
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("origin", "is_served"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1:9000", True),
        ("http://[::1]:9000", True),
        ("http://chat.localhost", True),
        ("http://evil.example:9000", False),
        ("http://localhost.evil.example", False),
        ("http://[::1", False),
        ("null", False),
        ("", False),
    ],
)
def test_without_keys_only_pages_of_this_machine_may_ask(
    gateway: Gateway, guarded: Gateway, origin: str, is_served: bool
) -> None:
    """A page's host name may resolve to this machine, and then the browser lets the page ask."""
    headers = {"Origin": origin, "Host": origin.removeprefix("http://") or "x"}
    body = {**LONG, "max_tokens": 1}
    answer = gateway.post("/v1/completions", body, headers=headers)
    assert answer.status_code == (200 if is_served else 403)
    if not is_served:
        assert answer.json()["error"]["code"] == "origin_refused"
    answer = guarded.post("/v1/completions", body, headers={**AUTHORIZED, "Origin": origin})
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", [None, "", "application/x-www-form-urlencoded"])
def test_json_is_read_if_its_sender_does_not_say_what_it_is(
    guarded: Gateway, kind: str | None
) -> None:
    """Like curl, unless it is told to. Browsers say which page is asking."""
    headers = AUTHORIZED if kind is None else {**AUTHORIZED, "Content-Type": kind}
    body = json.dumps({**LONG, "max_tokens": 1}).encode()
    url = f"{guarded.url}/v1/completions"
    assert httpx.post(url, content=body, headers=headers, timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize("charset", ['"UTF-8"', "utf8"])
def test_the_charset_may_be_said(guarded: Gateway, charset: str) -> None:
    headers = {**AUTHORIZED, "Content-Type": f"Application/JSON; charset={charset}"}
    body = {**LONG, "max_tokens": 1}
    assert guarded.post("/v1/completions", body, headers=headers).status_code == 200


def test_a_client_that_leaves_before_it_has_asked(guarded: Gateway) -> None:
    """It is not an error of the gateway, whose log must have none."""
    line = 'minisgl_gateway_requests_total{route="/v1/completions",status="499"}'
    before = guarded.metric(line)
    with socket.create_connection(guarded.address) as connection:
        connection.sendall(post(b'{"model":', "Content-Length: 1000"))
    guarded.wait_metric(line, before + 1)


def test_a_body_that_is_no_http(guarded: Gateway) -> None:
    assert raw(guarded, post(b"zz\r\n", "Transfer-Encoding: chunked")).startswith(b"HTTP/1.1 400 ")


def test_clients_of_older_http_get_neither_chunks_nor_permission(guarded: Gateway) -> None:
    """They know neither: the end of the connection ends a stream, and the body comes unasked."""
    body = json.dumps({**LONG, "max_tokens": 3, "stream": True}).encode()
    data = post(body, f"Content-Length: {len(body)}", "Expect: 100-continue")
    head, _, rest = data.replace(b"HTTP/1.1", b"HTTP/1.0").partition(b"\r\n\r\n")
    found = b""
    with socket.create_connection(guarded.address, timeout=PATIENCE_S) as connection:
        connection.sendall(head + b"\r\n\r\n")
        time.sleep(0.05)  # in which permission would come
        connection.sendall(rest)
        while piece := connection.recv(65536):
            found += piece
    head, _, events = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert all(line.startswith(b"data: ") for line in events.split(b"\n") if line)
    assert events.endswith(b"data: [DONE]\n\n")


def test_a_whole_answer_for_older_http(guarded: Gateway) -> None:
    body = json.dumps({**LONG, "max_tokens": 3}).encode()
    data = post(body, f"Content-Length: {len(body)}").replace(b"HTTP/1.1", b"HTTP/1.0")
    with socket.create_connection(guarded.address, timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    head, _, answer = found.partition(b"\r\n\r\n")
    assert f"content-length: {len(answer)}".encode() in head.lower()
    assert json.loads(answer)["usage"]["completion_tokens"] == 3


def test_offers_to_speak_something_else_are_not_taken(guarded: Gateway) -> None:
    """Requests are answered as they are, with their bodies."""
    offer = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAEAAEAA",
    }
    with httpx.Client(headers={**AUTHORIZED, **offer}, timeout=PATIENCE_S) as client:
        for _ in range(2):
            answer = client.post(f"{guarded.url}/v1/completions", json={**LONG, "max_tokens": 1})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("place", range(len("\r\nUpgrade:") + 1))
def test_such_an_offer_in_two_packets(guarded: Gateway, place: int) -> None:
    body = json.dumps({**LONG, "max_tokens": 1}).encode()
    data = post(body, "Connection: Upgrade", "Upgrade: h2c", f"Content-Length: {len(body)}")
    cut = data.index(b"\r\nUpgrade:") + place
    with socket.create_connection(guarded.address, timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(data[:cut])
        time.sleep(0.05)
        connection.sendall(data[cut:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("is_answered_first", [False, True])
def test_a_body_is_read_as_it_stands(guarded: Gateway, is_answered_first: bool) -> None:
    """What looks like an offer in it does not move its end, after which the next request begins."""
    hidden = b"GET /hidden HTTP/1.1\r\nHost: x\r\nX: ..........\r\n\r\n"
    body = b"\nUpgrade:" * (len(hidden) // 6) + hidden
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(guarded.address, timeout=PATIENCE_S) as connection:
        found = b""
        if is_answered_first:
            connection.sendall(head.encode())
            found = connection.recv(65536)
            connection.sendall(body)
        else:
            connection.sendall(head.encode() + body)
        connection.sendall(last)
        while piece := connection.recv(65536):
            found += piece
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"401", b"200"]


def test_head(gateway: Gateway) -> None:
    for path in ("/", "/health", "/v1/models"):
        answer = gateway.request("HEAD", path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["Content-Length"]) > 0
    assert gateway.request("HEAD", "/v1/completions").status_code == 405


def test_other_routes_and_methods(gateway: Gateway) -> None:
    assert gateway.get("/v1/nothing").json()["error"]["code"] == "not_found"
    answer = gateway.get("/v1/completions")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    error = answer.json()["error"]
    assert error["code"] == "method_not_allowed"
    assert error["message"] == "GET /v1/completions is not offered, only POST"
    answer = gateway.request("PUT", "/v1/responses/resp_1")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, DELETE")
    assert answer.json()["error"]["message"].endswith(" is not offered, only GET and DELETE")


# --- how many at a time -----------------------------------------------------------------------


ENDLESS: dict[str, Any] = {**LONG, "max_tokens": 7000, "stream": True, "stop": "never said"}


def wait_free(guarded: Gateway) -> None:
    """Wait until a key has all its places again, which clients that left give back."""
    small = {**LONG, "n": 3, "max_tokens": 1}
    wait_for(
        lambda: guarded.post("/v1/completions", small, headers=AUTHORIZED).status_code == 200,
        "places given back by a client that left",
    )


def test_one_key_may_have_so_many_answers_at_a_time(guarded: Gateway) -> None:
    """Eight come at once; those that are let in stay until all have an answer."""
    ready = threading.Barrier(8)
    with httpx.Client(headers=AUTHORIZED, timeout=PATIENCE_S) as client:

        def ask(number: int) -> httpx.Response:
            ready.wait()
            request = client.build_request("POST", f"{guarded.url}/v1/completions", json=ENDLESS)
            return client.send(request, stream=True)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
        for answer in answers:
            if answer.status_code == 429:
                assert answer.headers["Retry-After"] == "1"
                answer.read()
                assert answer.json()["error"]["type"] == "rate_limit_error"
            answer.close()
    wait_free(guarded)
    answer = guarded.post("/v1/completions", {**LONG, "n": 4}, headers=AUTHORIZED)
    assert answer.status_code == 400, "there is never room for its answers"
    error = answer.json()["error"]
    assert error["message"] == "at most 3 answers can be had at a time, got 4"
    assert error["param"] == "n" and "Retry-After" not in answer.headers


def test_so_many_answers_in_all(guarded: Gateway) -> None:
    other = {"Authorization": f"Bearer {KEYS[1]}"}
    body = {**ENDLESS, "n": 3}
    with httpx.stream(
        "POST", f"{guarded.url}/v1/completions", json=body, headers=other, timeout=PATIENCE_S
    ) as first:
        assert first.status_code == 200
        answer = guarded.post("/v1/completions", {**LONG, "n": 3}, headers=AUTHORIZED)
        assert answer.status_code == 429
    wait_free(guarded)


def test_a_reader_that_is_silent_is_cut(guarded: Gateway) -> None:
    before = guarded.metric("minisgl_gateway_slow_readers_total")
    fields = {**LONG, "max_tokens": 4000, "stream": True, "logprobs": 20}
    body = json.dumps(fields).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(guarded.address)
        reader.sendall(post(body, f"Content-Length: {len(body)}"))
        wait_for(
            lambda: guarded.metric("minisgl_gateway_slow_readers_total") > before,
            "a cut of the silent reader",
        )
    guarded.wait_metric("minisgl_gateway_open_streams", 0)


def test_answers_that_nobody_reads_do_not_keep_a_connection(guarded: Gateway) -> None:
    before = guarded.metric("minisgl_gateway_slow_readers_total")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(guarded.address)
        reader.sendall(b"GET /page.js HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        wait_for(
            lambda: guarded.metric("minisgl_gateway_slow_readers_total") > before,
            "a cut of the silent reader",
        )


def has_connection(gateway: Gateway, port: int) -> bool:
    """Whether the gateway has one to our ``port``; a closed one may linger in the kernel."""
    ends = [f":{gateway.address[1]:04X}", f":{port:04X}"]
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = [
        fields[9]
        for fields in map(str.split, lines)
        if [address[-5:] for address in fields[1:3]] == ends
    ]
    return any(inode != "0" for inode in inodes)


def test_a_whole_answer_that_nobody_reads_is_cut(guarded: Gateway) -> None:
    count = 'minisgl_gateway_request_seconds_count{route="/v1/completions"}'
    before = guarded.metric(count)
    body = json.dumps({**LONG, "max_tokens": 400, "logprobs": 20}).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(guarded.address)
        reader.sendall(post(body, f"Content-Length: {len(body)}", "Connection: close"))
        port = reader.getsockname()[1]
        wait_for(lambda: guarded.metric(count) > before, "the end of its request")
        wait_for(lambda: not has_connection(guarded, port), "the end of its connection")


# --- what goes wrong behind it ----------------------------------------------------------------


def test_deadlines_and_keys_from_the_environment(talker: TritonServer, tmp_path: Any) -> None:
    triton = f"127.0.0.1:{talker.grpc_port}"
    headers = {"Authorization": "Bearer b"}
    long = {**LONG, "max_tokens": 7000}

    def stream_of(timeout_s: float) -> httpx.Response:
        with gateway_of(
            triton, tmp_path / "log", f"--timeout-s={timeout_s}", MINISGL_API_KEYS="a b"
        ) as gateway:
            assert gateway.get("/v1/models").status_code == 401
            answer = gateway.post("/v1/completions", long, headers=headers)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "timeout"
            return gateway.post("/v1/completions", {**long, "stream": True}, headers=headers)

    stream = stream_of(1.0)
    if stream.status_code == 504:  # a busy machine had nothing to stream yet
        stream = stream_of(10.0)
    assert stream.status_code == 200
    *events, last, end = stream.text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert text and SCRIPT.startswith(text[: len(SCRIPT)])
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert end == "", "no [DONE] after an error"


def test_an_engine_that_is_away(tmp_path: Any) -> None:
    with ExitStack() as stack:
        unused = stack.enter_context(socket.socket())
        unused.bind(("127.0.0.1", 0))  # no process listens there
        triton = f"127.0.0.1:{unused.getsockname()[1]}"
        gateway = stack.enter_context(gateway_of(triton, tmp_path / "log"))
        assert gateway.get("/health").status_code == 503
        for stream in (False, True):
            answer = gateway.post("/v1/completions", {**LONG, "stream": stream})
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            assert "127.0.0.1" not in answer.text
        assert gateway.get("/v1/models").status_code == 200


def test_an_engine_that_is_full(wide: Gateway, talker: TritonServer) -> None:
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    wait_for(lambda: not any(Metrics(talker)[name] for name in gauges), "an idle engine")
    body = {**ENDLESS, "n": 8}
    with httpx.stream("POST", f"{wide.url}/v1/completions", json=body, timeout=PATIENCE_S) as first:
        assert first.status_code == 200

        def refused() -> bool:
            answer = wide.post("/v1/completions", {**LONG, "max_tokens": 1})
            return answer.status_code == 503 and "queue full" in answer.text

        wait_for(refused, "an engine with eight requests open")
        assert wide.get("/health").status_code == 200


def test_an_engine_that_drains(tmp_path: Path) -> None:
    """It finishes what it has begun, and the probe says that it takes no more."""
    repository = paced_repository(tmp_path)
    with (
        running(repository, exit_code=None) as server,
        gateway_of(f"127.0.0.1:{server.grpc_port}", tmp_path / "log") as gateway,
    ):
        assert gateway.get("/health").json() == {"status": "ok"}
        body = {**LONG, "stream": True}
        with httpx.stream(
            "POST", f"{gateway.url}/v1/completions", json=body, timeout=PATIENCE_S
        ) as answer:
            pieces = answer.iter_raw()
            assert next(pieces)
            (server.directory / DRAIN_MARKER).touch()
            wait_for(lambda: gateway.get("/health").status_code == 503, "an engine that drains")
            assert gateway.post("/v1/completions", LONG).status_code == 503
            assert next(pieces)
        server.signal(signal.SIGKILL)


def test_health_and_metrics(gateway: Gateway) -> None:
    assert gateway.get("/health").json() == {"status": "ok"}
    line = 'minisgl_gateway_requests_total{route="/v1/chat/completions",status="200"}'
    before = gateway.metric(line)
    assert gateway.chat("What is the capital of France?").status_code == 200
    gateway.wait_metric(line, before + 1)
    own = 'minisgl_gateway_request_seconds_count{route="/metrics"}'
    wait_for(lambda: gateway.metric(own) > 0, "the counts of what was asked here")
    gateway.wait_metric("minisgl_gateway_open_streams", 0)
