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
    states: LayerStates, num_key_heads: int, num_places: int, most_tokens: int
) -> UnsettledTokens:
    """Room for checks of a layer with these states, whose updates have the matrices' columns for
    keys. What was there before must not be read: it is NaN."""
    num_heads, value_dim, key_dim = states.matrices.shape[1:]
    shape = num_places, most_tokens

    def room(*of_token: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((*shape, *of_token), torch.nan, dtype=dtype, device=states.conv.device)

    return UnsettledTokens(
        room(states.conv.shape[1], dtype=states.conv.dtype),
        room(num_key_heads, key_dim),
        room(num_heads, value_dim),
        room(num_heads, 1),
    )


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
