"""Checks of guesses for tests of kernels, and memory for what their tokens keep."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.kernels.checks import CHECK_COLUMNS, NO_PLACE, CheckedTokens
from minisgl_backend.kernels.layer_states import PendingUpdates, UnsettledTokens


def checks_of(
    lengths: list[int], rows: list[int], places: list[int], device: torch.device | None = None
) -> tuple[Tensor, CheckedTokens]:
    """The slots of the tokens, and the checks of ``rows`` at ``places``. A length of 0 is a token
    of padding."""
    slots, lines = [], []
    for length, row, place in zip(lengths, rows, places, strict=True):
        slots += [row] * length if length else [-1]
        lines += [[place, index, length] for index in range(length)]
        lines += [] if length else [[NO_PLACE] + [0] * (CHECK_COLUMNS - 1)]
    return (
        torch.tensor(slots, device=device),
        CheckedTokens(torch.tensor(lines, dtype=torch.int32, device=device)),
    )


def unsettled_tokens(
    num_layers: int,
    num_places: int,
    most_tokens: int,
    num_channels: int,
    num_key_heads: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_decays: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> UnsettledTokens:
    """Of all layers, full of NaN, as what is not written must not be read. Heads have
    ``num_decays``; ``dtype`` is the convolution's."""
    places = num_layers, num_places, most_tokens
    inputs = torch.full((*places, num_channels), torch.nan, dtype=dtype, device=device)
    keys, values, decays = (
        torch.full((*places, heads, size), torch.nan, device=device)
        for heads, size in (
            (num_key_heads, key_dim),
            (num_heads, value_dim),
            (num_heads, num_decays),
        )
    )
    return UnsettledTokens(inputs, keys, values, decays)


def of_layer(unsettled: UnsettledTokens, layer: int) -> UnsettledTokens:
    """The part of a layer."""
    return UnsettledTokens(
        unsettled.inputs[layer],
        unsettled.keys[layer],
        unsettled.values[layer],
        unsettled.decays[layer],
    )


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


def no_updates(
    num_layers: int, num_rows: int, *sizes: int, device: torch.device | None = None
) -> PendingUpdates:
    """Of all layers. ``sizes``: numbers of key heads and heads, key_dim and value_dim."""
    key_heads, heads, key_dim, value_dim = sizes
    none = PendingUpdates.none(num_layers * num_rows, key_heads, heads, key_dim, value_dim, device)

    def of_layers(of_rows: Tensor) -> Tensor:
        return of_rows.view(num_layers, num_rows, *of_rows.shape[1:])

    return PendingUpdates(
        of_layers(none.keys),
        of_layers(none.values),
        of_layers(none.decays),
        of_layers(none.begins),
    )
