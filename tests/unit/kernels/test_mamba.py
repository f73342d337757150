"""Mamba 2, in blocks and token by token, against the functions of ``transformers``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h as theirs

from minisgl_backend.kernels.causal_conv import causal_conv
from minisgl_backend.kernels.chunk_runs import Run, Runs
from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates, stored
from minisgl_backend.kernels.mamba import (
    MambaInputs,
    MambaWeights,
    mamba_checks,
    mamba_runs,
    mamba_step,
    scan,
    scan_step,
)
from minisgl_backend.kernels.settle import settle
from minisgl_backend.plan import WHOLE_EVERY
from tests.checks import CHECKS, arranged, layered, nothing_kept, settling

GROUPS, HEADS, HEAD_DIM, STATE = 2, 4, 12, 16
INNER, CHANNELS = HEADS * HEAD_DIM, HEADS * HEAD_DIM + 2 * GROUPS * STATE


OfTokens: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, B, C, steps, the logs of decays."""


def inputs(num_tokens: int) -> OfTokens:
    draw = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HEADS, HEAD_DIM, generator=draw)
    writers, readers = torch.randn(2, num_tokens, GROUPS, STATE, generator=draw)
    steps = torch.rand(num_tokens, HEADS, generator=draw) * 2
    return x, writers, readers, steps, -steps * torch.rand(HEADS, generator=draw) * 4


def some(of_all: OfTokens, span: slice) -> OfTokens:
    x, writers, readers, steps, decays = of_all
    return x[span], writers[span], readers[span], steps[span], decays[span]


def made_weights(draw: torch.Generator) -> MambaWeights:
    rates, biases, skips = torch.randn(3, HEADS, generator=draw)
    return MambaWeights(
        GROUPS,
        torch.randn(CHANNELS, 4, generator=draw),
        torch.randn(CHANNELS, generator=draw),
        rates,
        biases,
        skips,
        torch.rand(INNER, generator=draw) + 0.5,
        1e-5,
        (0.0, math.inf),
    )


def made_states(conv: Tensor, matrices: Tensor) -> LayerStates:
    pending = PendingUpdates.none(len(conv), GROUPS, HEADS, STATE, HEAD_DIM)
    return LayerStates(conv, matrices, pending)


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.5, 1.5)])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
def test_a_prompt_gives_what_transformers_gives(
    num_tokens: int, limits: tuple[float, float]
) -> None:
    draw = torch.Generator().manual_seed(num_tokens)
    weights = replace(made_weights(draw), time_steps=limits)
    z = torch.randn(num_tokens, INNER, generator=draw)
    channels = torch.randn(num_tokens, CHANNELS, generator=draw)
    steps = torch.randn(num_tokens, HEADS, generator=draw)
    states = made_states(torch.zeros(1, CHANNELS, 3), torch.zeros(1, HEADS, HEAD_DIM, STATE))
    found = torch.empty_like(z)
    runs = Runs.of([Run(0, num_tokens, 0, 0)], torch.from_numpy)
    mamba_runs(found, MambaInputs(z, channels, steps), weights, states, runs)
    convolved, _ = causal_conv(channels, torch.zeros(CHANNELS, 3), weights.conv, weights.conv_bias)
    x, writers, readers = convolved.tensor_split([INNER, INNER + GROUPS * STATE], dim=1)
    expected, last = theirs.mamba2_chunk_scan(
        x.view(1, num_tokens, HEADS, HEAD_DIM),
        steps[None],
        -weights.log_rates.exp(),
        writers.view(1, num_tokens, GROUPS, STATE),
        readers.view(1, num_tokens, GROUPS, STATE),
        chunk_size=32,
        D=weights.skips,
        dt_bias=weights.biases,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    gated_norm: Any = theirs.NemotronHRMSNormGated
    norm = gated_norm(INNER, group_size=INNER // GROUPS, eps=1e-5)
    norm.weight.data = weights.norm
    expected = norm(expected.view(num_tokens, INNER), z)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.matrices, last, rtol=1e-4, atol=1e-4)


def test_the_convolution_has_a_bias() -> None:
    draw = torch.Generator().manual_seed(3)
    x, weight = torch.randn(9, 5, generator=draw), torch.randn(5, 4, generator=draw)
    bias = torch.randn(5, generator=draw)
    expected = theirs.causal_conv1d_fn(x.T[None], weight, bias, activation="silu")[0].T
    found, _ = causal_conv(x, torch.zeros(5, 3), weight, bias)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cut", [1, 16, 64, 99])
def test_tokens_may_be_cut_anywhere(cut: int) -> None:
    of_all, state = inputs(100), torch.zeros(HEADS, HEAD_DIM, STATE)
    expected, last = scan(*of_all, state)
    first, state = scan(*some(of_all, slice(cut)), state)
    rest, state = scan(*some(of_all, slice(cut, None)), state)
    torch.testing.assert_close(torch.cat([first, rest]), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_rows_step_by_their_own_states() -> None:
    of_all = inputs(3)
    states = torch.randn(6, HEADS, HEAD_DIM, STATE, generator=torch.Generator().manual_seed(2))
    before, slots = states.clone(), torch.tensor([4, 0, 2])
    found = scan_step(*of_all, states, slots)
    for row, slot in enumerate(slots.tolist()):
        one = slice(row, row + 1)
        expected, last = scan(*some(of_all, one), before[slot])
        torch.testing.assert_close(found[one], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[slot], last, rtol=1e-4, atol=1e-5)
    assert torch.equal(states[[1, 3, 5]], before[[1, 3, 5]])


def test_runs_give_what_steps_give() -> None:
    """Rows begin or continue from a state; snapshots are kept within runs and at their ends."""
    draw = torch.Generator().manual_seed(4)
    weights = replace(made_weights(draw), time_steps=(0.1, 2.0))
    z, channels = (torch.randn(170, width, generator=draw) for width in (INNER, CHANNELS))
    steps = torch.randn(170, HEADS, generator=draw)
    conv = torch.randn(8, CHANNELS, 3, generator=draw)
    matrices = torch.randn(8, HEADS, HEAD_DIM, STATE, generator=draw)
    states, before = (made_states(conv.clone(), matrices.clone()) for _ in range(2))
    runs = (
        Run(0, 2, 3, 7, ((1, 5),)),
        Run(2, 80, 1, 0, ((66, 0), (80, 4))),
        Run(80, 90, 2, 5, ((83, 6),)),
        Run(90, 170, 7, 9),
    )
    found = torch.empty_like(z)
    of_all = MambaInputs(z, channels, steps)
    mamba_runs(found, of_all, weights, states, Runs.of(runs, torch.from_numpy))
    before.conv[1], before.matrices[1] = 0.0, 0.0
    for run in runs:
        slot = torch.tensor([run.slot])
        for token in range(run.begin, run.end):
            one = slice(token, token + 1)
            expected = z[one].clone()
            of_token = MambaInputs(z[one], channels[one], steps[one])
            mamba_step(expected, of_token, weights, before, slot, slot)
            torch.testing.assert_close(found[one], expected, rtol=1e-4, atol=1e-4)
            for end, kept in run.kept:
                if end == token + 1:
                    for of_slot in (before.conv, before.matrices):
                        of_slot[kept] = of_slot[run.slot]
    torch.testing.assert_close(states.conv, before.conv)
    torch.testing.assert_close(states.matrices, before.matrices, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checks_give_what_steps_give(normed: bool, state_dtype: torch.dtype) -> None:
    """They leave states as they are, whatever many of their tokens are added afterwards."""
    draw = torch.Generator().manual_seed(5)
    weights = replace(made_weights(draw), time_steps=(0.1, 2.0))
    weights = weights if normed else replace(weights, norm=None)
    slots, checks, positions = arranged(CHECKS)
    num_tokens = len(slots) + 3  # the last ones are of others
    z, channels = (torch.randn(num_tokens, width, generator=draw) for width in (INNER, CHANNELS))
    steps = torch.randn(num_tokens, HEADS, generator=draw)
    conv = torch.randn(6, CHANNELS, 3, generator=draw)
    matrices = torch.randn(6, HEADS, HEAD_DIM, STATE, generator=draw).to(state_dtype)
    states = made_states(conv.clone(), matrices.clone())
    states = replace(states, unsettled=nothing_kept(states, GROUPS, 5, 8))
    found = torch.full_like(z, 7.0)
    mamba_checks(found, MambaInputs(z, channels, steps), weights, states, slots, checks, positions)
    assert torch.equal(states.conv, conv) and torch.equal(states.matrices, matrices)
    # after each token: the row's states, which are rounded only where slots hold them
    after: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    stepped = made_states(conv.clone(), matrices.clone().float())
    expected = torch.zeros_like(z)
    for begin, length, _ in checks.listed():
        slot = slots[begin : begin + 1]
        for count in range(1, length + 1):
            one = slice(begin + count - 1, begin + count)
            of_token = MambaInputs(z[one], channels[one], steps[one])
            mamba_step(expected[one], of_token, weights, stepped, slot, positions[one])
            of_row = stepped.conv[slot[0]].clone(), stepped.matrices[slot[0]].clone()
            after[int(slot), count] = of_row
    expected[len(slots) :] = 7.0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for count in range(1, 9):
        settled = made_states(conv.clone(), matrices.clone())
        settled = replace(settled, unsettled=states.unsettled)
        settle(*layered(settled), settling(CHECKS, count), keys_are_lines=False)
        for check in CHECKS:
            if not check.is_padding:
                right = after[check.slot, min(count, check.length)]
                end = check.position + min(count, check.length)
                assert torch.equal(settled.conv[check.slot], right[0])
                torch.testing.assert_close(
                    settled.matrices[check.slot], stored(right[1], state_dtype)
                )
                assert (settled.pending.begins[check.slot] == end % WHOLE_EVERY).all()
        assert torch.equal(settled.matrices[[1, 4]], matrices[[1, 4]])
        assert torch.equal(settled.conv[[1, 4]], conv[[1, 4]])
