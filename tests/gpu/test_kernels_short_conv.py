"""Gated short convolutions for one token a row, for runs of tokens, and for checks of guesses,
against the twins."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels import short_conv
from minisgl_backend.kernels.chunk_runs import Run, Runs, num_blocks, runs_table
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates
from minisgl_backend.kernels.settle import settle
from minisgl_backend.kernels.short_conv import ShortConvInputs
from tests.checks import CHECKS, arranged, layered, nothing_kept, settling
from tests.gpu.compare import TOLERANCE, relative_error
from tests.gpu.test_kernels_mamba import RUNS

CHANNELS = [40, 300] if is_interpreted() else [40, 1024, 2048]


def made_weights(
    channels: int, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    weight = torch.randn(channels, width, device=device) / width
    return weight.to(dtype), torch.randn(channels, device=device).to(dtype)


def made_inputs(
    channels: int, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> ShortConvInputs:
    """Inputs as a layer has them: parts of wider rows."""
    projected = torch.randn(num_tokens, 3 * channels + 5, device=device).to(dtype)
    return ShortConvInputs(*projected[:, : 3 * channels].split(channels, dim=1))


def made_states(
    channels: int, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same states of 8 slots twice, as a layer between others has them."""
    states = torch.randn(8, 3, channels, width - 1, device=device).to(dtype)
    return states.clone()[:, 1], states.clone()[:, 1]


@pytest.mark.parametrize(("channels", "width", "biased"), [*product(CHANNELS, [2, 3, 7], [0, 1])])
def test_short_conv_step(
    device: torch.device, dtype: torch.dtype, channels: int, width: int, biased: int
) -> None:
    """Each step finds the states of the one before; other rows and slots stay as they are."""
    weight, bias = made_weights(channels, width, device, dtype)
    weights = weight, bias if biased else None
    states, wanted = made_states(channels, width, device, dtype)
    slots = torch.tensor([4, -1, 2], device=device)
    for _ in range(width):
        inputs = made_inputs(channels, 5, device, dtype)
        out, expected = (torch.full_like(inputs.x, 7.0).contiguous() for _ in range(2))
        short_conv.short_conv_step_reference(expected, inputs, *weights, wanted, slots)
        short_conv.short_conv_step(out, inputs, *weights, states, slots)
        assert relative_error(out[[0, 2]], expected[[0, 2]]) < 2 * TOLERANCE[dtype]
        assert (out[[1, 3, 4]] == 7).all() and (expected[[1, 3, 4]] == 7).all()
        # products may be rounded the other way
        assert relative_error(states, wanted) < TOLERANCE[dtype]
    assert torch.equal(states[[0, 1, 3, 5]], wanted[[0, 1, 3, 5]])


@pytest.mark.parametrize(
    ("channels", "width", "runs", "padding"), [*product(CHANNELS[:2], [3], RUNS, [0, 3])]
)
def test_short_conv_runs(
    device: torch.device,
    dtype: torch.dtype,
    channels: int,
    width: int,
    runs: tuple[Run, ...],
    padding: int,
) -> None:
    end = runs[-1].end
    table = runs_table(runs, num_blocks(runs) + padding, len(runs) + padding, end=end)
    many = Runs.over(torch.from_numpy(table).to(device), len(runs) + padding)
    inputs = made_inputs(channels, end + 9 * padding, device, dtype)
    weights = made_weights(channels, width, device, dtype)
    states, wanted = made_states(channels, width, device, dtype)
    fresh = [run.slot for run in runs if run.is_fresh]
    states[fresh] = wanted[fresh] = torch.nan  # left by another request
    out, expected = (torch.full_like(inputs.x, 7.0).contiguous() for _ in range(2))
    short_conv.short_conv_runs_reference(expected, inputs, *weights, wanted, many)
    short_conv.short_conv_runs(out, inputs, *weights, states, many)
    assert not out[: runs[0].begin].any() and not out[end:].any()
    assert relative_error(out, expected) < 2 * TOLERANCE[dtype]
    assert torch.equal(states, wanted)


@pytest.mark.parametrize(
    ("channels", "width", "biased"), [*product(CHANNELS[:2], [2, 3, 7], [0, 1])]
)
def test_short_conv_checks(
    device: torch.device, dtype: torch.dtype, channels: int, width: int, biased: int
) -> None:
    """Results are those of steps, and so are states when four tokens of each check count."""
    weight, bias = made_weights(channels, width, device, dtype)
    weights = weight, bias if biased else None
    conv, wanted = made_states(channels, width, device, dtype)
    begun = conv.clone()
    states = LayerStates(
        conv,
        torch.empty(8, 0, 0, 0, device=device),
        PendingUpdates.none(8, 0, 0, 0, 0, device),
    )
    states = replace(states, unsettled=nothing_kept(states, 0, 5, 8))
    slots, checks, _ = arranged(CHECKS, device)
    inputs = made_inputs(channels, len(slots) + 3, device, dtype)
    out, expected = (torch.full_like(inputs.x, 7.0).contiguous() for _ in range(2))
    short_conv.short_conv_checks(out, inputs, *weights, states, slots, checks)
    assert torch.equal(conv, begun)
    for begin, length, _ in checks.listed():
        own = slots[begin : begin + 1]
        for token in range(begin, begin + length):
            if token == begin + 4:
                kept = wanted[own].clone()
            one = slice(token, token + 1)
            part = ShortConvInputs(inputs.b[one], inputs.c[one], inputs.x[one])
            short_conv.short_conv_step_reference(expected[one], part, *weights, wanted, own)
        if length > 4:
            wanted[own] = kept
    assert relative_error(out, expected) < 2 * TOLERANCE[dtype]
    assert (out[: len(slots)][slots < 0] == 7).all() and (out[len(slots) :] == 7).all()
    settle(*layered(states), settling(CHECKS, 4, device), keys_are_lines=True)
    assert torch.equal(conv, wanted)
