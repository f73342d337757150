"""What the replicas have cached, as the door knows it from their reports.

A prefix of whole pages is known by its *key*, 64 bits over its salt and all of its tokens. A
replica reports each page that it publishes, with the key of the prefix which ends there, and each
page that leaves its tree, by its number. So the shadow says exactly what a match in the replica's
own radix tree would find, but for pages that are detached there: they count until they leave it.
A table of keys, unlike a tree for each replica, is searched in a time that hardly depends on their
number.

Prefixes may also be *expected* of a replica: a request that will publish them is on its way.

Knows tokens, page ids and the numbers of replicas. Must not know loads or requests. Two prefixes
might have one key; then a request goes to a replica that has less of it than was thought, and
nothing else is wrong.

Invariant: a replica that holds a page of a prefix holds all pages before it, since a tree loses
pages from the ends of its leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray

Keys: TypeAlias = "npt.NDArray[np.uint64]"
"""Of a prompt's prefixes of 1, 2, ... pages."""
Replicas: TypeAlias = int
"""A set of replicas, a bit for each."""

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FACTORS: Final = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = np.uint64(30), np.uint64(27), np.uint64(31)


class PrefixKeys:
    """Computes keys for pages of ``page_size`` tokens.

    The key of a prefix is the sum, modulo 2^64, of a number for the salt and one for each page: the
    weighted sum of its tokens, times an odd number for the page's place. It is linear, so that it
    costs few operations; all weights are fixed odd numbers of 64 random bits.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        weights = _odd_numbers(page_size + 1)
        self._weights, self._start = weights[:-1], weights[-1]
        self._places = np.empty(0, np.uint64)

    def of(self, tokens: IntArray, salt: str = "") -> Keys:
        """uint64 [len(tokens) // page_size]; ``tokens`` int32 [num_tokens]."""
        num_pages = len(tokens) // self.page_size
        pages = tokens[: num_pages * self.page_size].reshape(num_pages, self.page_size)
        contents = pages.astype(np.uint64) @ self._weights  # [num_pages], modulo 2^64
        contents += self._start  # so that no page counts nothing
        if num_pages > len(self._places):
            self._places = _odd_numbers(self.page_size + 1 + 2 * num_pages)[self.page_size + 1 :]
        contents *= self._places[:num_pages]
        keys: Keys = contents.cumsum()
        if salt:
            keys += _of_salt(salt)
        return keys


class TreeReports:
    """Watches a replica's cache (``TreeWatch`` of ``cache.radix_cache``), and says what its shadow
    has to know: in the same order, and in the shadow's terms.

    ``publish`` gets keys and pages, ``evict`` pages, and ``forget`` is called if all are gone: what
    the functions of ``CacheShadow`` take for one replica.
    """

    def __init__(
        self,
        page_size: int,
        *,
        publish: Callable[[Keys, IntArray], None],
        evict: Callable[[IntArray], None],
        forget: Callable[[], None],
    ) -> None:
        self._keys = PrefixKeys(page_size)
        self._publish = publish
        self.left = evict
        self.emptied = forget

    def published(self, tokens: IntArray, salt: str, pages: IntArray) -> None:
        """``pages``, int32, are the last full ones of ``tokens``, int32."""
        self._publish(self._keys.of(tokens, salt)[-len(pages) :], pages)


class CacheShadow:
    """The prefixes that each of ``num_replicas`` has in its cache of ``num_pages``, by their keys.

    Replicas are numbered 0 .. num_replicas - 1.
    """

    def __init__(self, num_replicas: int, num_pages: int) -> None:
        self.num_replicas = num_replicas
        self._cached: dict[int, Replicas] = {}
        self._expected: dict[int, Replicas] = {}
        # by replica and page: the key of the prefix that ends there, 0 if none does
        self._keys = np.zeros((num_replicas, num_pages), np.uint64)

    @property
    def num_prefixes(self) -> int:
        """Number of different prefixes that are cached."""
        return len(self._cached)

    def publish(self, replica: int, keys: Keys, pages: IntArray) -> None:
        """A replica has the prefixes of these keys from now on; each ends in the page, int32, at
        the same index."""
        held = self._keys[replica]
        is_new = held[pages] != keys
        if not is_new.any():
            return
        fresh, at = keys[is_new], pages[is_new]
        if held[at].any():
            raise InvariantError("a page is published twice, and did not leave the tree between")
        bit = 1 << replica
        for key in fresh.tolist():
            others = self._cached.get(key, 0)
            if others & bit:  # also in a page that is detached: what becomes of that is the same
                held[held == np.uint64(key)] = 0
            self._cached[key] = others | bit
        held[at] = fresh

    def evict(self, replica: int, pages: IntArray) -> None:
        """These pages, int32, have left the replica's tree."""
        held = self._keys[replica]
        keys = held[pages]
        held[pages] = 0
        _take(self._cached, keys[keys != 0].tolist(), replica)

    def reports(self, replica: int, page_size: int) -> TreeReports:
        """The observer of a replica's cache, for a cache in this process."""
        return TreeReports(
            page_size,
            publish=partial(self.publish, replica),
            evict=partial(self.evict, replica),
            forget=partial(self.forget_cached, replica),
        )

    def expect(self, replica: int, keys: Keys) -> None:
        """A request that will publish these prefixes goes to the replica."""
        bit, expected = 1 << replica, self._expected
        for key in keys.tolist():
            if key in expected:
                expected[key] |= bit
            else:
                expected[key] = bit

    def withdraw(self, replica: int, keys: Keys) -> None:
        """Expect these prefixes no longer."""
        _take(self._expected, keys.tolist(), replica)

    def forget_cached(self, replica: int) -> None:
        """The replica has lost its cache, and goes on with its requests."""
        self.evict(replica, np.flatnonzero(self._keys[replica]).astype(np.int32))

    def forget(self, replica: int) -> None:
        """The replica has lost its cache, and what was expected of it."""
        self.forget_cached(replica)
        _take(self._expected, list(self._expected), replica)

    def has(self, replica: int, key: np.uint64) -> bool:
        """Whether the replica has the prefix of this key in its cache."""
        return bool(self._cached.get(key.item(), 0) >> replica & 1)

    def longest(
        self, keys: Keys, among: Replicas, *, expected: bool = True
    ) -> tuple[int, Replicas]:
        """Number of pages of the longest prefix that one of the replicas ``among`` has, and those
        of them that have it: all, if it is 0. With ``expected``, pages that are only expected
        count, too.
        """
        cached, waiting = self._cached, self._expected if expected else {}
        low, high, found = 0, len(keys), among
        while low < high:  # the first ``low`` pages are held by ``found``
            middle = (low + high + 1) // 2
            key = keys.item(middle - 1)
            holders = (cached.get(key, 0) | waiting.get(key, 0)) & among
            if holders:
                low, found = middle, holders
            else:
                high = middle - 1
        return low, found

    def match_lengths(self, keys: Keys) -> list[int]:
        """Number of pages that each replica has of a prompt; for tests and reports."""
        return [
            self.longest(keys, 1 << replica, expected=False)[0]
            for replica in range(self.num_replicas)
        ]


def _take(holders: dict[int, Replicas], keys: Sequence[int], replica: int) -> None:
    """Take a replica from the holders of ``keys``; it need not be among them."""
    others = ~(1 << replica)
    for key in keys:
        left = holders.get(key, 0) & others
        if left:
            holders[key] = left
        else:
            holders.pop(key, None)


def _odd_numbers(count: int) -> Keys:
    """The first ``count`` numbers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), made odd."""
    x = _STEP * np.arange(1, count + 1, dtype=np.uint64)
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    odd: Keys = x ^ (x >> _SHIFTS[2]) | np.uint64(1)
    return odd


class AdapterShadow:
    """Which adapters are in the slots of the replicas, as far as the requests that were sent there
    tell: those of the last ones, ``num_slots`` at each."""

    def __init__(self, num_replicas: int, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: list[dict[int, None]] = [{} for _ in range(num_replicas)]  # the oldest first

    def expect(self, replica: int, adapter_id: int) -> None:
        """A request with this adapter was sent to a replica."""
        held = self._held[replica]
        held.pop(adapter_id, None)
        held[adapter_id] = None
        if len(held) > self._num_slots:
            del held[next(iter(held))]

    def holders(self, adapter_id: int) -> Replicas:
        """The replicas that have the adapter."""
        return sum(1 << replica for replica, held in enumerate(self._held) if adapter_id in held)

    def forget(self, replica: int) -> None:
        """A replica has lost all."""
        self._held[replica].clear()


def _of_salt(salt: str) -> np.uint64:
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))
