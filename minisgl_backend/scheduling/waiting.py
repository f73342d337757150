"""The waiting sequences, and the order in which they are served.

A higher priority goes first, and among equal priorities the older request. No priority starves: one
level of priority is worth a head start of ``HEAD_START`` arrivals, so a request is overtaken by at
most that many later ones per level above its own.

Among sequences with the priority of the head of the queue, the order may change to make use of
common prefixes, but no sequence is passed by more than ``max_overtaken`` later ones:
- A sequence waits for a prefix that a running one is about to compute, instead of computing it too.
- *Companions* are served next, so that they run together (``cache.groups``): sequences that have
  more in common with one that was served than the head has.
- With the policy ``lpm`` (longest prefix match) there are no companions. Instead, the sequence with
  the most cached tokens among the first ``WINDOW`` is served next.

No sequence is passed because it is large: once chosen, it waits until it fits, and all others wait
behind it. A sequence without a free slot for its adapter is passed, since rows and pages would not
help it. But after ``MOST_PAST_SLOTS`` times the slot with the fewest rows is *kept*: it gets no
more rows, so that it becomes free. After as many times again, so is another one, and so on. (If all
were kept at once, few rows would run with many adapters.) From sequences of lower priority, the
first one is kept from the start. Must not know whether there is room for a sequence: ``admission``
decides that.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Set
from itertools import chain, islice, takewhile
from typing import Final, TypeAlias

import numpy as np

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import Request
from minisgl_backend.scheduling.adapter_places import AdapterPlaces
from minisgl_backend.scheduling.sequence import Precedence, Sequence, by_precedence

HEAD_START: Final = 1024
WINDOW: Final = 32
MOST_PAST_SLOTS: Final = 64
_MOST_SERVED: Final = 64

_Neighbour: TypeAlias = tuple[str, bytes, Precedence, Sequence]
"""A sequence, and before it what it is sorted by, so that sequences with a long common prefix are
neighbours. Precedences are unique."""


def precedence_of(request: Request, arrival: int) -> Precedence:
    """The place of the ``arrival``-th request in the order of service."""
    return (arrival - request.priority * HEAD_START, arrival)


class WaitingQueue:
    """The waiting sequences, in order of precedence; ``policy`` is fcfs or lpm.

    With a ``max_overtaken`` of 0 this is also the order of service, but for sequences without a
    slot for their adapter. Common prefixes shorter than ``worthwhile_tokens`` are ignored.
    ``places`` are the slots of adapters.
    """

    def __init__(
        self,
        cache: KVCache,
        policy: str,
        max_overtaken: int,
        *,
        worthwhile_tokens: int,
        places: AdapterPlaces,
    ) -> None:
        self._cache = cache
        self._places = places
        self._longest_prefix_first = policy == "lpm"
        self._max_overtaken = max_overtaken
        self._worthwhile_tokens = worthwhile_tokens
        self._sequences: list[Sequence] = []
        self._by_tokens: list[_Neighbour] = []
        self._served: deque[_Neighbour] = deque(maxlen=_MOST_SERVED)  # may have companions
        self._chosen: Sequence | None = None  # as a companion of one of these
        self._ahead: list[Precedence] = []  # of served sequences that have passed the head
        # during ``choose``: some slots are kept from lower priorities than this, ...
        self._least_for_slots = -math.inf
        self._for_others: Set[int] = frozenset()  # ... so that these are the adapters left to them
        self._kept_for: Sequence | None = None  # the first sequence that was passed often, and ...
        self._num_passed_before = 0  # ... how often when it became the first

    def __len__(self) -> int:
        return len(self._sequences)

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence at the place that its precedence gives it."""
        insort(self._sequences, sequence, key=by_precedence)
        if self._brings_together:
            insort(self._by_tokens, _neighbour(sequence), key=_without_sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is in the queue."""
        index = bisect_left(self._sequences, sequence.precedence, key=by_precedence)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise InvariantError(f"request {sequence.request.id} is not in the queue")
        del self._sequences[index]
        if self._brings_together:
            key = _without_sequence(_neighbour(sequence))
            del self._by_tokens[bisect_left(self._by_tokens, key, key=_without_sequence)]
        first = self._sequences[0].precedence if self._sequences else sequence.precedence
        del self._ahead[: bisect_left(self._ahead, first)]

    def choose(self) -> Sequence | None:
        """The sequence to be served next, which stays in the queue; None if there is none, or if
        all candidates wait for a prefix or for a slot for their adapter."""
        self._least_for_slots = -math.inf
        able = self._able()
        head = next(able, None)
        if head is None or self._num_passed_by(head) >= self._max_overtaken:
            return head
        self._chosen = self._companion(head) if self._brings_together else None
        if self._chosen is not None:
            return self._chosen
        level = head.request.priority
        window = takewhile(
            lambda sequence: sequence.request.priority == level,
            islice(chain([head], able), WINDOW),
        )
        due = filter(self._is_due, window)
        if self._longest_prefix_first:
            return max(due, key=self._num_cached_tokens, default=None)  # the first of equals
        return next(due, None)

    def _able(self) -> Iterator[Sequence]:
        """The waiting sequences that have a slot for their adapter, or need none."""
        for sequence in self._sequences:
            if self._finds_slot(sequence):
                yield sequence
            elif self._least_for_slots < math.inf:
                self._keep_slots(sequence)

    def _keep_slots(self, sequence: Sequence) -> None:
        """Keep slots for a sequence that has none for its adapter."""
        num_passed, num_kept = self._num_passed_by(sequence), 1
        least: float = sequence.request.priority
        if num_passed >= MOST_PAST_SLOTS:
            if sequence is not self._kept_for:
                self._kept_for, self._num_passed_before = sequence, num_passed
            num_kept += (num_passed - self._num_passed_before) // MOST_PAST_SLOTS
            least = math.inf
        if least > self._least_for_slots:
            self._least_for_slots = least
            self._for_others = self._places.busiest(all_but=num_kept)

    def _finds_slot(self, sequence: Sequence) -> bool:
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        if sequence.request.priority < self._least_for_slots:
            return adapter.id in self._for_others
        return self._places.has_place(adapter)

    def _num_passed_by(self, sequence: Sequence) -> int:
        """Number of later sequences that were served before this one."""
        return len(self._ahead) - bisect_right(self._ahead, sequence.precedence)

    def admit(self, sequence: Sequence) -> None:
        """Take out the chosen sequence; note that it has passed others and may have companions."""
        if sequence is not self._sequences[0]:
            insort(self._ahead, sequence.precedence)
        self.remove(sequence)
        if self._brings_together and sequence is not self._chosen:
            self._served.append(_neighbour(sequence))

    @property
    def _brings_together(self) -> bool:
        return self._max_overtaken > 0 and not self._longest_prefix_first

    def _companion(self, head: Sequence) -> Sequence | None:
        """A companion that is due, of the earliest served sequence that has one. Forgets served
        sequences without companions."""
        for served in list(self._served):
            nearest = self._nearest(served, head)
            if nearest is None:
                self._served.remove(served)
            elif self._finds_slot(nearest) and self._is_due(nearest):
                return nearest
        return None

    def _nearest(self, served: _Neighbour, head: Sequence) -> Sequence | None:
        """The companion that has most in common with a served sequence."""
        index = bisect_left(self._by_tokens, _without_sequence(served), key=_without_sequence)
        most, nearest = _num_common_tokens(served[3], head) + self._worthwhile_tokens, None
        for *_, sequence in self._by_tokens[max(index - 1, 0) : index + 1]:
            common = _num_common_tokens(served[3], sequence)
            if common >= most and sequence.request.priority == head.request.priority:
                most, nearest = common, sequence
        return nearest

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether running sequences are not about to compute a longer prefix of this one."""
        coming = self._cache.promised_length(sequence.reusable, sequence.request.cache_key)
        if coming < self._worthwhile_tokens:
            return True
        return coming < self._num_cached_tokens(sequence) + self._worthwhile_tokens

    def _num_cached_tokens(self, sequence: Sequence) -> int:
        return self._cache.match_length(sequence.reusable, sequence.request.cache_key)


def _neighbour(sequence: Sequence) -> _Neighbour:
    key = sequence.request.cache_key
    return (key, sequence.tokens.tobytes(), sequence.precedence, sequence)


def _without_sequence(neighbour: _Neighbour) -> tuple[str, bytes, Precedence]:
    return neighbour[:3]


def _num_common_tokens(one: Sequence, other: Sequence) -> int:
    """The length of the common prefix, 0 if the two may not share pages."""
    if one.request.cache_key != other.request.cache_key:
        return 0
    length = min(len(one.tokens), len(other.tokens))
    differ = one.tokens[:length] != other.tokens[:length]
    first = int(np.argmax(differ)) if length else 0  # 0 also if none differs
    return first if length and differ[first] else length
