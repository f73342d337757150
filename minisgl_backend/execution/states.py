"""The recurrent states of rows and snapshots, for models with recurrent layers.

Knows slots only by number. The planner knows which request has a row, and to which prefix a
snapshot belongs. The states of a slot are contiguous, layer by layer; so a slot is copied by two
launches. These are the slots:

    [0, num_rows)                 rows
    [num_rows]                    the dummy row, whose states no request reads
    [num_rows + 1, num_slots)     snapshots

The updates that states of rows may lack (``PendingUpdates``) are beside them. There are none when a
row's slot is copied, nor after another is copied to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from minisgl_backend.device.base import Device
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.kernels.delta_runs import (
    BLOCK,
    Run,
    Runs,
    num_blocks,
    runs_table,
    table_size,
)
from minisgl_backend.kernels.gated_delta import DeltaStates
from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates
from minisgl_backend.models.spec import DeltaSpec, RecurrentSpec, state_bytes
from minisgl_backend.plan import NO_SNAPSHOT, WHOLE_EVERY
from minisgl_backend.request import IntArray


class StateStorage:
    """The states of all layers; ``layers`` has those of each."""

    def __init__(
        self,
        shape: RecurrentSpec,
        *,
        num_rows: int,
        num_snapshots: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
    ):
        """``shape`` is this rank's. ``dtype``, that of activations, is used for convolutions,
        ``state_dtype`` for matrices."""
        self.num_snapshots = num_snapshots
        self._first_snapshot = num_rows + 1
        num_slots = num_rows + 1 + num_snapshots
        slots = (num_slots, len(shape.layers))
        conv = (*slots, shape.num_channels, shape.conv_width - 1)
        matrices = (*slots, *shape.matrices)
        self._conv = torch.zeros(conv, dtype=dtype, device=device)
        self._matrices = torch.zeros(matrices, dtype=state_dtype, device=device)
        make: Callable[..., LayerStates] = LayerStates
        if isinstance(shape, DeltaSpec):
            readers = torch.zeros(
                (num_slots, shape.num_key_heads), dtype=torch.int32, device=device
            )
            make = partial(DeltaStates, readers=readers)
        every = [PendingUpdates.none(num_rows + 1, *shape.updates, device) for _ in shape.layers]
        self._begins = torch.stack([pending.begins for pending in every])  # [layers, rows, heads]
        own = [
            replace(pending, begins=begins)
            for pending, begins in zip(every, self._begins, strict=True)
        ]
        self.layers: Sequence[LayerStates] = [
            make(*states)
            for states in zip(self._conv.unbind(1), self._matrices.unbind(1), own, strict=True)
        ]

    def keep(self, rows: IntArray, snapshots: IntArray) -> None:
        """Copy the present states of rows to snapshots; both int32[num_kept]."""
        self._copy(rows, snapshots + self._first_snapshot)

    def restore(self, batch: FlatBatch) -> None:
        """Copy snapshots to the rows whose chunks begin from them."""
        begun_from = batch.snapshots.begun_from
        resumes = begun_from != NO_SNAPSHOT
        rows = batch.chunk_rows[resumes]
        self._copy(begun_from[resumes] + self._first_snapshot, rows)
        starts = batch.positions[batch.chunk_offsets[:-1][resumes]]
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            self._begins[:, row] = start % WHOLE_EVERY

    def runs_of(self, batch: FlatBatch) -> list[Run]:
        """The chunks of ``batch``, with the slots of their rows and snapshots."""
        offsets, ends = batch.chunk_offsets.tolist(), batch.chunk_ends.tolist()
        snapshots = batch.snapshots
        positions = snapshots.saved_positions.tolist()
        slots = (snapshots.saved + self._first_snapshot).tolist()
        saved = np.searchsorted(snapshots.saved_chunks, np.arange(len(ends) + 1)).tolist()
        runs = []
        for chunk, row in enumerate(batch.chunk_rows.tolist()):
            begin, end = offsets[chunk : chunk + 2]
            to_index = end - ends[chunk]  # from positions of the row
            own = range(saved[chunk], saved[chunk + 1])
            kept = tuple((positions[save] + to_index, slots[save]) for save in own)
            runs.append(Run(begin, end, row, begin - to_index, kept))
        return runs

    def _copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy slot by slot, all layers at once."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for states in (self._conv, self._matrices):
                states[target].copy_(states[source])


class CapturedRuns:
    """The chunks of captured steps of several sizes, in one buffer, written before each step."""

    def __init__(
        self,
        states: StateStorage,
        device: Device,
        room: Callable[[int], int],
        most_tokens: int,
        *,
        most_checks: int,
    ):
        """``room`` gives the number of chunks that a step of a given number of tokens may have;
        ``most_tokens`` is the size of the largest step. Up to ``most_checks`` rows of a step have
        guesses."""
        self._states = states
        self._device = device
        self._room = room
        self._most_checks = most_checks
        most = table_size(self._most_blocks(most_tokens), room(most_tokens))
        self._buffer = torch.empty(most, dtype=torch.int32, device=device.torch_device)

    def view(self, size: int) -> Runs:
        """The chunks of a step of ``size`` tokens."""
        num_lines = self._room(size)
        used = table_size(self._most_blocks(size), num_lines)
        return Runs.over(self._buffer[:used], num_lines)

    def fits(self, batch: FlatBatch, size: int) -> bool:
        """Whether a step of ``size`` tokens has room for the blocks of ``batch``. It must have room
        for the chunks."""
        return num_blocks(self._states.runs_of(batch)) <= self._most_blocks(size)

    def write(self, batch: FlatBatch, size: int) -> None:
        """Cut the chunks of ``batch`` into blocks."""
        most_blocks, most_lines = self._most_blocks(size), self._room(size)
        runs = self._states.runs_of(batch)
        table = runs_table(runs, most_blocks, most_lines, end=len(batch.rows))
        self._device.overwrite(self._buffer[: len(table)], table)

    def _most_blocks(self, size: int) -> int:
        """Enough even if each chunk has a block that is not full, at its end or at a snapshot, and
        chunks with guesses another, before these."""
        most_chunks = self._room(size)
        return -(-size // BLOCK) + most_chunks + min(most_chunks, self._most_checks)


def pending_bytes(shape: RecurrentSpec) -> int:
    """The bytes of the updates of one row that may be pending in all layers, on one rank."""
    return len(shape.layers) * PendingUpdates.num_bytes(*shape.updates)


def bytes_per_slot(shape: RecurrentSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> int:
    """The bytes of the states of one row or snapshot in all layers, on one rank. The types are as
    in ``StateStorage``."""
    return state_bytes(shape, dtype.itemsize, state_dtype.itemsize)
