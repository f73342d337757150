"""An index of the prefixes that the replicas have cached, kept up to date by their reports.

A prefix of whole pages is known by its *key*, 64 bits over its salt and all of its tokens. A
replica reports each page that it publishes, with the key of the prefix that ends there, and each
page that leaves its tree, by its number. So the index says exactly what a match in the replica's
own radix tree would find, except for pages that are detached there: they count until they leave it.
The time to search a table of keys, unlike that to search a tree for each replica, hardly depends on
the number of replicas.

It also knows the prefixes in a replica's main memory (``cache.host``), which are as good as cached.
Prefixes may also be *expected* of a replica: a request that will publish them is on its way.

Knows tokens, page ids and the numbers of replicas. Must not know loads or requests.

Invariant: a replica that holds a page of a prefix holds all pages before it, since a tree loses
pages from the ends of its leaves. The same holds for main memory by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray
from minisgl_backend.routing.expected import ExpectedNode, ExpectedPrefixes
from minisgl_backend.routing.keys import Keys, PrefixKeys, Replicas


class TreeReports:
    """Watches a replica's cache (``TreeWatch`` of ``cache.radix_cache``), and reports its changes
    to the index, in the same order.

    The functions correspond to those of ``CacheIndex``, for one replica: ``publish`` gets keys and
    pages, ``evict`` gets pages, and ``forget`` is called when the cache is emptied.
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


class _Level:
    """The prefixes that each replica holds in its pages, or in its slots of main memory: then
    *pages* stands for slots."""

    def __init__(self, num_replicas: int, num_pages: int) -> None:
        self.holders: dict[int, Replicas] = {}
        """By key."""
        # by replica and page: the key of the prefix that ends there, 0 if there is none
        self._keys = np.zeros((num_replicas, num_pages), np.uint64)

    def publish(self, replica: int, keys: Keys, pages: IntArray) -> None:
        """See ``CacheIndex.publish``."""
        held = self._keys[replica]
        is_new = held[pages] != keys
        if not is_new.any():
            return
        fresh, at = keys[is_new], pages[is_new]
        if held[at].any():
            raise InvariantError("a page is published twice, and did not leave the tree between")
        bit = 1 << replica
        for key in fresh.tolist():
            others = self.holders.get(key, 0)
            if others & bit:  # already in another page, detached by now: that one no longer counts
                held[held == np.uint64(key)] = 0
            self.holders[key] = others | bit
        held[at] = fresh

    def evict(self, replica: int, pages: IntArray) -> None:
        """See ``CacheIndex.evict``."""
        held = self._keys[replica]
        keys = held[pages]
        held[pages] = 0
        others = ~(1 << replica)
        for key in keys[keys != 0].tolist():
            left = self.holders.get(key, 0) & others
            if left:
                self.holders[key] = left
            else:
                self.holders.pop(key, None)

    def forget(self, replica: int) -> None:
        """A replica holds nothing any more."""
        self.evict(replica, np.flatnonzero(self._keys[replica]).astype(np.int32))


class CacheIndex:
    """The prefixes that each of ``num_replicas`` has in its cache of ``num_pages``, by their keys,
    and in ``num_host_slots`` of main memory.

    Replicas are numbered 0 .. num_replicas - 1.
    """

    def __init__(self, num_replicas: int, num_pages: int, num_host_slots: int = 0) -> None:
        self.num_replicas = num_replicas
        self._cached = _Level(num_replicas, num_pages)
        self._in_host = _Level(num_replicas, num_host_slots)
        self._expected = ExpectedPrefixes()

    def publish(self, replica: int, keys: Keys, pages: IntArray, *, in_host: bool = False) -> None:
        """A replica has the prefixes of these keys from now on. ``pages``, int32, are those in
        which they end, in the same order; ``in_host``: slots of main memory."""
        level = self._in_host if in_host else self._cached
        level.publish(replica, keys, pages)

    def evict(self, replica: int, pages: IntArray, *, in_host: bool = False) -> None:
        """These pages, int32, have left the replica's tree; ``in_host``: these slots."""
        level = self._in_host if in_host else self._cached
        level.evict(replica, pages)

    def expect(self, replica: int, keys: Keys) -> ExpectedNode:
        """A request with this prompt goes to a replica, which will have all of the prompt."""
        return self._expected.add(replica, keys)

    def withdraw(self, replica: int, node: ExpectedNode) -> None:
        """No longer expect the prompt for which ``expect`` returned ``node``. Once for each."""
        self._expected.remove(replica, node)

    def forget(self, replica: int) -> None:
        """The replica has lost its cache, main memory included; what is expected of it stays."""
        self._cached.forget(replica)
        self._in_host.forget(replica)

    def longest(self, keys: Keys, among: Replicas) -> tuple[int, Replicas]:
        """Number of pages of the longest prefix that any of the replicas ``among`` has cached or is
        expected to publish, and the replicas among them that have it: all, if it is 0."""
        cached, in_host, item = self._cached.holders.get, self._in_host.holders.get, keys.item
        low, high, found = 0, len(keys), among
        while low < high:  # the first ``low`` pages are held by ``found``
            middle = (low + high) // 2
            key = item(middle)
            holders = (cached(key, 0) | in_host(key, 0)) & among
            if holders:
                low, found = middle + 1, holders
            else:
                high = middle
        further, expecting = self._expected.longest(keys, among)
        if further > low:
            return further, expecting
        return low, found | expecting if further == low else found
