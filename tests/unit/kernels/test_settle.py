"""Tokens of checks that count are added to states, against adding one token after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.layer_states import PendingUpdates, stored
from minisgl_backend.kernels.settle import Settling, settle
from minisgl_backend.plan import WHOLE_EVERY
from tests.checks import filled, unsettled_tokens

LAYERS, ROWS, PLACES, MOST = 3, 7, 5, 8
CHANNELS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 11, 2, 4, 6, 10
CHECKS = [(4, 1, 13, 8), (0, 3, 30, 1), (5, 0, 7, 3), (2, 4, 2 * WHOLE_EVERY, 2)]
"""Row, place, position of the first token, and number of tokens that count."""


def added(state: Tensor, decay: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[num_heads, key_dim, value_dim] after one token more."""
    keys = key.repeat_interleave(HEADS // KEY_HEADS, dim=0)
    return state * decay.exp()[..., None] + keys[..., None] * value[:, None, :]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("keys_are_lines", "by_dimension"), [(True, False), (True, True), (False, False)]
)
def test_settled_states_are_those_after_the_tokens_that_count(
    keys_are_lines: bool, by_dimension: bool, state_dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(1)
    conv = torch.randn(ROWS, LAYERS, CHANNELS, 3, generator=draw)
    matrices = torch.randn(ROWS, LAYERS, HEADS, KEY_DIM, VALUE_DIM, generator=draw)
    sizes = CHANNELS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM
    unsettled = unsettled_tokens(LAYERS, PLACES, MOST, *sizes, by_dimension=by_dimension)
    pending = PendingUpdates.of_layers(LAYERS, ROWS, *sizes[1:])
    states = matrices.to(state_dtype)
    states = states if keys_are_lines else states.mT.contiguous()
    wanted_conv, wanted = conv.clone(), states.clone()
    for row, place, _, count in CHECKS:
        own = filled(unsettled, place, count, draw)
        for layer in range(LAYERS):
            seen = torch.cat([conv[row, layer], own.inputs[layer].T], dim=1)
            wanted_conv[row, layer] = seen[:, -3:]
            state = wanted[row, layer].float()
            state = state if keys_are_lines else state.mT
            since = torch.zeros_like(own.decays[layer, 0])
            for token in range(count):
                decay = own.decays[layer, token]
                key, value = own.keys[layer, token], own.values[layer, token]
                state = added(state, decay - since, key, value)
                since = decay
            wanted[row, layer] = stored(state if keys_are_lines else state.mT, state_dtype)
    settling = Settling.of(CHECKS, torch.from_numpy)
    settle(conv, states, pending, unsettled, settling, keys_are_lines=keys_are_lines)
    assert torch.equal(conv, wanted_conv)
    tolerance = 1e-4 if state_dtype == torch.float32 else 2e-2
    torch.testing.assert_close(states, wanted, rtol=tolerance, atol=tolerance)
    begins = torch.zeros(ROWS, dtype=torch.int32)
    for row, _, start, count in CHECKS:
        begins[row] = (start + count) % WHOLE_EVERY
    assert (pending.begins == begins[None, :, None]).all()


def test_layers_may_have_no_matrices() -> None:
    """Those of gated short convolutions."""
    draw = torch.Generator().manual_seed(2)
    conv = torch.randn(ROWS, LAYERS, CHANNELS, 2, generator=draw)
    unsettled = unsettled_tokens(LAYERS, PLACES, MOST, CHANNELS, 0, 0, 0, 0)
    own = filled(unsettled, 3, 1, draw)
    wanted = conv.clone()
    wanted[5] = torch.cat([conv[5, :, :, 1:], own.inputs.mT], dim=2)
    pending = PendingUpdates.of_layers(LAYERS, ROWS, 0, 0, 0, 0)
    matrices = torch.zeros(ROWS, LAYERS, 0, 0, 0)
    settling = Settling.of([(5, 3, 20, 1)], torch.from_numpy)
    settle(conv, matrices, pending, unsettled, settling, keys_are_lines=True)
    assert torch.equal(conv, wanted)
