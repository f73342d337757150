"""Which adapter is in which slot of the device, and which slots are in use.

A slot is in use while a sequence with its adapter has a row. A slot that is not in use keeps its
adapter until another one needs the place; the least recently used goes first. The plan that admits
the first row of an adapter orders that it is copied to the device, which the step then waits for;
so the adapters that a plan loads are small, or only one. Must not know how they get there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from minisgl_backend.errors import InvariantError
from minisgl_backend.request import Adapter

MOST_LOADED_BYTES: Final = 256 * 2**20
"""The most that a plan loads, unless one adapter alone is larger: some 10 ms of a PCIe bus."""


@dataclass(slots=True)
class _Place:
    """The slot of an adapter, and the number of rows that use it."""

    slot: int
    num_rows: int = 0


class AdapterPlaces:
    """Slots 1 .. ``num_slots``; 0 stands for none."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        # by adapter; of those that no row uses, the one used least recently comes first
        self._places: dict[int, _Place] = {}
        self._num_idle = 0
        self._loaded_bytes = 0  # by the next plan

    def begin_plan(self) -> bool:
        """The next adapters are loaded by another plan. Returns whether the last one loaded any."""
        has_loaded = self._loaded_bytes > 0
        self._loaded_bytes = 0
        return has_loaded

    def has_place(self, adapter: Adapter) -> bool:
        """Whether a row may have the adapter now."""
        if adapter.id in self._places:
            return True
        loaded = self._loaded_bytes
        if loaded and loaded + adapter.facts.num_bytes > MOST_LOADED_BYTES:
            return False
        return bool(self._free) or self._num_idle > 0

    def busiest(self, *, all_but: int) -> set[int]:
        """The ids of the adapters in use, except the ``all_but`` ones that the fewest rows have."""
        by_rows = sorted((num_rows, adapter_id) for adapter_id, num_rows in self.in_use())
        return {adapter_id for _, adapter_id in by_rows[all_but:]}

    def take(self, adapter: Adapter | None) -> tuple[int, bool]:
        """Let one more row use the adapter, for which there must be a place. Returns its slot, and
        whether the adapter must be loaded into it."""
        if adapter is None:
            return 0, False
        place = self._places.get(adapter.id)
        is_new = place is None
        if place is None:
            place = _Place(self._free.pop() if self._free else self._evict())
            self._places[adapter.id] = place
            self._loaded_bytes += adapter.facts.num_bytes
        elif not place.num_rows:
            self._num_idle -= 1
        place.num_rows += 1
        return place.slot, is_new

    def give_back(self, adapter: Adapter | None) -> None:
        """One row fewer uses the adapter."""
        if adapter is None:
            return
        place = self._places[adapter.id]
        if not place.num_rows:
            raise InvariantError(f"no row has adapter {adapter.name!r}")
        place.num_rows -= 1
        if not place.num_rows:
            self._places[adapter.id] = self._places.pop(adapter.id)
            self._num_idle += 1

    def in_use(self) -> Iterator[tuple[int, int]]:
        """The ids of the adapters in use, and how many rows have each."""
        for adapter_id, place in self._places.items():
            if place.num_rows:
                yield adapter_id, place.num_rows

    def check(self, rows: dict[int, int]) -> None:
        """Raise ``InvariantError`` unless exactly these numbers of rows have adapters, by id."""
        if dict(self.in_use()) != rows:
            raise InvariantError("the adapters of rows are not those that slots are in use for")
        slots = sorted([*self._free, *(place.slot for place in self._places.values())])
        if slots != list(range(1, self.num_slots + 1)):
            raise InvariantError("an adapter slot is missing, or taken twice")
        if self._num_idle != sum(not place.num_rows for place in self._places.values()):
            raise InvariantError("the number of idle adapter slots is wrong")

    def _evict(self) -> int:
        """Evict the least recently used adapter, and return its slot."""
        for adapter_id, place in self._places.items():
            if not place.num_rows:
                del self._places[adapter_id]
                self._num_idle -= 1
                return place.slot
        raise InvariantError("all adapter slots are in use")
