"""Which stream is sent next, and how many packets may be under way at once.

Knows streams only by what the caller says about them. Must not know what is sent or how.

What a client waits for most goes first: the first answer of a stream, its end, a probe. Other
streams wait here while ``max_packets`` are under way. The next packet of a stream that waits here
still takes in the tokens made in the meantime; a packet that waits in Triton's queues would only
delay the first answers of others. So a busy server sends fewer and larger packets, and the time to
first token stays short.

While new requests wait to be taken in, plain items wait, too, but not forever: each costs time in
the process that takes requests in, and a client waits most for its first token.

A packet is under way until it is acknowledged, its stream ends, or ``patience_s`` are over: a lost
acknowledgement must not hold up other streams forever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_PATIENCE_S: Final = 0.25
_MOST_HELD_S: Final = 1.0
"""How long plain items wait if new requests never stop coming."""


class Outbox(Generic[T]):
    """A queue with two priorities. Safe to use from any thread; only ``get`` blocks."""

    def __init__(
        self,
        max_packets: int,
        *,
        requests_wait: Callable[[], bool] = lambda: False,
        most_held_s: float = _MOST_HELD_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """``requests_wait`` says whether new requests wait to be taken in."""
        self._most_held_s = most_held_s
        self._requests_wait = requests_wait
        self._held_since_s: float | None = None
        self._max_packets = max_packets
        self._patience_s = patience_s
        self._urgent: deque[T | None] = deque()
        self._plain: deque[T] = deque()
        self._under_way: dict[int, float] = {}
        self._changed = threading.Condition()

    def put(self, item: T, *, urgent: bool) -> None:
        """Add an item; ``urgent`` ones go first, however many packets are under way."""
        with self._changed:
            if urgent:
                self._urgent.append(item)
            else:
                self._plain.append(item)
                if len(self._under_way) >= self._max_packets:
                    return
            self._changed.notify()

    def close(self, num_getters: int) -> None:
        """Let ``num_getters`` calls of ``get`` return None."""
        with self._changed:
            self._urgent.extend([None] * num_getters)
            self._changed.notify_all()

    def get(self) -> T | None:
        """Wait for the next item and return it; None if the outbox is closed."""
        with self._changed:
            while True:
                if self._urgent:
                    return self._urgent.popleft()
                if (
                    self._plain
                    and len(self._under_way) < self._max_packets
                    and not self._holds_back()
                ):
                    return self._plain.popleft()
                self._changed.wait()

    def _holds_back(self) -> bool:
        if not self._requests_wait():
            self._held_since_s = None
            return False
        now_s = time.monotonic()
        if self._held_since_s is None:
            self._held_since_s = now_s
        return now_s - self._held_since_s < self._most_held_s

    def sent(self, key: int) -> None:
        """A packet of stream ``key`` is under way from now on."""
        with self._changed:
            self._under_way[key] = time.monotonic()

    def arrived(self, key: int) -> None:
        """No packet of stream ``key`` is under way anymore."""
        with self._changed:
            if self._under_way.pop(key, None) is not None and self._plain:
                self._changed.notify()

    def expire(self, now_s: float) -> None:
        """Stop counting the packets that have been under way for too long, and look if plain items
        are still held back. Must be called a few times a second."""
        with self._changed:
            late = [
                key for key, sent_s in self._under_way.items() if now_s - sent_s > self._patience_s
            ]
            for key in late:
                del self._under_way[key]
            if late or self._held_since_s is not None:
                self._changed.notify_all()
