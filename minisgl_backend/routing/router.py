"""Chooses the replica for each request, and keeps count of what it has sent where.

The rule: of the replicas that are in balance, take the one that has the longest prefix of the
prompt in its cache; of several, the one with the least load, those with a free row first. A
replica's load has three measures: rows, prompt tokens that wait to be computed, and pages, each as
a share of what it can hold. If the prefix is at least as long as those of other requests are on
average, the replica is *in balance* if each measure is at most ``Balance.ratio`` times the mean of
all replicas, plus ``Balance.slack``. A shorter prefix pulls proportionally less, down to nothing:
then a replica must not be above the mean. So what leaves a busy replica is what costs the least to
compute again. Waiting for as many tokens as the prefix saves is no imbalance: computing them
elsewhere takes as long.

An adapter that a replica has on its device pulls like a long prefix, but ranks below prefixes: of
the replicas that have equally much of the prompt, the ones with the adapter come first.

So a conversation goes where its past is cached; a prefix that many requests share spreads to
other replicas as soon as those that have it are busier than the mean, and no faster.

Pure: no processes, no clock. Whoever drives it tells it when a prompt is computed, a sequence grows
or a request ends. Must not know tokens beyond the prompt, or how replicas are reached.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray
from minisgl_backend.routing.adapter_index import AdapterIndex
from minisgl_backend.routing.cache_index import CacheIndex
from minisgl_backend.routing.expected import ExpectedNode
from minisgl_backend.routing.keys import Keys, PrefixKeys, Replicas

_FOLLOWS: Final = 0.02
"""How much a request moves the average length of prefixes."""

_Load: TypeAlias = tuple[int, int, int]
"""Rows, waiting tokens, pages."""
_Limits: TypeAlias = tuple[float, float, float]
"""The largest load in balance."""
_Rank: TypeAlias = tuple[bool, float, int, Replicas]
"""Whether a replica has no free row; the largest measure of its load, as a share of what it can
hold; the number of requests sent to it; and the replica."""


@dataclass(frozen=True, slots=True)
class Balance:
    """How far a replica's load may be above the mean before requests with a long cached prefix
    there go elsewhere: ``ratio`` times the mean, at least 1, plus ``slack``, a share of the
    capacity."""

    ratio: float = 1.2
    slack: float = 0.03

    def __post_init__(self) -> None:
        if not (self.ratio >= 1 and self.slack >= 0):
            raise ValueError("ratio must be at least 1, and slack at least 0")


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """What a replica can hold: rows, prompt tokens of one step, pages."""

    rows: int
    prefill_tokens: int
    pages: int


@dataclass(slots=True, eq=False)
class Placement:
    """A request at its replica.

    ``num_cached`` tokens of its prompt are cached there, or expected. ``expected`` is where the
    prompt ends among those that the replica is expected to publish; None once it is computed.
    ``num_rows``, ``waiting_tokens`` and ``pages`` are its part of the replica's load.
    """

    replica: int
    num_cached: int
    expected: ExpectedNode | None
    num_rows: int
    waiting_tokens: int
    pages: int
    has_ended: bool = False


class Router:
    """Routes requests to replicas of equal capacity, over a ``CacheIndex`` of their caches."""

    def __init__(
        self,
        index: CacheIndex,
        *,
        page_size: int,
        capacity: ReplicaCapacity,
        balance: Balance | None = None,
        num_adapter_slots: int = 0,
    ) -> None:
        self.index = index
        self.adapters = AdapterIndex(index.num_replicas, num_adapter_slots)
        self.keys = PrefixKeys(page_size)
        self.num_routed = [0] * index.num_replicas
        """Number of requests sent to each replica."""
        self._page_size = page_size
        self._balance = Balance() if balance is None else balance
        self.capacity: _Load = (capacity.rows, capacity.prefill_tokens, capacity.pages)
        self.loads: list[_Load] = [(0, 0, 0)] * index.num_replicas
        """Of each replica, in the units of ``capacity``."""
        self._total: _Load = (0, 0, 0)  # of all replicas that are up
        self._ranks: list[_Rank] = [
            (False, 0.0, 0, 1 << number) for number in range(index.num_replicas)
        ]
        self._by_load = list(self._ranks)  # sorted
        self.up: Replicas = (1 << index.num_replicas) - 1
        """The replicas that requests are sent to."""
        self._usual = 0.0  # pages of the longest prefix that a request finds, on average

    def route(
        self,
        prompt: IntArray,
        salt: str,
        *,
        num_rows: int = 1,
        adapter_id: int | None = None,
    ) -> Placement | None:
        """Choose a replica for the prompt, int32 [num_tokens], and count its ``num_rows`` samples
        there.

        None if no replica is up.
        """
        if not self.up:
            return None
        # the last token is always computed, for its logits
        keys = self.keys.of(prompt[:-1], salt)
        favoured = 0 if adapter_id is None else self.adapters.holders(adapter_id)
        replica, num_held = self.choose(keys, favoured)
        num_cached = num_held * self._page_size
        placement = Placement(
            replica=replica,
            num_cached=num_cached,
            expected=self.index.expect(replica, keys),
            num_rows=num_rows,
            waiting_tokens=len(prompt) - num_cached,
            pages=-(-len(prompt) // self._page_size) - num_held,
        )
        if adapter_id is not None:
            self.adapters.expect(replica, adapter_id)
        self.num_routed[replica] += 1
        self._add(replica, (num_rows, placement.waiting_tokens, placement.pages))
        return placement

    def choose(self, keys: Keys, favoured: Replicas = 0) -> tuple[int, int]:
        """The replica that the rule picks from those that are up, at least one, and how many pages
        of the prefix it has. ``favoured`` are the replicas that have the adapter."""
        longest, holders = self.index.longest(keys, self.up)
        self._usual += _FOLLOWS * (longest - self._usual)
        left, num_held, having = self.up, longest, holders
        while True:  # from the longest prefix that any replica left has to shorter ones
            limits, replica = self._limits(self._pull(num_held), num_held), None
            if favoured:
                replica = self.least_loaded(having & favoured, self._limits(pull=1.0))
            if replica is None:
                replica = self.least_loaded(having, limits)
            if replica is not None:
                return replica, num_held
            if not num_held:
                break
            # of the others, those in balance now: a shorter prefix has tighter limits
            left &= ~having
            num_held, having = self._next_longest(keys[:num_held], left, limits, favoured)
        replica = self.least_loaded(holders)  # none is in balance
        assert replica is not None
        return replica, longest

    def least_loaded(self, replicas: Replicas, limits: _Limits | None = None) -> int | None:
        """The least loaded of ``replicas`` whose load is within the limits, if there is one; of
        equally loaded ones, the one that was sent the fewest requests."""
        loads = self.loads
        if not replicas & (replicas - 1):  # at most one, as for most prefixes
            replica = replicas.bit_length() - 1
            within = replicas and (limits is None or _fits(loads[replica], limits))
            return replica if within else None
        for _, _, _, bit in self._by_load:
            if replicas & bit:
                replica = bit.bit_length() - 1
                if limits is None or _fits(loads[replica], limits):
                    return replica
        return None

    def _next_longest(
        self, keys: Keys, left: Replicas, limits: _Limits, favoured: Replicas
    ) -> tuple[int, Replicas]:
        """The longest prefix that a replica of ``left`` has that is favoured or in balance, and its
        holders."""
        is_any, having = self.index.longest(keys[:1], left)
        if is_any:
            having = self._in_balance(having, limits) | having & favoured
            if having:
                return self.index.longest(keys, having)
        return 0, left

    def _pull(self, num_held: int) -> float:
        """How much a prefix of ``num_held`` pages pulls."""
        return min(1.0, num_held / self._usual) if self._usual else 0.0

    def _limits(self, pull: float, num_held: int = 0) -> _Limits:
        """The largest load that counts as balanced, for a prefix of ``num_held`` pages with this
        pull."""
        num_up = self.up.bit_count()
        ratio, slack = 1 + pull * (self._balance.ratio - 1), pull * self._balance.slack
        (rows, tokens, pages), most = self._total, self.capacity
        return (
            ratio * rows / num_up + slack * most[0],
            ratio * tokens / num_up + slack * most[1] + num_held * self._page_size,
            ratio * pages / num_up + slack * most[2],
        )

    def computed(self, placement: Placement) -> None:
        """The prompt is computed, and its published pages are reported. Idempotent."""
        if placement.expected is None:
            return
        self.index.withdraw(placement.replica, placement.expected)
        placement.expected = None
        self._add(placement.replica, (0, -placement.waiting_tokens, 0))
        placement.waiting_tokens = 0

    def grow(self, placements: Sequence[Placement]) -> None:
        """Sequences at one replica have taken one more page each time that they are named."""
        num_pages = 0
        for placement in placements:
            if not placement.has_ended:
                placement.pages += 1
                num_pages += 1
        if num_pages:
            self._add(placements[0].replica, (0, 0, num_pages))

    def end(self, placement: Placement) -> None:
        """The request has left its replica, for any reason. Raises ``InvariantError`` if it had
        already left."""
        if placement.has_ended:
            raise InvariantError("a placement ends twice")
        self.computed(placement)
        placement.has_ended = True
        self._add(placement.replica, (-placement.num_rows, 0, -placement.pages))

    def leave(self, replica: int) -> None:
        """Send no more requests to a replica: it drains, or is gone. Idempotent."""
        self._set_up(self.up & ~(1 << replica))
        self.adapters.forget(replica)

    def join(self, replica: int) -> None:
        """Send requests to a replica, which was started or is to continue. Idempotent."""
        self._set_up(self.up | 1 << replica)

    def _set_up(self, replicas: Replicas) -> None:
        self.up = replicas
        loads = [load for number, load in enumerate(self.loads) if replicas >> number & 1]
        rows, tokens, pages = map(sum, zip(*loads, strict=True)) if loads else (0, 0, 0)
        self._total = rows, tokens, pages

    def _add(self, replica: int, change: _Load) -> None:
        """Count ``change`` in the load of a replica, and put it in its place by load."""
        rows, tokens, pages = load = _sum(self.loads[replica], change)
        self.loads[replica] = load
        most = self.capacity
        busiest = max(rows / most[0], tokens / most[1], pages / most[2])
        del self._by_load[bisect_left(self._by_load, self._ranks[replica])]
        # a prompt waits a few steps for other prompts, but for a row until some answer ends
        is_full = rows >= most[0]
        rank = self._ranks[replica] = is_full, busiest, self.num_routed[replica], 1 << replica
        insort(self._by_load, rank)
        if self.up >> replica & 1:
            self._total = _sum(self._total, change)

    def _in_balance(self, replicas: Replicas, limits: _Limits) -> Replicas:
        """The ones among ``replicas`` whose load is within the limits."""
        within = 0
        while replicas:
            bit = replicas & -replicas
            if _fits(self.loads[bit.bit_length() - 1], limits):
                within |= bit
            replicas ^= bit
        return within


def _fits(load: _Load, limits: _Limits) -> bool:
    return load[0] <= limits[0] and load[1] <= limits[1] and load[2] <= limits[2]


def _sum(a: _Load, b: _Load) -> _Load:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
