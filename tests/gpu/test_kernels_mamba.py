"""Mamba 2 for one token a row, for runs of tokens, and for checks of guesses, against the twins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels import mamba
from minisgl_backend.kernels.chunk_runs import Run, Runs, num_blocks, runs_table
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates, UnsettledTokens
from minisgl_backend.kernels.mamba import MambaInputs, MambaWeights
from minisgl_backend.kernels.settle import Settling, settle, settle_reference
from minisgl_backend.plan import WHOLE_EVERY
from tests.checks import Check, arranged, layered, nothing_kept, settling
from tests.gpu.compare import TOLERANCE, assert_close, relative_error

TINY = (2, 4, 24, 20)
"""Groups, heads, values of a head and numbers of a state for each."""
SEVERAL_PROGRAMS = (1, 6, 40, 24)
"""The heads of the group are those of a program of ``_prepare``, and some more."""
SHAPES = (
    [TINY, (1, 2, 40, 64)]
    if is_interpreted()
    else [TINY, (8, 128, 80, 128), (8, 64, 64, 128), (1, 48, 64, 128), (1, 24, 128, 256)]
)
OF_16_BITS = [torch.bfloat16, torch.float16]
NO_LIMITS = (0.0, math.inf)


def num_channels(shape: tuple[int, ...]) -> int:
    groups, heads, head_dim, state_size = shape
    return heads * head_dim + 2 * groups * state_size


def made_weights(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *, width: int = 4
) -> MambaWeights:
    groups, heads, head_dim, _ = shape
    channels = num_channels(shape)
    conv = (torch.randn(channels, width, device=device) / width).to(dtype)
    conv_bias = torch.randn(channels, device=device).to(dtype)
    rates, biases, skips = torch.randn(3, heads, device=device).to(dtype)
    norm = (1 + 0.1 * torch.randn(heads * head_dim, device=device)).to(dtype)
    return MambaWeights(groups, conv, conv_bias, rates, biases, skips, norm, 1e-5, NO_LIMITS)


def made_inputs(
    shape: tuple[int, ...], num_tokens: int, device: torch.device, dtype: torch.dtype
) -> MambaInputs:
    """Inputs as a layer has them: parts of wider rows."""
    _, heads, head_dim, _ = shape
    parts = (heads * head_dim, num_channels(shape), heads, 5)
    projected = torch.randn(num_tokens, sum(parts), device=device).to(dtype)
    z, channels, steps, _ = projected.split(parts, dim=1)
    return MambaInputs(z, channels, steps)


def made_states(
    shape: tuple[int, ...],
    slots: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int = 4,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[LayerStates, LayerStates]:
    """The same states twice, as a layer between others has them."""
    groups, heads, head_dim, state_size = shape
    conv = torch.randn(slots, 3, num_channels(shape), width - 1, device=device).to(dtype)
    matrices = torch.randn(slots, 3, heads, head_dim, state_size, device=device).to(state_dtype)
    one, other = (
        LayerStates(
            conv.clone()[:, 1],
            matrices.clone()[:, 1],
            PendingUpdates.none(slots, groups, heads, state_size, head_dim, device),
        )
        for _ in range(2)
    )
    return one, other


def runs_on(device: torch.device, runs: Sequence[Run]) -> Runs:
    return Runs.of(runs, lambda array: torch.from_numpy(array).to(device))


@pytest.mark.parametrize(
    ("shape", "width", "state_dtype"),
    [*product(SHAPES, [2, 4], [torch.float32]), *product(SHAPES[:2], [4], OF_16_BITS)],
)
def test_mamba_step(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    state_dtype: torch.dtype,
) -> None:
    """Each step finds the states of the one before; other rows and slots stay as they are. Steps
    alternate between few rows and more, for which the kernel has another form."""
    weights = made_weights(shape, device, dtype, width=width)
    states, wanted = made_states(shape, 6, device, dtype, width=width, state_dtype=state_dtype)
    begun = states.matrices.clone()
    few = torch.tensor([4, -1, 2], device=device)
    for step in range(width):
        slots = few if step % 2 == 0 else torch.cat([few, few.new_full((7,), -1)])
        inputs = made_inputs(shape, len(slots), device, dtype)
        out, expected = (torch.full_like(inputs.z, 7.0).contiguous() for _ in range(2))
        positions = torch.full((len(slots),), step, device=device)
        mamba.mamba_step_reference(expected, inputs, weights, wanted, slots)
        mamba.mamba_step(out, inputs, weights, states, slots, positions, leaves=False)
        assert_close(out, expected, tolerance=2 * max(TOLERANCE[dtype], TOLERANCE[state_dtype]))
        assert (out[1] == 7).all()
        assert torch.equal(states.conv, wanted.conv)
    for slot in (2, 4):
        error = relative_error(states.matrices[slot], wanted.matrices[slot])
        assert error < 2 * max(1e-3, TOLERANCE[state_dtype])  # the interpreter truncates bfloat16
        assert (states.pending.begins[slot] == width).all()
    assert torch.equal(states.matrices[[0, 1, 3, 5]], begun[[0, 1, 3, 5]])


@pytest.mark.parametrize(
    ("shape", "width", "state_dtype"),
    [
        *product(SHAPES, [4], [torch.float32]),
        (TINY, 2, torch.float32),
        (SEVERAL_PROGRAMS, 4, torch.float32),
        *((TINY, 4, each) for each in OF_16_BITS),
    ],
)
def test_steps_of_many_rows(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    state_dtype: torch.dtype,
) -> None:
    """Steps leave updates pending, from all places on, with steps that leave none, a prompt and
    other chunks in between. States are whole when the next position is a multiple of
    ``WHOLE_EVERY``."""
    weights = made_weights(shape, device, dtype, width=width)
    states, wanted = made_states(shape, 12, device, dtype, width=width, state_dtype=state_dtype)
    pending = states.pending
    for of_pending in (pending.keys, pending.values, pending.decays):
        of_pending.fill_(torch.nan)  # left by other requests
    begun = states.matrices.clone()
    slots = torch.tensor([7, 2, -1, 4, 0, 11, 3, 9, 1, 10, -1], device=device)
    rows = (slots >= 0).nonzero()[:, 0]
    positions = torch.arange(100, 100 + len(slots), dtype=torch.int32, device=device)
    pending.begins[slots[rows]] = positions[rows, None] % WHOLE_EVERY
    tolerance = 2 * max(TOLERANCE[dtype], TOLERANCE[state_dtype])
    for step in range(3 * WHOLE_EVERY):
        if step == WHOLE_EVERY + 3:
            prompt = Run(0, WHOLE_EVERY + 5, int(slots[1]), 0)
            chunk = Run(prompt.end, prompt.end + 9, int(slots[3]), int(positions[3]))
            other = Run(chunk.end, chunk.end + 2, int(slots[6]), int(positions[6]))
            inputs = made_inputs(shape, other.end, device, dtype)
            out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
            runs = runs_on(device, [prompt, chunk, other])
            mamba.mamba_runs_reference(expected, inputs, weights, wanted, runs)
            mamba.mamba_runs(out, inputs, weights, states, runs)
            assert relative_error(out, expected) < tolerance
            for row, run in ((1, prompt), (3, chunk), (6, other)):
                positions[row] = run.end_position
        inputs = made_inputs(shape, len(slots), device, dtype)
        out, expected = (torch.full_like(inputs.z, 7.0).contiguous() for _ in range(2))
        mamba.mamba_step_reference(expected, inputs, weights, wanted, slots)
        leaves = step not in (2 * WHOLE_EVERY - 3, 2 * WHOLE_EVERY)
        mamba.mamba_step(out, inputs, weights, states, slots, positions, leaves=leaves)
        assert_close(out, expected, tolerance=tolerance)
        assert torch.equal(states.conv, wanted.conv)
        positions += 1
        is_whole = positions[rows] % WHOLE_EVERY == 0
        for slot in slots[rows][is_whole | (not leaves)].tolist():
            error = relative_error(states.matrices[slot], wanted.matrices[slot])
            assert error < 2 * max(1e-3, TOLERANCE[state_dtype])
    unused = [5, 6, 8]
    assert torch.equal(states.matrices[unused], begun[unused])


@pytest.mark.parametrize("limits", [(0.5, math.inf), (0.25, 0.75)])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_steps_have_limits(
    device: torch.device,
    dtype: torch.dtype,
    limits: tuple[float, float],
    whole: bool,
    leaves: bool,
) -> None:
    """Also without the convolution's bias, and without a norm, in both kernels for steps."""
    weights = replace(made_weights(TINY, device, dtype), time_steps=limits)
    weights = weights if whole else replace(weights, conv_bias=None, norm=None)
    states, wanted = made_states(TINY, 2, device, dtype)
    inputs = made_inputs(TINY, 70, device, dtype)
    inputs.steps.mul_(3)
    out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
    slots, positions = (torch.tensor([number], device=device) for number in (1, WHOLE_EVERY - 1))
    states.pending.begins[1] = WHOLE_EVERY - 1
    runs = runs_on(device, [Run(1, 70, 0, 0)])
    mamba.mamba_step_reference(expected, inputs, weights, wanted, slots)
    mamba.mamba_runs_reference(expected, inputs, weights, wanted, runs)
    mamba.mamba_step(out, inputs, weights, states, slots, positions, leaves=leaves)
    mamba.mamba_runs(out, inputs, weights, states, runs)
    tolerance = 5e-5 if dtype == torch.float32 else 2 * TOLERANCE[dtype]
    assert relative_error(out, expected) < tolerance
    assert relative_error(states.matrices, wanted.matrices) < tolerance


RUNS = [
    (Run(0, 1, 3, 0),),
    (Run(0, 2, 3, 5, ((1, 5),)), Run(2, 4, 1, 0, ((3, 6), (4, 7)))),
    (Run(0, 64, 2, 16), Run(64, 129, 0, 0), Run(129, 131, 1, 7)),
    (Run(0, 5, 3, 6), Run(5, 80, 1, 0, ((16, 4), (21, 5))), Run(80, 150, 2, 9)),
    (Run(5, 205, 1, 33, ((21, 4), (85, 5), (205, 6))), Run(205, 268, 0, 0, ((253, 7),))),
]
"""Tokens before the first are those of decoding rows."""


@pytest.mark.parametrize(
    ("shape", "runs", "padding", "state_dtype"),
    [
        *product(SHAPES, RUNS, [0, 3], [torch.float32]),
        *product(SHAPES[:2], RUNS[-1:], [0], OF_16_BITS),
    ],
)
def test_mamba_runs(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    runs: tuple[Run, ...],
    padding: int,
    state_dtype: torch.dtype,
) -> None:
    end = runs[-1].end
    table = runs_table(runs, num_blocks(runs) + padding, len(runs) + padding, end=end)
    many = Runs.over(torch.from_numpy(table).to(device), len(runs) + padding)
    inputs = made_inputs(shape, end + 9 * padding, device, dtype)
    weights = made_weights(shape, device, dtype)
    states, wanted = made_states(shape, 8, device, dtype, state_dtype=state_dtype)
    for of_slots in (states.matrices, states.conv, wanted.matrices, wanted.conv):
        of_slots[[run.slot for run in runs if run.is_fresh]] = torch.nan  # left by another request
    out, expected = (torch.full_like(inputs.z, 7.0).contiguous() for _ in range(2))
    mamba.mamba_runs_reference(expected, inputs, weights, wanted, many)
    mamba.mamba_runs(out, inputs, weights, states, many)
    assert (out[: runs[0].begin] == 7).all() and not out[end:].any()
    tolerance = 5e-5 if dtype == torch.float32 else 2 * TOLERANCE[dtype]
    assert relative_error(out, expected) < tolerance
    if state_dtype != torch.float32:
        tolerance = max(tolerance, TOLERANCE[state_dtype])
    assert torch.equal(states.conv, wanted.conv)
    for slot, matrix in enumerate(states.matrices):
        assert relative_error(matrix, wanted.matrices[slot]) < tolerance


@pytest.mark.parametrize(
    ("shape", "width", "state_dtype", "whole"),
    [
        *product(SHAPES, [4], [torch.float32], [True]),
        (SEVERAL_PROGRAMS, 2, torch.float32, True),
        (TINY, 4, torch.float32, False),
        *((TINY, 4, each, True) for each in OF_16_BITS),
    ],
)
def test_mamba_checks(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    state_dtype: torch.dtype,
    whole: bool,
) -> None:
    """Steps leave updates pending; then each row has a check, some of whose tokens count, and goes
    on. If not ``whole``, the weights have neither a norm nor the convolution's bias, and the steps
    dt have limits."""
    weights = made_weights(shape, device, dtype, width=width)
    if not whole:
        weights = replace(weights, conv_bias=None, norm=None, time_steps=(0.25, 0.75))
    states, wanted = made_states(shape, 8, device, dtype, width=width, state_dtype=state_dtype)
    tolerance = 2 * max(TOLERANCE[dtype], TOLERANCE[state_dtype])
    rows = torch.tensor([7, 2, 4, 0], device=device)
    # some write their states on the way
    positions = torch.arange(6, 10, dtype=torch.int32, device=device)
    for of_pending in (states.pending.keys, states.pending.values, states.pending.decays):
        of_pending.fill_(torch.nan)  # left by other requests
    states.pending.begins[rows] = positions[:, None] % WHOLE_EVERY

    def step() -> None:
        inputs = made_inputs(shape, len(rows), device, dtype)
        out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
        mamba.mamba_step_reference(expected, inputs, weights, wanted, rows)
        mamba.mamba_step(out, inputs, weights, states, rows, positions, leaves=True)
        assert_close(out, expected, tolerance=tolerance)
        positions.add_(1)

    for _ in range(3):
        step()
    rest = [
        Check(length, slot, place, position)
        for length, slot, place, position in zip(
            (1, 8, 2, 5), rows.tolist(), (3, 0, 4, 1), positions.tolist(), strict=True
        )
    ]
    steps_checks = (rest[0], Check(2), *rest[1:], Check(1))
    slots, checks, of_tokens = arranged(steps_checks, device)
    groups = shape[0]
    states, wanted = (
        replace(each, unsettled=nothing_kept(each, groups, 5, 8)) for each in (states, wanted)
    )
    kept, expected_kept = states.unsettled, wanted.unsettled
    assert kept is not None and expected_kept is not None
    begun = [of.clone() for of in (states.conv, states.matrices, states.pending.begins)]
    inputs = made_inputs(shape, len(slots) + 2, device, dtype)
    out, expected = (torch.full_like(inputs.z, 7.0).contiguous() for _ in range(2))
    mamba.mamba_checks_reference(expected, inputs, weights, wanted, slots, checks)
    mamba.mamba_checks(out, inputs, weights, states, slots, checks, of_tokens)
    assert_close(out, expected, tolerance=tolerance)
    assert (out[len(slots) :] == 7).all() and not out[: len(slots)][slots < 0].any()
    for found, right in zip(
        (states.conv, states.matrices, states.pending.begins), begun, strict=True
    ):
        assert torch.equal(found, right)
    for check in rest:
        own = check.place, slice(check.length)
        assert torch.equal(kept.inputs[own], expected_kept.inputs[own])
        assert relative_error(kept.keys[own], expected_kept.keys[own]) < TOLERANCE[dtype]
        assert relative_error(kept.values[own], expected_kept.values[own]) < TOLERANCE[dtype]
        assert relative_error(kept.decays[own], expected_kept.decays[own]) < 1e-5
    counts = settling(steps_checks, 4, device)
    settle(*layered(states), counts, keys_are_lines=False)
    settle_reference(*layered(wanted), counts, keys_are_lines=False)
    assert torch.equal(states.conv, wanted.conv)
    for slot in rows.tolist():
        error = relative_error(states.matrices[slot], wanted.matrices[slot])
        assert error < 2 * max(1e-3, TOLERANCE[state_dtype])
    unused = [1, 3, 5, 6]
    assert torch.equal(states.matrices[unused], wanted.matrices[unused])
    positions += counts.counts
    step()


def test_updates_are_settled_in_all_layers(device: torch.device) -> None:
    """One row has updates pending, one has none, and others have no check. Some columns are left
    for a second program."""
    layers, slots, rows, groups, heads, values, keys, channels, width = 3, 5, 4, 2, 4, 12, 40, 9, 4
    draw = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device)

    conv, matrices = (
        drawn(slots, layers, channels, width - 1),
        drawn(slots, layers, heads, values, keys),
    )
    pending = PendingUpdates(
        drawn(layers, rows, groups, WHOLE_EVERY, keys),
        drawn(layers, rows, heads, WHOLE_EVERY, values),
        -drawn(layers, rows, heads, WHOLE_EVERY).abs().cumsum(-1),
        torch.full((layers, rows, heads), 6, dtype=torch.int32, device=device),
    )
    pending.begins[:, 2] = 1
    kept = UnsettledTokens(
        drawn(layers, 3, 8, channels),
        drawn(layers, 3, 8, groups, keys),
        drawn(layers, 3, 8, heads, values),
        -drawn(layers, 3, 8, heads, 1).abs().cumsum(2),
    )
    wanted_conv, wanted = conv.clone(), matrices.clone()
    wanted_pending = replace(pending, begins=pending.begins.clone())
    decays = pending.decays[:, 2]
    wanted[2] *= decays[..., 4, None, None].exp()
    for place in range(1, 5):
        left = (decays[..., 4] - decays[..., place]).exp()[..., None, None]
        own = pending.keys[:, 2, :, place].repeat_interleave(heads // groups, dim=1)
        wanted[2] += left * pending.values[:, 2, :, place, :, None] * own[:, :, None]
    checks = Settling.of(
        [(2, 1, 13, 8), (0, 2, 22, 2)], lambda array: torch.from_numpy(array).to(device)
    )
    settle_reference(wanted_conv, wanted, wanted_pending, kept, checks, keys_are_lines=False)
    settle(conv, matrices, pending, kept, checks, keys_are_lines=False)
    assert torch.equal(conv, wanted_conv)
    assert relative_error(matrices, wanted) < 1e-5
    assert torch.equal(pending.begins, wanted_pending.begins)
    assert pending.begins[:, :, 0].tolist() == [[0, 6, 5, 6]] * layers


@pytest.mark.parametrize("state_dtype", OF_16_BITS)
@pytest.mark.parametrize("leaves", [True, False])
def test_large_states_stay_finite(
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    leaves: bool,
) -> None:
    """States beyond the largest float16, in all kernels; NaN stays NaN."""
    weights, end = made_weights(TINY, device, dtype), 8
    states, wanted = made_states(TINY, 4, device, dtype, state_dtype=state_dtype)
    states.matrices[1, 0, 0, 0] = wanted.matrices[1, 0, 0, 0] = torch.nan
    inputs = made_inputs(TINY, end, device, dtype)
    inputs.channels.abs_().mul_(1e3)
    weights.conv.abs_()
    out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
    runs = runs_on(device, [Run(1, end, 3, 0, ((4, 2),))])
    slots, positions = (torch.tensor([number], device=device) for number in (1, WHOLE_EVERY - 1))
    states.pending.begins[1] = WHOLE_EVERY - 1
    mamba.mamba_step_reference(expected, inputs, weights, wanted, slots)
    mamba.mamba_runs_reference(expected, inputs, weights, wanted, runs)
    mamba.mamba_step(out, inputs, weights, states, slots, positions, leaves=leaves)
    mamba.mamba_runs(out, inputs, weights, states, runs)
    assert states.matrices[1, 0].isnan().any()
    for slot in (1, 2, 3):
        found, right = (of.matrices[slot].float().nan_to_num() for of in (states, wanted))
        assert relative_error(found, right) < 2 * TOLERANCE[torch.bfloat16]
        assert found.isfinite().all()
        assert (found.abs().max() == 65504) == (state_dtype == torch.float16)
