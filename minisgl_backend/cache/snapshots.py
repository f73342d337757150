"""The prefix cache of models with recurrent layers.

A recurrent layer keeps one state instead of keys and values, so the pages of a prefix are not
enough to go on from it: the state after it is needed, too. The executor keeps *snapshots*, numbered
copies of such states. A prefix is found up to the last position that has one.

Knows the numbers of snapshots and which prefix each belongs to. Must not know what is in them, or
when one is saved or read. A number may be reused at once: steps run in order, so the snapshot is
overwritten only after all steps that read it. (Before its step computes anything, a snapshot is
overwritten only if main memory has its states: ``take_snapshot`` then spares those that the step
reads.)
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.kv import Lease
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.tree_snapshots import TreeSnapshots
from minisgl_backend.cache.tree_watch import TreeWatch
from minisgl_backend.plan import NO_SNAPSHOT
from minisgl_backend.request import IntArray


class SnapshotCache(RadixCache):
    """``RadixCache`` whose leases begin at a snapshot (``Lease.snapshot``), at position 0, or where
    the caller has the states.

    Snapshots are numbered 0 .. num_snapshots - 1.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_snapshots: int,
        *,
        is_clean: bool = True,
        watch: TreeWatch | None = None,
        host: HostCache | None = None,
    ) -> None:
        """``host`` keeps states, too."""
        super().__init__(
            num_pages, page_size, is_clean=is_clean, watch=watch, needs_snapshots=True, host=host
        )
        self.num_snapshots = num_snapshots
        self._snapshots = TreeSnapshots(self._tree, num_snapshots)

    @property
    def num_taken_snapshots(self) -> int:
        return self._snapshots.num_taken

    def promised_length(self, tokens: IntArray, salt: str) -> int:
        """Always 0: pages that will be published may have no snapshot after them."""
        return 0

    def take_snapshot(self, *, rolls: bool = False, spared: Set[int] = frozenset()) -> int | None:
        """If none is free, the least recently used prefix loses its own. Decoding rows, whose
        snapshots cannot be found yet, get none while half of all are taken."""
        if rolls and self.num_taken_snapshots >= self.num_snapshots // 2:
            return None
        return self._snapshots.take(spared)

    def attach_snapshot(self, lease: Lease, num_tokens: int, snapshot: int) -> None:
        self._require_held(lease)
        assert lease.node is not None
        self._snapshots.attach(lease.node, num_tokens // self.page_size, snapshot)

    def return_snapshot(self, snapshot: int) -> None:
        self._snapshots.give_back(snapshot)

    def snapshots_along(self, lease: Lease) -> Sequence[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        node, num_pages = lease.node, lease.num_shared
        while node is not None and node.parent is not None:
            if node.snapshot != NO_SNAPSHOT:
                found.append((num_pages, node.snapshot))
            num_pages -= len(node.pages)
            node = node.parent
        return found[::-1]

    def discard(self, lease: Lease) -> None:
        super().discard(lease)
        self._snapshots.reclaim()

    def emptied(self) -> SnapshotCache:
        if self._watch is not None:
            self._watch.emptied()
        return type(self)(
            self.num_pages,
            self.page_size,
            self.num_snapshots,
            is_clean=False,
            watch=self._watch,
            host=None if self._host is None else self._host.emptied(),
        )

    def check(self) -> None:
        super().check()
        self._snapshots.check()

    def _make_room(self, num_pages: int) -> bool:
        has_room = super()._make_room(num_pages)
        self._snapshots.reclaim()
        return has_room
