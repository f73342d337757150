"""What of a server's log the operator sees, and why a server did not start.

Knows the shape of tritonserver's log lines. Must not know processes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Final

_HARMLESS: Final = (
    "unable to create stream for",  # ensembles ask for a CUDA stream, also without a GPU
    "CudaDriverHelper has not been initialized",
    "pinned_memory_manager.cc",
    "Unable to allocate pinned system memory",
    "Signal (15) received",
)
_OURS: Final = re.compile(r'^[IWE]\d{4} ([\d:]+)\.\d+ +\d+ \S*\.py:\d+\] "(.*)"$')
_TRITON_INFO: Final = re.compile(r"^[IV]\d{4} [\d:.]+ +\d+ (?!\S*\.py:)")
_LOAD_FAILURE: Final = re.compile(r"failed to load '(\w+)' version \d+: [\w ]+?: (.*)")
_ERROR: Final = re.compile(r"^E\d{4} [\d:.]+ +\d+ \S+:\d+\] (.*)|^error: (.*)")


class Console:
    """Shows the log's lines on stderr: all, or without Triton's own chatter."""

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything

    def show(self, line: str) -> None:
        """Print a line if the operator should see it."""
        if self._everything:
            print(line, file=sys.stderr, flush=True)
        elif not self._is_chatter(line):
            print(_OURS.sub(r"\1 \2", line), file=sys.stderr, flush=True)

    def _is_chatter(self, line: str) -> bool:
        # Triton prints tables of its models and options after an info line
        if line.startswith(("+--", "| ")):
            return True
        if any(text in line for text in _HARMLESS):
            return True
        return not line.strip() or _TRITON_INFO.match(line) is not None


def failure_in_log(lines: Iterable[str]) -> str | None:
    """The first cause in a server's log: why a model did not load, else the first error line."""
    texts = list(lines)
    for line in texts:
        found = _LOAD_FAILURE.search(line)
        if found:
            # Triton quotes messages, and the backend adds where Python was
            cause = found.group(2).split("\\n\\nAt:")[0].rstrip('"')
            return f"{found.group(1)}: {cause}"
    for line in texts:
        found = _ERROR.match(line)
        if found and not any(text in line for text in _HARMLESS):
            return str(found.group(1) or found.group(2))
    return None
