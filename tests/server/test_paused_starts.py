"""A model's process gets no processor while it starts: tritonserver aborts, and is started again.

24.10 gives such a process up after about a second, and then takes a lock that it has freed.
"""

from __future__ import annotations

from pathlib import Path

from minisgl_kit.repositories import repository_with
from tests.server.client import generate
from tests.server.conftest import running
from tests.server.test_newer_tritons import supervised

PAUSED = """\
import os
import pathlib
import signal
import subprocess

from minisgl_backend.tritonserver.tokenizer import TritonPythonModel

starts = pathlib.Path({starts!r})
with starts.open("a") as file:
    print(file=file)
if starts.stat().st_size <= {num_paused}:
    subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {{os.getpid()}}"])
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def paused(folder: Path, *, num_paused: int) -> Path:
    """A model repository whose tokenizer is paused in its first starts."""
    model = PAUSED.format(starts=str(folder / "starts"), num_paused=num_paused)
    return repository_with({"tokenizer": model}, folder)


def num_starts(folder: Path) -> int:
    """How often the tokenizer has started. tritonserver may have started more often: if the machine
    is busy, it may abort for want of another process before this one begins."""
    return len((folder / "starts").read_bytes())


def test_a_server_for_tests_and_benchmarks_comes_up(tmp_path: Path) -> None:
    with running(paused(tmp_path, num_paused=2)) as server:
        assert num_starts(tmp_path) >= 3
        assert generate(server, input_ids=[1], max_tokens=3)["text_output"]


def test_a_served_one_comes_up(tmp_path: Path) -> None:
    """Each start but the first is a recovery. There may be a second one: now and then 24.10 hangs
    or aborts in a start by itself."""
    with supervised(paused(tmp_path, num_paused=1)) as world:
        assert world.num_starts == 1 + world.num_recoveries() >= 2
        assert num_starts(tmp_path) >= 2
        assert world.answers()
