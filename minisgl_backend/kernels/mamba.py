"""Mamba 2: a state that decays, to which each token adds, and which each token reads.

A head keeps S [head_dim, state_size]. A token with value x [head_dim], step dt > 0, and vectors
B and C [state_size], which all heads of a group share, updates and reads it by (arXiv 2405.21060)

    S = exp(a dt) S + dt x B^T;  y = S C + d x

with a < 0 and d learned for each head. Then y is multiplied by SiLU of a gate z, and normalized
over the heads of a group. Before all this x, B and C go through a causal convolution
(``causal_conv``).

Several tokens of one sequence are computed in blocks. Within a block what a token reads of the
others is a matrix of products C B^T, weighted by decays and steps, so everything is GEMMs. Only the
state goes from one block to the next.

The decode steps of many rows leave updates pending (``layer_states``). There S is transposed: the
key of an update is B, and its value dt x. Steps that check guesses keep both (``checks``).

Knows only tensors, slots of states and positions. States and sums are computed in float32, whatever
the dtype of the inputs; the kernels' GEMMs over blocks take operands of that dtype. In slots S may
have 16 bits: then it is rounded whenever it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.causal_conv import (
    causal_conv_checks_reference,
    causal_conv_runs,
    causal_conv_runs_reference,
    causal_conv_step_reference,
)
from minisgl_backend.kernels.checks import CheckedTokens
from minisgl_backend.kernels.chunk_runs import BLOCK, Runs
from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.layer_states import LayerStates, rows_of, stored

_MANY_BYTES: Final = 16 * 2**20
"""Of the states of a step's rows in a layer. From then on, not to write them saves more time than
another launch takes."""


@dataclass(frozen=True, slots=True, eq=False)
class MambaWeights:
    """The weights of a layer other than its projections.

    ``conv`` [num_channels, width] and ``conv_bias`` [num_channels] are the convolution's; the last
    column is for the token itself. ``log_rates`` (of decay), ``biases`` (of steps) and ``skips``
    (d above) are [num_heads]. ``norm`` [num_heads * head_dim] is the weight of the output's norm,
    and ``eps`` that norm's; None: the output is only gated. Steps are clamped to ``time_steps``.
    """

    num_groups: int
    conv: Tensor
    conv_bias: Tensor | None
    log_rates: Tensor
    biases: Tensor
    skips: Tensor
    norm: Tensor | None
    eps: float
    time_steps: tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class MambaInputs:
    """The projections of tokens. A token's numbers are contiguous; tokens may be strided.

    ``z`` [num_tokens, num_heads * head_dim] is the output's gate. ``channels`` [num_tokens,
    num_channels], before the convolution: the values x of all heads, then B and C of all groups.
    ``steps`` [num_tokens, num_heads], before their bias and softplus.
    """

    z: Tensor
    channels: Tensor
    steps: Tensor


def mamba_step(
    out: Tensor,
    inputs: MambaInputs,
    weights: MambaWeights,
    states: LayerStates,
    slots: Tensor,
    positions: Tensor,
    *,
    leaves: bool | None = None,
    pdl: bool = False,
) -> None:
    """The layer between its projections for the first tokens, one per row, whose ``states`` are
    updated in place.

    ``out`` [num_tokens, num_heads * head_dim] gets the result. ``slots`` int64 [num_rows] is -1 for
    a token that is left to others; ``positions``, of at least these tokens, are integers. With
    ``pdl`` the kernel before this one must not write ``states``, ``slots`` or ``positions``.
    ``leaves``: whether updates may be left pending; None: if that is faster.
    """
    if not use_triton(out):
        mamba_step_reference(out, inputs, weights, states, slots)
        return
    from minisgl_backend.kernels.triton_kernels.mamba_step import launch_mamba_step

    if leaves is None:
        leaves = len(slots) * states.matrices[0].nbytes >= _MANY_BYTES
    launch_mamba_step(
        out,
        (inputs.z, inputs.channels, inputs.steps),
        (weights.conv, weights.conv_bias),
        (weights.log_rates, weights.biases, weights.skips, weights.norm),
        (states.conv, states.matrices),
        states.pending.tensors,
        slots,
        positions,
        num_groups=weights.num_groups,
        eps=weights.eps,
        time_steps=weights.time_steps,
        leaves=leaves,
        pdl=pdl,
    )


def mamba_runs(
    out: Tensor, inputs: MambaInputs, weights: MambaWeights, states: LayerStates, runs: Runs
) -> None:
    """The same for the tokens of ``runs``. All tokens after them are padding, and get zeros."""
    if not use_triton(out):
        mamba_runs_reference(out, inputs, weights, states, runs)
        return
    from minisgl_backend.kernels.triton_kernels.mamba_blocks import launch_mamba_blocks

    channels = inputs.channels
    convolved = torch.empty(channels.shape, dtype=channels.dtype, device=channels.device)
    causal_conv_runs(convolved, channels, states.conv, runs, weights.conv, weights.conv_bias)
    launch_mamba_blocks(
        out,
        (inputs.z, convolved, inputs.steps),
        (weights.log_rates, weights.biases, weights.skips, weights.norm),
        states.matrices,
        states.pending.tensors,
        runs.blocks,
        runs.lines,
        num_groups=weights.num_groups,
        eps=weights.eps,
        time_steps=weights.time_steps,
    )


def mamba_checks(
    out: Tensor,
    inputs: MambaInputs,
    weights: MambaWeights,
    states: LayerStates,
    slots: Tensor,
    checks: CheckedTokens,
    positions: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """The same for the tokens of ``checks``, the first ones, which leave states as they are. What
    they would add is kept in ``states.unsettled``. ``slots`` int64 [num_tokens] are those of their
    rows. Other tokens among ``slots`` are padding, and get zeros. With ``pdl`` the kernel before
    this one must not write ``checks``, either."""
    if not use_triton(out):
        mamba_checks_reference(out, inputs, weights, states, slots, checks)
        return
    from minisgl_backend.kernels.triton_kernels.mamba_checks import launch_mamba_checks

    unsettled = states.unsettled
    assert unsettled is not None
    launch_mamba_checks(
        out,
        (inputs.z, inputs.channels, inputs.steps),
        (weights.conv, weights.conv_bias),
        (weights.log_rates, weights.biases, weights.skips, weights.norm),
        (states.conv, states.matrices),
        states.pending.tensors,
        unsettled.tensors,
        slots,
        checks.lines,
        positions,
        num_groups=weights.num_groups,
        eps=weights.eps,
        time_steps=weights.time_steps,
        pdl=pdl,
    )


def mamba_step_reference(
    out: Tensor, inputs: MambaInputs, weights: MambaWeights, states: LayerStates, slots: Tensor
) -> None:
    """The twin of ``mamba_step``."""
    convolved = torch.empty_like(inputs.channels)
    causal_conv_step_reference(
        convolved, inputs.channels, states.conv, slots, weights.conv, weights.conv_bias
    )
    of_rows, slots = rows_of(slots)
    x, writers, readers = _parts(convolved[of_rows], weights, states.matrices)
    steps, decays = _rates(inputs.steps[of_rows], weights)
    found = scan_step(x, writers, readers, steps, decays, states.matrices, slots)
    found += x * weights.skips.float()[:, None]
    out[of_rows] = _gated(found, inputs.z[of_rows], weights).to(out.dtype)


def mamba_runs_reference(
    out: Tensor, inputs: MambaInputs, weights: MambaWeights, states: LayerStates, runs: Runs
) -> None:
    """The twin of ``mamba_runs``."""
    convolved, matrices = torch.empty_like(inputs.channels), states.matrices
    causal_conv_runs_reference(
        convolved, inputs.channels, states.conv, runs, weights.conv, weights.conv_bias
    )
    each = *_parts(convolved, weights, matrices), *_rates(inputs.steps, weights)
    out[int(runs.blocks[-1, 1]) :] = 0
    for run in runs.listed():
        state = torch.zeros_like(matrices[0]) if run.is_fresh else matrices[run.slot]
        state = state.float()
        for begin, end, slots in run.pieces():
            x, writers, readers, steps, decays = (of_all[begin:end] for of_all in each)
            found, state = scan(x, writers, readers, steps, decays, state)
            found += x * weights.skips.float()[:, None]
            out[begin:end] = _gated(found, inputs.z[begin:end], weights)
            for slot in slots:
                matrices[slot] = stored(state, matrices.dtype)
        states.pending.clear(run.slot, run.end_position)


def mamba_checks_reference(
    out: Tensor,
    inputs: MambaInputs,
    weights: MambaWeights,
    states: LayerStates,
    slots: Tensor,
    checks: CheckedTokens,
) -> None:
    """The twin of ``mamba_checks``, where no updates are pending."""
    unsettled, channels = states.unsettled, inputs.channels
    assert unsettled is not None
    convolved = torch.empty_like(channels)
    causal_conv_checks_reference(
        convolved,
        channels,
        states.conv,
        unsettled.inputs,
        slots,
        checks,
        weights.conv,
        weights.conv_bias,
    )
    out[: len(slots)] = 0
    for begin, length, place in checks.listed():
        own = slice(begin, begin + length)
        x, writers, readers = _parts(convolved[own], weights, states.matrices)
        steps, decays = _rates(inputs.steps[own], weights)
        # a copy of the row's state, in a slot of its own
        state, slot = states.matrices[slots[begin : begin + 1]].float(), slots.new_zeros(1)
        found = torch.empty_like(x)
        for i in range(length):
            one = slice(i, i + 1)
            found[one] = scan_step(
                x[one], writers[one], readers[one], steps[one], decays[one], state, slot
            )
        found += x * weights.skips.float()[:, None]
        out[own] = _gated(found, inputs.z[own], weights).to(out.dtype)
        unsettled.keys[place, :length] = writers
        unsettled.values[place, :length] = x * steps[..., None]
        unsettled.decays[place, :length] = decays.cumsum(0)[..., None]


def _parts(
    convolved: Tensor, weights: MambaWeights, matrices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [num_tokens, num_heads, head_dim], B and C [num_tokens, num_groups, state_size], in
    float32."""
    num_heads, head_dim, state_size = matrices.shape[1:]
    inner, of_groups = num_heads * head_dim, weights.num_groups * state_size
    x, writers, readers = convolved.float().tensor_split([inner, inner + of_groups], dim=1)
    groups = len(x), weights.num_groups, state_size
    return x.reshape(len(x), num_heads, head_dim), writers.reshape(groups), readers.reshape(groups)


def _rates(steps: Tensor, weights: MambaWeights) -> tuple[Tensor, Tensor]:
    """The steps, and the logs of the decays, float32 [num_tokens, num_heads]."""
    wide = F.softplus(steps.float() + weights.biases.float()).clamp(*weights.time_steps)
    return wide, -weights.log_rates.float().exp() * wide


def _gated(found: Tensor, z: Tensor, weights: MambaWeights) -> Tensor:
    """What the heads read, [num_tokens, num_heads, head_dim], gated and, if there is a norm,
    normalized over the heads of each group: float32 [num_tokens, num_heads * head_dim]."""
    opened = found.flatten(1) * F.silu(z.float())
    if weights.norm is None:
        return opened
    opened = opened.view(len(z), weights.num_groups, opened.shape[1] // weights.num_groups)
    wide = F.rms_norm(opened, opened.shape[-1:], None, weights.eps)
    return wide.flatten(1) * weights.norm


def scan(
    x: Tensor, writers: Tensor, readers: Tensor, steps: Tensor, decays: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What one sequence's tokens read of the state, without d x, and the state after them.

    ``x`` [num_tokens, num_heads, head_dim]; ``writers`` and ``readers``, B and C, [num_tokens,
    num_groups, state_size]; ``steps`` and ``decays``, which are logs, [num_tokens, num_heads];
    ``state`` [num_heads, head_dim, state_size]. All are float32. Returns the shapes of ``x`` and
    ``state``.
    """
    num_tokens, num_heads, head_dim = x.shape
    num_groups = writers.shape[1]
    sharing = num_heads // num_groups
    padding = -num_tokens % BLOCK

    def blocks(of_tokens: Tensor) -> Tensor:
        """[num_tokens, n, ...] -> [num_blocks, n, BLOCK, ...]"""
        padded = F.pad(of_tokens, (0, 0) * (of_tokens.dim() - 1) + (0, padding))
        return padded.view(-1, BLOCK, *of_tokens.shape[1:]).transpose(1, 2)

    values, since = blocks(x * steps[..., None]), blocks(decays).cumsum(-1)
    writers, readers = blocks(writers), blocks(readers)  # [num_blocks, num_groups, BLOCK, ...]
    between = since[..., :, None] - since[..., None, :]  # from the column's token to the row's
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=x.device).tril()
    between = between.masked_fill(~causal, -torch.inf).exp()
    products = (readers @ writers.mT).repeat_interleave(sharing, dim=1)
    found = (products * between) @ values  # [num_blocks, num_heads, BLOCK, head_dim]
    # what each block adds to the state, and how much it keeps of it
    left = values * (since[..., -1:] - since).exp()[..., None]
    left = left.view(-1, num_groups, sharing, BLOCK, head_dim).transpose(2, 3).flatten(3)
    added = left.mT @ writers  # [num_blocks, num_groups, sharing * head_dim, state_size]
    kept = since[..., -1].exp()[..., None, None]  # [num_blocks, num_heads, 1, 1]
    before = torch.empty_like(added)
    for block, of_block in enumerate(added):
        before[block] = state.view_as(of_block)
        state = state * kept[block] + of_block.view_as(state)
    read = readers @ before.mT  # [num_blocks, num_groups, BLOCK, sharing * head_dim]
    read = read.view(-1, num_groups, BLOCK, sharing, head_dim).transpose(2, 3).flatten(1, 2)
    found += read * since.exp()[..., None]
    return found.transpose(1, 2).flatten(0, 1)[:num_tokens], state


def scan_step(
    x: Tensor,
    writers: Tensor,
    readers: Tensor,
    steps: Tensor,
    decays: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """The same for one token each of several rows, whose ``states`` are updated in place.

    Arguments are as in ``scan``, with rows in place of tokens; ``states`` are
    ``LayerStates.matrices``; ``slots`` int64 [num_rows].
    """
    sharing = x.shape[1] // writers.shape[1]
    # [num_rows, num_heads, state_size]
    writers, readers = (each.repeat_interleave(sharing, dim=1) for each in (writers, readers))
    state = states[slots].float() * decays.exp()[..., None, None]
    state += (x * steps[..., None])[..., None] * writers[..., None, :]
    states[slots] = stored(state, states.dtype)
    found: Tensor = state @ readers[..., None]  # [num_rows, num_heads, head_dim, 1]
    return found.squeeze(-1)
