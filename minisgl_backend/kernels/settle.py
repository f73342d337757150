"""Adds the tokens of checks that count to recurrent states, of all layers at once.

With S' the state before a step that checks guesses (``checks``), d(i) the log of the decay from
there up to and including token i of a row, and k(i) v(i)^T what token i adds, the state after n
tokens is

    S = exp(d(n)) S' + sum over i <= n of exp(d(n) - d(i)) k(i) v(i)^T

Knows only tensors, slots of states and places of what is kept. Must not know how the update of a
token is computed (``gated_delta``, ``mamba``), or which guesses are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.layer_states import PendingUpdates, UnsettledTokens, stored
from minisgl_backend.plan import WHOLE_EVERY
from minisgl_backend.request import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Settling:
    """The checks to settle, int32 [num_checks] each, on the device: the slots of their rows, their
    places, the positions of their first tokens, and the numbers of tokens that count, which are 0
    for padding."""

    rows: Tensor
    places: Tensor
    starts: Tensor
    counts: Tensor

    @classmethod
    def of(
        cls, checks: list[tuple[int, int, int, int]], upload: Callable[[IntArray], Tensor]
    ) -> Settling:
        """Each of ``checks`` is the numbers above. ``upload`` copies an array to the device."""
        return cls(*upload(np.array(checks, np.int32).T.copy()))


def settle(
    conv: Tensor,
    matrices: Tensor,
    pending: PendingUpdates,
    unsettled: UnsettledTokens,
    checks: Settling,
    *,
    keys_are_lines: bool,
) -> None:
    """Add the tokens that count to the states of their rows. Then nothing is pending in these.

    ``conv`` [num_slots, num_layers, num_channels, width - 1] and ``matrices`` [num_slots,
    num_layers, num_heads, rows, columns] are those of all layers, updated in place; so are the
    fields of ``pending`` and ``unsettled``, which here begin with a dimension of layers.
    ``keys_are_lines``: rows of a matrix belong to dimensions of keys, not of values.
    """
    if use_triton(conv):
        from minisgl_backend.kernels.triton_kernels.settle_kernels import launch_settle

        launch_settle(
            conv,
            matrices,
            pending.tensors,
            unsettled.tensors,
            (checks.rows, checks.places, checks.starts, checks.counts),
            keys_are_lines=keys_are_lines,
        )
    else:
        settle_reference(conv, matrices, pending, unsettled, checks, keys_are_lines=keys_are_lines)


def settle_reference(
    conv: Tensor,
    matrices: Tensor,
    pending: PendingUpdates,
    unsettled: UnsettledTokens,
    checks: Settling,
    *,
    keys_are_lines: bool,
) -> None:
    """The twin of the kernels of ``settle``, where no updates are pending."""
    num_heads = matrices.shape[2]
    of_checks = (checks.rows, checks.places, checks.starts, checks.counts)
    for row, place, start, count in zip(*(each.tolist() for each in of_checks), strict=True):
        if not count:
            continue
        pending.begins[:, row] = (start + count) % WHOLE_EVERY
        inputs = unsettled.inputs[:, place, :count].transpose(1, 2)  # [layers, channels, count]
        conv[row] = torch.cat([conv[row], inputs], dim=-1)[..., count:]
        if not num_heads:
            continue
        decays = unsettled.decays[:, place, :count]  # [layers, count, heads, 1 or key_dim]
        left = (decays[:, -1:] - decays).exp()
        keys = unsettled.keys[:, place, :count]
        keys = keys.repeat_interleave(num_heads // keys.shape[2], dim=2) * left
        added = torch.einsum("lnhk,lnhv->lhkv", keys, unsettled.values[:, place, :count])
        state = matrices[row] if keys_are_lines else matrices[row].mT  # [layers, heads, K, V]
        state = state.float() * decays[:, -1].exp()[..., None] + added
        matrices[row] = stored(state if keys_are_lines else state.mT, matrices.dtype)
