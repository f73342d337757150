"""A model's process ends with the process that started it, even if its interpreter is stuck."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend import death_signal

STARTER = """\
import subprocess, sys, threading

def load():
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.DEVNULL)
    sys.stdin.readline()

loader = threading.Thread(target=load)
loader.start()
loader.join()
sys.stdin.readline()
"""
"""Starts a model's process from a thread that ends at a line of its input, as tritonserver's does
when the model is loaded. What the process prints goes where this one's does."""

MODEL = """\
import ctypes, os, signal, threading
from minisgl_backend import death_signal

print(os.getpid(), flush=True)

def keep_the_lock():
    ctypes.PyDLL(None).pause()
"""
STUCK_WHILE_LOADING = """
with death_signal.ending_with(os.getppid()):
    print("loading", flush=True)
    keep_the_lock()
"""
STUCK_WHEN_LOADED = """
is_asked = threading.Event()
end_with = death_signal.end_with

def listen(number):
    end_with(number)
    if threading.current_thread() is not threading.main_thread():
        is_asked.set()

death_signal.end_with = listen
with death_signal.ending_with(os.getppid()):
    pass
print("loaded", flush=True)
is_asked.wait()
print("stuck", flush=True)
keep_the_lock()
"""
PARENT_SEEMS_THE_FIRST_THREAD = """
death_signal._is_child_of_main_thread = lambda _: False
with death_signal.ending_with(os.getppid()):
    pass
print("loaded", flush=True)
signal.pause()
"""
PARENT_IS_GONE = """
with death_signal.ending_with(os.getppid() + 1):
    print("loading", flush=True)
"""
PATIENCE_S = 60


class Starter:
    """A process that has started a model's process."""

    def __init__(self, process: subprocess.Popen[str], model: int) -> None:
        self.process = process
        self.model = model
        """A descriptor of the model's process."""

    def check_it_says(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def end_loader(self) -> None:
        """End the thread that started the model's process."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def check_model_ends_at_kill(self) -> None:
        assert not select.select([self.model], [], [], 0)[0]
        self.process.kill()
        assert select.select([self.model], [], [], PATIENCE_S)[0]


@contextlib.contextmanager
def starting(model: str) -> Iterator[Starter]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", STARTER, MODEL + model]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        descriptor = os.pidfd_open(int(process.stdout.readline()))
        try:
            yield Starter(process, descriptor)
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
            process.kill()


def test_end_of_the_parent_while_stuck_in_loading() -> None:
    with starting(STUCK_WHILE_LOADING) as starter:
        starter.check_it_says("loading")
        starter.check_model_ends_at_kill()


def test_end_of_the_parent_while_stuck_later() -> None:
    """The earlier end of the thread that loaded the model ends nothing."""
    with starting(STUCK_WHEN_LOADED) as starter:
        starter.check_it_says("loaded")
        starter.end_loader()
        starter.check_it_says("stuck")
        starter.check_model_ends_at_kill()


def test_end_of_the_parent_where_it_cannot_be_told_which_thread_that_is() -> None:
    with starting(PARENT_SEEMS_THE_FIRST_THREAD) as starter:
        starter.check_it_says("loaded")
        starter.end_loader()
        starter.check_model_ends_at_kill()


def test_nothing_is_loaded_where_the_parent_is_gone() -> None:
    command = [sys.executable, "-c", MODEL + PARENT_IS_GONE]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert "loading" not in ended.stdout


def test_the_first_thread_is_told_by_the_own_namespace_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In other namespaces the ids of this process and its parent may be those of any processes."""
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: f"7 {os.getpid()} 8 ")
    assert death_signal._is_child_of_main_thread(os.getppid())
    monkeypatch.setattr(os, "readlink", lambda path: "7")
    assert not death_signal._is_child_of_main_thread(os.getppid())
