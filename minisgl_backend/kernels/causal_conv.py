"""A causal convolution over the last few tokens, mostly with SiLU: each channel for itself.

Layers with recurrent states begin with it (``gated_delta``, ``mamba``) or are little more
(``short_conv``). Its own state is the inputs of the tokens before. Knows only tensors, slots of
states and runs of tokens. Steps of one token a row have no kernel here: it is part of theirs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.checks import CheckedTokens
from minisgl_backend.kernels.chunk_runs import Runs
from minisgl_backend.kernels.dispatch import at_least_float32, use_triton
from minisgl_backend.kernels.layer_states import rows_of


def causal_conv_runs(
    out: Tensor,
    x: Tensor,
    states: Tensor,
    runs: Runs,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> None:
    """The convolution over the tokens of ``runs``. ``out``, which is contiguous, and ``x`` are
    [num_tokens, channels]; ``states`` are ``LayerStates.conv``, updated in place; ``weight``
    [channels, width], whose last column is for the token itself; ``bias`` [channels]."""
    if not use_triton(x):
        causal_conv_runs_reference(out, x, states, runs, weight, bias, silu=silu)
        return
    from minisgl_backend.kernels.triton_kernels.conv_blocks import launch_conv_blocks

    launch_conv_blocks(out, x, states, runs.blocks, runs.lines, weight, bias, silu=silu)


def causal_conv_checks(
    out: Tensor,
    x: Tensor,
    states: Tensor,
    inputs: Tensor,
    slots: Tensor,
    checks: CheckedTokens,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    pdl: bool = False,
) -> None:
    """The same for the tokens of ``checks``, the first ones, which leave ``states`` as they are.
    Their inputs are kept in ``inputs`` (``UnsettledTokens``). ``slots`` int64 [num_tokens] are
    those of their rows. With ``pdl`` the kernel before this one must write nothing but ``x``."""
    if not use_triton(x):
        causal_conv_checks_reference(out, x, states, inputs, slots, checks, weight, bias, silu=silu)
        return
    from minisgl_backend.kernels.triton_kernels.conv_checks import launch_conv_checks

    launch_conv_checks(
        out, x, states, inputs, slots, checks.lines, weight, bias, silu=silu, pdl=pdl
    )


def causal_conv_step_reference(
    out: Tensor,
    x: Tensor,
    states: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> None:
    """The same for one token of each row; ``slots`` int64 [num_rows] is -1 for a token that is left
    to others."""
    of_rows, slots = rows_of(slots)
    inputs = torch.cat([states[slots], x[of_rows][..., None].to(states.dtype)], dim=-1)
    states[slots] = inputs[..., 1:]
    mixed = (at_least_float32(inputs) * weight).sum(-1)
    mixed = mixed if bias is None else mixed + bias
    out[of_rows] = (F.silu(mixed) if silu else mixed).to(x.dtype)


def causal_conv_runs_reference(
    out: Tensor,
    x: Tensor,
    states: Tensor,
    runs: Runs,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> None:
    """The twin of ``causal_conv_runs``."""
    for run in runs.listed():
        state = torch.zeros_like(states[0]) if run.is_fresh else states[run.slot]
        for begin, end, slots in run.pieces():
            out[begin:end], state = causal_conv(x[begin:end], state, weight, bias, silu=silu)
            for slot in slots:
                states[slot] = state


def causal_conv_checks_reference(
    out: Tensor,
    x: Tensor,
    states: Tensor,
    inputs: Tensor,
    slots: Tensor,
    checks: CheckedTokens,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> None:
    """The twin of ``causal_conv_checks``."""
    for begin, length, place in checks.listed():
        end = begin + length
        out[begin:end], _ = causal_conv(x[begin:end], states[slots[begin]], weight, bias, silu=silu)
        inputs[place, :length] = x[begin:end].to(inputs.dtype)


def causal_conv(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """The convolution over one sequence's tokens, and the state after them.

    ``x`` [num_tokens, channels]; ``state`` [channels, width - 1], the inputs of the previous
    tokens; ``weight`` [channels, width], whose last column is for the token itself. Returns
    [num_tokens, channels] and a new state.
    """
    inputs = torch.cat([state, x.T.to(state.dtype)], dim=1)  # [channels, width - 1 + num_tokens]
    wide = at_least_float32(inputs)
    own_bias = None if bias is None else bias.to(wide.dtype)
    mixed = F.conv1d(wide[None], weight[:, None].to(wide.dtype), own_bias, groups=len(weight))[0]
    return (F.silu(mixed) if silu else mixed).T.to(x.dtype), inputs[:, len(x) :]
