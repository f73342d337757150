"""The recurrent states of a layer, by slot: what all kinds of them have in common.

Knows only tensors. Must not know how a state is computed (``gated_delta``, ``mamba``), or whose a
slot is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The recurrent states of one layer, by slot.

    ``conv`` [num_slots, num_channels, width - 1]: a convolution's last inputs. ``matrices``
    [num_slots, num_heads, rows, columns], float32, bfloat16 or float16: a matrix of each head. What
    a slot has is contiguous, but other layers may have memory between slots.
    """

    conv: Tensor
    matrices: Tensor


def stored(state: Tensor, dtype: torch.dtype) -> Tensor:
    """``state`` as slots of this type hold it: float16 is clamped to 65,504, and NaN stays NaN."""
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        state = state.clamp(-most, most)
    return state.to(dtype)


def rows_of(slots: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of the tokens that have slots, and their slots; ``slots`` int64 [num_rows] is -1
    for a token that has none."""
    found = (slots >= 0).nonzero().squeeze(1)
    return found, slots[found]
