"""Which lines of a server's log the operator sees, and why a server did not start.

Knows the shape of tritonserver's log lines, and stderr. Must not know processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import sys
from collections.abc import Iterable
from typing import Final

_HARMLESS: Final = (
    "unable to create stream for",  # ensembles ask for a CUDA stream, even without a GPU
    "CudaDriverHelper has not been initialized",
    "pinned_memory_manager.cc",
    "Unable to allocate pinned system memory",
    "Signal (15) received",
)
_OURS: Final = re.compile(r'^[IWE]\d{4} ([\d:]+)\.\d+ +\d+ \S*\.py:\d+\] "(.*)"$')
_TRITON_INFO: Final = re.compile(r"^[IV]\d{4} [\d:.]+ +\d+ (?!\S*\.py:)")
_REFUSAL: Final = re.compile(
    r"^E\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\] .*"
    r"(?:Failed to create instance|failed to load '\w+'|is at UNAVAILABLE state)"
    r".*TritonModelException: "
)
"""A model says why it does not load, as Triton repeats it for everything that needs the model. Who
waits for the load tells it by ``load_failure``. What a model says later is told nowhere else."""
_LOAD_FAILURE: Final = re.compile(
    r"failed to load '(\w+)' version \d+: [\w ]+?: (?:TritonModelException: )?(.*)"
)
_PATIENCE_MS: Final = 1000
_ERROR: Final = re.compile(r"^E\d{4} [\d:.]+ +\d+ \S+:\d+\] (.*)|^error: (.*)")


class Console:
    """Writes lines to stderr: all lines of the server's log, or all but Triton's own chatter.

    Never raises, and waits at most a second for a reader, whatever stderr is: a server that waited
    longer would not serve. Lines that are not read are dropped, and counted. May be used by any
    thread and by signal handlers.
    """

    def __init__(self, *, everything: bool, descriptor: int | None = None) -> None:
        """``descriptor`` replaces stderr."""
        self._everything = everything
        self._descriptor = _stderr() if descriptor is None else descriptor
        self._patience_ms = _PATIENCE_MS
        self._num_left_out = 0

    def show(self, line: str) -> None:
        """Print a line of the server's log if the operator should see it."""
        if self._everything:
            self.say(line)
        elif not self._is_chatter(line):
            self.say(_OURS.sub(r"\1 \2", line))

    def say(self, line: str) -> None:
        """Print a line."""
        if self._descriptor is None:
            return
        missing = f"({self._num_left_out} lines left out: not read)\n" * bool(self._num_left_out)
        data = f"{missing}{line}\n".encode(errors="replace")
        self._num_left_out += 1
        with contextlib.suppress(OSError):  # the reader is gone, or the disk is full
            for start in range(0, len(data), select.PIPE_BUF):
                if not self._is_writable(self._descriptor):
                    return
                # a pipe that is writable takes this much without blocking
                os.write(self._descriptor, data[start : start + select.PIPE_BUF])
            self._num_left_out = 0

    def _is_writable(self, descriptor: int) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        is_writable = bool(poll.poll(self._patience_ms))
        self._patience_ms = _PATIENCE_MS if is_writable else 0
        return is_writable

    def _is_chatter(self, line: str) -> bool:
        # Triton prints tables of its models and options after an info line
        if line.startswith(("+--", "| ")):
            return True
        if any(text in line for text in _HARMLESS):
            return True
        return not line.strip() or any(it.match(line) for it in (_TRITON_INFO, _REFUSAL))


class ConsoleHandler(logging.Handler):
    """Shows this process's own log records on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        self._console.say(self.format(record))


def _stderr() -> int | None:
    """The descriptor of stderr; None if it is closed."""
    try:
        return None if sys.stderr is None else sys.stderr.fileno()
    except (OSError, ValueError):
        return None


def load_failure(line: str) -> str | None:
    """Which model did not load and why, if this line of a server's log says so."""
    found = _LOAD_FAILURE.search(line)
    if found is None:
        return None
    # Triton quotes messages, and the backend appends where in Python the error occurred
    cause = found.group(2).split("\\n\\nAt:")[0].rstrip('"')
    return f"{found.group(1)}: {cause}"


def failure_in_log(lines: Iterable[str]) -> str | None:
    """The first cause in a server's log: why a model did not load, else the first error line."""
    texts = list(lines)
    for line in texts:
        if cause := load_failure(line):
            return cause
    for line in texts:
        found = _ERROR.match(line)
        if found and not any(text in line for text in _HARMLESS):
            return str(found.group(1) or found.group(2))
    return None
