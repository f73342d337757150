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

from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.models.spec import DeltaSpec
from minisgl_backend.models.token_mixing import LayerStates, RecurrentRows, Segment
from minisgl_backend.plan import NO_SNAPSHOT


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
        conv = (num_slots, shape.num_channels, shape.conv_width - 1)
        matrices = (num_slots, shape.num_heads, shape.key_dim, shape.value_dim)
        self.layers = [
            LayerStates(
                conv=torch.zeros(conv, dtype=dtype, device=device),
                matrices=torch.zeros(matrices, dtype=torch.float32, device=device),
            )
            for _ in shape.layers
        ]

    def of_batch(self, batch: FlatBatch, decode_rows: Tensor) -> RecurrentRows:
        """Which tokens of ``batch`` are whose; ``decode_rows`` int32 or int64 [num_decodes]."""
        segments = []
        for chunk, row in enumerate(batch.chunk_rows.tolist()):
            begin, end = batch.chunk_offsets[chunk : chunk + 2].tolist()
            to_flat = end - int(batch.chunk_ends[chunk])  # from positions of the row
            snapshot = int(batch.begun_from[chunk])
            before: int | None = row
            if snapshot != NO_SNAPSHOT:
                before = self._first_snapshot + snapshot
            elif begin == to_flat:  # position 0
                before = None
            # of the chunk: up to each position whose states are kept, then the rest
            for entry in np.flatnonzero(batch.saved_chunks == chunk).tolist():
                saved = self._first_snapshot + int(batch.saved_snapshots[entry])
                border = to_flat + int(batch.saved_positions[entry])
                segments.append(Segment(begin, border, before, (row, saved)))
                begin, before = border, row
            if begin < end:
                segments.append(Segment(begin, end, before, (row,)))
        return RecurrentRows(decode_rows.long(), tuple(segments))


def bytes_per_slot(shape: DeltaSpec, dtype: torch.dtype) -> int:
    """How many bytes the states of one row or snapshot take in all layers, on one rank."""
    conv = shape.num_channels * (shape.conv_width - 1) * dtype.itemsize
    matrices = shape.num_heads * shape.key_dim * shape.value_dim * torch.float32.itemsize
    return len(shape.layers) * (conv + matrices)
