"""`minisgl chat --model`: a server that starts and ends with the chat."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pexpect
import pytest

from minisgl_backend.config import DEMO_MODEL
from tests.client.commands import GREEDY, MINISGL, run
from tests.waiting import wait_until

pytestmark = pytest.mark.server

_LOAD_S: Final = 120


@contextmanager
def chat(directory: Path, *words: str) -> Iterator[pexpect.spawn[str]]:
    """A chat in a terminal; when the block is left, nothing that it started may still run.

    Whatever its server starts keeps files in ``directory``, which identifies it.
    """
    history = str(directory / "history")
    child = pexpect.spawn(
        MINISGL[0],
        [*MINISGL[1:], "chat", "--history", history, *GREEDY, *words],
        encoding="utf-8",
        timeout=_LOAD_S,
        dimensions=(40, 160),
        env={
            **os.environ,
            "TERM": "xterm-256color",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "TMPDIR": str(directory),
        },
    )
    try:
        yield child
    finally:
        child.close(force=True)
        wait_until(lambda: not started_in(directory))


def started_in(directory: Path) -> dict[int, str]:
    """The processes that have their temporary files there, and what they run."""
    mark = f"TMPDIR={directory}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:  # otherwise it has ended, but its parent has not reaped it
                    found[int(process.name)] = command
        except OSError:  # it has just ended
            continue
    return found


def test_a_chat_with_a_server_of_its_own(tmp_path: Path) -> None:
    options = ["--", "--num-pages", "300", "--max-running-requests", "4"]
    with chat(tmp_path, "--model", DEMO_MODEL, *options) as child:
        child.expect(r"loading .*demo_model")
        child.expect(r"demo_model at 127\.0\.0\.1:\d+\. /help lists commands")
        commands = " ".join(started_in(tmp_path).values())
        assert "tritonserver" in commands
        assert "--num-pages 300" in commands
        child.expect(">")
        child.send("What is the capital of France?\r")
        child.expect("Paris")
        child.expect("tokens/s")
        child.expect(">")
        child.send("\x03")  # clears the line; it is not for the server
        child.expect(">")
        child.send("What is the opposite of hot?\r")
        child.expect("cold")
        child.expect("tokens/s")
        child.expect(">")
        child.send("\x04")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
        assert not started_in(tmp_path)  # it has waited for its server
        assert [path.name for path in tmp_path.iterdir()] == ["history"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_chat_ends_the_server(number: signal.Signals, tmp_path: Path) -> None:
    with chat(tmp_path, "--model", DEMO_MODEL) as child:
        child.expect("/help lists commands")
        assert len(started_in(tmp_path)) > 4
        child.kill(number)
        child.expect(pexpect.EOF)
        wait_until(lambda: not started_in(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} <= {"history"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_while_it_loads(number: signal.Signals, tmp_path: Path) -> None:
    with chat(tmp_path, "--model", DEMO_MODEL) as child:
        child.expect("loading .*: ")  # the server has said something
        assert started_in(tmp_path)
        child.kill(number)
        child.expect(pexpect.EOF)
        wait_until(lambda: not started_in(tmp_path))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "/no/such/folder"], "Error: /no/such/folder is neither a folder nor a model"),
        (
            ["--model", DEMO_MODEL, "--", "--num-pags", "3"],
            r"Error: No such option '?--num-pags'?\.? .*Did you mean .*--num-pages",
        ),
        (
            ["--model", DEMO_MODEL, "--", "--max-sequence-length", "9000"],
            "Error: max_sequence_length 9000 exceeds the model's context of 8192",
        ),
        (
            ["--model", DEMO_MODEL, "--", "--num-pages", "900000000"],
            "Error: num_pages=900000000 of 16 positions would take",
        ),
        (["--", "--num-pages", "3"], "Error: --num-pages is for a server of its own: give --model"),
        (["--model", DEMO_MODEL, "--url", "x:1"], "Error: --model starts a server of its own, and"),
    ],
)
def test_what_a_server_refuses_is_told(words: list[str], complaint: str, tmp_path: Path) -> None:
    with chat(tmp_path, *words) as child:
        child.expect(complaint)
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus in (1, 2)


def test_a_chat_starts_no_server_without_a_terminal() -> None:
    done = run("chat", "--model", DEMO_MODEL)
    assert done.returncode == 2
    assert "chat needs a terminal" in done.stderr
