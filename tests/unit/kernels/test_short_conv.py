"""Gated short convolutions, in runs and token by token, against the layer of ``transformers``."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from minisgl_backend.kernels.delta_runs import Run, Runs
from minisgl_backend.kernels.short_conv import ShortConvInputs, short_conv_runs, short_conv_step

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
