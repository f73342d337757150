"""An event that a signal handler may set.

Python runs handlers on the main thread, between any two of its instructions. So if that thread
waits for a ``threading.Event``, whose ``wait`` and ``set`` take a lock, a handler that sets the
event may wait forever for a lock that its own thread holds. Nothing is locked here.
"""

from __future__ import annotations

import math
import os
import select
import weakref


class StopEvent:
    """Set once, by a signal handler or any thread; waited for by any thread."""

    def __init__(self) -> None:
        self._is_set = False
        # Linux only: readable for all who wait, from the first write on
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)

    def set(self) -> None:
        """Wake up those who wait."""
        self._is_set = True
        os.eventfd_write(self._descriptor, 1)

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, or for ``timeout_s``; returns whether it is set."""
        if not self._is_set:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        return self._is_set
