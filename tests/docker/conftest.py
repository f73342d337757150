"""What the tests of docker/ share: its files, the tools that check them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from minisgl_backend.server.process import TritonServer
from tests.server.client import PATIENCE_S, wait_for

ROOT: Final = Path(__file__).parents[2]
DOCKER: Final = ROOT / "docker"


def tool(name: str) -> str:
    """The path of a program, preferably in this environment; skips the test if it is missing."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; .ci/run installs it")
    return path


@pytest.fixture(scope="session")
def gateway(server: TritonServer) -> Iterator[str]:
    """The address of a gateway in front of the server, which has answered and counted a request."""
    command = [tool("minisgl"), "gateway", f"--triton=127.0.0.1:{server.grpc_port}", "--port=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("ready on ").strip()
            ask_gateway(url)
            # which is counted once the client has all of the answer
            counted = "minisgl_gateway_request_seconds_count"
            wait_for(lambda: counted in metrics_of(url), "its count")
            yield url
        finally:
            process.terminate()


def ask_gateway(url: str) -> None:
    """One streamed chat."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "minisgl", "messages": messages, "stream": True, "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert b"[DONE]" in response.read()


def metrics_of(url: str) -> str:
    """The gateway's metrics page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as response:
        return str(response.read(), "utf-8")
