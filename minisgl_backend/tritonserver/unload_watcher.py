"""A thread next to the engine that notices in time that the model must end.

Triton tells a model that it is being unloaded only when its last request has ended, so requests
could hold up an unload, a reload or the end of the server for as long as they run. (Triton's own
``is_model_ready`` corrupts the backend's shared memory if it is called during ``execute``, as
measured with 24.10.) So the thread asks the server's HTTP endpoint whether the model is ready, and
checks whether a successor has removed its marker, or the server's starter asks to drain. As soon as
the model must end, the engine drains.

An engine that drains never comes back, and one answer proves nothing: newer servers ask the model
before they answer, and if it was paused they say after some seconds that it is not ready. So
several answers in a row are needed, and only prompt ones count. Must not know requests, or how an
engine drains.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.error
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from minisgl_backend.loopback import open_local
from minisgl_backend.runtime_files import QueueMarker

logger = logging.getLogger(__name__)

_EVERY_S: Final = 0.25
_PATIENCE: Final = 3
"""This many times in a row, "not ready" means that the model is being unloaded, and a refused or
broken connection that the server is shutting down."""
_PROMPT_S: Final = 1.0
"""A slower answer is a sign of a pause: newer servers wait up to 5 s for the model."""


class Readiness(Enum):
    """What the server says when it is asked whether a model is ready."""

    READY = auto()
    NOT_READY = auto()
    REFUSED = auto()
    """It does not take the connection, or breaks it."""
    NONE = auto()
    """It does not answer in time, which proves nothing: it may be busy, or paused."""


def ask(url: str, *, timeout_s: float = 2.0) -> Readiness:
    """Ask the server at ``url``."""
    try:
        # a connection of its own each time: an idle one would hold up the server's end
        with open_local(url, timeout_s=timeout_s) as response:
            return Readiness.READY if response.status == 200 else Readiness.NOT_READY
    except urllib.error.HTTPError:
        return Readiness.NOT_READY
    except OSError as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        return Readiness.REFUSED if isinstance(cause, ConnectionError) else Readiness.NONE


class UnloadWatcher:
    """Calls ``report`` a few times a second, and ``drain`` once, on a thread of its own."""

    def __init__(
        self,
        *,
        ready_url: str | None,
        marker: QueueMarker,
        report: Callable[[], None],
        drain: Callable[[], None],
    ) -> None:
        """``ready_url`` answers 200 while the model is ready; None if it is not known."""
        self._ready_url = ready_url
        self._marker = marker
        self._report = report
        self._drain = drain
        self._draining: threading.Thread | None = None
        self._was_ready = False
        self._num_bad = 0
        """Number of answers in a row that are signs of an end."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unload watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for a drain that has begun."""
        self._closing.set()
        self._thread.join()
        if self._draining is not None:
            self._draining.join()

    def _run(self) -> None:
        fails = False
        while not self._closing.wait(_EVERY_S):
            try:  # in this order, so that the end is noticed even if reports fail
                if self._draining is None and self._is_ending():
                    self._draining = threading.Thread(target=self._drain, name="drain")
                    self._draining.start()
                self._report()
                fails = False
            except Exception:
                if not fails:
                    logger.exception("the engine cannot report")
                fails = True

    def _is_ending(self) -> bool:
        if self._marker.must_drain():
            logger.info("the server is about to stop; open requests may finish")
            return True
        if self._marker.is_replaced():
            logger.info("a newer load of the model took over; open requests may finish")
            return True
        if self._ready_url is not None:
            self._note(self._ready_url)
        if self._was_ready and self._num_bad >= _PATIENCE:
            logger.info("the model is being unloaded; open requests may finish")
            return True
        return False

    def _note(self, ready_url: str) -> None:
        """Ask the server, and note its answer."""
        began_s = time.monotonic()
        readiness = ask(ready_url)
        took_s = time.monotonic() - began_s
        if readiness is Readiness.READY:
            self._was_ready = True
            self._num_bad = 0
        elif readiness is not Readiness.NONE and took_s <= _PROMPT_S:
            self._num_bad += 1
