"""The recurrent states of a layer, by slot: what all kinds of them have in common.

A state is a matrix S of each head, which decays, and to which each token adds an update of rank 1.
In decode steps of many rows, reading and writing S takes most of the time. So their kernels write
S only if the next position is a multiple of ``WHOLE_EVERY``. The updates of the tokens since then
are *pending*: with d(i) the log of the decay up to and including token i since S' was written, and
k(i) v(i)^T its update, the state after token t is

    S = exp(d(t)) S' + sum over i <= t of exp(d(t) - d(i)) k(i) v(i)^T

The kernels for steps of few rows and for runs of several tokens add those that they find, and leave
none. No kernel leaves any if each dimension of a key decays by itself.

Knows only tensors. Must not know how an update is computed (``gated_delta``, ``mamba``), or whose a
slot is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minisgl_backend.plan import WHOLE_EVERY


@dataclass(frozen=True, slots=True, eq=False)
class PendingUpdates:
    """The updates that a layer's ``matrices`` lack, by row; that of the token at position p has the
    place p % WHOLE_EVERY. All are contiguous.

    float32: ``keys`` [num_rows, num_key_heads, WHOLE_EVERY, key_dim], which consecutive heads
    share; ``values`` [num_rows, num_heads, WHOLE_EVERY, value_dim]; ``decays`` [num_rows,
    num_heads, WHOLE_EVERY]: logs, since the matrix was written. ``begins`` int32 [num_rows,
    num_heads]: the place of the first update that is pending.
    """

    keys: Tensor
    values: Tensor
    decays: Tensor
    begins: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The fields."""
        return self.keys, self.values, self.decays, self.begins

    @classmethod
    def none(
        cls,
        num_rows: int,
        num_key_heads: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        device: torch.device | None = None,
    ) -> PendingUpdates:
        """For rows that have no states yet."""
        keys = torch.zeros(num_rows, num_key_heads, WHOLE_EVERY, key_dim, device=device)
        values = torch.zeros(num_rows, num_heads, WHOLE_EVERY, value_dim, device=device)
        decays = torch.zeros(num_rows, num_heads, WHOLE_EVERY, device=device)
        begins = torch.zeros(num_rows, num_heads, dtype=torch.int32, device=device)
        return cls(keys, values, decays, begins)

    @classmethod
    def of_layers(
        cls, num_layers: int, num_rows: int, *sizes: int, device: torch.device | None = None
    ) -> PendingUpdates:
        """The same for all layers: the fields begin with a dimension of these. ``sizes`` are those
        of ``none``."""
        key_heads, heads, key_dim, value_dim = sizes
        none = cls.none(num_layers * num_rows, key_heads, heads, key_dim, value_dim, device)
        return cls(*(of.view(num_layers, num_rows, *of.shape[1:]) for of in none.tensors))

    def by_layer(self) -> list[PendingUpdates]:
        """What ``of_layers`` has made for each layer."""
        return [PendingUpdates(*of_layer) for of_layer in zip(*self.tensors, strict=True)]

    def clear(self, row: int, position: int) -> None:
        """Nothing is pending in a row whose next token has this position."""
        self.begins[row] = position % WHOLE_EVERY

    @staticmethod
    def num_bytes(num_key_heads: int, num_heads: int, key_dim: int, value_dim: int) -> int:
        """Of one row."""
        per_place = num_key_heads * key_dim + num_heads * (value_dim + 1)
        return 4 * WHOLE_EVERY * per_place + 4 * num_heads


@dataclass(frozen=True, slots=True, eq=False)
class UnsettledTokens:
    """What the tokens of checks would add to a layer's states (``checks``), by the place of a check
    and the token's index in it. All are contiguous.

    ``inputs`` [num_places, most_tokens, num_channels] of the convolution, whose type they have.
    float32: ``keys`` [num_places, most_tokens, num_key_heads, key_dim], which consecutive heads
    share; ``values`` [num_places, most_tokens, num_heads, value_dim]; ``decays`` [num_places,
    most_tokens, num_heads, 1]: logs, from the state before the check up to and including the token;
    or [..., key_dim], if each dimension of a key decays by itself.
    """

    inputs: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The fields."""
        return self.inputs, self.keys, self.values, self.decays

    @classmethod
    def of_layers(
        cls,
        num_layers: int,
        num_places: int,
        most_tokens: int,
        num_channels: int,
        *sizes: int,
        by_dimension: bool,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> UnsettledTokens:
        """Zeros, for all layers: the fields begin with a dimension of these. ``sizes``: numbers of
        key heads and heads, key_dim and value_dim; ``by_dimension``: each dimension of a key decays
        by itself; ``dtype`` is the convolution's."""
        key_heads, heads, key_dim, value_dim = sizes
        places = num_layers, num_places, most_tokens
        inputs = torch.zeros(*places, num_channels, dtype=dtype, device=device)
        keys, values, decays = (
            torch.zeros(*places, *of_token, device=device)
            for of_token in (
                (key_heads, key_dim),
                (heads, value_dim),
                (heads, key_dim if by_dimension else 1),
            )
        )
        return cls(inputs, keys, values, decays)

    def by_layer(self) -> list[UnsettledTokens]:
        """What ``of_layers`` has made for each layer."""
        return [UnsettledTokens(*of_layer) for of_layer in zip(*self.tensors, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The recurrent states of one layer, by slot.

    ``conv`` [num_slots, num_channels, width - 1]: a convolution's last inputs. ``matrices``
    [num_slots, num_heads, rows, columns], float32, bfloat16 or float16: a matrix of each head. What
    a slot has is contiguous, but other layers may have memory between slots. ``pending`` is of
    those slots that rows have, which come first. ``unsettled`` must be given if steps check
    guesses.
    """

    conv: Tensor
    matrices: Tensor
    pending: PendingUpdates
    unsettled: UnsettledTokens | None = field(default=None, kw_only=True)


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
