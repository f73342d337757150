"""The adapters of rows: which slot each row's adapter is in, and a step's tokens in their order.

Which row has which slot is known on the host, from plans; the device gets the tokens of a step
by adapter (``kernels.adapters``). Adapters come to the device by plans, too: rank 0 has
them on the host (``AdapterStore``) and sends them to the other ranks by the group, in the order of
the steps. Must not know requests, files of adapters that no plan names, or why a slot is taken.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.errors import InvariantError
from minisgl_backend.kernels.adapters import AdaptedTokens, AdapterRun
from minisgl_backend.models.adapter_files import AdapterFile, open_adapter
from minisgl_backend.models.adapter_slots import AdapterShape, AdapterSlots
from minisgl_backend.parallel.group import Group
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray


class AdapterStore:
    """Adapters on the host, by id, ready to be copied to a device. For any thread."""

    def __init__(self, slots: AdapterSlots, *, pinned: bool) -> None:
        self._slots = slots
        self._pinned = pinned
        self._lock = threading.Lock()
        self._adapters: dict[int, Tensor] = {}

    def check(self, folder: Path) -> tuple[int, int]:
        """The rank and the targets of an adapter that fits the model; reads it, and keeps nothing.

        Raises ``ConfigError``."""
        file = self._open(folder)
        for _ in file.tensors():
            pass
        shape = self._slots.shape_of(file)
        return shape.rank, shape.targets

    def read(self, adapter_id: int, folder: Path) -> tuple[int, int]:
        """Read an adapter; its rank and targets. Raises ``ConfigError``; then nothing is kept."""
        file = self._open(folder)
        flat = self._slots.pack(file)
        if self._pinned:
            flat = flat.pin_memory()
        with self._lock:
            self._adapters[adapter_id] = flat
        shape = self._slots.shape_of(file)
        return shape.rank, shape.targets

    def _open(self, folder: Path) -> AdapterFile:
        slots = self._slots
        return open_adapter(folder, slots.projections, slots.names, max_rank=slots.max_rank)

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


class RowAdapters:
    """The slots of all rows, the dummy row included; for use in submitted work only."""

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
        self._ranks = np.zeros(slots.num_slots + 1, np.int32)  # of the adapters in the slots

    def held(self, plan: StepPlan) -> list[Tensor]:
        """The adapters that a plan loads, on rank 0, which may be dropped once this was called.
        Also outside of submitted work."""
        return (
            [] if self._store is None else list(map(self._store.get, plan.load_adapters.tolist()))
        )

    def take(self, plan: StepPlan, held: list[Tensor]) -> None:
        """Load what the plan loads, and note the slots of its rows."""
        numbers = (plan.load_slots, plan.load_ranks, plan.load_targets)
        loads = zip(*(array.tolist() for array in numbers), strict=True)
        for index, (slot, rank, targets) in enumerate(loads):
            shape = AdapterShape(rank, targets)
            flat = self._slots.empty(shape)
            if held:
                flat.copy_(held[index], non_blocking=True)
            if self._group.size > 1:
                flat = self._group.broadcast(flat)
            self._slots.write(slot, shape, flat)
            self._ranks[slot] = rank
        if len(plan.adapter_rows):
            self._of_rows[plan.adapter_rows] = plan.adapter_slots

    def have_any(self, rows: IntArray | HostArray) -> bool:
        """Whether any of these rows has an adapter."""
        return bool(self._of_rows[rows].any())

    def of_tokens(self, rows: HostArray) -> AdaptedTokens | None:
        """The tokens of a step by adapter, ``rows`` [num_tokens] being theirs; None if no row has
        one."""
        slots = self._of_rows[rows]  # [num_tokens]
        order = np.argsort(slots, kind="stable")
        present, begins = np.unique(slots[order], return_index=True)
        ends = [*begins[1:].tolist(), len(order)]
        runs = tuple(
            AdapterRun(slot, int(self._ranks[slot]), begin, end)
            for slot, begin, end in zip(present.tolist(), begins.tolist(), ends, strict=True)
            if slot
        )
        return AdaptedTokens(self._device.upload(order), runs) if runs else None
