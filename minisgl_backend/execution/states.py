"""The recurrent states of rows and of snapshots, for models whose layers keep any.

Knows slots by number only: which row has which request, and which prefix a snapshot belongs to, the
planner knows. One layer's states lie together (``LayerStates``), in the slots

    [0, num_rows)                 rows
    [num_rows]                    the dummy row, whose states no request reads
    [num_rows + 1, num_slots)     snapshots
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.kernels.gated_delta import Run, Runs
from minisgl_backend.models.spec import DeltaSpec
from minisgl_backend.models.token_mixing import LayerStates, RecurrentRows
from minisgl_backend.plan import NO_SNAPSHOT
from minisgl_backend.request import IntArray


class StateStorage:
    """The states of all layers; ``layers`` has those of each."""

    def __init__(
        self,
        shape: DeltaSpec,
        *,
        num_rows: int,
        num_snapshots: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """``shape`` is that of this rank; ``dtype``, of activations, is that of convolutions."""
        self.num_snapshots = num_snapshots
        self._first_snapshot = num_rows + 1
        num_slots = num_rows + 1 + num_snapshots
        slots = (len(shape.layers), num_slots)
        conv = (*slots, shape.num_channels, shape.conv_width - 1)
        matrices = (*slots, shape.num_heads, shape.key_dim, shape.value_dim)
        self._conv = torch.zeros(conv, dtype=dtype, device=device)
        self._matrices = torch.zeros(matrices, dtype=torch.float32, device=device)
        self.layers = [
            LayerStates(*of_layer) for of_layer in zip(self._conv, self._matrices, strict=True)
        ]

    def keep(self, rows: IntArray, snapshots: IntArray) -> None:
        """Copy the states that rows have now to snapshots; int32[num_kept] both.

        One copy for all layers of a row: few launches, and no memory beside the slots.
        """
        slots = (snapshots + self._first_snapshot).tolist()
        for row, slot in zip(rows.tolist(), slots, strict=True):
            for states in (self._conv, self._matrices):
                states[:, slot].copy_(states[:, row])

    def of_batch(self, batch: FlatBatch, decode_rows: Tensor, device: Device) -> RecurrentRows:
        """Which tokens of ``batch`` are whose; ``decode_rows`` int32 or int64 [num_decodes]."""
        if not len(batch.chunk_rows):
            return RecurrentRows(decode_rows.long())
        runs = []
        for chunk, row in enumerate(batch.chunk_rows.tolist()):
            begin, end = (batch.chunk_offsets[chunk : chunk + 2] - batch.num_decodes).tolist()
            to_index = end - int(batch.chunk_ends[chunk])  # from positions of the row
            saved = np.flatnonzero(batch.saved_chunks == chunk)
            borders = (batch.saved_positions[saved] + to_index).tolist()
            slots = (batch.saved_snapshots[saved] + self._first_snapshot).tolist()
            kept = tuple(zip(borders, slots, strict=True))
            runs.append(Run(begin, end, row, begin == to_index, kept))
        begun = None
        resumes = batch.begun_from != NO_SNAPSHOT
        if resumes.any():
            rows, numbers = batch.chunk_rows[resumes], batch.begun_from[resumes]
            begun = device.upload(np.array([rows, numbers + self._first_snapshot], np.int64))
        return RecurrentRows(decode_rows.long(), Runs.of(runs, device.upload), begun)


def bytes_per_slot(shape: DeltaSpec, dtype: torch.dtype) -> int:
    """How many bytes the states of one row or snapshot take in all layers, on one rank."""
    conv = shape.num_channels * (shape.conv_width - 1) * dtype.itemsize
    matrices = shape.num_heads * shape.key_dim * shape.value_dim * torch.float32.itemsize
    return len(shape.layers) * (conv + matrices)
