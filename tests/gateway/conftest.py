"""Gateways for the tests: real processes in front of real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl_backend.server.process import TritonServer
from minisgl_kit.repositories import repository_with
from tests.fakes import chat_templates
from tests.gateway import magistral as said
from tests.gateway.agent import model_of_agents
from tests.server.client import PATIENCE_S, wait_for
from tests.server.conftest import running

COMMAND = [sys.executable, "-m", "minisgl_backend.cli", "gateway"]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bogotá 🌧"}}\n</tool_call>'
SCRIPT = f"I will look it up.\n{CALL}\n"
"""What the paced engine says, again and again."""
THOUGHTS = "<think>\nTwo and two.\nThat is four.\n</think>\n\nIt is 4.\n"
PACED = """\
from minisgl_bench.paced import paced_model

TritonPythonModel = paced_model(step_s=0.003, text={!r})
"""
_AGENT = "from tests.gateway.agent import TritonPythonModel\n"
_MAGISTRAL = "from tests.gateway.magistral import TritonPythonModel\n"
LIMITS = {"max_running_requests": "4", "max_queued_requests": "4", "max_prefill_tokens": "64"}
KEYS = ("first-key", "second-key")
TLS = ssl.create_default_context()
"""For httpx, which would otherwise read all certificates for each request: 30 ms."""


@dataclass(frozen=True)
class Gateway:
    """A gateway under test."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """POST a body: JSON, or bytes as they are."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        return self.request("POST", path, content=body, headers=headers, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request on its own connection."""
        return httpx.request(method, self.url + path, timeout=2 * PATIENCE_S, verify=TLS, **more)

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        """Ask for an answer to one message."""
        messages = [{"role": "user", "content": content}]
        body = {"model": "minisgl", "messages": messages, "temperature": 0, **fields}
        return self.post("/v1/chat/completions", body)

    def metric(self, line: str) -> float:
        """A line of /metrics, by its name and labels as written there."""
        text = self.get("/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0

    def wait_metric(self, line: str, value: float) -> None:
        """Wait until /metrics says so: an answer is counted once the client has all of it."""
        wait_for(lambda: self.metric(line) == value, f"{line} {value}")

    def wait_logged(self, pattern: str) -> None:
        """Wait until the log has such a line, which is written when an answer is counted."""
        wait_for(lambda: bool(re.search(pattern, self.log.read_text())), pattern)


@contextmanager
def gateway_of(
    triton: str | Sequence[str], log: Path, *options: str, **environment: str
) -> Iterator[Gateway]:
    """A listening gateway in front of one or several servers; it must end cleanly, without any bug
    in its log."""
    if isinstance(triton, str):
        command = [*COMMAND, "--triton", triton, "--port", "0"]
    else:
        servers = [word for address in triton for word in ("--server", address)]
        command = [*COMMAND, *servers, "--port", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **environment},
        )
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, log.read_text()
        yield Gateway(found[0], process, log)
    finally:
        was_killed = process.poll() == -signal.SIGKILL
        process.terminate()
        process.stdout.close()
        code = process.wait(PATIENCE_S * 2)
    text = log.read_text()
    assert was_killed or code == 0, text
    assert "Traceback" not in text, text


@contextmanager
def gateway_to(model: Path, folder: Path, engine: str | None = None) -> Iterator[Gateway]:
    """A gateway in front of a server of this checkpoint, both in ``folder``; ``engine`` is code
    that the server runs as its engine instead."""
    repository = repository_with({} if engine is None else {"llm_engine": engine}, folder)
    with (
        running(repository, options={"model": str(model)}) as server,
        gateway_of(f"127.0.0.1:{server.grpc_port}", folder / "log") as started,
    ):
        yield started


@pytest.fixture(scope="session")
def gateway(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of the demo model, open to everybody."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    with gateway_of(f"127.0.0.1:{server.grpc_port}", log) as started:
        yield started


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose engine says ``SCRIPT`` forever, a token every 3 ms, to four at a time."""
    folder = tmp_path_factory.mktemp("talker")
    repository = repository_with({"llm_engine": PACED.format(SCRIPT)}, folder)
    # many streams are cancelled here, and 24.10 sometimes leaks one, so that it cannot unload
    with running(repository, options=LIMITS, exit_code=None) as started:
        yield started
        started.signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def guarded(talker: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of the talker, with keys, low limits and little patience."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text(f"# who may ask\n{KEYS[0]}  # the first\n\n{KEYS[1]}\n")
    with gateway_of(
        f"127.0.0.1:{talker.grpc_port}",
        folder / "log",
        *("--api-key-file", str(folder / "keys")),
        *("--max-requests", "5"),
        *("--max-requests-per-key", "3"),
        *("--max-body-bytes", "100000"),
        *("--patience-s", "2"),
    ) as started:
        yield started
        log = (folder / "log").read_text()
        assert not any(key in log for key in KEYS)


@pytest.fixture(scope="session")
def wide(talker: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of the talker, open to everybody."""
    log = tmp_path_factory.mktemp("wide") / "log"
    with gateway_of(f"127.0.0.1:{talker.grpc_port}", log) as started:
        yield started


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of an engine that says ``THOUGHTS``, with Qwen3's template."""
    folder = tmp_path_factory.mktemp("thinker")
    model = model_of_agents(folder, chat_templates.QWEN3)
    with gateway_to(model, folder, PACED.format(THOUGHTS)) as started:
        yield started


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of a model that calls a tool before it answers: see ``agent``."""
    folder = tmp_path_factory.mktemp("agent")
    with gateway_to(model_of_agents(folder), folder, _AGENT) as started:
        yield started


@pytest.fixture(scope="session")
def magistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of a model that thinks, speaks and calls a tool: see ``magistral``."""
    folder = tmp_path_factory.mktemp("magistral")
    model = chat_templates.demo_model(
        folder / "model", chat_templates.MAGISTRAL, said.MARKS, special=True
    )
    with gateway_to(model, folder, _MAGISTRAL) as started:
        yield started
