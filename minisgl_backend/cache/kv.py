"""Who holds which page: leases on the pages of the KV cache, with or without shared prefixes.

Knows token ids, page ids and which pages may hold NaN. Must not know rows, requests or tensors: the
executor keeps the keys and values themselves, and one more page for padding, which is not among the
pages here.

NaN and infinity in a page are dangerous even at positions that attention masks out, since 0 * NaN
is NaN. So a page must not be handed out with what a step left in it, unless that is known to be
finite. A finite token, sampled from a sequence, verifies all pages of the sequence, because its
logits depend on every position before it. A page that is written and not verified is *suspect*;
once it is free again, it is *broken*: ``take_broken`` names it, and the executor clears it. (With a
sliding window a token depends on the last layers of the window alone. NaN that only the last layer
computes, at a position that has left the window when the first token is sampled, goes unnoticed.)

The pages of a lease, in the order of their positions:

    [0, num_shared)         cached: in the tree, pinned by ``node``, never written again
    [num_shared, written)   private, written by committed steps; suspect until they are verified
    [written, len(pages))   private, for tokens that committed steps have not computed yet

Invariants, all verified by ``check``:
- Every page is free, cached (in the tree) or leased (private to one lease), and never two of these.
- The cached pages that a lease uses are pinned until the lease is released.
- No free page is suspect.
Rules for the caller, which nothing here can verify:
- The positions of a lease's shared pages are never written again, only those of private pages.
- ``publish`` is called only for tokens whose step is committed, and comes before ``release`` if
  steps have written to the lease since the last ``publish``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from minisgl_backend.cache.groups import groups_of
from minisgl_backend.cache.pages import PagePool, num_pages_for
from minisgl_backend.cache.radix import Node, RadixTree
from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_GROUPS, NO_SNAPSHOT, Groups
from minisgl_backend.request import IntArray


class Verified(Enum):
    """Which pages of a lease a finite token has verified."""

    NONE = "no token has been sampled behind them"
    OWN = "a token has, by a step that had other pages in place of some of the shared ones"
    ALL = "a token has, by a step that read the pages which the lease has now"


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's claim on pages, in the order of its positions (see the map above).

    ``promise``: the pages that it is going to publish, if that was promised and is still to come.
    ``snapshot`` is that of the states behind the pages it was acquired with, if the cache has such
    (``cache.snapshots``).
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    num_shared: int = 0
    node: Node | None = None
    promise: Node | None = None
    salt: bytes = b""
    snapshot: int = NO_SNAPSHOT
    released: bool = False

    @property
    def num_private(self) -> int:
        """Number of pages that become free when the lease is released."""
        return len(self.pages) - self.num_shared


class KVCache(Protocol):
    """The planner's view of the pages.

    Every method that takes a lease raises ``InvariantError`` if the lease was released before.
    """

    page_size: int
    num_pages: int

    @property
    def num_free(self) -> int:
        """Number of pages that are neither cached nor leased."""

    @property
    def num_cached(self) -> int:
        """Number of pages in the tree, pinned or not."""

    @property
    def num_evictable(self) -> int:
        """Number of cached pages that no lease pins."""

    def match_length(self, tokens: IntArray, salt: str = "") -> int:
        """Number of tokens that ``acquire`` would find cached now. Changes nothing."""

    def promise(self, lease: Lease, tokens: IntArray) -> None:
        """Note that the full pages of ``tokens`` will be published, until they are, or the lease
        ends. At most once for a lease."""

    def promised_length(self, tokens: IntArray, salt: str = "") -> int:
        """Number of tokens that ``acquire`` would find if all promised pages were published, but
        no other ones."""

    def acquire(self, tokens: IntArray, salt: str = "") -> Lease:
        """A lease on the longest cached prefix of ``tokens[:-1]``, in whole pages.

        ``tokens`` is int32[num_tokens]. The last token is left out since at least one token must be
        computed for its logits. Only prefixes published with the same ``salt`` are found.
        """

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Add pages until ``num_tokens`` positions fit, evicting cached pages if need be.

        False, and no page is added, if there are too few.
        """

    def grow_each(self, leases: Sequence[Lease]) -> IntArray | None:
        """Add one page to each lease, evicting if need be, and return them, int32[num_leases].

        None, and no page is added, if there are too few.
        """

    def publish(self, lease: Lease, tokens: IntArray, *, verified: Verified) -> range:
        """Make the full pages of ``tokens``, all committed tokens from position 0 on, shareable.

        ``verified`` says whether a finite token has been sampled behind ``tokens``. If the same
        prefix is cached by now in other pages, the lease takes these, and its own are freed.
        Returns the indices at which ``lease.pages`` changed in this way.
        """

    def groups(self, leases: Sequence[Lease], cost_tokens: int) -> Groups:
        """Which of the leases share cached pages; the members are indices of ``leases``.

        A group saves reading more than ``cost_tokens`` positions for each of its members. Takes
        time by the number of leases and of groups, not of pages.
        """

    def cached_length(self, tokens: IntArray, salt: str = "") -> int:
        """Number of tokens of ``tokens[:-1]`` whose pages are cached, though perhaps without a
        snapshot behind them: others have begun in the same way, and more may."""

    def take_snapshot(self) -> int | None:
        """A number to save recurrent states under, for models that have them; None if there is
        none to give."""

    def attach_snapshot(self, lease: Lease, num_tokens: int, snapshot: int) -> None:
        """Let others begin behind the first ``num_tokens`` published tokens of ``lease``, a whole
        number of pages, with a snapshot that was taken."""

    def return_snapshot(self, snapshot: int) -> None:
        """Give back a snapshot that was taken, and is of no use."""

    def release(self, lease: Lease) -> None:
        """End the lease: its private pages become free, and its shared pages may be evicted."""

    def discard(self, lease: Lease) -> None:
        """End the lease of a sequence whose logits were not finite.

        Its private pages become broken. No match finds its suspect pages any more, nor any page
        that only this lease used, nor what continues them. These pages become broken, too, as soon
        as no other lease uses them.
        """

    def take_broken(self) -> IntArray:
        """The free pages that may hold NaN and were not returned before, int32[num_pages]."""

    def emptied(self) -> KVCache:
        """A new cache of the same kind and size. All pages are free, and all are broken."""

    def check(self) -> None:
        """Raise ``InvariantError`` unless each page is either free, cached or leased. Slow."""


class TreeWatch(Protocol):
    """Is told, in order, what enters and leaves the tree of a cache."""

    def published(self, tokens: IntArray, salt: str, pages: IntArray) -> None:
        """``pages`` are in the tree from now on: the last full ones of ``tokens``."""

    def left(self, pages: IntArray) -> None:
        """``pages`` are not in the tree any more."""

    def emptied(self) -> None:
        """An empty cache takes the place of the one that was watched."""


class NaiveCache:
    """Shares nothing: every sequence computes all its tokens itself."""

    def __init__(self, num_pages: int, page_size: int, *, is_clean: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._pool = PagePool(num_pages, is_clean=is_clean)
        self._leases: dict[Lease, None] = {}

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def num_evictable(self) -> int:
        return 0

    def match_length(self, tokens: IntArray, salt: str = "") -> int:
        return 0

    def promise(self, lease: Lease, tokens: IntArray) -> None:
        pass

    def promised_length(self, tokens: IntArray, salt: str = "") -> int:
        return 0

    def acquire(self, tokens: IntArray, salt: str = "") -> Lease:
        return self._register(Lease())

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        self._require_held(lease)
        missing = num_pages_for(num_tokens, self.page_size) - len(lease.pages)
        if missing <= 0:
            return True
        if not self._make_room(missing):
            return False
        # [0, N)   the pages of the lease so far
        # [N, M)   new and private: from the free pages, after as many evictions as that takes
        lease.pages.frombytes(self._pool.allocate(missing).tobytes())
        return True

    def grow_each(self, leases: Sequence[Lease]) -> IntArray | None:
        if not self._make_room(len(leases)):
            return None
        pages = self._pool.allocate(len(leases))
        for lease, page in zip(leases, pages.tolist(), strict=True):
            self._require_held(lease)
            lease.pages.append(page)
        return pages

    def publish(self, lease: Lease, tokens: IntArray, *, verified: Verified) -> range:
        self._require_held(lease)
        self._judge(lease, len(tokens), verified)
        return range(0)

    def groups(self, leases: Sequence[Lease], cost_tokens: int) -> Groups:
        return NO_GROUPS

    def cached_length(self, tokens: IntArray, salt: str = "") -> int:
        return self.match_length(tokens, salt)

    def take_snapshot(self) -> int | None:
        return None

    def attach_snapshot(self, lease: Lease, num_tokens: int, snapshot: int) -> None:
        self.return_snapshot(snapshot)

    def return_snapshot(self, snapshot: int) -> None:
        raise InvariantError("this cache has given no snapshots away")

    def release(self, lease: Lease) -> None:
        self._end(lease)

    def discard(self, lease: Lease) -> None:
        self._end(lease, is_suspect=True)

    def take_broken(self) -> IntArray:
        return self._pool.take_broken()

    def emptied(self) -> KVCache:
        return type(self)(self.num_pages, self.page_size, is_clean=False)

    def check(self) -> None:
        self._pool.check()
        self._check_pages([])

    def _register(self, lease: Lease) -> Lease:
        self._leases[lease] = None
        return lease

    def _end(self, lease: Lease, *, is_suspect: bool = False) -> None:
        """End the lease and free its private pages."""
        self._require_held(lease)
        lease.released = True
        del self._leases[lease]
        private = _as_array(lease.pages[lease.num_shared :])
        if is_suspect:
            self._pool.suspect(private)
        self._pool.free(private)

    def _require_held(self, lease: Lease) -> None:
        if lease.released:
            raise InvariantError("a lease is used after its release")

    def _judge(self, lease: Lease, num_tokens: int, verified: Verified) -> None:
        """Trust or suspect the pages with the first ``num_tokens`` positions of the lease."""
        if verified is not Verified.NONE and not self._pool.num_suspect:
            return
        num_written = num_pages_for(num_tokens, self.page_size)
        if verified is Verified.ALL:
            self._pool.trust(_as_array(lease.pages[:num_written]))
        elif verified is Verified.OWN:
            self._pool.trust(_as_array(lease.pages[lease.num_shared : num_written]))
        else:
            self._pool.suspect(_as_array(lease.pages[lease.num_shared : num_written]))

    def _make_room(self, num_pages: int) -> bool:
        return num_pages <= self._pool.num_free

    def _check_pages(self, cached: list[IntArray]) -> None:
        private = [_as_array(lease.pages[lease.num_shared :]) for lease in self._leases]
        pages = np.concatenate([self._pool.free_pages(), *cached, *private])
        if not np.array_equal(np.sort(pages), np.arange(self.num_pages)):
            raise InvariantError(
                f"{self._pool.num_free} free, {sum(map(len, cached))} cached and "
                f"{sum(map(len, private))} leased pages are not the {self.num_pages} of the pool"
            )


class RadixCache(NaiveCache):
    """Leases with the same salt and a common prefix of tokens share the pages of the prefix."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        is_clean: bool = True,
        watch: TreeWatch | None = None,
    ) -> None:
        super().__init__(num_pages, page_size, is_clean=is_clean)
        self._tree = RadixTree(page_size)
        self._promises = RadixTree(page_size)  # its pages are indices only
        self._watch = watch

    @property
    def num_cached(self) -> int:
        return self._tree.num_pages

    @property
    def num_evictable(self) -> int:
        return self._tree.num_evictable

    def match_length(self, tokens: IntArray, salt: str = "") -> int:
        return self._tree.match_length(tokens[:-1], salt_key(salt)) * self.page_size

    def promise(self, lease: Lease, tokens: IntArray) -> None:
        assert lease.promise is None
        num_pages = len(tokens) // self.page_size
        if num_pages > lease.num_shared:
            indices = np.arange(num_pages, dtype=np.int32)
            whole = tokens[: num_pages * self.page_size]
            tree = self._promises
            lease.promise, _ = tree.insert(tree.root, whole, indices, lease.salt)

    def promised_length(self, tokens: IntArray, salt: str = "") -> int:
        return self._promises.match_length(tokens[:-1], salt_key(salt)) * self.page_size

    def acquire(self, tokens: IntArray, salt: str = "") -> Lease:
        key = salt_key(salt)
        node, pages = self._tree.match(tokens[:-1], key)
        return self._register(
            Lease(
                pages=array("i", pages.tobytes()),
                num_shared=len(pages),
                node=node,
                salt=key,
                snapshot=node.snapshot,
            )
        )

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
        # [start, start + known)   others have published these tokens meanwhile: the lease takes
        #                          their pages, which may be suspect or not, and its own are freed
        # [start + known, stop)    own pages, now in the tree
        # [stop, len(pages))       private as before
        own = _as_array(lease.pages[start:stop])
        fresh = tokens[start * self.page_size : stop * self.page_size]
        lease.node, known = self._tree.insert(lease.node, fresh, own, lease.salt)
        lease.num_shared = stop
        if lease.promise is not None and stop > int(lease.promise.pages[-1]):
            self._keep_promise(lease)
        lease.pages[start : start + len(known)] = array("i", known.tobytes())
        self._pool.free(own[: len(known)])
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
        dropped = self._tree.drop(lease.node, self._pool.has_suspects)
        self._pool.suspect(dropped)
        self._free_dropped(dropped)

    def emptied(self) -> KVCache:
        if self._watch is not None:
            self._watch.emptied()
        return RadixCache(self.num_pages, self.page_size, is_clean=False, watch=self._watch)

    def _end(self, lease: Lease, *, is_suspect: bool = False) -> None:
        super()._end(lease, is_suspect=is_suspect)
        if lease.promise is not None:
            self._keep_promise(lease)

    def _keep_promise(self, lease: Lease) -> None:
        """Forget what the lease has promised: it is done, or will never be."""
        assert lease.promise is not None
        self._promises.unpin(lease.promise)
        self._promises.evict(self._promises.num_evictable)
        lease.promise = None

    def check(self) -> None:
        self._pool.check()
        self._tree.check()
        self._promises.check()
        promised = sum(lease.promise is not None for lease in self._leases)
        if sum(node.pins for node in self._promises.root.children.values()) != promised:
            raise InvariantError("not exactly the promises of leases are noted")
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
            raise InvariantError("a node's pins are not those of the leases")

    def _make_room(self, num_pages: int) -> bool:
        short = num_pages - self._pool.num_free
        if short > self._tree.num_evictable:
            return False
        if short > 0:
            self._free_dropped(self._tree.evict(short))
        return True

    def _free_dropped(self, pages: IntArray) -> None:
        """Free pages that have left the tree."""
        self._pool.free(pages)
        if self._watch is not None and len(pages):
            self._watch.left(pages)


def _as_array(pages: array[int]) -> IntArray:
    return np.array(pages, dtype=np.int32)


def salt_key(salt: str) -> bytes:
    """The salt as the tree has it in its keys."""
    return salt.encode("utf-8", "surrogatepass")


def salt_of(key: bytes) -> str:
    """The salt of which ``salt_key`` made ``key``."""
    return key.decode("utf-8", "surrogatepass")
