"""Signals end a command although its threads are in calls that take minutes.

Otherwise each test would wait for ten minutes, and fail by its time limit.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.waiting import wait_until

STUCK_MAIN_THREAD = """
import ctypes, signal, subprocess
from minisgl_backend.cli.interrupt import end_in_time
end_in_time({takes_over}clean_up_s=0.1)
child = subprocess.Popen(["sleep", "600"])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
lock = ctypes.CDLL(None).pthread_mutex_lock
mutex = ctypes.create_string_buffer(64)
lock(mutex)
print("stuck", child.pid, flush=True)
lock(mutex)  # no signal interrupts it, as none does a call of torch
"""

ENDED_THREAD = """
from pathlib import Path
glob = Path.glob
Path.glob = lambda self, pattern: [Path("/proc/self/task/0/children"), *glob(self, pattern)]
"""

STUCK_STEP = """
import sys, time
from minisgl_backend.device.cpu import CpuDevice

submit = CpuDevice.submit

def stuck(self, work):
    def step():
        print("stuck", flush=True)
        time.sleep(600)
    return submit(self, step)

CpuDevice.submit = stuck
from minisgl_backend.cli.__main__ import main
sys.argv = ["minisgl", "bench", "offline", "--requests", "1", "--num-pages", "64"]
main()
"""

IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # torch aborts the process
                os._exit(1)
sys.meta_path.insert(0, Finder())
from minisgl_backend.cli.__main__ import main
sys.argv = ["minisgl", "bench", *{arguments}]
main()
"""


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def words_when_stuck(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("stuck"):
            return line.split()
    raise AssertionError("it ended before it was stuck")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_main_thread_in_a_long_call_is_no_obstacle(number: signal.Signals) -> None:
    with running(STUCK_MAIN_THREAD.format(takes_over="")) as process:
        words_when_stuck(process)
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number


def test_child_processes_are_ended_too() -> None:
    with running(STUCK_MAIN_THREAD.format(takes_over="")) as process:
        _, pid = words_when_stuck(process)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        wait_until(lambda: not is_alive(int(pid)))


def test_a_thread_that_ends_meanwhile_is_no_obstacle() -> None:
    with running(ENDED_THREAD + STUCK_MAIN_THREAD.format(takes_over="")) as process:
        _, pid = words_when_stuck(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        wait_until(lambda: not is_alive(int(pid)))


def test_a_signal_that_the_command_takes_over_is_left_to_it() -> None:
    takes_over = f"lambda number: number == {int(signal.SIGINT)}, "
    with running(STUCK_MAIN_THREAD.format(takes_over=takes_over)) as process:
        words_when_stuck(process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_ends_while_a_step_runs(number: signal.Signals) -> None:
    with running(STUCK_STEP) as process:
        words_when_stuck(process)
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number


@pytest.mark.parametrize("arguments", [["offline"], ["decode"], ["adapters"], ["kernels"]])
def test_ctrl_c_while_torch_is_imported(arguments: list[str]) -> None:
    with running(IMPORTING.format(arguments=arguments)) as process:
        assert process.wait(timeout=60) == 130


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
