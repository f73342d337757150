"""Whether a start makes progress: real processes, and a clock that the test moves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from minisgl_backend.server.progress import Progress, work_of
from tests.waiting import PATIENCE_S

WAITS = "import sys; print(flush=True); sys.stdin.read()"
COMPUTES = "while True: pass"
READS = "import time\nwhile True: open('/proc/self/maps').read(); time.sleep(0.001)"
ITS_CHILD_COMPUTES = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])"


class Clock:
    """A clock that shows the time the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def session(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.02)


NAMED = """
import sys
with open("/proc/self/comm", "wb") as file:
    file.write("программа".encode()[:15])  # as the kernel cuts a longer name
print(flush=True)
sys.stdin.read()
"""


def test_a_process_may_have_a_name_that_is_no_text() -> None:
    with session(NAMED) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert work_of(process.pid) > 0


def test_who_waits_is_stuck() -> None:
    clock = Clock()
    with session(WAITS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        progress = Progress(process.pid, set, clock=clock)
        clock.now_s = 50.0
        assert progress.stuck_s() == 50.0
        assert progress.stuck_s() == 50.0


@pytest.mark.parametrize("program", [COMPUTES, ITS_CHILD_COMPUTES, READS])
def test_who_computes_gets_on(program: str) -> None:
    """The process itself may compute, or one that it started; reading also counts."""
    clock = Clock()
    with session(program) as process:
        progress = Progress(process.pid, set, clock=clock)
        before_s = work_of(process.pid)
        wait(lambda: work_of(process.pid) > before_s + 0.6)
        clock.now_s = 50.0
        assert progress.stuck_s() == 0.0
        clock.now_s = 50.5
        assert progress.stuck_s() == 0.5, "not looked at again so soon"


def test_processes_that_have_loaded_count_no_more() -> None:
    clock = Clock()
    loaded: set[int] = set()
    with session(COMPUTES) as process:
        progress = Progress(process.pid, lambda: loaded, clock=clock)
        wait(lambda: work_of(process.pid) > 0.6)
        clock.now_s, loaded = 50.0, {process.pid}
        assert progress.stuck_s() == 0.0, "to have loaded is to get on"
        before_s = work_of(process.pid)
        wait(lambda: work_of(process.pid) > before_s + 0.6)
        clock.now_s = 90.0
        assert progress.stuck_s() == 40.0


def test_a_session_that_is_gone_does_nothing() -> None:
    with session(WAITS) as process:
        pass
    assert work_of(process.pid) == 0
