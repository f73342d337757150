"""Who holds which page: leases on the pages of the KV cache, with or without shared prefixes.

Knows token ids, page ids and which pages may hold NaN. Must not know rows, requests or tensors: the
executor keeps the keys and values, and a page for padding that is not among the pages here.

NaN and infinity in a page are dangerous even at positions that attention masks out, since 0 * NaN
is NaN. So a page may be reused only if its contents are known to be finite, or are cleared. A
finite token, sampled from a sequence, verifies all pages of the sequence, because its logits depend
on every position before it. A page that is written and not verified is *suspect*; once it is free
again, it is *broken*: ``take_broken`` names it, and the executor clears it. (A sliding window is
the exception: NaN that only the last layer computes goes unnoticed, if its position has left the
window by the time the first token is sampled. And no token depends on the keys and values of an MTP
layer. But these are made of finite numbers only.)

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

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.radix import Node
from minisgl_backend.cache.windows import WindowLease, WindowPages
from minisgl_backend.plan import NO_SNAPSHOT, Groups
from minisgl_backend.request import IntArray


class Verified(Enum):
    """Which pages of a lease a finite token has verified."""

    NONE = "no token was sampled after them"
    OWN = "a token was, by a step that read other pages in place of some of the shared ones"
    ALL = "a token was, by a step that read the pages that the lease has now"


@dataclass(slots=True, eq=False)
class Lease(WindowLease):
    """One sequence's claim on pages, in the order of its positions (see the map above).

    ``promise``: the last node of the pages that it has promised (in the tree of promises); None
    once they are published. ``snapshot``: the snapshot of the states after the pages with which it
    was acquired, if the cache has snapshots (``cache.snapshots``).
    """

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
    def windows(self) -> WindowPages | None:
        """The pages of layers with windows, if they have pages of their own."""

    @property
    def host(self) -> HostCache | None:
        """The prefixes in main memory, if any are kept."""

    @property
    def num_free(self) -> int:
        """Number of pages that are neither cached nor leased."""

    @property
    def num_cached(self) -> int:
        """Number of pages in the tree, pinned or not."""

    @property
    def num_evictable(self) -> int:
        """Number of cached pages that no lease pins."""

    @property
    def num_taken_snapshots(self) -> int:
        """Number of snapshots that were taken and are neither attached nor given back."""

    def match_length(self, tokens: IntArray, salt: str) -> int:
        """Number of tokens that ``acquire`` would find cached now. Changes nothing."""

    def promise(self, lease: Lease, tokens: IntArray) -> None:
        """Announce that the full pages of ``tokens`` will be published. Holds until they are, or
        the lease ends. At most once for each lease."""

    def promised_length(self, tokens: IntArray, salt: str) -> int:
        """Number of tokens that ``acquire`` would find if the promised pages alone were cached."""

    def acquire(self, tokens: IntArray, salt: str, *, resumed_at: int = 0) -> Lease:
        """A lease on the longest cached prefix of ``tokens[:-1]``, in whole pages.

        ``tokens`` is int32[num_tokens]. The last token is left out because it must be computed for
        its logits. Only prefixes published with the same ``salt`` are found. The caller has the
        recurrent states after the first ``resumed_at`` tokens, unless that is 0: then the lease
        has the cached pages up to there, with or without a snapshot after them.
        """

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Add pages until ``num_tokens`` positions fit, evicting cached pages if necessary.

        False if there are too few pages: then none is added.
        """

    def grow_each(self, leases: Sequence[Lease]) -> IntArray | None:
        """Add one page to each lease, evicting if necessary, and return them, int32[num_leases].

        None if there are too few pages: then none is added.
        """

    def publish(self, lease: Lease, tokens: IntArray, *, verified: Verified) -> range:
        """Make the full pages of ``tokens``, all committed tokens from position 0 on, shareable.

        ``verified`` says whether a finite token was sampled after ``tokens``. Where the same prefix
        is already cached in other pages, the lease takes those, and its own are freed. Returns the
        indices at which ``lease.pages`` changed in this way.
        """

    def finite_pages(self, lease: Lease) -> IntArray:
        """The published pages of a lease, int32[num_pages], up to the first that may hold NaN."""

    def groups(self, leases: Sequence[Lease], cost_tokens: int) -> Groups:
        """Which of the leases share cached pages; the members are indices of ``leases``.

        There is a group only if it saves reading more than ``cost_tokens`` positions per member.
        The time depends on the number of leases and groups, not on that of pages.
        """

    def cached_length(self, tokens: IntArray, salt: str) -> int:
        """Number of leading tokens of ``tokens[:-1]`` whose pages are cached. They may be unusable,
        for lack of a snapshot or a window after them. But other sequences began with them, so more
        may."""

    def take_snapshot(self, *, rolls: bool = False, spared: Set[int] = frozenset()) -> int | None:
        """The number of a snapshot, under which recurrent states can be saved; None if there is
        none to spare. One that ``rolls`` is held as long as its row decodes; the last snapshots are
        never given out for that. None of ``spared`` is given out."""

    def attach_snapshot(self, lease: Lease, num_tokens: int, snapshot: int) -> None:
        """Let others begin after the first ``num_tokens`` published tokens of ``lease``, which fill
        whole pages, from a snapshot that was taken."""

    def return_snapshot(self, snapshot: int) -> None:
        """Give back a snapshot that was taken and will not be attached."""

    def snapshots_along(self, lease: Lease) -> Sequence[tuple[int, int]]:
        """The snapshots after published pages of a lease: pairs of a number of pages, ascending,
        and the snapshot after them."""

    def release(self, lease: Lease) -> None:
        """End the lease: its private pages become free, and its shared pages may be evicted."""

    def discard(self, lease: Lease) -> None:
        """End the lease of a sequence whose logits were not finite.

        Its private pages become broken. The pages in the tree that are suspect or used by this
        lease alone can no longer be found, nor can their continuations; they become broken, too,
        as soon as no other lease uses them.
        """

    def take_broken(self) -> IntArray:
        """The free pages that may hold NaN and were not returned before, int32[num_pages]."""

    def emptied(self) -> KVCache:
        """A new cache of the same kind and size. All pages are free, and all are broken."""

    def check(self) -> None:
        """Raise ``InvariantError`` unless each page is either free, cached or leased. Slow."""
