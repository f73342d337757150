"""Copies of pages in main memory: one slot for each, with what the page holds in all layers.

Copies are queued like all other work of a step, so they come in the order of the plans: a page is
saved before a later part of the plan, or a later plan, writes to it, and loaded before a layer
reads it. On a GPU they go through a small buffer on the device, so that a page, which is in pieces
there (one for each layer), crosses the bus as a whole, from or to pinned memory.

Each rank has the slots of its own part. Knows pages and slots by number. Must not know what tokens
they hold, or when one is reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from minisgl_backend.device.base import Device
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.plan import HostCopies
from minisgl_backend.request import IntArray

_STAGED_BYTES: Final = 32 * 2**20


class HostPages:
    """Slots 0 .. num_slots - 1 in main memory. Used only in submitted work."""

    def __init__(self, storage: KVStorage, device: Device, num_slots: int) -> None:
        """Raises ``MemoryError`` if there is too little main memory."""
        self._storage = storage
        self._device = device
        page_bytes = storage.page_bytes
        self._slots = device.host_memory(num_slots * page_bytes).view(num_slots, page_bytes)
        self._staged = torch.empty(  # [pages that are copied at once, page_bytes]
            (max(1, min(num_slots, _STAGED_BYTES // page_bytes)), page_bytes),
            dtype=torch.uint8,
            device=device.torch_device,
        )

    def save(self, copies: HostCopies) -> None:
        """Queue copies of pages to slots."""
        for pages, slots in self._parts(copies):
            staged = self._staged[: len(pages)]
            self._storage.read(self._device.upload(pages.astype(np.int64)), staged)
            for first, last, slot in _runs(slots):
                target = self._slots[slot : slot + last - first]
                target.copy_(staged[first:last], non_blocking=True)

    def load(self, copies: HostCopies) -> None:
        """Queue copies of slots to pages."""
        for pages, slots in self._parts(copies):
            staged = self._staged[: len(pages)]
            for first, last, slot in _runs(slots):
                source = self._slots[slot : slot + last - first]
                staged[first:last].copy_(source, non_blocking=True)
            self._storage.write(self._device.upload(pages.astype(np.int64)), staged)

    def _parts(self, copies: HostCopies) -> Iterator[tuple[IntArray, IntArray]]:
        """As many pages and slots as can be copied at once."""
        most = len(self._staged)
        for begin in range(0, len(copies.pages), most):
            yield copies.pages[begin : begin + most], copies.slots[begin : begin + most]


def _runs(slots: IntArray) -> Iterator[tuple[int, int, int]]:
    """The runs of consecutive numbers: the indices of the first and behind the last, and the
    first number."""
    borders = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    for first, last in pairwise(borders):
        yield first, last, int(slots[first])
