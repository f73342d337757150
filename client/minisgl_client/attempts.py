"""When to retry, and until when: all attempts of a request share one deadline.

Knows clocks and errors. Never waits itself, so that it serves both kinds of client.
"""

from __future__ import annotations

import logging
import math
import random
import time
from typing import Final

from minisgl_client.errors import MinisglError, Timeout

logger = logging.getLogger(__name__)

GRACE_S: Final = 2.0
"""How much later than the server the client gives up: the server's answer has the text so far."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_INT32_MAX: Final = 2**31 - 1


def wait_s(timeout_ms: int | None) -> float | None:
    """How long this side waits for an answer that the server ends after ``timeout_ms``."""
    return None if timeout_ms is None else timeout_ms / 1000 + GRACE_S


class Attempts:
    """The attempts of one request; made when the request is called."""

    def __init__(self, request_id: str, retries: int, timeout_s: float | None) -> None:
        self.started_s = time.perf_counter()
        self._request_id = request_id
        self._retries_left = retries
        self._timeout_s = timeout_s
        self._pause_s = _FIRST_PAUSE_S

    def remaining_s(self) -> float | None:
        """Time left until the deadline, if there is one; raises ``Timeout`` if it has passed."""
        if self._timeout_s is None:
            return None
        remaining_s = self.started_s + self._timeout_s - time.perf_counter()
        if remaining_s <= 0:
            raise Timeout(f"no answer within {self._timeout_s:g} s")
        return remaining_s

    def remaining_ms(self) -> int | None:
        """The same for the server, in whole ms."""
        remaining_s = self.remaining_s()
        return None if remaining_s is None else min(math.ceil(remaining_s * 1000), _INT32_MAX)

    def pause_after(self, error: MinisglError) -> float:
        """Seconds to wait before the next attempt; raises ``error`` if there will be none.

        Pauses double. Half of each is random, so that clients that were refused at the same time do
        not retry at the same time.
        """
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        in_time = (
            self._timeout_s is None
            or time.perf_counter() + pause_s < self.started_s + self._timeout_s
        )
        if not (error.retryable and self._retries_left and in_time):
            raise error
        self._retries_left -= 1
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        logger.info("request %r: again in %.2f s: %s", self._request_id, pause_s, error)
        return pause_s
