"""The adapters of rows: the slot of each row's adapter, and the tokens of a step by adapter.

The host knows from plans which row uses which slot. The device gets the tokens of a step arranged
by adapter (``kernels.adapters``). Plans also load adapters onto the device: rank 0 has them on the
host (``AdapterStore``) and sends them to the other ranks through the group, in the order of steps.
Must not know requests, or why a slot is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.errors import InvariantError
from minisgl_backend.file_names import reachable
from minisgl_backend.kernels.adapters import (
    AdaptedTokens,
    arrange_tokens,
    arranged_size,
    block_tokens,
)
from minisgl_backend.models.adapter_files import AdapterFile, open_adapter
from minisgl_backend.models.adapter_slots import AdapterShape, AdapterSlots
from minisgl_backend.parallel.group import Group
from minisgl_backend.plan import AdapterMoves
from minisgl_backend.request import AdapterFacts, IntArray


class AdapterStore:
    """Adapters on the host, by id, ready to be copied to a device. Any thread may use it."""

    def __init__(self, slots: AdapterSlots, *, pinned: bool) -> None:
        self._slots = slots
        self._pinned = pinned
        self._lock = threading.Lock()
        self._adapters: dict[int, Tensor] = {}

    def check(self, folder: Path) -> AdapterFacts:
        """Read an adapter without keeping it. Raises ``ConfigError`` if it does not fit."""
        with self._opened(folder) as file:
            self._slots.pack(file)
        return self._facts(file)

    def read(self, adapter_id: int, folder: Path) -> AdapterFacts:
        """Read an adapter and keep it. Raises ``ConfigError`` if it does not fit."""
        with self._opened(folder) as file:
            flat = self._slots.pack(file)
        if self._pinned:
            flat = flat.pin_memory()
        with self._lock:
            self._adapters[adapter_id] = flat
        return self._facts(file)

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter; ignored if there is none."""
        with self._lock:
            self._adapters.pop(adapter_id, None)

    def get(self, adapter_id: int) -> Tensor:
        """The adapter in its flat form."""
        with self._lock:
            if adapter_id not in self._adapters:
                raise InvariantError(f"adapter {adapter_id} is not on the host")
            return self._adapters[adapter_id]

    def _facts(self, file: AdapterFile) -> AdapterFacts:
        shape = self._slots.shape_of(file)
        num_bytes = self._slots.num_elements(shape) * self._slots.dtype.itemsize
        return AdapterFacts(shape.rank, shape.targets, file.state, num_bytes, file.base)

    @contextmanager
    def _opened(self, folder: Path) -> Iterator[AdapterFile]:
        slots = self._slots
        with reachable(folder) as place:
            yield open_adapter(place, slots.projections, slots.names, max_rank=slots.max_rank)


class RowAdapters:
    """The slots of all rows, including the dummy row. Used only in submitted work."""

    def __init__(
        self,
        slots: AdapterSlots,
        device: Device,
        group: Group,
        *,
        num_rows: int,
        store: AdapterStore | None,
    ):
        """``num_rows`` includes the dummy row; ``store`` is rank 0's."""
        self._slots = slots
        self._device = device
        self._group = group
        self._store = store
        self._of_rows = np.zeros(num_rows, np.int32)
        self._ranks = np.zeros(slots.num_slots + 1, np.int32)  # as kernels compute them
        self.version = 0
        """Changes whenever a row or a slot does."""

    def held(self, moves: AdapterMoves) -> list[Tensor]:
        """On rank 0, the adapters that a plan loads; the store may drop them afterwards. May be
        called outside submitted work."""
        return [] if self._store is None else list(map(self._store.get, moves.load_ids.tolist()))

    def take(self, moves: AdapterMoves, held: list[Tensor]) -> None:
        """Load the adapters of a plan, and note the slots of its rows."""
        numbers = (moves.load_slots, moves.load_ranks, moves.load_targets)
        loads = zip(*(array.tolist() for array in numbers), strict=True)
        for index, (slot, rank, targets) in enumerate(loads):
            shape = AdapterShape(rank, targets)
            flat = self._slots.empty(shape)
            if held:
                flat.copy_(held[index], non_blocking=True)
            if self._group.size > 1:
                flat = self._group.broadcast(flat)
            self._slots.write(slot, shape, flat)
            self._ranks[slot] = self._slots.padded_rank(rank)
        if len(moves.rows):
            self._of_rows[moves.rows] = moves.slots
            self.version += 1

    def have_any(self, rows: IntArray | HostArray) -> bool:
        """Whether any of these rows uses an adapter."""
        return bool(self._of_rows[rows].any())

    def of_tokens(self, rows: HostArray) -> AdaptedTokens:
        """The tokens of a step that is not captured, which belong to ``rows`` [num_tokens]."""
        num_tokens = len(rows)
        # on the host, no kernel needs blocks of equal work
        block = num_tokens if self._device.is_host else block_tokens(num_tokens)
        content = self.arranged(rows, num_tokens, block=block)
        return AdaptedTokens(self._device.upload(content), num_tokens, block)

    def arranged(self, rows: IntArray | HostArray, num_tokens: int, *, block: int) -> IntArray:
        """The content of ``AdaptedTokens`` for tokens of ``rows``, followed by padding up to
        ``num_tokens``."""
        slots = np.zeros(num_tokens, np.int32)
        slots[: len(rows)] = self._of_rows[rows]
        size = self.arranged_size(num_tokens, block=block)
        return arrange_tokens(slots, self._ranks, block=block, size=size)

    def arranged_size(self, num_tokens: int, *, block: int) -> int:
        """The length of that content."""
        return arranged_size(num_tokens, self._slots.num_slots, block)

    def with_dummy_adapter(self, work: Callable[[], None]) -> None:
        """Do ``work`` while the dummy row uses the largest adapter, so that all kernels compile."""
        self._of_rows[-1], self._ranks[1] = 1, self._slots.padded_rank(self._slots.max_rank)
        try:
            work()
        finally:
            self._of_rows[-1] = self._ranks[1] = 0


class CapturedAdapters:
    """The tokens by adapter of captured steps of several sizes, in one buffer that is written
    before each step."""

    def __init__(self, adapters: RowAdapters, device: Device, most_tokens: int):
        """``most_tokens`` is the size of the largest step."""
        self._adapters = adapters
        self._device = device
        # larger blocks are fewer, so the largest step need not have the longest buffer
        most = max(self._length(size) for size in range(1, most_tokens + 1))
        self._buffer = torch.zeros(most, dtype=torch.int32, device=device.torch_device)
        self._written: tuple[int, int, bytes] | None = None

    def view(self, size: int) -> AdaptedTokens:
        """The tokens of a step of ``size`` tokens."""
        return AdaptedTokens(self._buffer[: self._length(size)], size, block_tokens(size))

    def write(self, rows: IntArray | HostArray, size: int) -> None:
        """Arrange the tokens of a step, which belong to ``rows``, followed by padding."""
        key = self._adapters.version, size, rows.tobytes()
        if key == self._written:
            return
        content = self._adapters.arranged(rows, size, block=block_tokens(size))
        self._device.overwrite(self._buffer[: len(content)], content)
        self._written = key

    def _length(self, size: int) -> int:
        return self._adapters.arranged_size(size, block=block_tokens(size))
