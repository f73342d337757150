"""The processes of this machine, as the kernel shows them. Must not know what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_RANKS: Final = frozenset({b"minisgl_backend.tensor_parallel", b"minisgl_check.frail_rank"})
_NUM_THREADS: Final = 17
"""Where the number of threads stands behind the name in ``/proc/PID/stat``."""


def runs(pid: int) -> bool:
    """Whether a process exists, and not as a zombie: Triton 24.10 reaps none until it ends. One of
    which other threads are left is none yet: these hold its files and locks."""
    state = _stat(pid)
    return state is not None and (state[0] != "Z" or int(state[_NUM_THREADS]) > 1)


def children_of(parent: int) -> list[int]:
    """The running processes that a process has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        state = _stat(int(process.name))
        if state is not None and int(state[1]) == parent and state[0] != "Z":
            found.append(int(process.name))
    return found


def is_rank(pid: int) -> bool:
    """Whether a process is a rank of an engine, other than rank 0."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return not _RANKS.isdisjoint(words)


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat.rpartition(b")")[2].decode("ascii").split()  # the name before may be any bytes
    except OSError:
        return None
