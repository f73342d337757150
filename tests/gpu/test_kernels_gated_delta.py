"""Gated DeltaNet for one token a row, for checks of guesses, and for runs of tokens, against the
twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from minisgl_backend.kernels import causal_conv, gated_delta
from minisgl_backend.kernels.chunk_runs import Run, Runs, num_blocks, runs_table
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.gated_delta import (
    DeltaInputs,
    DeltaStates,
    DeltaWeights,
)
from minisgl_backend.kernels.layer_states import PendingUpdates, UnsettledTokens
from minisgl_backend.kernels.settle import Settling, settle, settle_reference
from minisgl_backend.plan import WHOLE_EVERY
from tests.checks import Check, arranged, layered, nothing_kept
from tests.gpu.compare import TOLERANCE, assert_close, relative_error

TINY = (2, 4, 16, 24)
"""Key heads, heads, dimensions of a key and of a value."""
SHAPES = (
    [TINY, (2, 2, 64, 32)] if is_interpreted() else [TINY, (4, 12, 128, 128), (16, 32, 128, 128)]
)
OF_16_BITS = [torch.bfloat16, torch.float16]


def made_weights(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *, width: int = 4
) -> DeltaWeights:
    key_heads, heads, _, value_dim = shape
    conv = torch.randn(num_channels(shape), width, device=device).to(dtype)
    rates, biases = torch.randn(2, heads, device=device).to(dtype)
    norm = (1 + 0.1 * torch.randn(value_dim, device=device)).to(dtype)
    return DeltaWeights(key_heads, conv, rates, biases, norm, 1e-6)


def num_channels(shape: tuple[int, ...]) -> int:
    key_heads, heads, key_dim, value_dim = shape
    return 2 * key_heads * key_dim + heads * value_dim


def made_inputs(
    shape: tuple[int, ...], num_tokens: int, device: torch.device, dtype: torch.dtype
) -> DeltaInputs:
    """Inputs as a layer has them: parts of wider rows."""
    _, heads, _, value_dim = shape
    parts = (num_channels(shape), heads * value_dim, heads, heads, 5)
    projected = torch.randn(num_tokens, sum(parts), device=device).to(dtype)
    channels, z, b, a, _ = projected.split(parts, dim=1)
    return DeltaInputs(channels, z.unflatten(1, (heads, value_dim)), a, b)


def made_states(
    shape: tuple[int, ...],
    slots: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int = 4,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[DeltaStates, DeltaStates]:
    """The same states twice, as a layer between others has them."""
    key_heads, heads, key_dim, value_dim = shape
    conv = torch.randn(slots, 3, num_channels(shape), width - 1, device=device).to(dtype)
    matrices = torch.randn(slots, 3, heads, key_dim, value_dim, device=device).to(state_dtype)
    readers = torch.zeros(slots, key_heads, dtype=torch.int32, device=device)
    one, other = (
        DeltaStates(
            conv.clone()[:, 1],
            matrices.clone()[:, 1],
            PendingUpdates.none(slots, key_heads, heads, key_dim, value_dim, device),
            readers,
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
def test_delta_step(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    state_dtype: torch.dtype,
) -> None:
    """Each step finds the states of the one before; steps alternate between few rows and more, for
    which the kernel has another form."""
    weights = made_weights(shape, device, dtype, width=width)
    states, wanted = made_states(shape, 6, device, dtype, width=width, state_dtype=state_dtype)
    begun = states.matrices.clone()
    few = torch.tensor([4, -1, 2], device=device)
    for step in range(width):
        slots = few if step % 2 == 0 else torch.cat([few, few.new_full((7,), -1)])
        inputs = made_inputs(shape, len(slots), device, dtype)
        out, expected = (torch.full_like(inputs.z, 7.0).contiguous() for _ in range(2))
        positions = torch.full((len(slots),), step, device=device)
        gated_delta.delta_step_reference(expected, inputs, weights, wanted, slots)
        gated_delta.delta_step(out, inputs, weights, states, slots, positions)
        assert_close(out, expected, tolerance=2 * max(TOLERANCE[dtype], TOLERANCE[state_dtype]))
        assert torch.equal(states.conv, wanted.conv)
        assert not states.readers.any()
    for slot in (2, 4):
        error = relative_error(states.matrices[slot], wanted.matrices[slot])
        assert error < 2 * max(1e-3, TOLERANCE[state_dtype])  # the interpreter truncates bfloat16
        assert (states.pending.begins[slot] == width).all()
    assert torch.equal(states.matrices[[0, 1, 3, 5]], begun[[0, 1, 3, 5]])


SOME_CHECKS = [
    Check(5, slot=4, place=2, position=8),
    Check(1),
    Check(1, slot=0, place=0, position=16),
    Check(8, slot=3, place=1, position=24),
    Check(1),
]
"""Of three rows, for which nothing is pending; two are padding."""


def with_room(states: DeltaStates) -> DeltaStates:
    """States with room for three checks of up to 8 tokens."""
    by_dimension = states.pending.begins.shape[1] == 0
    room = nothing_kept(
        states, states.readers.shape[1], 3, 8, keys_are_lines=True, by_dimension=by_dimension
    )
    return replace(states, unsettled=room)


def assert_alike(found: UnsettledTokens, wanted: UnsettledTokens, tolerance: float) -> None:
    """Also as to what is not written."""
    assert torch.equal(found.inputs.nan_to_num(7.0), wanted.inputs.nan_to_num(7.0))
    for one, other in (
        (found.keys, wanted.keys),
        (found.values, wanted.values),
        (found.decays, wanted.decays),
    ):
        assert torch.equal(one.isnan(), other.isnan())
        assert_close(one.nan_to_num(), other.nan_to_num(), tolerance=tolerance)


def settle_both(
    states: DeltaStates, wanted: DeltaStates, counted: list[tuple[int, int, int, int]]
) -> None:
    """Add the tokens that count (``Settling.of``), to ``wanted`` by the twin, in which nothing is
    pending."""
    settling = Settling.of(counted, lambda array: torch.from_numpy(array).to(states.conv.device))
    settle(*layered(states), settling, keys_are_lines=True)
    settle_reference(*layered(wanted), settling, keys_are_lines=True)


def assert_checks(
    states: DeltaStates,
    wanted: DeltaStates,
    inputs: DeltaInputs,
    weights: DeltaWeights,
    state_dtype: torch.dtype,
) -> None:
    """``SOME_CHECKS`` give the same by the kernels and by the twin, of ``states`` and ``wanted``,
    which are equal. States change only when some of the tokens are settled."""
    dtype = states.conv.dtype
    conv, begun = states.conv.clone(), states.matrices.clone()
    slots, checks, positions = arranged(SOME_CHECKS, states.conv.device)
    out, expected = (torch.full_like(inputs.z, 7.0).contiguous() for _ in range(2))
    gated_delta.delta_checks_reference(expected, inputs, weights, wanted, slots, checks)
    gated_delta.delta_checks(out, inputs, weights, states, slots, checks, positions)
    tolerance = 2 * TOLERANCE[dtype]
    assert_close(out, expected, tolerance=tolerance)
    assert not out[: len(slots)][slots < 0].any() and (out[len(slots) :] == 7).all()
    assert states.unsettled is not None and wanted.unsettled is not None
    assert_alike(states.unsettled, wanted.unsettled, tolerance)
    assert torch.equal(states.conv, conv) and torch.equal(states.matrices, begun)
    assert not states.readers.any() and not states.pending.begins.any()
    settle_both(states, wanted, [(4, 2, 8, 2), (0, 0, 16, 1), (3, 1, 24, 8)])
    assert torch.equal(states.conv, wanted.conv)
    for slot in (0, 3, 4):
        error = relative_error(states.matrices[slot], wanted.matrices[slot])
        assert error < 2 * max(1e-3, TOLERANCE[dtype], TOLERANCE[state_dtype])
    assert torch.equal(states.matrices[[1, 2, 5]], begun[[1, 2, 5]])


@pytest.mark.parametrize(
    ("shape", "width", "state_dtype"),
    [*product(SHAPES, [2, 4], [torch.float32]), *product(SHAPES[:2], [4], OF_16_BITS)],
)
def test_delta_checks(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    state_dtype: torch.dtype,
) -> None:
    """Checks beside padding, whose first tokens count; states change only then."""
    weights = made_weights(shape, device, dtype, width=width)
    states, wanted = (
        with_room(of)
        for of in made_states(shape, 6, device, dtype, width=width, state_dtype=state_dtype)
    )
    slots, _, _ = arranged(SOME_CHECKS, device)
    inputs = made_inputs(shape, len(slots) + 2, device, dtype)
    assert_checks(states, wanted, inputs, weights, state_dtype)
    begins = torch.tensor([1, 0, 0, 0, 2, 0], device=device)[:, None]
    assert (states.pending.begins == begins).all()


def test_checks_add_pending_updates(device: torch.device, dtype: torch.dtype) -> None:
    """To what tokens read; and states get them when they are settled."""
    weights = made_weights(TINY, device, dtype)
    states, wanted = (with_room(of) for of in states_with_updates(device, dtype))
    starts = [WHOLE_EVERY + 2, WHOLE_EVERY - 1, 5]
    slots, checks, positions = arranged(
        [
            Check(3, slot=1, place=0, position=starts[0]),
            Check(2, slot=3, place=1, position=starts[1]),
            Check(4, slot=0, place=2, position=starts[2]),
        ],
        device,
    )
    inputs = made_inputs(TINY, len(slots), device, dtype)
    out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
    gated_delta.delta_checks_reference(expected, inputs, weights, wanted, slots, checks)
    gated_delta.delta_checks(out, inputs, weights, states, slots, checks, positions)
    assert_close(out, expected, tolerance=2 * TOLERANCE[dtype])
    settle_both(states, wanted, [(1, 0, starts[0], 2), (3, 1, starts[1], 2), (0, 2, starts[2], 1)])
    assert relative_error(states.matrices, wanted.matrices) < 2e-3
    begins = torch.tensor([6, 4, 0, 1], device=device)[:, None]
    assert (states.pending.begins == begins).all()


def test_pending_updates_are_added(device: torch.device, dtype: torch.dtype) -> None:
    """A state with updates that another kernel has left gives what the whole one gives."""
    weights, slots = made_weights(TINY, device, dtype), torch.tensor([1, 3, 0], device=device)
    states, wanted = states_with_updates(device, dtype)
    positions = torch.tensor([WHOLE_EVERY + 2, WHOLE_EVERY - 1, 5], device=device)
    inputs = made_inputs(TINY, len(slots), device, dtype)
    out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
    gated_delta.delta_step_reference(expected, inputs, weights, wanted, slots)
    gated_delta.delta_step(out, inputs, weights, states, slots, positions)
    assert_close(out, expected, tolerance=2 * TOLERANCE[dtype])
    assert relative_error(states.matrices, wanted.matrices) < 2e-3
    begins = torch.tensor([6, 3, 0, 0], device=device)[:, None]
    assert (states.pending.begins == begins).all()


def test_runs_add_pending_updates(device: torch.device, dtype: torch.dtype) -> None:
    """The same for runs; after them nothing is pending."""
    weights = made_weights(TINY, device, dtype)
    states, wanted = states_with_updates(device, dtype)
    several = (
        Run(0, 5, 1, WHOLE_EVERY + 2),
        Run(5, 8, 3, WHOLE_EVERY - 1, ((6, 2),)),
        Run(8, 80, 0, 5),
    )
    inputs, runs = made_inputs(TINY, 80, device, dtype), runs_on(device, several)
    out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
    gated_delta.delta_runs_reference(expected, inputs, weights, wanted, runs)
    gated_delta.delta_runs(out, inputs, weights, states, runs)
    tolerance = 5e-5 if dtype == torch.float32 else 2 * TOLERANCE[dtype]
    assert relative_error(out, expected) < tolerance
    for slot, matrix in enumerate(states.matrices):
        assert relative_error(matrix, wanted.matrices[slot]) < tolerance
    begins = torch.tensor([5, 7, 0, 2], device=device)[:, None]  # slot 2 is a snapshot
    assert (states.pending.begins == begins).all()


def states_with_updates(
    device: torch.device, dtype: torch.dtype
) -> tuple[DeltaStates, DeltaStates]:
    """States of four rows, for the first of which the next position is 5, for the second
    ``WHOLE_EVERY + 2``, and for the last ``WHOLE_EVERY - 1``; with updates pending in these two,
    and the same states with nothing pending."""
    states, wanted = made_states(TINY, 4, device, dtype)
    pending = states.pending
    for of_pending in (pending.keys, pending.values):
        of_pending.normal_()
    pending.decays.copy_(torch.rand_like(pending.decays).neg_().cumsum(-1))
    pending.begins.copy_(torch.tensor([5, 1, 0, 0])[:, None])
    for slot, end in ((1, 2), (3, WHOLE_EVERY - 1)):
        for head, key_head in enumerate([0, 0, 1, 1]):
            state, decays = wanted.matrices[slot, head], pending.decays[slot, head]
            state *= decays[end - 1].exp()
            for place in range(int(pending.begins[slot, head]), end):
                left = (decays[end - 1] - decays[place]).exp()
                key = pending.keys[slot, key_head, place]
                state += left * torch.outer(key, pending.values[slot, head, place])
    return states, wanted


@pytest.mark.parametrize(
    ("key_heads", "heads", "width", "state_dtype"),
    [
        (2, 6, 4, torch.float32),
        (16, 32, 4, torch.float32),
        (3, 3, 2, torch.float32),
        *((4, 8, 4, state_dtype) for state_dtype in OF_16_BITS),
    ],
)
def test_steps_of_many_rows(
    device: torch.device, key_heads: int, heads: int, width: int, state_dtype: torch.dtype
) -> None:
    """The kernel that leaves updates pending, from all places on, with steps of the other one and
    a check of guesses in between. States are whole when the next position is a multiple of
    ``WHOLE_EVERY``."""
    if is_interpreted():
        pytest.skip("needs a GPU")
    from minisgl_backend.kernels.cuda.delta_step import HEAD_DIM, DeltaStepKernel

    dtype, shape = torch.bfloat16, (key_heads, heads, HEAD_DIM, HEAD_DIM)
    kernel = DeltaStepKernel(key_heads, heads, width, state_dtype, device)
    weights = made_weights(shape, device, dtype, width=width)
    states, wanted = (
        with_room(of)
        for of in made_states(shape, 24, device, dtype, width=width, state_dtype=state_dtype)
    )
    for of_pending in (states.pending.keys, states.pending.values, states.pending.decays):
        of_pending.fill_(torch.nan)  # left by other requests
    begun = states.matrices.clone()
    slots = torch.randperm(24, device=device)[:21]
    slots[[3, 20]] = -1
    rows = (slots >= 0).nonzero()[:, 0]
    positions = torch.randint(100, 200, (len(slots),), dtype=torch.int32, device=device)
    states.pending.begins[slots[rows]] = positions[rows, None] % WHOLE_EVERY
    tolerance = 2 * max(TOLERANCE[dtype], TOLERANCE[state_dtype])
    for step in range(3 * WHOLE_EVERY):
        if step == WHOLE_EVERY + 3:
            slot, start = int(slots[1]), int(positions[1])
            of_tokens, checks, there = arranged([Check(8, slot, 2, start)], device)
            inputs = made_inputs(shape, len(of_tokens), device, dtype)
            out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
            gated_delta.delta_checks_reference(expected, inputs, weights, wanted, of_tokens, checks)
            gated_delta.delta_checks(out, inputs, weights, states, of_tokens, checks, there)
            assert_close(out, expected, tolerance=tolerance)
            settle_both(states, wanted, [(slot, 2, start, 5)])
            positions[1] += 5
        inputs = made_inputs(shape, len(slots), device, dtype)
        out, expected = (torch.full_like(inputs.z, 7.0).contiguous() for _ in range(2))
        gated_delta.delta_step_reference(expected, inputs, weights, wanted, slots)
        others = step in (2 * WHOLE_EVERY - 3, 2 * WHOLE_EVERY)
        run = gated_delta.delta_step if others else kernel
        run(out, inputs, weights, states, slots, positions)
        assert_close(out, expected, tolerance=tolerance)
        assert torch.equal(states.conv, wanted.conv)
        positions += 1
        whole = slots[rows][positions[rows] % WHOLE_EVERY == 0]
        for slot in whole.tolist():
            error = relative_error(states.matrices[slot], wanted.matrices[slot])
            assert error < 2 * max(1e-3, TOLERANCE[state_dtype])
    unused = [slot for slot in range(24) if slot not in slots.tolist()]
    assert torch.equal(states.matrices[unused], begun[unused])


RUNS = [
    (Run(0, 1, 3, 0),),
    (Run(0, 2, 3, 5, ((1, 5),)), Run(2, 4, 1, 0, ((3, 6), (4, 7)))),
    (Run(0, 64, 2, 16), Run(64, 129, 0, 0), Run(129, 131, 1, 7)),
    (Run(0, 5, 3, 6), Run(5, 80, 1, 0, ((16, 4), (21, 5))), Run(80, 150, 2, 9)),
    (Run(5, 205, 1, 33, ((21, 4), (85, 5), (205, 6))), Run(205, 268, 0, 0, ((253, 7),))),
]
"""Tokens before the first are those of decoding rows."""


@pytest.mark.parametrize(("width", "biased"), [(2, False), (4, False), (4, True)])
@pytest.mark.parametrize("runs", RUNS)
def test_conv_runs(
    device: torch.device, dtype: torch.dtype, runs: tuple[Run, ...], width: int, biased: bool
) -> None:
    channels, many = 150, runs_on(device, runs)
    x = torch.randn(runs[-1].end, channels + 2, device=device).to(dtype)[:, :channels]
    weight = torch.randn(channels, width, device=device).to(dtype)
    bias = torch.randn(channels, device=device).to(dtype) if biased else None
    states = torch.randn(8, channels, width - 1, device=device).to(dtype)
    before = states.clone()
    out, expected = (torch.full_like(x, 7.0).contiguous() for _ in range(2))
    causal_conv.causal_conv_runs_reference(expected, x, before, many, weight, bias)
    causal_conv.causal_conv_runs(out, x, states, many, weight, bias)
    assert_close(out, expected)
    assert torch.equal(states, before)


@pytest.mark.parametrize(("width", "biased", "silu"), [(2, False, True), (4, True, False)])
def test_conv_checks(
    device: torch.device, dtype: torch.dtype, width: int, biased: bool, silu: bool
) -> None:
    """Checks shorter and longer than the convolution, beside padding; states stay as they are."""
    channels = 150
    slots, checks, _ = arranged(SOME_CHECKS, device)
    x = torch.randn(len(slots), channels + 2, device=device).to(dtype)[:, :channels]
    weight = torch.randn(channels, width, device=device).to(dtype)
    bias = torch.randn(channels, device=device).to(dtype) if biased else None
    states = torch.randn(6, 3, channels, width - 1, device=device).to(dtype)[:, 1]
    before = states.clone()
    inputs, kept = (torch.full((3, 9, channels), 7.0, dtype=dtype, device=device) for _ in range(2))
    out, expected = (torch.full_like(x, 7.0).contiguous() for _ in range(2))
    causal_conv.causal_conv_checks_reference(
        expected, x, states, kept, slots, checks, weight, bias, silu=silu
    )
    causal_conv.causal_conv_checks(out, x, states, inputs, slots, checks, weight, bias, silu=silu)
    assert_close(out, expected)
    assert torch.equal(inputs, kept) and torch.equal(states, before)


@pytest.mark.parametrize(
    ("shape", "runs", "padding", "state_dtype"),
    [
        *product(SHAPES, RUNS, [0, 3], [torch.float32]),
        *product(SHAPES[:2], RUNS[-1:], [0], OF_16_BITS),
    ],
)
def test_delta_runs(
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
    gated_delta.delta_runs_reference(expected, inputs, weights, wanted, many)
    gated_delta.delta_runs(out, inputs, weights, states, many)
    assert (out[: runs[0].begin] == 7).all() and not out[end:].any()
    tolerance = 5e-5 if dtype == torch.float32 else 2 * TOLERANCE[dtype]
    assert relative_error(out, expected) < tolerance
    if state_dtype != torch.float32:
        tolerance = max(tolerance, TOLERANCE[state_dtype])
    for slot, matrix in enumerate(states.matrices):
        assert relative_error(matrix, wanted.matrices[slot]) < tolerance
    assert torch.equal(states.pending.begins, wanted.pending.begins)


def test_equal_keys_stay_finite(device: torch.device, dtype: torch.dtype) -> None:
    """A prompt that repeats one token: the powers of the system's matrix grow beyond float32."""
    weights = made_weights(TINY, device, dtype)
    weights.log_rates.fill_(-20.0)  # nothing decays
    runs, one = runs_on(device, [Run(0, 200, 0, 0)]), made_inputs(TINY, 1, device, dtype)
    every = torch.zeros(200, dtype=torch.int64, device=device)
    inputs = DeltaInputs(one.channels[every], one.z[every], one.a[every], one.b[every] + 20)
    states, wanted = made_states(TINY, 1, device, dtype)
    out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
    gated_delta.delta_runs_reference(expected, inputs, weights, wanted, runs)
    gated_delta.delta_runs(out, inputs, weights, states, runs)
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    assert relative_error(out, expected) < tolerance
    assert relative_error(states.matrices, wanted.matrices) < tolerance


@pytest.mark.parametrize("shape", [TINY] if is_interpreted() else [TINY, (3, 3, 96, 192)])
def test_rates_up_to_two(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Those of OLMo Hybrid, with its heads."""
    weights = replace(made_weights(shape, device, dtype), rate_scale=2.0)
    states, wanted = made_states(shape, 2, device, dtype)
    inputs, runs = made_inputs(shape, 140, device, dtype), runs_on(device, [Run(0, 140, 1, 0)])
    out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
    gated_delta.delta_runs_reference(expected, inputs, weights, wanted, runs)
    gated_delta.delta_runs(out, inputs, weights, states, runs)
    tolerance = 5e-5 if dtype == torch.float32 else 2 * TOLERANCE[dtype]
    assert relative_error(out, expected) < tolerance
    assert relative_error(states.matrices[1], wanted.matrices[1]) < tolerance
    slots, positions = (torch.tensor([at], device=device) for at in (1, 140))
    gated_delta.delta_step_reference(expected[:1], inputs, weights, wanted, slots)
    gated_delta.delta_step(out[:1], inputs, weights, states, slots, positions)
    assert relative_error(out[:1], expected[:1]) < 2 * tolerance


@pytest.mark.parametrize("state_dtype", OF_16_BITS)
def test_large_states_stay_finite(
    device: torch.device, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """States beyond the largest float16, in both kernels; NaN stays NaN."""
    weights, end = made_weights(TINY, device, dtype), 8
    states, wanted = made_states(TINY, 4, device, dtype, state_dtype=state_dtype)
    states.matrices[1, 0, 0, 0] = wanted.matrices[1, 0, 0, 0] = torch.nan
    inputs = made_inputs(TINY, end, device, dtype)
    inputs.channels.abs_().mul_(1e6)
    weights.conv.abs_()
    out, expected = (torch.empty_like(inputs.z).contiguous() for _ in range(2))
    runs = runs_on(device, [Run(1, end, 3, 0, ((4, 2),))])
    slots = torch.tensor([1], device=device)
    gated_delta.delta_step_reference(expected, inputs, weights, wanted, slots)
    gated_delta.delta_runs_reference(expected, inputs, weights, wanted, runs)
    gated_delta.delta_step(out, inputs, weights, states, slots, slots)
    gated_delta.delta_runs(out, inputs, weights, states, runs)
    assert states.matrices[1, 0].isnan().any()
    for slot in (1, 2, 3):
        found, right = (of.matrices[slot].float().nan_to_num() for of in (states, wanted))
        assert relative_error(found, right) < 2 * TOLERANCE[torch.bfloat16]
        assert found.isfinite().all()
        assert (found.abs().max() == 65504) == (state_dtype == torch.float16)


def test_runs_are_cut_into_blocks() -> None:
    one = Run(0, 70, 2, 300, ((66, 9),))
    runs = Runs.of([one, Run(70, 71, 1, 0), Run(71, 75, 0, 4, ((72, 5),))], torch.from_numpy)
    assert runs.blocks.tolist() == [
        [0, 64, -1, 0],
        [64, 66, 9, 0],
        [66, 70, -1, 0],
        [70, 71, -1, 1],
        [71, 72, 5, 2],
        [72, 75, -1, 2],
    ]
    assert runs.lines.tolist() == [[0, 3, 2, 300], [3, 4, 1, 0], [4, 6, 0, 4]]
    assert runs.blocks.dtype == torch.int32
    assert np.diff(runs.lines[:, :2].numpy()).sum() == len(runs.blocks)


@pytest.mark.parametrize("runs", [(), *RUNS])
def test_what_kernels_read_tells_the_runs(runs: tuple[Run, ...]) -> None:
    table = torch.from_numpy(runs_table(runs, num_blocks(runs) + 2, len(runs) + 1, end=300))
    padded = Runs.over(table, len(runs) + 1)
    assert padded.listed() == list(runs)
    assert padded.blocks[-2:].tolist() == [[300, 300, -1, 0]] * 2
