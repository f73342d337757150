"""A gated short convolution (LFM2): a layer's whole token mixing between its projections.

A token's input is three vectors b, c and x, of as many numbers as there are channels. The products
b x go through a causal convolution without SiLU (``causal_conv``); its results are multiplied by c.
Knows only tensors, slots of states and runs of tokens. Sums are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.causal_conv import (
    causal_conv_checks,
    causal_conv_runs,
    causal_conv_runs_reference,
    causal_conv_step_reference,
)
from minisgl_backend.kernels.checks import CheckedTokens
from minisgl_backend.kernels.chunk_runs import Runs
from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.layer_states import LayerStates


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvInputs:
    """What tokens are projected to: b, c and x above, each [num_tokens, channels]. A token's
    numbers are contiguous; tokens may be strided, all by the same number."""

    b: Tensor
    c: Tensor
    x: Tensor


def short_conv_step(
    out: Tensor,
    inputs: ShortConvInputs,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """The mixing for the first tokens, one per row.

    ``out`` [num_tokens, channels] gets the result; ``weight`` [channels, width], whose last column
    is for the token itself; ``bias`` [channels]; ``states`` are ``LayerStates.conv``, updated in
    place. ``slots`` int64 [num_rows] is -1 for a token that is left to others. With ``pdl`` the
    kernel before this one must not write ``states`` or ``slots``.
    """
    if not use_triton(out):
        short_conv_step_reference(out, inputs, weight, bias, states, slots)
        return
    from minisgl_backend.kernels.triton_kernels.short_conv_step import launch_short_conv_step

    launch_short_conv_step(
        out, (inputs.b, inputs.c, inputs.x), weight, bias, states, slots, pdl=pdl
    )


def short_conv_runs(
    out: Tensor,
    inputs: ShortConvInputs,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    runs: Runs,
) -> None:
    """The same for the tokens of ``runs``. All other tokens get zeros."""
    if not use_triton(out):
        short_conv_runs_reference(out, inputs, weight, bias, states, runs)
        return
    out.zero_()
    causal_conv_runs(out, inputs.b * inputs.x, states, runs, weight, bias, silu=False)
    out *= inputs.c


def short_conv_checks(
    out: Tensor,
    inputs: ShortConvInputs,
    weight: Tensor,
    bias: Tensor | None,
    states: LayerStates,
    slots: Tensor,
    checks: CheckedTokens,
) -> None:
    """The same for the tokens of ``checks``, the first ones, which leave the convolution's states
    as they are. ``slots`` int64 [num_tokens] are those of their rows, and -1 for a token that is
    left to others. Other tokens of padding get zeros."""
    assert states.unsettled is not None
    kept, num_tokens = states.unsettled.inputs, len(slots)
    own, c = out[:num_tokens], inputs.c[:num_tokens]
    gated = inputs.b[:num_tokens] * inputs.x[:num_tokens]
    mixed = torch.zeros_like(gated)
    causal_conv_checks(mixed, gated, states.conv, kept, slots, checks, weight, bias, silu=False)
    own.copy_(torch.where((slots >= 0)[:, None], mixed * c, own))


def short_conv_step_reference(
    out: Tensor,
    inputs: ShortConvInputs,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
) -> None:
    """The twin of ``short_conv_step``."""
    gated = inputs.b * inputs.x
    mixed = torch.zeros_like(gated)
    causal_conv_step_reference(mixed, gated, states, slots, weight, bias, silu=False)
    is_own = (slots >= 0)[:, None]
    own = out[: len(slots)]
    own.copy_(torch.where(is_own, mixed[: len(slots)] * inputs.c[: len(slots)], own))


def short_conv_runs_reference(
    out: Tensor,
    inputs: ShortConvInputs,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    runs: Runs,
) -> None:
    """The twin of ``short_conv_runs``."""
    out.zero_()
    causal_conv_runs_reference(out, inputs.b * inputs.x, states, runs, weight, bias, silu=False)
    out *= inputs.c
