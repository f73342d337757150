"""The waiting sequences, and the order in which they are served.

A higher priority goes first, and among equal priorities the older request. No priority starves: one
level of priority is worth a head start of ``HEAD_START`` arrivals, so a request is overtaken by at
most that many later ones per level above its own.

With the policy ``lpm`` (longest prefix match), the sequence with the most cached tokens goes first
among the first ``WINDOW`` sequences that have the priority of the head of the queue. It may pass
the same head only ``MAX_OVERTAKEN`` times.

No sequence is passed because it is large: at the head, it waits until it fits, and all others wait
behind it. Must not know whether there is room for a sequence: that is decided by ``admission``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import takewhile
from typing import Final

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import Request
from minisgl_backend.scheduling.sequence import Precedence, Sequence

HEAD_START: Final = 1024
WINDOW: Final = 32
MAX_OVERTAKEN: Final = 64


def precedence_of(request: Request, arrival: int) -> Precedence:
    """The place of the ``arrival``-th request in the order of service."""
    return (arrival - request.priority * HEAD_START, arrival)


def by_precedence(sequence: Sequence) -> Precedence:
    """The key by which sequences are sorted: the first is served first."""
    return sequence.precedence


class WaitingQueue:
    """The waiting sequences, in order of precedence; ``policy`` is fcfs or lpm."""

    def __init__(self, cache: KVCache, policy: str) -> None:
        self._cache = cache
        self._longest_prefix_first = policy == "lpm"
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence at the place that its precedence gives it."""
        insort(self._sequences, sequence, key=by_precedence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, at whatever place it is."""
        place = bisect_left(self._sequences, sequence.precedence, key=by_precedence)
        if place == len(self._sequences) or self._sequences[place] is not sequence:
            raise InvariantError(f"request {sequence.request.id} is not in the queue")
        del self._sequences[place]

    def choose(self) -> Sequence | None:
        """The sequence to be served next, which stays in the queue; None if the queue is empty."""
        if not self._sequences:
            return None
        head = self._sequences[0]
        if not self._longest_prefix_first or head.overtaken >= MAX_OVERTAKEN:
            return head
        level = head.request.priority
        window = takewhile(
            lambda sequence: sequence.request.priority == level, self._sequences[:WINDOW]
        )
        return max(window, key=self._num_cached_tokens)  # the first of equals

    def admit(self, sequence: Sequence) -> None:
        """Take out the chosen sequence; if it passes the head, the head remembers it."""
        head = self._sequences[0]
        if sequence is not head:
            head.overtaken += 1
        self.remove(sequence)

    def _num_cached_tokens(self, sequence: Sequence) -> int:
        return self._cache.match_length(sequence.reusable, sequence.request.cache_salt)
