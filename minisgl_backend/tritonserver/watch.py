"""A thread beside the engine that reports, and that notices the end of the model in time.

Triton tells a model of its unloading only when its last request has ended, so that requests could
hold up an unload, a reload or the end of the server for as long as they care to run. (Triton's own
``is_model_ready`` corrupts the backend's shared memory where it is called beside ``execute``, as
measured with 24.10.) So the thread asks the server's HTTP endpoint whether the model is ready, and
looks whether a successor took its sign down, or the server's starter asks to drain; then the engine
does.
"""

from __future__ import annotations

import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from minisgl_backend.tritonserver.hint import QueueSign

logger = logging.getLogger(__name__)

_EVERY_S = 0.25
_PATIENCE = 3
"""Refused or broken connections in a row that mean that the server shuts down."""


class Watch:
    """Calls ``report`` a few times a second, and ``drain`` once, on a thread of its own."""

    def __init__(
        self,
        *,
        ready_url: str | None,
        sign: QueueSign,
        report: Callable[[], None],
        drain: Callable[[], None],
    ) -> None:
        """``ready_url`` answers 200 while the model is ready; None where nobody knows it."""
        self._ready_url = ready_url
        self._sign = sign
        self._report = report
        self._drain = drain
        self._draining: threading.Thread | None = None
        self._was_ready = False
        self._num_failures = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for a drain that has begun."""
        self._closing.set()
        self._thread.join()
        if self._draining is not None:
            self._draining.join()

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_S):
            try:
                self._report()
                if self._draining is None and self._is_ending():
                    self._draining = threading.Thread(target=self._drain, name="drain")
                    self._draining.start()
            except Exception:
                logger.exception("the engine could not report")

    def _is_ending(self) -> bool:
        if self._sign.asks_to_drain():
            logger.info("the server is about to stop; open requests may finish")
            return True
        if self._sign.is_replaced():
            logger.info("a newer load of the model took over; open requests may finish")
            return True
        if self._is_ready():
            self._was_ready = True
            self._num_failures = 0
        if self._was_ready and self._num_failures >= _PATIENCE:
            logger.info("the model is being unloaded; open requests may finish")
            return True
        return False

    def _is_ready(self) -> bool:
        """Ask the server; no answer in time says nothing, an answer or a refusal does."""
        if self._ready_url is None:
            return True
        try:
            # a connection of its own each time: an idle one would hold up the server's end
            with urllib.request.urlopen(self._ready_url, timeout=2) as response:
                if response.status == 200:
                    return True
        except TimeoutError:
            return False
        except urllib.error.HTTPError:
            self._num_failures = _PATIENCE
            return False
        except OSError:
            pass
        self._num_failures += 1
        return False
