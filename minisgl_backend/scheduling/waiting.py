"""The waiting sequences, and the order in which they are served.

A higher priority goes first, and among equal priorities the older request. No priority starves: one
level of priority is worth a head start of ``HEAD_START`` arrivals, so a request is overtaken by at
most that many later ones per level above its own.

With the policy ``lpm`` (longest prefix match), the sequence with the most cached tokens goes first
among the first ``WINDOW`` sequences that have the priority of the head of the queue. It may pass
the same head only ``MAX_OVERTAKEN`` times.

No sequence is passed because it is large: at the head, it waits until it fits, and all others wait
behind it. One whose adapter finds no slot is passed, since rows and pages would not help it; but
after ``MAX_OVERTAKEN`` times only by sequences without an adapter, so that slots come free. Must
not know whether there is room for a sequence: that is decided by ``admission``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Final

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import Request
from minisgl_backend.scheduling.adapter_places import AdapterPlaces
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

    def __init__(self, cache: KVCache, policy: str, places: AdapterPlaces | None = None) -> None:
        self._cache = cache
        self._places = places or AdapterPlaces(0)
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
        """The sequence to be served next, which stays in the queue; None if there is none that
        finds a slot for its adapter."""
        able = self._able()
        head = next(able, None)
        if head is None or not self._longest_prefix_first or head.overtaken >= MAX_OVERTAKEN:
            return head
        level = head.request.priority
        window = takewhile(lambda sequence: sequence.request.priority == level, able)
        # the first of equals
        return max([head, *islice(window, WINDOW - 1)], key=self._num_cached_tokens)

    def _able(self) -> Iterator[Sequence]:
        """The waiting sequences that find a slot for their adapters, or that need none."""
        keeps_slots = False
        for sequence in self._sequences:
            adapter = sequence.request.adapter
            if adapter is None or (not keeps_slots and self._places.has_place(adapter)):
                yield sequence
            else:
                keeps_slots |= sequence.overtaken >= MAX_OVERTAKEN

    def admit(self, sequence: Sequence) -> None:
        """Take out the chosen sequence; a head that it passes remembers it: that of the queue, and
        that of the sequences that find a slot."""
        for head in dict.fromkeys((self._sequences[0], next(self._able(), sequence))):
            head.overtaken += head is not sequence
        self.remove(sequence)

    def _num_cached_tokens(self, sequence: Sequence) -> int:
        return self._cache.match_length(sequence.reusable, sequence.request.cache_key)
