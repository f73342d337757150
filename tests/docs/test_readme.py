"""The README's examples, run against a real server, print what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest

from minisgl_backend.server.process import TritonServer
from tests.docker.conftest import tool
from tests.docs.markdown import Call, Page
from tests.docs.test_docs import ROOT

pytestmark = pytest.mark.server

README: Final = Page(ROOT / "README.md")
CURLS: Final = [call for call in README.calls if "curl" in call.command]

EXAMPLES: Final = [block.text for block in README.blocks if block.language == "python"]


@pytest.fixture(scope="module")
def here(server: TritonServer, gateway: str) -> Callable[[str], str]:
    """Replaces the README's usual ports with those of the running servers."""
    ports = {
        "127.0.0.1:8000": f"127.0.0.1:{server.http_port}",
        "127.0.0.1:8001": f"127.0.0.1:{server.grpc_port}",
        "localhost:8001": f"127.0.0.1:{server.grpc_port}",
        "127.0.0.1:9000": gateway.removeprefix("http://"),
    }

    def put(text: str) -> str:
        for usual, real in ports.items():
            text = text.replace(usual, real)
        return text

    return put


@pytest.mark.parametrize("call", CURLS, ids=lambda call: re.findall(r"/(\w+) ", call.command)[0])
def test_curl_lines_print_what_is_shown(call: Call, here: Callable[[str], str]) -> None:
    done = subprocess.run(
        ["bash", "-c", here(call.command)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert '"error"' not in done.stdout
    if "data: " in call.output:
        shown, printed = events(call.output), events(done.stdout)
        assert shown[0].keys() == printed[0].keys()
        assert text_of(printed).startswith(text_of(shown))
        assert printed[-1]["finish_reason"] == shown[-1]["finish_reason"]
    else:
        assert call.output in ("", done.stdout.strip())


def events(text: str) -> list[dict[str, Any]]:
    """Server-sent events. How text is cut into them depends on the machine's load."""
    lines = text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data:")]


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(event["text_output"] for event in found)


def test_the_shell_example_prints_what_is_shown(server: TritonServer) -> None:
    (call,) = [call for call in README.calls if "minisgl generate" in call.command]
    done = subprocess.run(
        [tool("minisgl"), *shlex.split(call.command)[1:]],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MINISGL_URL": f"127.0.0.1:{server.grpc_port}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == call.output


def test_the_first_curl_line_is_what_the_server_suggests() -> None:
    suggested = next(block.text for block in README.blocks if "Try it:" in block.text)
    assert CURLS[0].command in suggested


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.split()[1])
def test_python_examples_print_what_their_comments_say(
    example: str, here: Callable[[str], str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", here(example)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"print\(.*\)  # (.+)", example)
    assert promised
    assert [text for text in promised if text not in done.stdout] == []
