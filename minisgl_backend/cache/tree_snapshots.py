"""The numbers of copies of recurrent states, and the prefixes in a radix tree that have one.

Each level of the prefix cache has such copies: the device's are snapshots, those in main memory are
in slots for states. Knows numbers. Must not know what is in a copy, or when it is made.

Invariant, verified by ``check``: every number is free, attached to a prefix in the tree, or taken
and not given back yet.
"""

from __future__ import annotations

from collections.abc import Set

from minisgl_backend.cache.radix import Node, RadixTree
from minisgl_backend.errors import InvariantError


class TreeSnapshots:
    """Numbers 0 .. num_snapshots - 1, for the prefixes in ``tree``, which nothing else gives
    snapshots."""

    def __init__(self, tree: RadixTree, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_taken = 0
        self._tree = tree
        self._free = list(range(num_snapshots - 1, -1, -1))

    @property
    def num_attached(self) -> int:
        """Number of prefixes that have a snapshot."""
        return self.num_snapshots - self.num_taken - len(self._free)

    def take(self, spared: Set[int] = frozenset()) -> int | None:
        """A number that is not ``spared``: if none is free, the least recently used prefix with
        such a snapshot loses it. None if there is none."""
        number = self._pop_free(spared)
        if number is None:
            self._tree.lose_oldest_snapshot(spared)
            self.reclaim()
            number = self._pop_free(spared)
        self.num_taken += number is not None
        return number

    def attach(self, node: Node, num_pages: int, number: int) -> bool:
        """Attach a number that was taken: see ``RadixTree.attach``. If that is not possible, the
        number is free again, and False is returned."""
        is_attached = self._tree.attach(node, num_pages, number)
        self.num_taken -= 1
        if not is_attached:
            self._free.append(number)
        return is_attached

    def give_back(self, number: int) -> None:
        """Free a number that was taken."""
        self.num_taken -= 1
        self._free.append(number)

    def reclaim(self) -> None:
        """Free the numbers of prefixes that have lost their snapshot."""
        self._free.extend(self._tree.take_lost_snapshots())

    def check(self) -> None:
        """Raise ``InvariantError`` if the invariant is broken."""
        attached = self._tree.snapshots()
        known = sorted([*self._free, *attached])
        if len(set(known)) != len(known) or len(known) + self.num_taken != self.num_snapshots:
            raise InvariantError(
                f"{len(self._free)} free, {len(attached)} attached and {self.num_taken} taken "
                f"snapshots do not add up to {self.num_snapshots}"
            )

    def _pop_free(self, spared: Set[int]) -> int | None:
        for index in reversed(range(len(self._free))):
            if self._free[index] not in spared:
                return self._free.pop(index)
        return None
