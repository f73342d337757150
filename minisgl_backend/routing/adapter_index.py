"""Which adapters the replicas have on their devices, judging by the requests that they were sent.

Must not know prefixes or loads.
"""

from __future__ import annotations

from minisgl_backend.routing.keys import Replicas


class AdapterIndex:
    """The last ``num_slots`` adapters at each of ``num_replicas``."""

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
        """A replica has lost all its adapters."""
        self._held[replica].clear()
