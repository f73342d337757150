"""A server that belongs to one command: `minisgl serve` as a child process, on free ports.

Knows that command's lines: one says where gRPC listens as soon as the models are loaded; the last
ones say why it did not start. Must not know the engine, whose package may be missing here.

Invariant: the child ends with this process, whatever ends this one: the kernel then sends it
SIGTERM, and it ends its own children and removes their files.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final

import click

_PACKAGE: Final = "minisgl_backend"
_PORTS: Final = ("--http-port", "--grpc-port", "--metrics-port", "--health-port")
_READY: Final = re.compile(r" +gRPC +(\S+)")
_ERROR: Final = "Error: "
_KEPT_LINES: Final = 20
_PATIENCE_S: Final = 20.0
"""How long the server has to end; it takes a second or two when nothing is in flight."""
_PR_SET_PDEATHSIG: Final = 1


class OwnServer:
    """A server of ``model``; leaving the block ends it. Belongs to the thread that makes it."""

    def __init__(self, model: str, options: Sequence[str]) -> None:
        """``options`` are further words for `minisgl serve`. Raises ``click.ClickException``."""
        if find_spec(_PACKAGE) is None:
            raise click.ClickException(
                "--model needs the engine on this machine: pip install '.[server]' in a clone"
            )
        ports = [word for port in _PORTS for word in (port, "0")]
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        command = [sys.executable, "-m", f"{_PACKAGE}.cli", "serve", "--model", model]
        try:
            self._process = subprocess.Popen(
                [*command, *ports, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                # Ctrl-C in the terminal is for the chat alone
                start_new_session=True,
                preexec_fn=_ending_with(os.getpid()),
            )
        except OSError as error:
            raise click.ClickException(f"no server can be started: {error}") from None

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def wait_ready(self, show: Callable[[str], None]) -> str:
        """Wait until the models are loaded; returns the address of gRPC.

        ``show`` gets each line of the server's log. Raises ``click.ClickException`` with the words
        of a server that does not start.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if ready := _READY.fullmatch(line.rstrip()):
                threading.Thread(target=self._keep_lines, daemon=True).start()
                self._lines.clear()
                return ready[1]
            if line.strip():
                self._lines.append(line.rstrip())
                show(line.strip())
        raise click.ClickException(self._failure())

    def take_lines(self) -> list[str]:
        """The last lines of the server's log since it was ready, or since the last call."""
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines

    def _failure(self) -> str:
        """Why it did not start: its error and everything after it, or else its last lines."""
        lines = list(self._lines)
        errors = [index for index, line in enumerate(lines) if line.startswith(_ERROR)]
        told = "\n".join(lines[errors[-1] :] if errors else lines).removeprefix(_ERROR)
        return told or "the server did not start, and did not say why"

    def _keep_lines(self) -> None:
        """Keep reading, on a thread of its own, else the server would have to wait for a reader."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip():
                self._lines.append(line.rstrip())

    def _end(self) -> None:
        for _ in range(2):  # the second signal makes it end at once
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE_S)
                return
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                continue
        self._process.kill()
        self._process.wait()


def _ending_with(parent: int) -> Callable[[], None]:
    """A function to call in the child: it then gets SIGTERM when ``parent``, or the thread of it
    that forked, ends."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: in a child the loader's locks may be held

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has already ended
            os._exit(1)

    return ask
