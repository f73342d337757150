"""Signs that engines put up for others in the server's runtime directory; advice, never a lock.

A sign is an empty file, named after its engine and after whether its queue is full. Tokenizers look
at them to refuse early; without a runtime directory there are none, and the engine refuses by
itself. When a model is reloaded, the new engine takes the old one's sign down, so that the old one
learns that it has a successor. The server's starter puts a file ``drain`` beside the signs when it
is about to stop the server, and waits until the engines have taken their signs down; and a file
``recovering`` while it reloads a model that died, so that nobody sends requests that way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Final

from minisgl_backend.shared_names import DRAIN_FILE, QUEUE_FULL, QUEUE_OPEN, RECOVERING_FILE

_READ_EVERY_S: Final = 0.02


class QueueSign:
    """The engine's side; ``place`` names the model's instance, at which one engine should serve."""

    def __init__(self, directory: Path | None, place: str) -> None:
        self._directory = directory
        # by the id, a supervisor knows what to remove if this process was killed
        self._name = f"{place}.{os.getpid()}.{secrets.token_hex(8)}"
        self._full = False
        if directory is not None:
            for state in (QUEUE_OPEN, QUEUE_FULL):
                for old in directory.glob(f"{state}.{place}.*"):
                    old.unlink(missing_ok=True)
            self._path(QUEUE_OPEN).touch()

    def show(self, full: bool) -> None:
        """Make the sign say whether the queue is full."""
        if self._directory is None or full == self._full:
            return
        before, after = (QUEUE_OPEN, QUEUE_FULL) if full else (QUEUE_FULL, QUEUE_OPEN)
        with contextlib.suppress(FileNotFoundError):
            self._path(before).rename(self._path(after))
        self._full = full

    def is_replaced(self) -> bool:
        """Whether a successor took the sign down."""
        if self._directory is None:
            return False
        return not (self._path(QUEUE_OPEN).exists() or self._path(QUEUE_FULL).exists())

    def asks_to_drain(self) -> bool:
        """Whether who started the server is about to stop it."""
        return self._directory is not None and (self._directory / DRAIN_FILE).exists()

    def remove(self) -> None:
        """The engine ends."""
        if self._directory is not None:
            for state in (QUEUE_OPEN, QUEUE_FULL):
                self._path(state).unlink(missing_ok=True)

    def _path(self, state: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{state}.{self._name}"


class QueueView:
    """The tokenizer's side."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._read_s = float("-inf")
        self._states: set[str] = set()

    def is_full(self) -> bool:
        """Whether every engine says that its queue is full."""
        states = self._look()
        return QUEUE_FULL in states and QUEUE_OPEN not in states

    def is_recovering(self) -> bool:
        """Whether another model is being loaded again."""
        return RECOVERING_FILE in self._look()

    def _look(self) -> set[str]:
        """The states that signs show, looked up every 20 ms at most."""
        now_s = time.monotonic()
        if self._directory is not None and now_s - self._read_s >= _READ_EVERY_S:
            self._read_s = now_s
            try:
                self._states = {path.name.partition(".")[0] for path in self._directory.iterdir()}
            except OSError:
                self._states = set()
        return self._states
