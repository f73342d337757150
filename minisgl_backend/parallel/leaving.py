"""Gives up a communicator, once and on a separate thread.

NCCL first releases what waits on the GPU, then itself waits until every CUDA graph that holds the
communicator is destroyed. So code that still holds graphs must not wait for NCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Leaving:
    """Runs ``work`` at the first call of ``begin``."""

    def __init__(self, work: Callable[[], None]):
        self._thread = threading.Thread(target=work, name="leave", daemon=True)
        self._lock = threading.Lock()

    @property
    def has_begun(self) -> bool:
        return self._thread.ident is not None

    def begin(self, patience_s: float) -> None:
        """Start the work unless it has begun, and wait at most ``patience_s`` for it to end."""
        with self._lock:
            if not self.has_begun:
                self._thread.start()
        self._thread.join(patience_s)
