"""Limits how many requests of all calls are in the engine at a time.

An engine refuses requests when its queue is full, since a server's clients can retry. In process
the caller waits instead: a request enters when the engine has room for it.
"""

from __future__ import annotations

import threading

from minisgl_backend.errors import Cancelled


class Room:
    """Counts the requests that are open, and the prompt tokens of those that wait for a row.

    Both counts are at least the engine's own, which it lowers before its events arrive.
    """

    def __init__(self, *, most_requests: int, most_waiting_tokens: int) -> None:
        self._most_requests = most_requests
        self._most_waiting_tokens = most_waiting_tokens
        self._num_requests = 0
        self._num_waiting_tokens = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def enter(self, num_tokens: int, *, num_requests: int = 1, wait: bool) -> bool:
        """Let in the ``num_requests`` samples of a prompt of ``num_tokens``; False if there is no
        room.

        With ``wait``, waits for room. Raises ``Cancelled`` once the room is closed.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._is_closed or self._fits(num_tokens, num_requests)
                )
            self._check_open()
            if not self._fits(num_tokens, num_requests):
                return False
            self._num_requests += num_requests
            self._num_waiting_tokens += num_tokens
            return True

    def check_open(self) -> None:
        """Raise ``Cancelled`` if the room is closed."""
        with self._changed:
            self._check_open()

    def admitted(self, num_tokens: int) -> None:
        """A request has been given a row."""
        with self._changed:
            self._num_waiting_tokens -= num_tokens
            self._changed.notify_all()

    def left(self, num_tokens: int, *, num_requests: int = 1) -> None:
        """Requests have ended; ``num_tokens`` is 0 if the first of them had been given a row."""
        with self._changed:
            self._num_requests -= num_requests
            self._num_waiting_tokens -= num_tokens
            self._changed.notify_all()

    def close(self) -> None:
        """Let nothing in any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Cancelled("this LLM is closed")

    def _fits(self, num_tokens: int, num_requests: int) -> bool:
        waiting = self._num_waiting_tokens
        return self._num_requests + num_requests <= self._most_requests and (
            not waiting or waiting + num_tokens <= self._most_waiting_tokens
        )
