"""The recurrent states of rows and snapshots, for models with recurrent layers.

Knows slots only by number. The planner knows which request has a row, and to which prefix a
snapshot belongs. The states of a slot are contiguous, layer by layer; so a slot is copied by two
launches. These are the slots:

    [0, num_rows)                 rows
    [num_rows]                    the dummy row, whose states no request reads
    [num_rows + 1, num_slots)     snapshots

The updates that states of rows may lack (``PendingUpdates``) are beside them. There are none when a
row's slot is copied, nor after another is copied to it. Steps that check guesses keep what their
tokens would add to states, until a plan tells which of them count (``unsettled``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.unsettled import Due, UnsettledRows
from minisgl_backend.kernels.checks import CHECK_COLUMNS, NO_PLACE, CheckedTokens
from minisgl_backend.kernels.chunk_runs import (
    BLOCK,
    Run,
    Runs,
    num_blocks,
    runs_table,
    table_size,
)
from minisgl_backend.kernels.gated_delta import DeltaStates
from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates, UnsettledTokens
from minisgl_backend.kernels.settle import Settling, settle
from minisgl_backend.models.recurrent_spec import DeltaSpec, RecurrentSpec, state_bytes
from minisgl_backend.plan import NO_SNAPSHOT, WHOLE_EVERY, StepPlan
from minisgl_backend.request import EMPTY, IntArray


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
        num_checks: int,
        most_tokens: int,
    ):
        """``shape`` is this rank's. ``dtype``, that of activations, is used for convolutions,
        ``state_dtype`` for matrices. ``num_checks`` rows may be unsettled, with up to
        ``most_tokens`` tokens each."""
        self._shape = shape
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
        num_layers = len(shape.layers)
        self._pending = PendingUpdates.of_layers(
            num_layers, num_rows + 1, *_pending_shape(shape), device=device
        )
        self._unsettled = UnsettledTokens.of_layers(
            num_layers,
            num_checks,
            most_tokens,
            shape.num_channels,
            *shape.updates,
            by_dimension=shape.by_dimension,
            dtype=dtype,
            device=device,
        )
        self._unsettled_rows = UnsettledRows(num_checks, most_tokens, dummy_row=num_rows)
        self.num_checks = num_checks
        self.layers: Sequence[LayerStates] = [
            make(conv, matrices, pending, unsettled=unsettled)
            for conv, matrices, pending, unsettled in zip(
                self._conv.unbind(1),
                self._matrices.unbind(1),
                self._pending.by_layer(),
                self._unsettled.by_layer(),
                strict=True,
            )
        ]

    def take_due(self, plan: StepPlan) -> Due:
        """See ``UnsettledRows``. The caller settles them."""
        return self._unsettled_rows.take_due(plan)

    def compile(self, upload: Callable[[IntArray], Tensor]) -> None:
        """Run the kernels of ``settle`` for the dummy row, if any rows may be unsettled."""
        if self._unsettled.inputs.numel():
            self.settle(Settling.of([(self._first_snapshot - 1, 0, 0, 1)], upload))

    def begin_checks(
        self, rows: IntArray | HostArray, positions: IntArray | HostArray, lengths: IntArray
    ) -> IntArray:
        """The lines of ``CheckedTokens`` for a step that checks guesses, which leaves its decoding
        rows unsettled. ``rows`` and ``positions`` are those of the step's tokens, and ``lengths``
        are ``FlatBatch.check_lengths``."""
        firsts = np.cumsum(lengths) - lengths
        return self._unsettled_rows.begin(rows[firsts], positions[firsts], lengths)

    def keep(self, rows: IntArray, snapshots: IntArray) -> None:
        """Copy the present states of rows to snapshots; both int32[num_kept]."""
        self._copy(rows, snapshots + self._first_snapshot)

    def snapshot(self, number: int) -> list[Tensor]:
        """The states of a snapshot in all layers: convolutions, and matrices if there are any, both
        contiguous, [num_layers, ...]."""
        slot = self._first_snapshot + number
        return [states[slot] for states in (self._conv, self._matrices) if states[slot].numel()]

    def restore(self, batch: FlatBatch) -> None:
        """Copy snapshots to the rows whose chunks begin from them."""
        begun_from = batch.snapshots.begun_from
        resumes = begun_from != NO_SNAPSHOT
        rows = batch.chunk_rows[batch.num_checks :][resumes]
        self._copy(begun_from[resumes] + self._first_snapshot, rows)
        starts = batch.positions[batch.chunk_offsets[batch.num_checks : -1][resumes]]
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            self._pending.begins[:, row] = start % WHOLE_EVERY

    def runs_of(self, batch: FlatBatch) -> list[Run]:
        """The prompt chunks of ``batch``, with the slots of their rows and snapshots."""
        rows = batch.chunk_rows[batch.num_checks :].tolist()
        offsets = batch.chunk_offsets[batch.num_checks :].tolist()
        ends = batch.chunk_ends[batch.num_checks :].tolist()
        snapshots = batch.snapshots
        positions = snapshots.saved_positions.tolist()
        slots = (snapshots.saved + self._first_snapshot).tolist()
        saved = np.searchsorted(snapshots.saved_chunks, np.arange(len(ends) + 1)).tolist()
        runs = []
        for chunk, row in enumerate(rows):
            begin, end = offsets[chunk : chunk + 2]
            to_index = end - ends[chunk]  # from positions of the row
            own = range(saved[chunk], saved[chunk + 1])
            kept = tuple((positions[save] + to_index, slots[save]) for save in own)
            runs.append(Run(begin, end, row, begin - to_index, kept))
        return runs

    def settle(self, checks: Settling) -> None:
        """Settle the states of rows."""
        settle(
            self._conv,
            self._matrices,
            self._pending,
            self._unsettled,
            checks,
            keys_are_lines=isinstance(self._shape, DeltaSpec),
        )

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
    ):
        """``room`` gives the number of chunks that a step of a given number of tokens may have;
        ``most_tokens`` is the size of the largest step."""
        self._states = states
        self._device = device
        self._room = room
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
        """Enough even if each chunk has a block that is not full, at its end or at a snapshot."""
        return -(-size // BLOCK) + self._room(size)


class CapturedChecks:
    """The checks of captured steps of several sizes, and those that they settle first, in one
    buffer, which is written before each step:

        the fields of ``Settling``, of ``num_checks`` numbers each | lines of ``CheckedTokens``
    """

    def __init__(self, states: StateStorage, device: Device, most_tokens: int):
        """``most_tokens`` is the size of the largest step."""
        self._states = states
        self._device = device
        self._begin = 4 * states.num_checks  # of the lines
        size = self._begin + most_tokens * CHECK_COLUMNS
        self._buffer = torch.empty(size, dtype=torch.int32, device=device.torch_device)
        self.write(EMPTY, EMPTY, EMPTY, most_tokens, [])

    def begin(self, size: int) -> CheckedTokens:
        """Settle the states of a step's rows; returns the checks of a step of ``size`` tokens."""
        self._states.settle(Settling(*self._buffer[: self._begin].view(4, -1)))
        lines = self._buffer[self._begin :].view(-1, CHECK_COLUMNS)
        return CheckedTokens(lines[:size])

    def write(
        self,
        rows: IntArray | HostArray,
        positions: IntArray | HostArray,
        lengths: IntArray,
        size: int,
        due: Due,
    ) -> None:
        """Begin the checks of a step, after settling those that are ``due``."""
        content = np.zeros(self._begin + size * CHECK_COLUMNS, np.int32)
        if due:
            content[: self._begin].reshape(4, -1)[:, : len(due)] = np.array(due).T
        lines = content[self._begin :].reshape(size, CHECK_COLUMNS)
        lines[len(rows) :] = NO_PLACE
        if len(rows):
            lines[: len(rows)] = self._states.begin_checks(rows, positions, lengths)
        self._device.overwrite(self._buffer[: len(content)], content)


def _pending_shape(shape: RecurrentSpec) -> tuple[int, int, int, int]:
    """The updates that steps may leave pending: none if each dimension of a key decays by
    itself."""
    return (0, 0, 0, 0) if shape.by_dimension else shape.updates


def pending_bytes(shape: RecurrentSpec) -> int:
    """The bytes of the updates of one row that may be pending in all layers, on one rank."""
    return len(shape.layers) * PendingUpdates.num_bytes(*_pending_shape(shape))


def unsettled_bytes(shape: RecurrentSpec, dtype: torch.dtype) -> int:
    """The bytes of what one token of a check would add to the states of all layers, on one rank.
    ``dtype`` is as in ``StateStorage``."""
    num_key_heads, num_heads, key_dim, value_dim = shape.updates
    decays = num_heads * (key_dim if shape.by_dimension else 1)
    numbers = num_key_heads * key_dim + num_heads * value_dim + decays
    return len(shape.layers) * (shape.num_channels * dtype.itemsize + 4 * numbers)


def bytes_per_slot(shape: RecurrentSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> int:
    """The bytes of the states of one row or snapshot in all layers, on one rank. The types are as
    in ``StateStorage``."""
    return state_bytes(shape, dtype.itemsize, state_dtype.itemsize)
