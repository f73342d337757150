"""A page of memory in which a model's process shows that it lives; it outlives the process.

Knows one small file, written through a memory map and read as a file. Must not know who looks, nor
what is concluded: a page tells when it was last touched, how old the last sign of the work loop
was then, and how many requests were inside the process: after a kill, as many as Triton would wait
for in vain.

Times are of ``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

_LAYOUT: Final = struct.Struct("=qqqqddd")
_PID, _STATE, _NUM_INSIDE, _NUM_SEEN, _STARTED_S, _BEAT_S, _TICK_AGE_S = range(7)
_PREFIX: Final = "heartbeat"


class State(IntEnum):
    """What a process says of itself."""

    SERVING = 0
    ENDING = 1
    BROKEN = 2


@dataclass(frozen=True, slots=True)
class Beat:
    """What a page says; ``tick_age_s`` is of the moment ``beat_s``.

    ``num_inside`` requests have come in and not had their final flag, of ``num_seen`` in all.
    """

    pid: int
    state: State
    num_inside: int
    num_seen: int
    started_s: float
    beat_s: float
    tick_age_s: float

    def silent_s(self, now_s: float) -> float:
        """For how long nothing has been heard of the process, or of the loop in it."""
        return max(self.tick_age_s, now_s - self.beat_s)


class Heartbeat:
    """The process's side. ``entered`` and ``left`` belong to any thread, ``beat`` to one."""

    def __init__(self, directory: Path, model: str) -> None:
        self.path = page_path(directory, model, os.getpid())
        draft = self.path.with_name(f".{self.path.name}")
        draft.write_bytes(bytes(_LAYOUT.size))
        with draft.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)
        # casts write a number in one go, so that a reader never sees half of one
        self._view = memoryview(self._page)
        self._ints = self._view.cast("q")
        self._floats = self._view.cast("d")
        self._lock = threading.Lock()
        self._ints[_PID] = os.getpid()
        self._floats[_STARTED_S] = time.monotonic()
        self.beat()
        draft.rename(self.path)

    def beat(self, *, tick_age_s: float = 0.0, state: State = State.SERVING) -> None:
        """The process lives; the work loop's last sign is that old."""
        self._ints[_STATE] = state
        self._floats[_TICK_AGE_S] = tick_age_s
        self._floats[_BEAT_S] = time.monotonic()

    def entered(self) -> None:
        """A request came in."""
        with self._lock:
            self._ints[_NUM_INSIDE] += 1
            self._ints[_NUM_SEEN] += 1

    def left(self) -> None:
        """A request got its final flag."""
        with self._lock:
            self._ints[_NUM_INSIDE] -= 1

    def close(self) -> None:
        """The process ends in good order: its page goes. Late ``left`` still work."""
        self.path.unlink(missing_ok=True)


def page_path(directory: Path, model: str, pid: int) -> Path:
    """Where the process ``pid`` of a model has its page."""
    return directory / f"{_PREFIX}.{pid}.{model}"


def socket_path(directory: Path, model: str, pid: int) -> Path:
    """Where the process ``pid`` of a model tells its counts."""
    return directory / f"stats.{pid}.{model}"


def pages(directory: Path) -> list[tuple[str, Path]]:
    """The pages in a directory, each with its model's name, in the order of their paths."""
    found = sorted(directory.glob(f"{_PREFIX}.*.*"))
    return [(path.name.split(".", 2)[2], path) for path in found]


def read_beat(path: Path) -> Beat | None:
    """What a page says; None where it has gone."""
    try:
        values = _LAYOUT.unpack(path.read_bytes())
    except FileNotFoundError:
        return None
    pid, state, num_inside, num_seen, started_s, beat_s, tick_age_s = values
    return Beat(pid, State(state), num_inside, num_seen, started_s, beat_s, tick_age_s)
