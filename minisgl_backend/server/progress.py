"""Whether a server's processes make progress with their start.

Knows the kernel's accounting of processes. Must not know what they do. Loading a model may take an
hour, but a process that loads computes or reads. A process that waits for a lock that is never
released does neither; this can happen, since tritonserver forks while its other threads hold locks.
The work of processes that have finished loading, such as heartbeats, does not count as progress.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

STUCK_AFTER_S: Final = 120.0
_LEAST_S: Final = 0.5
"""Computing time that counts as progress. Even among twenty busy processes of higher priority, a
start uses three times as much in ``STUCK_AFTER_S``."""
_S_PER_BYTE: Final = _LEAST_S / 2**21
"""Reading or writing 2 MiB counts as progress, too, however slow the disk."""
_LOOK_EVERY_S: Final = 1.0


class Progress:
    """The progress of the processes of one session (see setsid), since this object was made.

    ``loaded`` gives the ids of those that have nothing left to do.
    """

    def __init__(
        self,
        session: int,
        loaded: Callable[[], Collection[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._loaded = loaded
        self._clock = clock
        self._looked_s = self._moved_s = clock()
        self._work_s = work_of(session, loaded())

    def stuck_s(self) -> float:
        """Seconds since they last made progress."""
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            work_s = work_of(self._session, self._loaded())
            # the sum shrinks when a process ends or has loaded, and that is progress, too
            if not 0 <= work_s - self._work_s < _LEAST_S:
                self._work_s, self._moved_s = work_s, now_s
        return now_s - self._moved_s


def work_of(session: int, loaded: Collection[int] = ()) -> float:
    """The work of a session's processes that are not ``loaded``, in seconds of computing.

    Bytes read and written are converted to seconds.
    """
    ticks, num_bytes = 0, 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # the name in parentheses may be any bytes, such as half of a character
            fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[3]) != session or int(process.name) in loaded:
                continue
            ticks += sum(map(int, fields[11:15]))  # its own, and its children's that have ended
            counts = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
            num_bytes += int(counts["rchar"]) + int(counts["wchar"])
        except OSError:  # it has just ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK") + num_bytes * _S_PER_BYTE
