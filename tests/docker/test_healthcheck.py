"""docker/healthcheck.py tells a server that makes tokens from one that does not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from minisgl_backend.server.process import TritonServer
from tests.docker.conftest import DOCKER
from tests.server.client import Metrics, wait_for


def check(url: str) -> subprocess.CompletedProcess[str]:
    # -I: as in the container, without what the tests' environment adds
    command = [sys.executable, "-I", "-S", str(DOCKER / "healthcheck.py"), "--url", url]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.server
def test_a_server_that_makes_a_token_is_well(server: TritonServer) -> None:
    before = Metrics(server)["vllm:generation_tokens_total"]
    done = check(server.url())
    assert (done.returncode, done.stderr) == (0, "")
    wait_for(lambda: Metrics(server)["vllm:generation_tokens_total"] > before, "the token's count")


@contextmanager
def answering(status: int, body: object, embedding: Sequence[float] | None = None) -> Iterator[str]:
    """A server that answers every request like this, since ours cannot be made to; those for an
    embedding with ``embedding``, if given."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            embeds = embedding is not None and asked.get("embed")
            payload = json.dumps({"embedding": embedding} if embeds else body).encode()
            self.send_response(200 if embeds else status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as fake:
        thread = threading.Thread(target=fake.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{fake.server_port}"
        finally:
            fake.shutdown()
            thread.join()


def test_a_full_queue_is_no_illness() -> None:
    error = "in ensemble 'minisgl', UNAVAILABLE: queue full: 9 requests open of at most 9"
    with answering(400, {"error": error}) as url:
        assert check(url).returncode == 0


def test_a_model_that_only_makes_embeddings_is_well() -> None:
    refusal = "INVALID_ARG: embed must be true: the checkpoint has no output head"
    error = f"in ensemble 'minisgl', {refusal}"
    with answering(400, {"error": error}, [0.6, 0.8]) as url:
        assert check(url).returncode == 0
    with answering(400, {"error": error}) as url:
        assert check(url).returncode == 1


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with answering(200, {"text_output": "x"}) as url:
        assert check(url).returncode == 0


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": "in ensemble 'minisgl', INTERNAL: the engine failed"}),
        (400, {"error": "in ensemble 'minisgl', UNAVAILABLE: the engine is down"}),
        (500, {"error": "Stub process 'llm_engine_0_0' is not healthy."}),
        (200, {"no": "text"}),
    ],
)
def test_any_other_answer_is(status: int, body: dict[str, str]) -> None:
    with answering(status, body) as url:
        done = check(url)
    assert done.returncode == 1
    assert all(text in done.stderr for text in body.values())


def test_silence_is() -> None:
    done = check("http://127.0.0.1:1")
    assert done.returncode == 1
    assert "no answer" in done.stderr
