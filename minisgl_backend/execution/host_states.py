"""Copies of snapshots of recurrent states in main memory: one slot for each.

Queued in the order of the plans, as the copies of pages (``host_pages``). The states of a snapshot
are contiguous on the device, so a copy is two launches, and needs no buffer.

Each rank has the slots of its own part. Knows snapshots and slots by number. Must not know which
prefix they belong to, or when one is reused.
"""

from __future__ import annotations

from torch import Tensor

from minisgl_backend.device.base import Device
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.request import IntArray


class HostStates:
    """Slots 0 .. num_slots - 1 in main memory. Used only in submitted work."""

    def __init__(self, states: StateStorage, device: Device, num_slots: int) -> None:
        """Raises ``MemoryError`` if there is too little main memory."""
        self._states = states
        # [num_slots, num_layers, ...] for each of the tensors of a snapshot
        self._slots: list[Tensor] = [
            device.host_memory(num_slots * like.nbytes)
            .view(like.dtype)
            .view(num_slots, *like.shape)
            for like in states.snapshot(0)
        ]

    def save(self, snapshots: IntArray, slots: IntArray) -> None:
        """Queue copies of snapshots to state slots, int32[num_copies] both."""
        for snapshot, slot in zip(snapshots.tolist(), slots.tolist(), strict=True):
            for target, source in zip(self._slots, self._states.snapshot(snapshot), strict=True):
                target[slot].copy_(source, non_blocking=True)

    def load(self, snapshots: IntArray, slots: IntArray) -> None:
        """Queue copies of state slots to snapshots, int32[num_copies] both."""
        for snapshot, slot in zip(snapshots.tolist(), slots.tolist(), strict=True):
            for source, target in zip(self._slots, self._states.snapshot(snapshot), strict=True):
                target.copy_(source[slot], non_blocking=True)
