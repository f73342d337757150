"""Kimi Delta Attention for one token a row, for checks of guesses, and for runs of tokens, against
the twins."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from minisgl_backend.kernels import gated_delta
from minisgl_backend.kernels.chunk_runs import Run, Runs, num_blocks, runs_table
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.gated_delta import DeltaInputs, DeltaStates, DeltaWeights
from minisgl_backend.kernels.layer_states import PendingUpdates
from tests.checks import arranged
from tests.gpu.compare import TOLERANCE, assert_close, relative_error
from tests.gpu.test_kernels_gated_delta import (
    OF_16_BITS,
    RUNS,
    SOME_CHECKS,
    assert_checks,
    runs_on,
    with_room,
)

SHAPES = [(2, 24), (2, 64)] if is_interpreted() else [(2, 24), (3, 64), (32, 128)]
"""Heads, and their dimensions."""


def made_weights(
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int = 4,
    least_decay: float | None = None,
) -> DeltaWeights:
    heads, dim = shape
    conv = torch.randn(3 * heads * dim, width, device=device).to(dtype)
    rates = torch.randn(heads, device=device).to(dtype)
    biases = torch.randn(heads, dim, device=device).to(dtype)
    norm = (1 + 0.1 * torch.randn(dim, device=device)).to(dtype)
    return DeltaWeights(
        heads, conv, rates, biases, norm, 1e-6, sigmoid_gates=True, least_decay=least_decay
    )


def made_inputs(
    shape: tuple[int, int], num_tokens: int, device: torch.device, dtype: torch.dtype
) -> DeltaInputs:
    """Inputs as a layer has them: some are parts of wider rows."""
    heads, dim = shape
    parts = (3 * heads * dim, heads, 5)
    channels, b, _ = (
        torch.randn(num_tokens, sum(parts), device=device).to(dtype).split(parts, dim=1)
    )
    a, z = torch.randn(2, num_tokens, heads, dim, device=device).to(dtype)
    return DeltaInputs(channels, z, a, b)


def made_states(
    shape: tuple[int, int],
    slots: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int = 4,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[DeltaStates, DeltaStates]:
    """The same states twice, as a layer between others has them. No updates can be pending."""
    heads, dim = shape
    conv = torch.randn(slots, 3, 3 * heads * dim, width - 1, device=device).to(dtype)
    matrices = torch.randn(slots, 3, heads, dim, dim, device=device).to(state_dtype)
    readers = torch.zeros(slots, heads, dtype=torch.int32, device=device)
    pending = PendingUpdates.none(slots, 0, 0, 0, 0, device)
    one, other = (
        DeltaStates(conv.clone()[:, 1], matrices.clone()[:, 1], pending, readers) for _ in range(2)
    )
    return one, other


@pytest.mark.parametrize(
    ("shape", "width", "state_dtype", "least_decay"),
    [
        *product(SHAPES, [2, 4], [torch.float32], [None]),
        *product(SHAPES[:2], [4], OF_16_BITS, [None]),
        *product(SHAPES, [4], [torch.float32], [-5.0]),
    ],
)
def test_kimi_step(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    width: int,
    state_dtype: torch.dtype,
    least_decay: float | None,
) -> None:
    """Each step finds the states of the one before; steps alternate between few rows and more, for
    which the kernel has another form."""
    weights = made_weights(shape, device, dtype, width=width, least_decay=least_decay)
    states, wanted = made_states(shape, 6, device, dtype, width=width, state_dtype=state_dtype)
    begun = states.matrices.clone()
    few = torch.tensor([4, -1, 2], device=device)
    for step in range(width):
        slots = few if step % 2 == 0 else torch.cat([few, few.new_full((7,), -1)])
        inputs = made_inputs(shape, len(slots), device, dtype)
        out, expected = (torch.full_like(inputs.z, 7.0) for _ in range(2))
        positions = torch.full((len(slots),), step, device=device)
        gated_delta.delta_step_reference(expected, inputs, weights, wanted, slots)
        gated_delta.delta_step(out, inputs, weights, states, slots, positions)
        assert_close(out, expected, tolerance=2 * max(TOLERANCE[dtype], TOLERANCE[state_dtype]))
        assert torch.equal(states.conv, wanted.conv)
    for slot in (2, 4):
        error = relative_error(states.matrices[slot], wanted.matrices[slot])
        assert error < 2 * max(1e-3, TOLERANCE[state_dtype])  # the interpreter truncates bfloat16
    assert torch.equal(states.matrices[[0, 1, 3, 5]], begun[[0, 1, 3, 5]])


@pytest.mark.parametrize(
    ("shape", "width", "state_dtype", "least_decay"),
    [
        *product(SHAPES, [2, 4], [torch.float32], [None]),
        *product(SHAPES[:2], [4], OF_16_BITS, [None]),
        *product(SHAPES, [4], [torch.float32], [-5.0]),
    ],
)
def test_kimi_checks(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    width: int,
    state_dtype: torch.dtype,
    least_decay: float | None,
) -> None:
    """Checks beside padding, whose first tokens count; states change only then."""
    weights = made_weights(shape, device, dtype, width=width, least_decay=least_decay)
    states, wanted = (
        with_room(of)
        for of in made_states(shape, 6, device, dtype, width=width, state_dtype=state_dtype)
    )
    slots, _, _ = arranged(SOME_CHECKS, device)
    inputs = made_inputs(shape, len(slots) + 2, device, dtype)
    assert_checks(states, wanted, inputs, weights, state_dtype)


@pytest.mark.parametrize(
    ("shape", "runs", "padding", "state_dtype", "least_decay"),
    [
        *product(SHAPES, RUNS, [0, 3], [torch.float32], [None]),
        *product(SHAPES[:2], RUNS[-1:], [0], OF_16_BITS, [None]),
        *product(SHAPES, RUNS[-1:], [0], [torch.float32], [-5.0]),
    ],
)
def test_kimi_runs(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    runs: tuple[Run, ...],
    padding: int,
    state_dtype: torch.dtype,
    least_decay: float | None,
) -> None:
    end = runs[-1].end
    table = runs_table(runs, num_blocks(runs) + padding, len(runs) + padding, end=end)
    many = Runs.over(torch.from_numpy(table).to(device), len(runs) + padding)
    inputs = made_inputs(shape, end + 9 * padding, device, dtype)
    weights = made_weights(shape, device, dtype, least_decay=least_decay)
    states, wanted = made_states(shape, 8, device, dtype, state_dtype=state_dtype)
    for of_slots in (states.matrices, states.conv, wanted.matrices, wanted.conv):
        of_slots[[run.slot for run in runs if run.is_fresh]] = torch.nan  # left by another request
    out, expected = (torch.full_like(inputs.z, 7.0) for _ in range(2))
    gated_delta.delta_runs_reference(expected, inputs, weights, wanted, many)
    gated_delta.delta_runs(out, inputs, weights, states, many)
    assert (out[: runs[0].begin] == 7).all() and not out[end:].any()
    tolerance = 5e-5 if dtype == torch.float32 else 2 * TOLERANCE[dtype]
    assert relative_error(out, expected) < tolerance
    if state_dtype != torch.float32:
        tolerance = max(tolerance, TOLERANCE[state_dtype])
    for slot, matrix in enumerate(states.matrices):
        assert relative_error(matrix, wanted.matrices[slot]) < tolerance


@pytest.mark.parametrize(("log_rate", "least_decay"), [(-20.0, None), (6.0, None), (1.0, -20.0)])
def test_extreme_decays_stay_finite(
    device: torch.device, dtype: torch.dtype, log_rate: float, least_decay: float | None
) -> None:
    """A prompt that repeats one token whose state never decays, or almost at once in some
    dimensions and hardly at all in others."""
    shape = SHAPES[0]
    weights = made_weights(shape, device, dtype, least_decay=least_decay)
    biases = torch.linspace(-20, 20, shape[1], device=device).to(dtype).expand(shape).contiguous()
    weights = replace(weights, biases=biases)
    weights.log_rates.fill_(log_rate)
    runs, one = runs_on(device, [Run(0, 200, 0, 0)]), made_inputs(shape, 1, device, dtype)
    every = torch.zeros(200, dtype=torch.int64, device=device)
    inputs = DeltaInputs(one.channels[every], one.z[every], one.a[every], one.b[every] + 20)
    states, wanted = made_states(shape, 1, device, dtype)
    out, expected = (torch.empty_like(inputs.z) for _ in range(2))
    gated_delta.delta_runs_reference(expected, inputs, weights, wanted, runs)
    gated_delta.delta_runs(out, inputs, weights, states, runs)
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    assert relative_error(out, expected) < tolerance
    assert relative_error(states.matrices, wanted.matrices) < tolerance
