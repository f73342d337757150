"""Tokens of checks that count are added to the states of all layers, against the twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.layer_states import PendingUpdates
from minisgl_backend.kernels.settle import Settling, settle, settle_reference
from minisgl_backend.plan import WHOLE_EVERY
from tests.checks import filled, unsettled_tokens
from tests.gpu.compare import TOLERANCE, relative_error

LAYERS, SLOTS, ROWS, CHANNELS = 3, 7, 6, 300
CHECKS = [(4, 1, 13, 8), (0, 3, 30, 1), (5, 0, 2 * WHOLE_EVERY, 3), (2, 4, WHOLE_EVERY + 6, 2)]
"""Row, place, position of the first token, and number of tokens that count."""
BEGINS = {4: 1, 2: 5}
"""The places of the first updates that are pending in rows."""
TINY = (2, 4, 24, 40)
"""Key heads, heads, dimensions of a key and of a value."""
SHAPES = [TINY] if is_interpreted() else [TINY, (16, 32, 128, 128), (2, 16, 128, 64)]


def with_updates(
    matrices: Tensor, pending: PendingUpdates, *, keys_are_lines: bool, draw: torch.Generator
) -> Tensor:
    """``matrices`` with the updates that ``pending`` gets here."""
    whole, (num_heads, num_key_heads) = matrices.clone(), (matrices.shape[2], pending.keys.shape[2])
    for of_pending in (pending.keys, pending.values):
        of_pending.copy_(torch.randn(of_pending.shape, generator=draw))
    pending.decays.copy_(-torch.rand(pending.decays.shape, generator=draw).cumsum(-1))
    for row, _, start, _ in CHECKS:
        end = start % WHOLE_EVERY
        begin = BEGINS.get(row, end)
        pending.begins[:, row] = begin
        if begin == end:
            continue
        decays = pending.decays[:, row, :, :end, None]  # [layers, heads, end, 1]
        left = (decays[:, :, -1:] - decays[:, :, begin:]).exp()
        keys = pending.keys[:, row, :, begin:end].repeat_interleave(
            num_heads // num_key_heads, dim=1
        )
        added = (keys * left).mT @ pending.values[:, row, :, begin:end]
        state = whole[row] * decays[:, :, -1:].exp()
        whole[row] = state + (added if keys_are_lines else added.mT)
    return whole


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["delta", "kimi", "mamba"])
def test_settle(
    device: torch.device,
    dtype: torch.dtype,
    kind: str,
    shape: tuple[int, ...],
    state_dtype: torch.dtype,
) -> None:
    """Updates are pending in some rows, unless each dimension of a key decays by itself."""
    draw = torch.Generator().manual_seed(1)
    if kind == "kimi":
        shape = (shape[1], *shape[1:])
    _, heads, key_dim, value_dim = shape
    keys_are_lines = kind != "mamba"
    lines, columns = (key_dim, value_dim) if keys_are_lines else (value_dim, key_dim)
    conv = torch.randn(SLOTS, LAYERS, CHANNELS, 3, generator=draw).to(device, dtype)
    matrices = torch.randn(SLOTS, LAYERS, heads, lines, columns, generator=draw)
    matrices = matrices.to(device, state_dtype)
    unsettled = unsettled_tokens(
        LAYERS,
        5,
        8,
        CHANNELS,
        *shape,
        by_dimension=kind == "kimi",
        dtype=dtype,
        device=device,
    )
    for _, place, _, count in CHECKS:
        filled(unsettled, place, count, draw)
    if kind == "kimi":
        pending, whole = (
            PendingUpdates.of_layers(LAYERS, ROWS, 0, 0, 0, 0, device=device),
            matrices.clone(),
        )
    else:
        pending = PendingUpdates.of_layers(LAYERS, ROWS, *shape, device=device)
        whole = with_updates(
            matrices.float(), pending, keys_are_lines=keys_are_lines, draw=draw
        ).to(state_dtype)
    settling = Settling.of(CHECKS, lambda array: torch.from_numpy(array).to(device))
    begun, wanted_conv = matrices.clone(), conv.clone()
    settled = replace(pending, begins=pending.begins.clone())
    settle_reference(
        wanted_conv, whole, settled, unsettled, settling, keys_are_lines=keys_are_lines
    )
    settle(conv, matrices, pending, unsettled, settling, keys_are_lines=keys_are_lines)
    assert torch.equal(conv, wanted_conv)
    for row, _, start, count in CHECKS:
        error = relative_error(matrices[row], whole[row])
        assert error < 2 * TOLERANCE[state_dtype]
        assert (pending.begins[:, row] == (start + count) % WHOLE_EVERY).all()
    others = [slot for slot in range(SLOTS) if slot not in [row for row, *_ in CHECKS]]
    assert torch.equal(matrices[others], begun[others])
