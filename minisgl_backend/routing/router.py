"""Chooses the replica for each request, and keeps count of what it has sent where.

The rule: of the replicas that are in balance, the one that has the longest prefix of the prompt in
its cache; of several, the one with the least load. A replica's load has three measures: rows,
prompt tokens that wait to be computed, and pages, each as a share of what it can hold. It is *in
balance* if each measure is at most ``Balance.ratio`` times the mean of all replicas, plus
``Balance.slack``: for a prefix that is at least as long as those of other requests are on average.
A shorter one pulls in proportion less, down to nothing: for it, a replica must not be above the
mean. So what leaves a busy replica is what costs the least to compute again.

A conversation thus goes where its past is cached; a prefix that many requests share spreads to
other replicas as soon as those that have it are busier than the mean, and no faster.

Pure: no processes, no clock. Whoever drives it tells it when a prompt is computed, a sequence grows
and a request ends. Must not know tokens beyond the prompt, or how replicas are reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray
from minisgl_backend.routing.shadow import CacheShadow, Keys, PrefixKeys, Replicas

_FOLLOWS: Final = 0.02
"""How much a request moves the average length of prefixes."""

_Load: TypeAlias = tuple[int, int, int]
"""Rows, waiting tokens, pages."""


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
class Capacity:
    """What a replica can hold: rows, prompt tokens of one step, pages."""

    rows: int
    prefill_tokens: int
    pages: int


@dataclass(slots=True, eq=False)
class Placement:
    """A request at its replica.

    ``num_cached`` tokens of its prompt are cached there, or expected. ``keys`` are those of its
    prompt; it has made the replica expect those from ``first_expected`` on. ``num_rows``,
    ``waiting_tokens`` and ``pages`` are its part of the replica's load.
    """

    replica: int
    keys: Keys
    num_cached: int
    first_expected: int
    num_rows: int
    waiting_tokens: int
    pages: int
    has_ended: bool = False


class Router:
    """Routes requests to replicas of equal capacity, over a ``CacheShadow`` of their caches."""

    def __init__(
        self,
        shadow: CacheShadow,
        *,
        page_size: int,
        capacity: Capacity,
        balance: Balance | None = None,
    ) -> None:
        self.shadow = shadow
        self.keys = PrefixKeys(page_size)
        self.num_routed = [0] * shadow.num_replicas
        """Requests that each replica was sent."""
        self._page_size = page_size
        self._balance = Balance() if balance is None else balance
        self._capacity = capacity.rows, capacity.prefill_tokens, capacity.pages
        # rows, waiting tokens and pages, of each replica and of all that are up
        self._loads: list[_Load] = [(0, 0, 0)] * shadow.num_replicas
        self._total: _Load = (0, 0, 0)
        self._busiest = [0.0] * shadow.num_replicas  # the largest measure of each, as a share
        self._up: Replicas = (1 << shadow.num_replicas) - 1
        self._usual = 0.0  # pages of the longest prefix that a request finds, on average

    @property
    def load(self) -> npt.NDArray[np.float64]:
        """Rows, waiting tokens and pages of each replica as shares of its capacity,
        [3, num_replicas]."""
        shares: npt.NDArray[np.float64] = np.array(self._loads, np.float64) / self._capacity
        return shares.T

    def route(self, prompt: IntArray, salt: str = "", *, num_rows: int = 1) -> Placement | None:
        """Choose a replica for the prompt, int32 [num_tokens], and count its ``num_rows`` samples
        there.

        None if no replica is up.
        """
        if not self._up:
            return None
        # the last token is always computed, for its logits
        keys = self.keys.of(prompt[:-1], salt)
        replica, num_held = self.choose(keys)
        num_cached = num_held * self._page_size
        placement = Placement(
            replica=replica,
            keys=keys,
            num_cached=num_cached,
            first_expected=num_held,
            num_rows=num_rows,
            waiting_tokens=len(prompt) - num_cached,
            pages=-(-len(prompt) // self._page_size) - num_held,
        )
        self.shadow.expect(replica, keys[num_held:])
        self._add(replica, (num_rows, placement.waiting_tokens, placement.pages))
        self.num_routed[replica] += 1
        return placement

    def choose(self, keys: Keys) -> tuple[int, int]:
        """The replica that the rule names, of those that are up, and the number of pages that it
        has of the prefix. At least one is up."""
        longest, holders = self.shadow.longest(keys, self._up)
        self._usual += _FOLLOWS * (longest - self._usual)
        left, num_held = self._up, longest
        while left:  # from the longest prefix that any of those left has to shorter ones
            rows, tokens, pages = self._limits(num_held)
            left &= ~holders
            in_balance = [
                replica
                for replica in self._members(holders)
                if (load := self._loads[replica])[0] <= rows
                and load[1] <= tokens
                and load[2] <= pages
            ]
            if in_balance:
                return self._least_loaded(in_balance), num_held
            num_held, holders = self.shadow.longest(keys, left)
        longest, holders = self.shadow.longest(keys, self._up)  # none is in balance
        return self._least_loaded(self._members(holders)), longest

    def _limits(self, num_held: int) -> tuple[float, float, float]:
        """The largest load in balance, for a prefix of ``num_held`` pages."""
        pull = min(1.0, num_held / self._usual) if self._usual else 0.0
        num_up = self._up.bit_count()
        ratio, slack = 1 + pull * (self._balance.ratio - 1), pull * self._balance.slack
        rows, tokens, pages = (
            ratio * total / num_up + slack * most
            for total, most in zip(self._total, self._capacity, strict=True)
        )
        return rows, tokens, pages

    def least_loaded(self) -> int:
        """Of all that are up."""
        return self._least_loaded(self._members(self._up))

    def computed(self, placement: Placement) -> None:
        """The prompt is computed, and what is published of it reported. Idempotent."""
        if placement.has_ended:
            return
        self._add(placement.replica, (0, -placement.waiting_tokens, 0))
        placement.waiting_tokens = 0
        self.shadow.withdraw(placement.replica, placement.keys[placement.first_expected :])
        placement.first_expected = len(placement.keys)

    def grow(self, placement: Placement, num_pages: int) -> None:
        """The sequence has taken ``num_pages`` more."""
        if placement.has_ended:
            return
        self._add(placement.replica, (0, 0, num_pages))
        placement.pages += num_pages

    def end(self, placement: Placement) -> None:
        """The request has left its replica, for any reason. Raises ``InvariantError`` if it has
        before."""
        if placement.has_ended:
            raise InvariantError("a placement ends twice")
        self.computed(placement)
        placement.has_ended = True
        self._add(placement.replica, (-placement.num_rows, 0, -placement.pages))

    def leave(self, replica: int) -> None:
        """Send no more requests to a replica: it drains, or is gone. Idempotent."""
        self._set_up(self._up & ~(1 << replica))

    def join(self, replica: int) -> None:
        """Send requests to a replica, which was started or is to go on. Idempotent."""
        self._set_up(self._up | 1 << replica)

    def _set_up(self, replicas: Replicas) -> None:
        self._up = replicas
        loads = [self._loads[replica] for replica in self._members(replicas)]
        rows, tokens, pages = map(sum, zip(*loads, strict=True)) if loads else (0, 0, 0)
        self._total = rows, tokens, pages

    def _add(self, replica: int, change: _Load) -> None:
        """Count ``change`` in the load of a replica."""
        load = self._loads[replica] = _sum(self._loads[replica], change)
        self._busiest[replica] = max(
            part / most for part, most in zip(load, self._capacity, strict=True)
        )
        if self._up >> replica & 1:
            self._total = _sum(self._total, change)

    def _least_loaded(self, replicas: list[int]) -> int:
        """Of equally loaded ones, the one that was sent the fewest requests."""
        busiest, num_routed = self._busiest, self.num_routed
        return min(replicas, key=lambda replica: (busiest[replica], num_routed[replica]))

    def _members(self, replicas: Replicas) -> list[int]:
        """Ascending."""
        if replicas & (replicas - 1) == 0:
            return [replicas.bit_length() - 1] if replicas else []
        return [replica for replica in range(len(self._loads)) if replicas >> replica & 1]


def _sum(a: _Load, b: _Load) -> _Load:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
