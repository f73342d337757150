"""`minisgl serve` in a process of its own, as an operator runs it.

Knows the command, what it prints and what it keeps in its temporary folder. Must not know cases.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from minisgl_check.target import Target

_PORTS: Final = (
    "--http-port",
    "0",
    "--grpc-port",
    "0",
    "--metrics-port",
    "0",
    "--health-port",
    "0",
)
_ENDS_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """``folder`` is its temporary folder, which it must leave empty."""

    process: subprocess.Popen[str]
    folder: Path
    lines: queue.SimpleQueue[str | None]

    def line_with(self, text: str, timeout_s: float) -> str | None:
        """The next line that it prints with the text in it; None if it ends or is silent."""
        try:
            while (line := self.lines.get(timeout=timeout_s)) is not None:
                if text in line:
                    return line
        except queue.Empty:
            pass
        return None

    def target(self, timeout_s: float) -> Target | None:
        """Where it listens, once it says that it is ready; None if it never does."""
        shown = (
            self.line_with(name, timeout_s) or "" for name in ("  HTTP ", "  gRPC ", "  health ")
        )
        http, grpc, health = (line.split()[-1] if line else "" for line in shown)
        if not (http and grpc and health):
            return None
        return Target(grpc, http, health.removesuffix("/ready"))


@contextmanager
def served(
    *options: str, before: Sequence[str] = (), tritonserver: str | None = None
) -> Iterator[Served]:
    """The command with these options; it is killed with the block, if it still runs.

    ``before`` precedes the command, such as a shell that prepares something.
    """
    command = [*before, sys.executable, "-m", "minisgl_backend.cli", "serve", *_PORTS, *options]
    if tritonserver is not None:
        command += ["--tritonserver", tritonserver]
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mc-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            yield Served(process, Path(folder), lines)
        finally:
            process.terminate()
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(_ENDS_WITHIN_S)


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip("\n")))
    lines.put(None)
