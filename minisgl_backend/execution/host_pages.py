"""Copies of pages in main memory, or of window pages: one slot for each, with what the page holds
in all layers that have such pages.

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
from minisgl_backend.request import IntArray

_STAGED_BYTES: Final = 32 * 2**20


class HostPages:
    """Slots 0 .. num_slots - 1 in main memory, or window slots. Used only in submitted work."""

    def __init__(
        self, storage: KVStorage, device: Device, num_slots: int, *, window_pages: bool = False
    ) -> None:
        """Raises ``MemoryError`` if there is too little main memory."""
        self._storage = storage
        self._device = device
        self._window_pages = window_pages
        page_bytes = storage.page_bytes(window_pages=window_pages)
        self._slots = device.host_memory(num_slots * page_bytes).view(num_slots, page_bytes)
        self._staged = torch.empty(  # [pages that are copied at once, page_bytes]
            (max(1, min(num_slots, _STAGED_BYTES // page_bytes)), page_bytes),
            dtype=torch.uint8,
            device=device.torch_device,
        )

    def save(self, pages: IntArray, slots: IntArray) -> None:
        """Queue copies of pages to slots, int32[num_copies] both."""
        for some, to in self._parts(pages, slots):
            staged = self._staged[: len(some)]
            on_device = self._device.upload(some.astype(np.int64))
            self._storage.read(on_device, staged, window_pages=self._window_pages)
            for first, last, slot in _runs(to):
                target = self._slots[slot : slot + last - first]
                target.copy_(staged[first:last], non_blocking=True)

    def load(self, pages: IntArray, slots: IntArray) -> None:
        """Queue copies of slots to pages, int32[num_copies] both."""
        for some, source in self._parts(pages, slots):
            staged = self._staged[: len(some)]
            for first, last, slot in _runs(source):
                content = self._slots[slot : slot + last - first]
                staged[first:last].copy_(content, non_blocking=True)
            on_device = self._device.upload(some.astype(np.int64))
            self._storage.write(on_device, staged, window_pages=self._window_pages)

    def _parts(self, pages: IntArray, slots: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """As many pages and slots as can be copied at once."""
        most = len(self._staged)
        for begin in range(0, len(pages), most):
            yield pages[begin : begin + most], slots[begin : begin + most]


def _runs(slots: IntArray) -> Iterator[tuple[int, int, int]]:
    """The runs of consecutive numbers: the indices of the first and behind the last, and the
    first number."""
    borders = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    for first, last in pairwise(borders):
        yield first, last, int(slots[first])
