"""Chooses the replica for each request, and keeps count of what it has sent where.

The rule: of the replicas that are in balance, the one that has the longest prefix of the prompt in
its cache; of several, the one with the least load. A replica's load has three measures: rows,
prompt tokens that wait to be computed, and pages, each as a share of what it can hold. It is *in
balance* if each measure is at most ``Balance.ratio`` times the mean of all replicas, plus
``Balance.slack``.

A conversation thus goes where its past is cached; a prefix that many requests share spreads to
other replicas as soon as those that have it are busier than the mean, and no faster.

Pure: no processes, no clock. Whoever drives it tells it when a prompt is computed, a sequence grows
and a request ends. Must not know tokens beyond the prompt, or how replicas are reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray
from minisgl_backend.routing.shadow import CacheShadow, Keys, PrefixKeys, Replicas

_ROWS, _WAITING, _PAGES = range(3)
_MEASURES: Final = 3


@dataclass(frozen=True, slots=True)
class Balance:
    """How far a replica's load may be above the mean before requests with a cached prefix there go
    elsewhere: ``ratio`` times the mean, at least 1, plus ``slack``, a share of the capacity."""

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
    prompt; it has made the replica expect those from ``first_expected`` on. ``waiting_tokens`` and
    ``pages`` are its part of the replica's load.
    """

    replica: int
    keys: Keys
    num_cached: int
    first_expected: int
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
        num_replicas = shadow.num_replicas
        self.shadow = shadow
        self.keys = PrefixKeys(page_size)
        self._page_size = page_size
        self._balance = Balance() if balance is None else balance
        sizes = [capacity.rows, capacity.prefill_tokens, capacity.pages]
        self._capacity = np.array(sizes, np.float64)[:, None]
        # rows, waiting tokens and pages of each replica
        self._load = np.zeros((_MEASURES, num_replicas), np.float64)
        self._num_routed = np.zeros(num_replicas, np.int64)
        self._is_up = np.ones(num_replicas, np.bool_)

    @property
    def load(self) -> npt.NDArray[np.float64]:
        """Rows, waiting tokens and pages of each replica as shares of its capacity,
        [3, num_replicas]."""
        shares: npt.NDArray[np.float64] = self._load / self._capacity
        return shares

    def route(self, prompt: IntArray, salt: str = "") -> Placement | None:
        """Choose a replica for the prompt, int32 [num_tokens], and count the request there.

        None if no replica is up.
        """
        if not self._is_up.any():
            return None
        # the last token is always computed, for its logits
        keys = self.keys.of(prompt[:-1], salt)
        replica = self.choose(keys)
        num_held, _ = self.shadow.longest(keys, 1 << replica)
        num_cached = num_held * self._page_size
        placement = Placement(
            replica=replica,
            keys=keys,
            num_cached=num_cached,
            first_expected=num_held,
            waiting_tokens=len(prompt) - num_cached,
            pages=-(-len(prompt) // self._page_size) - num_held,
        )
        self.shadow.expect(replica, keys[num_held:])
        self._load[:, replica] += (1, placement.waiting_tokens, placement.pages)
        self._num_routed[replica] += 1
        return placement

    def choose(self, keys: Keys) -> int:
        """The replica that the rule names, of those that are up; at least one is."""
        _, candidates = self.shadow.longest(keys, self.in_balance())
        return self.least_loaded(candidates)

    def in_balance(self) -> Replicas:
        """The replicas that are up and in balance; if none is, all that are up."""
        is_up, load = self._is_up, self._load
        mean = (load @ is_up / np.count_nonzero(is_up))[:, None]  # [3, 1]
        limit = self._balance.ratio * mean + self._balance.slack * self._capacity
        is_in_balance = (load <= limit).all(axis=0) & is_up
        return _replicas(is_in_balance) or _replicas(is_up)

    def least_loaded(self, candidates: Replicas) -> int:
        """The one whose largest measure is the least; of several, the one that was sent the fewest
        requests."""
        if candidates & (candidates - 1) == 0:
            return candidates.bit_length() - 1
        which = _numbers(candidates, len(self._is_up))
        loads = (self._load[:, which] / self._capacity).max(axis=0)
        least = which[loads == loads.min()]
        return int(least[self._num_routed[least].argmin()])

    def computed(self, placement: Placement) -> None:
        """The prompt is computed, and what is published of it reported. Idempotent."""
        if placement.has_ended:
            return
        self._load[_WAITING, placement.replica] -= placement.waiting_tokens
        placement.waiting_tokens = 0
        self._withdraw(placement)

    def grow(self, placement: Placement, num_pages: int) -> None:
        """The sequence has taken ``num_pages`` more."""
        if placement.has_ended:
            return
        self._load[_PAGES, placement.replica] += num_pages
        placement.pages += num_pages

    def end(self, placement: Placement) -> None:
        """The request has left its replica, for any reason. Raises ``InvariantError`` if it has
        before."""
        if placement.has_ended:
            raise InvariantError("a placement ends twice")
        self.computed(placement)
        placement.has_ended = True
        self._load[:, placement.replica] -= (1, 0, placement.pages)

    def leave(self, replica: int) -> None:
        """Send no more requests to a replica: it drains."""
        self._is_up[replica] = False

    def join(self, replica: int) -> None:
        """Send requests to a replica, which was started or is to go on."""
        self._is_up[replica] = True

    def _withdraw(self, placement: Placement) -> None:
        self.shadow.withdraw(placement.replica, placement.keys[placement.first_expected :])
        placement.first_expected = len(placement.keys)


def _replicas(is_among: npt.NDArray[np.bool_]) -> Replicas:
    return int.from_bytes(np.packbits(is_among, bitorder="little").tobytes(), "little")


def _numbers(replicas: Replicas, num_replicas: int) -> npt.NDArray[np.int64]:
    """Ascending."""
    packed = np.frombuffer(replicas.to_bytes(-(-num_replicas // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
