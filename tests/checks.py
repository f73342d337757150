"""Steps that check guesses (``kernels.checks``), as tests of kernels arrange them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.checks import NO_PLACE, CheckedTokens
from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates, UnsettledTokens
from minisgl_backend.kernels.settle import Settling


@dataclass(frozen=True, slots=True)
class Check:
    """``length`` tokens of the row with this slot, the first of which has this position."""

    length: int
    slot: int = -1
    place: int = NO_PLACE
    position: int = 0

    @property
    def is_padding(self) -> bool:
        return self.slot < 0


CHECKS: Final = (
    Check(1, slot=3, place=1, position=7),
    Check(2),
    Check(8, slot=0, place=4, position=30),
    Check(2, slot=5, place=0, position=1),
    Check(5, slot=2, place=3, position=16),
    Check(1),
)
"""Of four rows among 6, at places among 5; some are padding."""


def arranged(
    checks: Sequence[Check], device: torch.device | None = None
) -> tuple[Tensor, CheckedTokens, Tensor]:
    """Of the tokens of ``checks``, one check after the other: the slots of their rows, int64; what
    kernels read; and their positions, int32."""
    tokens = [(check, index) for check in checks for index in range(check.length)]
    lines = [
        (NO_PLACE, 0, 0) if check.is_padding else (check.place, index, check.length)
        for check, index in tokens
    ]
    slots = torch.tensor([check.slot for check, _ in tokens], device=device)
    positions = [check.position + index for check, index in tokens]
    return (
        slots,
        CheckedTokens(torch.tensor(lines, dtype=torch.int32, device=device)),
        torch.tensor(positions, dtype=torch.int32, device=device),
    )


def settling(checks: Sequence[Check], count: int, device: torch.device | None = None) -> Settling:
    """``count`` tokens of each check count, or all, if it has fewer."""
    return Settling.of(
        [
            (check.slot, check.place, check.position, min(count, check.length))
            for check in checks
            if not check.is_padding
        ],
        lambda array: torch.from_numpy(array).to(device),
    )


def nothing_kept(
    states: LayerStates,
    num_key_heads: int,
    num_places: int,
    most_tokens: int,
    *,
    keys_are_lines: bool = False,
    by_dimension: bool = False,
) -> UnsettledTokens:
    """Room for checks of a layer with these states. Its updates have lines or columns of matrices
    for keys, each dimension of which may decay by itself."""
    num_heads, lines, columns = states.matrices.shape[1:]
    key_dim, value_dim = (lines, columns) if keys_are_lines else (columns, lines)
    of_layers = unsettled_tokens(
        1,
        num_places,
        most_tokens,
        states.conv.shape[1],
        num_key_heads,
        num_heads,
        key_dim,
        value_dim,
        by_dimension=by_dimension,
        dtype=states.conv.dtype,
        device=states.conv.device,
    )
    return of_layers.by_layer()[0]


def unsettled_tokens(
    *sizes: int,
    by_dimension: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> UnsettledTokens:
    """``UnsettledTokens.of_layers``. What was there before must not be read: it is NaN."""
    tokens = UnsettledTokens.of_layers(
        *sizes, by_dimension=by_dimension, dtype=dtype, device=device
    )
    for each in (tokens.inputs, tokens.keys, tokens.values, tokens.decays):
        each.fill_(torch.nan)
    return tokens


def filled(
    unsettled: UnsettledTokens, place: int, count: int, draw: torch.Generator
) -> UnsettledTokens:
    """``count`` tokens at ``place``, which are drawn, of all layers: [num_layers, count, ...]."""
    own = UnsettledTokens(
        unsettled.inputs[:, place, :count],
        unsettled.keys[:, place, :count],
        unsettled.values[:, place, :count],
        unsettled.decays[:, place, :count],
    )
    for of_tokens in (own.inputs, own.keys, own.values):
        of_tokens.copy_(torch.randn(of_tokens.shape, generator=draw))
    own.decays.copy_(-torch.rand(own.decays.shape, generator=draw).cumsum(1))
    return own


def layered(
    states: LayerStates,
) -> tuple[Tensor, Tensor, PendingUpdates, UnsettledTokens]:
    """The states of one layer as if it were all (``settle``)."""
    pending, kept = states.pending, states.unsettled
    assert kept is not None
    return (
        states.conv[:, None],
        states.matrices[:, None],
        PendingUpdates(
            pending.keys[None], pending.values[None], pending.decays[None], pending.begins[None]
        ),
        UnsettledTokens(kept.inputs[None], kept.keys[None], kept.values[None], kept.decays[None]),
    )
