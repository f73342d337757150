"""The prefix cache of models with recurrent layers.

A recurrent layer keeps one state instead of keys and values, so the pages of a prefix are not
enough to go on from it: the state after it is needed, too. The executor keeps *snapshots*, numbered
copies of such states. A prefix is found up to the last position that has one.

Knows the numbers of snapshots and which prefix each belongs to. Must not know what is in them, or
when one is saved or read. A number may be reused at once: steps run in order, so the snapshot is
overwritten only after all steps that read it.

Invariant, verified by ``check``: every snapshot is free, attached to a prefix in the tree, or taken
and not given back yet.
"""

from __future__ import annotations

from minisgl_backend.cache.kv import Lease
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.tree_watch import TreeWatch
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray


class SnapshotCache(RadixCache):
    """``RadixCache`` whose leases begin at a snapshot (``Lease.snapshot``) or at position 0.

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
    ) -> None:
        super().__init__(num_pages, page_size, is_clean=is_clean, watch=watch, needs_snapshots=True)
        self.num_snapshots = num_snapshots
        self._free_snapshots = list(range(num_snapshots - 1, -1, -1))
        self._num_taken = 0

    @property
    def num_taken_snapshots(self) -> int:
        return self._num_taken

    def promised_length(self, tokens: IntArray, salt: str) -> int:
        """Always 0: pages that will be published may have no snapshot after them."""
        return 0

    def take_snapshot(self, *, rolls: bool = False) -> int | None:
        """If none is free, the least recently used prefix loses its own. Decoding rows, whose
        snapshots cannot be found yet, get none while half of all are taken."""
        if rolls and self._num_taken >= self.num_snapshots // 2:
            return None
        if not self._free_snapshots:
            self._tree.lose_oldest_snapshot()
            self._reclaim()
        if not self._free_snapshots:
            return None
        self._num_taken += 1
        return self._free_snapshots.pop()

    def attach_snapshot(self, lease: Lease, num_tokens: int, snapshot: int) -> None:
        self._require_held(lease)
        assert lease.node is not None
        self._num_taken -= 1
        if not self._tree.attach(lease.node, num_tokens // self.page_size, snapshot):
            self._free_snapshots.append(snapshot)

    def return_snapshot(self, snapshot: int) -> None:
        self._num_taken -= 1
        self._free_snapshots.append(snapshot)

    def discard(self, lease: Lease) -> None:
        super().discard(lease)
        self._reclaim()

    def emptied(self) -> SnapshotCache:
        if self._watch is not None:
            self._watch.emptied()
        return type(self)(
            self.num_pages,
            self.page_size,
            self.num_snapshots,
            is_clean=False,
            watch=self._watch,
        )

    def check(self) -> None:
        super().check()
        attached = self._tree.snapshots()
        known = sorted([*self._free_snapshots, *attached])
        if len(set(known)) != len(known) or len(known) + self._num_taken != self.num_snapshots:
            raise InvariantError(
                f"{len(self._free_snapshots)} free, {len(attached)} attached and "
                f"{self._num_taken} taken snapshots do not add up to {self.num_snapshots}"
            )

    def _make_room(self, num_pages: int) -> bool:
        has_room = super()._make_room(num_pages)
        self._reclaim()
        return has_room

    def _reclaim(self) -> None:
        self._free_snapshots.extend(self._tree.take_lost_snapshots())
