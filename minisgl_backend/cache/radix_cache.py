"""The prefix cache: leases with a common prefix of tokens share its pages, kept in a radix tree.

Knows the tree, and promises: prefixes that leases are about to compute. The idea is SGLang's
(RadixAttention, arXiv 2312.07104). Must not know what is evicted first: the tree decides that.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from minisgl_backend.cache.groups import groups_of
from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.kv import KVCache, Lease, Verified
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.pages import as_array
from minisgl_backend.cache.radix import RadixTree, salt_key, salt_of
from minisgl_backend.cache.tree_watch import TreeWatch
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_SNAPSHOT, Groups
from minisgl_backend.request import IntArray


class RadixCache(NaiveCache):
    """Leases with the same salt and a common prefix of tokens share the pages of the prefix."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        is_clean: bool = True,
        watch: TreeWatch | None = None,
        windows: WindowPages | None = None,
        needs_snapshots: bool = False,
        host: HostCache | None = None,
    ) -> None:
        """For ``needs_snapshots`` see ``RadixTree``. ``host`` keeps states if there are snapshots,
        and window pages if there are ``windows``."""
        super().__init__(num_pages, page_size, is_clean=is_clean, windows=windows)
        self._tree = RadixTree(page_size, needs_snapshots=needs_snapshots)
        self._promises = RadixTree(page_size)  # its pages are indices only
        self._watch = watch
        self._host = host
        if host is not None:
            own = needs_snapshots, windows is not None
            if own != (host.keeps_states, host.keeps_windows):
                raise InvariantError("main memory keeps other things than the cache")

    @property
    def host(self) -> HostCache | None:
        return self._host

    @property
    def num_cached(self) -> int:
        return self._tree.num_pages

    @property
    def num_evictable(self) -> int:
        return self._tree.num_evictable

    def match_length(self, tokens: IntArray, salt: str) -> int:
        key = salt_key(salt)
        if self._windows is not None:
            return len(self._with_window(self._windows, tokens[:-1], key))
        return self._tree.match_length(tokens[:-1], key) * self.page_size

    def cached_length(self, tokens: IntArray, salt: str) -> int:
        return self._tree.cached_length(tokens[:-1], salt_key(salt)) * self.page_size

    def promise(self, lease: Lease, tokens: IntArray) -> None:
        assert lease.promise is None
        num_pages = len(tokens) // self.page_size
        if num_pages > lease.num_shared:
            indices = np.arange(num_pages, dtype=np.int32)
            whole = tokens[: num_pages * self.page_size]
            tree = self._promises
            lease.promise, _ = tree.insert(tree.root, whole, indices, lease.salt)

    def promised_length(self, tokens: IntArray, salt: str) -> int:
        return self._promises.match_length(tokens[:-1], salt_key(salt)) * self.page_size

    def acquire(self, tokens: IntArray, salt: str, *, resumed_at: int = 0) -> Lease:
        key = salt_key(salt)
        found = tokens[: resumed_at or -1]
        if self._windows is not None:
            found = self._with_window(self._windows, found, key)
        node, pages = self._tree.match(found, key, whole=resumed_at > 0)
        lease = Lease(
            pages=array("i", pages.tobytes()),
            num_shared=len(pages),
            node=node,
            salt=key,
            snapshot=NO_SNAPSHOT if resumed_at else node.snapshot,
        )
        if self._windows is not None:
            self._windows.enter(lease)
        return self._register(lease)

    def publish(self, lease: Lease, tokens: IntArray, *, verified: Verified) -> range:
        self._require_held(lease)
        self._judge(lease, len(tokens), verified)
        start, stop = lease.num_shared, len(tokens) // self.page_size
        if stop <= start:
            return range(0)
        if stop > len(lease.pages):
            raise InvariantError(f"{stop} pages are published, {len(lease.pages)} are leased")
        assert lease.node is not None
        # Indices of lease.pages; [start, stop) are full of tokens and private until now:
        # [0, start)               shared before, stays as it is
        # [start, start + known)   others have since published these tokens: the lease takes
        #                          their pages, suspect or not, and its own are freed
        # [start + known, stop)    own pages, now in the tree
        # [stop, len(pages))       private as before
        own = as_array(lease.pages[start:stop])
        fresh = tokens[start * self.page_size : stop * self.page_size]
        lease.node, known = self._tree.insert(lease.node, fresh, own, lease.salt)
        lease.num_shared = stop
        if lease.promise is not None and stop > int(lease.promise.pages[-1]):
            self._keep_promise(lease)
        if self._windows is not None:
            self._windows.replace(lease, start, known)
        lease.pages[start : start + len(known)] = array("i", known.tobytes())
        self._free(own[: len(known)])
        if self._watch is not None and start + len(known) < stop:
            self._watch.published(
                tokens[: stop * self.page_size], salt_of(lease.salt), own[len(known) :]
            )
        return range(start, start + len(known))

    def groups(self, leases: Sequence[Lease], cost_tokens: int) -> Groups:
        nodes = [lease.node for lease in leases if lease.node is not None]
        return groups_of(nodes, self.page_size, cost_tokens)

    def release(self, lease: Lease) -> None:
        # [0, num_shared)            unpinned: the nodes that no other lease pins may be evicted,
        #                            or are freed now if they are detached
        # [num_shared, len(pages))   freed
        self._end(lease)
        assert lease.node is not None
        self._free_dropped(self._tree.unpin(lease.node))

    def discard(self, lease: Lease) -> None:
        # [0, kept)                 pages that other leases use, too, and that are not suspect
        # [kept, num_shared)        leave the tree, now or with the last lease that uses them
        # [num_shared, len(pages))  freed, to be cleared
        self._end(lease, is_suspect=True)
        assert lease.node is not None
        dropped = self._tree.drop(lease.node, self._is_suspect)
        self._suspect(dropped)
        self._free_dropped(dropped)

    def emptied(self) -> KVCache:
        if self._watch is not None:
            self._watch.emptied()
        return RadixCache(
            self.num_pages,
            self.page_size,
            is_clean=False,
            watch=self._watch,
            windows=self._emptied_windows(),
            host=None if self._host is None else self._host.emptied(),
        )

    def check(self) -> None:
        self._pool.check()
        self._tree.check()
        self._promises.check()
        if self._host is not None:
            self._host.check()
        promised = sum(lease.promise is not None for lease in self._leases)
        if sum(node.pins for node in self._promises.root.children.values()) != promised:
            raise InvariantError("the tree of promises does not match the leases")
        self._check_pages([node.pages for node in self._tree.nodes()])
        pins = dict.fromkeys(self._tree.nodes(), 0)
        for lease in self._leases:
            node = lease.node
            held: list[int] = []
            while node is not None and node is not self._tree.root:
                held = [*node.pages.tolist(), *held]
                pins[node] = pins.get(node, 0) + 1
                node = node.parent
            if held != lease.pages[: lease.num_shared].tolist():
                raise InvariantError("a lease does not pin the shared pages that it uses")
        if any(node.pins != count for node, count in pins.items()):
            raise InvariantError("the pins of a node do not match the leases")

    def _end(self, lease: Lease, *, is_suspect: bool = False) -> None:
        super()._end(lease, is_suspect=is_suspect)
        if lease.promise is not None:
            self._keep_promise(lease)

    def _keep_promise(self, lease: Lease) -> None:
        """Forget what the lease has promised: it is published, or will never be."""
        assert lease.promise is not None
        self._promises.unpin(lease.promise)
        self._promises.evict(self._promises.num_evictable)
        lease.promise = None

    def _with_window(self, windows: WindowPages, tokens: IntArray, salt: bytes) -> IntArray:
        """The longest cached prefix of ``tokens`` whose last window is cached, too."""
        num_pages = windows.usable(self._tree.pages_along(tokens, salt))
        return tokens[: num_pages * self.page_size]

    def _make_room(self, num_pages: int) -> bool:
        short = num_pages - self._pool.num_free
        if short > self._tree.num_evictable:
            return False
        if short > 0:
            self._free_dropped(self._tree.evict(short))
        return True

    def _free_dropped(self, pages: IntArray) -> None:
        """Free pages that have left the tree."""
        self._free(pages)
        if self._watch is not None and len(pages):
            self._watch.left(pages)
