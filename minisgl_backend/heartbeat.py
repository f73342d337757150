"""The heartbeat file, by which a model's process shows that it lives; it outlives the process.

Knows one small file per process, which is written through a memory map and read as a file. It tells
when it was written last, how old the last sign of life of the process's work loop was then, and how
many requests were inside the process. If the process is killed, that is the number of requests for
which Triton would wait in vain. Must not know who reads it, nor what is concluded from it.

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
    """What a process says about itself."""

    SERVING = 0
    ENDING = 1
    BROKEN = 2


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat file says.

    It was written at ``beat_s``; the last sign of life of the work loop was ``tick_age_s`` old
    then. ``num_seen`` requests have come in, and ``num_inside`` of them have not had their final
    flag yet.
    """

    pid: int
    state: State
    num_inside: int
    num_seen: int
    started_s: float
    beat_s: float
    tick_age_s: float

    def silent_s(self, now_s: float) -> float:
        """For how long the process, or the work loop in it, has given no sign of life."""
        return max(self.tick_age_s, now_s - self.beat_s)


class Heartbeat:
    """Writes the file of this process. Any thread may call ``entered`` and ``left``."""

    def __init__(self, directory: Path, model: str) -> None:
        self.path = heartbeat_path(directory, model, os.getpid())
        draft = self.path.with_name(f".{self.path.name}")
        draft.write_bytes(bytes(_LAYOUT.size))
        with draft.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), _LAYOUT.size))
        # each of these writes a number as a whole, so that a reader never sees half of one
        self._ints = memory.cast("q")
        self._floats = memory.cast("d")
        self._lock = threading.Lock()
        self._ints[_PID] = os.getpid()
        self._floats[_STARTED_S] = time.monotonic()
        self.beat()
        draft.rename(self.path)

    def beat(self, *, tick_age_s: float = 0.0, state: State = State.SERVING) -> None:
        """Write that the process lives, and how old the work loop's last sign of life is."""
        self._ints[_STATE] = state
        self._floats[_TICK_AGE_S] = tick_age_s
        self._floats[_BEAT_S] = time.monotonic()

    def entered(self) -> None:
        """Count a request that came in."""
        with self._lock:
            self._ints[_NUM_INSIDE] += 1
            self._ints[_NUM_SEEN] += 1

    def left(self) -> None:
        """Count a request that has had its final flag."""
        with self._lock:
            self._ints[_NUM_INSIDE] -= 1

    def close(self) -> None:
        """Remove the file: the process ends in good order. Late calls of ``left`` still work."""
        self.path.unlink(missing_ok=True)


def heartbeat_path(directory: Path, model: str, pid: int) -> Path:
    """The heartbeat file of the process ``pid`` of a model."""
    return directory / f"{_PREFIX}.{pid}.{model}"


def socket_path(directory: Path, model: str, pid: int) -> Path:
    """The socket at which the process ``pid`` of a model tells its counts."""
    return directory / f"stats.{pid}.{model}"


def heartbeat_files(directory: Path) -> list[tuple[str, Path]]:
    """The heartbeat files in a directory, each with its model's name, in the order of paths."""
    found = sorted(directory.glob(f"{_PREFIX}.*.*"))
    return [(path.name.split(".", 2)[2], path) for path in found]


def read_beat(path: Path) -> Beat | None:
    """What a heartbeat file says; None if it is gone."""
    try:
        values = _LAYOUT.unpack(path.read_bytes())
    except FileNotFoundError:
        return None
    pid, state, num_inside, num_seen, started_s, beat_s, tick_age_s = values
    return Beat(pid, State(state), num_inside, num_seen, started_s, beat_s, tick_age_s)
