"""`minisgl bench state-dtypes`: how far outputs move when recurrent states are kept in 16 bits.

One row decodes token after token with a Gated DeltaNet layer, by the engine's own step, over states
of each type. Inputs are random; there is a head for each pair of decay and learning rate, which
shows for which pairs rounding does harm: if little decays and little is learned, most changes of a
state are smaller than half of its last bit.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Final

import click
import torch
from torch import Tensor

from minisgl_backend.kernels.gated_delta import (
    DeltaInputs,
    DeltaStates,
    DeltaWeights,
    delta_step,
)
from minisgl_backend.kernels.layer_states import PendingUpdates
from minisgl_bench.logits import first_device
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.report import Report, json_option

_SIZE: Final = 128
"""The size of keys and values, as in Qwen3-Next and later."""
_DECAYS: Final = (1e-6, 1e-4, 1e-3, 3e-3, 1e-2, 1e-1, 1.0)
"""Roughly the share of a state that a token takes away."""
_RATES: Final = (-5.0, -3.0, -1.0, 1.0)
"""The mean of the numbers that the sigmoid turns into learning rates."""
_HEADS: Final = tuple(itertools.product(_DECAYS, _RATES))
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_AVERAGED: Final = 50
"""The last tokens, whose errors count."""
_STEP_SIZE: Final = 0.02
"""Roughly what a decay multiplies: the softplus of a token's input."""


@click.command("state-dtypes")
@click.option(
    "--steps",
    type=POSITIVE_INT,
    multiple=True,
    default=(100, 1000, 8000),
    show_default=True,
    help="number of tokens; may be repeated",
)
@json_option
def state_dtypes(steps: tuple[int, ...], json_path: Path | None) -> None:
    """How much 16-bit recurrent states change the outputs of a layer, compared with float32."""
    device = first_device()
    report = Report(
        "outputs over recurrent states of 16 bits",
        info={"heads": len(_HEADS), "device": device.type, "torch": torch.__version__},
    )
    ascending = sorted(set(steps))
    for num_steps, errors in zip(ascending, measured(ascending, device), strict=True):
        for dtype, by_head in errors.items():
            report.add(
                steps=num_steps,
                state_dtype=str(dtype).removeprefix("torch."),
                error_percent=100 * float(by_head.square().mean().sqrt()),
                error_of_worst_head_percent=100 * float(by_head.max()),
            )
    report.emit(json_path)


@torch.inference_mode()
def measured(steps: list[int], device: torch.device) -> list[dict[torch.dtype, Tensor]]:
    """By type of states, [num_heads], at each of the ascending ``steps``: the root mean square of
    the relative errors of outputs, over the last ``_AVERAGED`` steps up to this one."""
    draw = torch.Generator().manual_seed(0)
    weights = _weights(draw, device)
    states = {dtype: _states(dtype, device) for dtype in _DTYPES}
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    means = 0.5 * torch.randn(_num_channels(), generator=draw)
    recent: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in _DTYPES[1:]}
    found = []
    for step in range(1, steps[-1] + 1):
        inputs = _inputs(means, draw, device)
        outputs = {}
        for dtype, own in states.items():
            outputs[dtype] = torch.empty_like(inputs.z)
            delta_step(outputs[dtype], inputs, weights, own, slots, slots)
        exact = outputs[torch.float32][0]
        for dtype, errors in recent.items():
            apart = (outputs[dtype][0] - exact).square().sum(-1) / exact.square().sum(-1)
            recent[dtype] = [*errors, apart][-_AVERAGED:]
        if step in steps:
            found.append(
                {dtype: torch.stack(errors).mean(0).sqrt() for dtype, errors in recent.items()}
            )
    return found


def _num_channels() -> int:
    return 3 * len(_HEADS) * _SIZE


def _weights(draw: torch.Generator, device: torch.device) -> DeltaWeights:
    """Random weights; each head has its own keys."""
    num_heads = len(_HEADS)
    decays = torch.tensor([decay for decay, _ in _HEADS])
    return DeltaWeights(
        num_key_heads=num_heads,
        conv=torch.randn(_num_channels(), 4, generator=draw).to(device) / 2,
        log_rates=(decays / _STEP_SIZE).log().to(device),
        biases=torch.full((num_heads,), math.log(math.expm1(_STEP_SIZE)), device=device),
        norm=torch.ones(_SIZE, device=device),
        eps=1e-6,
    )


def _states(dtype: torch.dtype, device: torch.device) -> DeltaStates:
    num_heads = len(_HEADS)
    return DeltaStates(
        conv=torch.zeros(1, _num_channels(), 3, device=device),
        matrices=torch.zeros(1, num_heads, _SIZE, _SIZE, dtype=dtype, device=device),
        readers=torch.zeros(1, num_heads, dtype=torch.int32, device=device),
        pending=PendingUpdates.none(1, num_heads, num_heads, _SIZE, _SIZE, device),
    )


def _inputs(means: Tensor, draw: torch.Generator, device: torch.device) -> DeltaInputs:
    """The inputs for one token. The output gate is the same for all numbers of a head."""
    num_heads = len(_HEADS)
    rates = torch.tensor([rate for _, rate in _HEADS])
    return DeltaInputs(
        channels=(means + torch.randn(1, len(means), generator=draw)).to(device),
        z=torch.ones(1, num_heads, _SIZE, device=device),
        a=0.5 * torch.randn(1, num_heads, generator=draw).to(device),
        b=(rates + torch.randn(1, num_heads, generator=draw)).to(device),
    )
