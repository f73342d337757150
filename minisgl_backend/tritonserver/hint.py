"""A hint from engines to tokenizers: all queues are full, so do not even tokenize.

A file per engine in the server's runtime directory, named after its state. It is advice only: the
engine itself refuses what does not fit, and without a runtime directory there is no hint.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

_OPEN: Final = "queue-open-"
_FULL: Final = "queue-full-"
_READ_EVERY_S: Final = 0.02


class QueueSign:
    """The engine's side; ``name`` is its own among the engines of a server."""

    def __init__(self, directory: Path | None, name: str) -> None:
        self._directory = directory
        self._name = name
        self._full = False
        if directory is not None:
            (directory / (_OPEN + name)).touch()

    def show(self, full: bool) -> None:
        """Change the sign where it is not right."""
        if self._directory is None or full == self._full:
            return
        prefixes = (_OPEN, _FULL) if full else (_FULL, _OPEN)
        before, after = (self._directory / (prefix + self._name) for prefix in prefixes)
        before.rename(after)
        self._full = full

    def remove(self) -> None:
        """The engine ends."""
        if self._directory is not None:
            for prefix in (_OPEN, _FULL):
                with contextlib.suppress(OSError):
                    (self._directory / (prefix + self._name)).unlink()


class QueueView:
    """The tokenizer's side."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._read_s = float("-inf")
        self._full = False

    def is_full(self) -> bool:
        """Whether every engine says that its queue is full; looked up every 20 ms at most."""
        if self._directory is None:
            return False
        now_s = time.monotonic()
        if now_s - self._read_s >= _READ_EVERY_S:
            self._read_s = now_s
            try:
                names = [path.name for path in self._directory.iterdir()]
            except OSError:
                names = []
            self._full = any(name.startswith(_FULL) for name in names) and not any(
                name.startswith(_OPEN) for name in names
            )
        return self._full
