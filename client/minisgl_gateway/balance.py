"""Which of several servers gets a request: consistent hashing with bounded loads, and ejection.

Each server has points on a ring, derived from its name. A request's key is a place on the ring, and
the servers after it are tried in turn: so requests with one beginning go to one server, and if
a server comes or goes, only the keys next to its points move. A server that has more than ``BOUND``
times the mean of open requests is passed over (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).

A server that fails a few times in a row, or says that it is ending, is *ejected*: it gets no
requests until a probe of it succeeds. Probes come after pauses that double.

Pure: knows no clock and no network. Must not know what a request is.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

BOUND: Final = 1.25
_POINTS: Final = 128
"""Points per server: the shares of several servers then differ by some 10 percent."""
_MOST_FAILURES: Final = 3
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0


@dataclass(slots=True)
class _Server:
    """``failures`` counts failures in a row. While the server is ejected, a probe is due at
    ``probe_s``, unless one is running; ``pause_s`` was the last pause."""

    num_open: int = 0
    failures: int = 0
    is_ejected: bool = False
    is_probed: bool = False
    probe_s: float = 0.0
    pause_s: float = 0.0


class Balance:
    """The servers, by index in the list of names. Times are readings of one clock, in seconds."""

    def __init__(self, names: Sequence[str]) -> None:
        self._servers = [_Server() for _ in names]
        points = sorted(
            (place_of(f"{name} {point}".encode()), server)
            for server, name in enumerate(names)
            for point in range(_POINTS)
        )
        self._places = [place for place, _ in points]
        self._owners = [server for _, server in points]

    def choose(self, key: bytes, excluding: Collection[int] = ()) -> int:
        """The server for a request, which counts as open there from now on.

        Ejected servers, and those in ``excluding``, are chosen only if there are no others.
        """
        order = list(self._order(key))
        usable = [each for each in order if not (each in excluding or self.is_ejected(each))]
        usable = usable or [each for each in order if each not in excluding] or order
        num_open = sum(self._servers[each].num_open for each in usable)
        most = math.ceil(BOUND * (num_open + 1) / len(usable))
        chosen = next(each for each in usable if self._servers[each].num_open < most)
        self._servers[chosen].num_open += 1
        return chosen

    def ended(self, server: int) -> None:
        """A request is no longer open."""
        self._servers[server].num_open -= 1

    def num_open(self, server: int) -> int:
        """Requests that are open at a server."""
        return self._servers[server].num_open

    def is_ejected(self, server: int) -> bool:
        """Whether a server gets no requests."""
        return self._servers[server].is_ejected

    def worked(self, server: int) -> None:
        """A server has answered a request. An ejected one stays ejected: the request is older."""
        one = self._servers[server]
        if not one.is_ejected:
            one.failures = 0

    def failed(self, server: int, now_s: float, *, is_ending: bool = False) -> None:
        """A server could not be reached, or broke a request.

        ``is_ending``: it said that it takes no more requests.
        """
        one = self._servers[server]
        one.failures += 1
        if not one.is_ejected and (is_ending or one.failures >= _MOST_FAILURES):
            self._eject(one, now_s)

    def due_probes(self, now_s: float) -> list[int]:
        """The ejected servers to probe now; ``probed`` must be called with each outcome."""
        due = [
            server
            for server, one in enumerate(self._servers)
            if one.is_ejected and not one.is_probed and one.probe_s <= now_s
        ]
        for server in due:
            self._servers[server].is_probed = True
        return due

    def probed(self, server: int, now_s: float, *, works: bool) -> None:
        """A probe has ended: the server gets requests again, or another probe is due later."""
        one = self._servers[server]
        if works:
            one.failures, one.is_ejected, one.is_probed, one.pause_s = 0, False, False, 0.0
        else:
            self._eject(one, now_s)

    def _eject(self, one: _Server, now_s: float) -> None:
        one.is_ejected, one.is_probed = True, False
        one.pause_s = min(_LONGEST_PAUSE_S, 2 * one.pause_s or _FIRST_PAUSE_S)
        one.probe_s = now_s + one.pause_s

    def _order(self, key: bytes) -> Iterator[int]:
        """All servers, in the order in which they come after the key's place."""
        begin = bisect.bisect(self._places, place_of(key))
        yield from dict.fromkeys(self._owners[begin:] + self._owners[:begin])


def place_of(key: bytes) -> int:
    """A place on the ring."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
