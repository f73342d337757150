"""A thread that takes things one after another, in the order in which they came.

A model's ``execute`` puts its requests on lanes and returns, so that tritonserver hands over the
next ones while these are worked on. How many lanes the detokenizer has is said here, since the
engine's process must know it, too. A lane must not know what it takes.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def num_stream_lanes() -> int:
    """Number of lanes of the detokenizer. The lane of a stream is its key modulo this number."""
    half = (os.cpu_count() or 1) // 2
    return min(4, max(2, half))


class Lane(Generic[T]):
    """Calls ``take`` with each item that is put on it, on a thread of its own.

    An error in ``take`` is logged, and the next item is taken: other requests must not wait forever
    because one could not even be answered.
    """

    def __init__(self, take: Callable[[T], None], *, name: str) -> None:
        self._take = take
        self._waiting: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Add an item, which must not be None, behind those that wait. May be called on any
        thread."""
        self._waiting.put(item)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits here."""
        return self._waiting.empty()

    def close(self) -> None:
        """End the thread once all items are taken."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._take(item)
            except Exception:
                logger.exception("%s: an item could not be taken", self._thread.name)
