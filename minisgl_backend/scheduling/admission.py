"""Who goes next: the order of the waiting sequences, and the pages to keep for the running ones.

Order. A higher priority goes first, and within a level the older request. No level starves: one
level is worth a head start of ``HEAD_START`` arrivals, so a request is overtaken by at most that
many later ones per level above its own. With the policy ``lpm`` (longest prefix match first), the
sequence with the most cached tokens among the first ``WINDOW`` of the head's level goes before the
head, but past one and the same head only ``MAX_OVERTAKEN`` times.

Nobody goes past a sequence because it is smaller: a large one at the head waits until it fits.

Reserve. Admitting a sequence takes pages for its known tokens at once. Beyond that, pages are kept
back for ``reserve_tokens`` more tokens of each running sequence (or what is left of its output, if
less): keeping all of max_tokens would leave most of the pool idle, since outputs are usually
shorter, and keeping nothing would retract sequences as soon as they are admitted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import takewhile

import numpy as np

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import Request
from minisgl_backend.scheduling.capacity import num_pages_for
from minisgl_backend.scheduling.rows import Rows
from minisgl_backend.scheduling.sequence import Precedence, Sequence

HEAD_START = 1024
WINDOW = 32
MAX_OVERTAKEN = 64


def precedence_of(request: Request, arrival: int) -> Precedence:
    """Place of the ``arrival``-th request in the order of service."""
    return (arrival - request.priority * HEAD_START, arrival)


def by_precedence(sequence: Sequence) -> Precedence:
    """Key to sort sequences by."""
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
        """Queue a sequence at its place."""
        insort(self._sequences, sequence, key=by_precedence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        place = bisect_left(self._sequences, sequence.precedence, key=by_precedence)
        if place == len(self._sequences) or self._sequences[place] is not sequence:
            raise InvariantError(f"request {sequence.request.id} is not in the queue")
        del self._sequences[place]

    def choose(self) -> Sequence | None:
        """Who goes next; it stays in the queue."""
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
        """Take out the chosen one, and count that it went past the head."""
        head = self._sequences[0]
        if sequence is not head:
            head.overtaken += 1
        self.remove(sequence)

    def _num_cached_tokens(self, sequence: Sequence) -> int:
        return self._cache.match_length(sequence.tokens, sequence.request.cache_salt)


def reserved_pages(rows: Rows, reserve_tokens: int, page_size: int) -> int:
    """Pages to keep back for the running rows, beyond those that they hold."""
    running = np.flatnonzero(rows.accepting & ~rows.retiring)
    growth = np.minimum(rows.limit[running] - 1 - rows.capacity[running], reserve_tokens)
    return int((-(-np.maximum(growth, 0) // page_size)).sum())


def pages_to_admit(sequence: Sequence, reserve_tokens: int, page_size: int) -> int:
    """Pages for a sequence's known tokens and its own reserve, cached ones included."""
    num_tokens = min(sequence.limit - 1, len(sequence.tokens) + reserve_tokens)
    return num_pages_for(num_tokens, page_size)
