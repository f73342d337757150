"""The recurrent states of rows and snapshots, and the chunks that kernels read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.execution.chunk_graphs import max_chunks
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.states import CapturedChecks, CapturedRuns, StateStorage
from minisgl_backend.kernels.checks import NO_PLACE
from minisgl_backend.kernels.chunk_runs import Run
from minisgl_backend.kernels.settle import Settling
from minisgl_backend.models.recurrent_spec import DeltaSpec
from minisgl_backend.plan import NO_SNAPSHOT, Snapshots
from tests.unit.execution.test_flat_batch import ints, plan_of

SHAPE = DeltaSpec(
    num_key_heads=2,
    num_heads=4,
    key_dim=8,
    value_dim=6,
    conv_width=4,
    layers=frozenset({0, 2, 3}),
)
NUM_ROWS = 9


@pytest.fixture
def storage() -> StateStorage:
    return StateStorage(
        SHAPE,
        num_rows=NUM_ROWS,
        num_snapshots=3,
        dtype=torch.float32,
        state_dtype=torch.float32,
        device=torch.device("cpu"),
        num_checks=0,
        most_tokens=0,
    )


def test_chunks_are_runs(storage: StateStorage) -> None:
    plan = plan_of([(4, 20, 7, 1), (2, 0, 5, 1), (6, 9, 3, 0), (1, 30, 2, 1)], [(0, 3), (3, 8)])
    snapshots = Snapshots(saved_chunks=ints(0, 1), saved_positions=ints(24, 4), saved=ints(2, 0))
    batch = FlatBatch.of(replace(plan, snapshots=snapshots))
    assert storage.runs_of(batch) == [
        Run(2, 9, 4, 20, ((6, NUM_ROWS + 3),)),
        Run(9, 14, 2, 0, ((13, NUM_ROWS + 1),)),
        Run(14, 17, 6, 9),
        Run(17, 19, 1, 30),
    ]


def test_nothing_is_pending_in_a_row_that_begins_from_a_snapshot(storage: StateStorage) -> None:
    """Whatever the row's last request has left."""
    for layer in storage.layers:
        layer.pending.begins.fill_(1)
    plan = plan_of([(4, 12, 5, 1), (2, 20, 5, 1)], [])
    snapshots = Snapshots(begun_from=ints(0, NO_SNAPSHOT))
    storage.restore(FlatBatch.of(replace(plan, snapshots=snapshots)))
    for layer in storage.layers:
        assert layer.pending.begins.is_contiguous()
        assert (layer.pending.begins[4] == 4).all()
        others = [row for row in range(NUM_ROWS + 1) if row != 4]
        assert (layer.pending.begins[others] == 1).all()


def test_a_slot_is_copied_in_all_layers(storage: StateStorage) -> None:
    for number, layer in enumerate(storage.layers):
        layer.conv[3], layer.matrices[3] = number, 10.0 + number
    storage.keep(ints(3), ints(1))
    plan = plan_of([(5, 8, 2, 1)], [])
    batch = FlatBatch.of(replace(plan, snapshots=Snapshots(begun_from=ints(1))))
    storage.restore(batch)
    for number, layer in enumerate(storage.layers):
        for slot in (3, 5, NUM_ROWS + 2):
            assert (layer.conv[slot] == number).all()
            assert (layer.matrices[slot] == 10 + number).all()
        assert not layer.matrices[[0, 1, 2, 4, 6, NUM_ROWS + 1]].any()


def test_graphs_have_room_for_a_part_of_a_block_of_each_chunk(storage: StateStorage) -> None:
    """Not for two of all chunks, as where each keeps a snapshot that is not at its end."""
    room = partial(max_chunks, max_rows=NUM_ROWS)
    captured = CapturedRuns(storage, CpuDevice(), room, 256)
    plan = plan_of([(row, 40, 16, 1) for row in range(8)], [])
    batch, every = FlatBatch.of(plan), ints(*range(8))
    assert captured.fits(batch, 128)
    captured.write(batch, 128)
    assert captured.view(128).listed() == storage.runs_of(batch)
    assert captured.view(128).blocks.shape == (2 + 8, 4)
    snapshots = Snapshots(saved_chunks=every, saved_positions=ints(*range(41, 49)), saved=every)
    assert not captured.fits(FlatBatch.of(replace(plan, snapshots=snapshots)), 128)


def test_steps_of_all_sizes_share_a_buffer(storage: StateStorage) -> None:
    room = partial(max_chunks, max_rows=NUM_ROWS)
    captured = CapturedRuns(storage, CpuDevice(), room, 256)
    small = FlatBatch.of(plan_of([(1, 0, 20, 1)], [(0, 5)]))
    for size in (32, 256):
        captured.write(small, size)
        runs = captured.view(size)
        assert runs.listed() == [Run(1, 21, 1, 0)]
        padding = runs.blocks[1:].numpy()
        assert (padding == np.array([21, 21, -1, 0])).all()


def test_captured_steps_settle_and_check_as_others_do() -> None:
    """Of several sizes, which share a buffer."""
    cpu = CpuDevice()
    eager, graphs = (
        StateStorage(
            SHAPE,
            num_rows=NUM_ROWS,
            num_snapshots=1,
            dtype=torch.float32,
            state_dtype=torch.float32,
            device=cpu.torch_device,
            num_checks=3,
            most_tokens=4,
        )
        for _ in range(2)
    )
    for own in zip(eager.layers, graphs.layers, strict=True):
        for layer in own:
            torch.manual_seed(2)
            assert layer.unsettled is not None
            parts = layer.unsettled.inputs, layer.unsettled.keys, layer.unsettled.values
            for part in (layer.conv, layer.matrices, *parts):
                part.normal_()
            layer.unsettled.decays.uniform_(-1, 0)
    captured = CapturedChecks(graphs, cpu, 8)
    assert (captured.begin(8).lines[:, 0] == NO_PLACE).all()
    starts = {4: 20, 1: 7}
    for rows, counts, size in (([4, 1], [3, 2], 8), ([1], [4], 4), ([4, 1], [1, 3], 5)):
        lengths, plan = ints(*counts), plan_of([], [(row, starts[row]) for row in rows])
        due = [states.take_due(plan) for states in (eager, graphs)]
        assert due[0] == due[1]
        if due[0]:
            eager.settle(Settling.of(due[0], cpu.upload))
        tokens = np.repeat(rows, lengths).astype(np.int32)
        positions = np.concatenate(
            [starts[row] + np.arange(n) for row, n in zip(rows, counts, strict=True)]
        )
        lines = eager.begin_checks(tokens, positions, lengths)
        captured.write(tokens, positions, lengths, size, due[1])
        found = captured.begin(size).lines
        assert found[: len(tokens)].tolist() == lines.tolist()
        assert (found[len(tokens) :, 0] == NO_PLACE).all() and len(found) == size
        for one, other in zip(eager.layers, graphs.layers, strict=True):
            assert torch.equal(one.conv, other.conv)
            assert torch.equal(one.matrices, other.matrices)
            assert torch.equal(one.pending.begins, other.pending.begins)
        for row, count in zip(rows, counts, strict=True):
            starts[row] += count
