"""A planner's actions and their times, line by line in a file, for benchmarks in another process.

Metrics are published only four times a second. If a benchmark needs the instant at which a request
was admitted, sampled a token or ended, the planner of its paced engine keeps a journal (``paced``).
Times are readings of ``time.monotonic``, a clock that all processes of a machine share. Must not
know what is measured from its lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

What: TypeAlias = Literal["added", "aborted", "admitted", "sampled"]

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Entry:
    """One action on some requests, and how many rows and pages are held after it."""

    time_s: float
    what: What
    request_ids: list[int]
    num_running: int
    num_used_pages: int

    def append_to(self, path: Path) -> None:
        """Append a line. The file is opened each time, since a planner is never closed."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


class Journal:
    """Reads the entries of a journal while they are written."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._entries: list[Entry] = []
        self._file = path.open(encoding="utf-8")
        self._part = ""

    def read(self) -> list[Entry]:
        """All entries so far."""
        *lines, self._part = (self._part + self._file.read()).split("\n")
        self._entries.extend(Entry(**json.loads(line)) for line in lines)
        return self._entries

    def find(
        self, condition: Callable[[Entry], bool], *, since: int, timeout_s: float
    ) -> Entry | None:
        """The first entry from index ``since`` on that meets the condition; None at a timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            is_late = time.monotonic() > deadline
            entries = self.read()
            for entry in entries[since:]:
                if condition(entry):
                    return entry
            since = max(since, len(entries))
            if is_late:
                return None
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
