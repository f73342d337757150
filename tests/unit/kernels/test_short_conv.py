"""Gated short convolutions, in runs and token by token, against the layer of ``transformers``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from minisgl_backend.kernels.chunk_runs import Run, Runs
from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates
from minisgl_backend.kernels.settle import settle
from minisgl_backend.kernels.short_conv import (
    ShortConvInputs,
    short_conv_checks,
    short_conv_runs,
    short_conv_step,
)
from tests.checks import CHECKS, arranged, layered, nothing_kept, settling

CHANNELS, LENGTH = 24, 90


def layer() -> Lfm2ShortConv:
    torch.manual_seed(3)
    config = Lfm2Config(
        hidden_size=CHANNELS, num_hidden_layers=1, layer_types=["conv"], conv_bias=True
    )
    return Lfm2ShortConv(config, 0).eval()


def mixed(theirs: Lfm2ShortConv, hidden: Tensor, cuts: list[int]) -> Tensor:
    """What our kernels make of one row, in runs that end at ``cuts``, then token by token."""
    inputs = ShortConvInputs(*theirs.in_proj(hidden).split(CHANNELS, dim=1))
    weights = theirs.conv.weight[:, 0], theirs.conv.bias
    states, out = torch.full((2, CHANNELS, 2), torch.nan), torch.empty(LENGTH, CHANNELS)
    begin = 0
    for end in cuts:
        part = ShortConvInputs(*(of[begin:end] for of in (inputs.b, inputs.c, inputs.x)))
        runs = Runs.of([Run(0, end - begin, 1, begin)], torch.from_numpy)
        short_conv_runs(out[begin:end], part, *weights, states, runs)
        begin = end
    for token in range(begin, LENGTH):
        here = slice(token, token + 1)
        part = ShortConvInputs(*(of[here] for of in (inputs.b, inputs.c, inputs.x)))
        short_conv_step(out[here], part, *weights, states, torch.tensor([1]))
    found: Tensor = theirs.out_proj(out)
    return found


def test_the_layer_is_that_of_transformers() -> None:
    """Wherever prompts are cut, even into runs that are shorter than the convolution."""
    theirs = layer()
    with torch.inference_mode():
        hidden = torch.randn(LENGTH, CHANNELS)
        wanted = theirs(hidden[None])[0]
        for cuts in ([LENGTH], [70], [1, 2, 65, 66], [1]):
            found = mixed(theirs, hidden, cuts)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [2, 3, 6])
def test_checks_give_what_steps_give(width: int) -> None:
    """They leave states as they are, whatever many of their tokens are added afterwards."""
    torch.manual_seed(4)
    weights = torch.randn(CHANNELS, width), torch.randn(CHANNELS)
    slots, checks, _ = arranged(CHECKS)
    inputs = ShortConvInputs(*torch.randn(3, len(slots) + 3, CHANNELS))
    conv = torch.randn(6, CHANNELS, width - 1)
    states = LayerStates(conv.clone(), torch.empty(6, 0, 0, 0), PendingUpdates.none(6, 0, 0, 0, 0))
    states = replace(states, unsettled=nothing_kept(states, 0, 5, 8))
    found = torch.full_like(inputs.x, 7.0)
    short_conv_checks(found, inputs, *weights, states, slots, checks)
    assert torch.equal(states.conv, conv)
    stepped, expected = conv.clone(), torch.full_like(inputs.x, 7.0)
    after: dict[tuple[int, int], Tensor] = {}  # the row's states after each token
    for begin, length, _ in checks.listed():
        slot = slots[begin : begin + 1]
        for count in range(1, length + 1):
            one = slice(begin + count - 1, begin + count)
            part = ShortConvInputs(inputs.b[one], inputs.c[one], inputs.x[one])
            short_conv_step(expected[one], part, *weights, stepped, slot)
            after[int(slot), count] = stepped[slot[0]].clone()
    torch.testing.assert_close(found, expected)
    for count in range(1, 9):
        settled = replace(states, conv=conv.clone())
        settle(*layered(settled), settling(CHECKS, count), keys_are_lines=True)
        for check in CHECKS:
            if not check.is_padding:
                right = after[check.slot, min(count, check.length)]
                assert torch.equal(settled.conv[check.slot], right)
        assert torch.equal(settled.conv[[1, 4]], conv[[1, 4]])
