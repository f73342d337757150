"""Snapshots of recurrent states go to main memory and come back as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.errors import InvariantError
from minisgl_backend.execution.host_slots import HostSlots
from minisgl_backend.execution.host_states import HostStates
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.models.recurrent_spec import ConvSpec, DeltaSpec, RecurrentSpec
from minisgl_backend.plan import HostCopies
from tests.unit.execution.test_flat_batch import ints

SHAPES: dict[str, RecurrentSpec] = {
    "delta": DeltaSpec(
        num_key_heads=2,
        num_heads=4,
        key_dim=8,
        value_dim=6,
        conv_width=4,
        layers=frozenset({0, 2, 3}),
    ),
    "without matrices": ConvSpec(
        num_channels=12, conv_width=3, layers=frozenset({1, 2}), bias=False
    ),
}
NUM_SNAPSHOTS = 5


def storage_of(shape: RecurrentSpec, device: Any) -> StateStorage:
    """Random states in bfloat16 and float32."""
    storage = StateStorage(
        shape,
        num_rows=2,
        num_snapshots=NUM_SNAPSHOTS,
        dtype=torch.bfloat16,
        state_dtype=torch.float32,
        device=device,
        num_checks=0,
        most_tokens=0,
    )
    for layer in storage.layers:
        for states in (layer.conv, layer.matrices):
            states.copy_(torch.randn(states.shape).to(states.dtype))
    return storage


def contents(storage: StateStorage) -> list[list[Tensor]]:
    """The states of all snapshots."""
    return [[it.clone() for it in storage.snapshot(number)] for number in range(NUM_SNAPSHOTS)]


def states(*pairs: tuple[int, int]) -> HostCopies:
    """Of pairs of a snapshot and a state slot."""
    snapshots, slots = zip(*pairs, strict=True)
    return HostCopies(snapshots=ints(*snapshots), state_slots=ints(*slots))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_states_return_as_they_were(shape: RecurrentSpec) -> None:
    device = CpuDevice()
    storage = storage_of(shape, device.torch_device)
    host = HostSlots(states=HostStates(storage, device, num_slots=3))
    before = contents(storage)

    def steps() -> None:
        host.save(states((3, 2), (0, 1)))
        for number in (0, 3):
            for it in storage.snapshot(number):
                it.zero_()
        host.save(states((4, 0)))
        host.load(states((1, 2), (0, 0)))
        host.load(states((2, 1)))

    device.submit(steps).result()
    device.close()
    expected = {0: before[4], 1: before[3], 2: before[0], 4: before[4]}
    for number, found in enumerate(contents(storage)):
        if number == 3:
            assert not any(it.any() for it in found)
        else:
            assert all(map(torch.equal, found, expected[number]))


def test_what_has_no_slots() -> None:
    host = HostSlots()
    for copy in (host.save, host.load):
        for copies in (states((0, 0)), HostCopies(window_pages=ints(0), window_slots=ints(0))):
            with pytest.raises(InvariantError, match="to or from 1 slots that are none"):
                copy(copies)
        copy(HostCopies(ints(0), ints(0)))  # pages that are only numbers
