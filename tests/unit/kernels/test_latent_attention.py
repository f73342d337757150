"""How rows are split in decode attention over latents."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.latent_attention import (
    MAX_SPLITS,
    LatentWorkspace,
    heads_of_tile,
    num_splits,
)

CPU = torch.device("cpu")


def test_tiles_waste_no_heads() -> None:
    """64 heads only if that leaves none over."""
    assert [heads_of_tile(heads) for heads in (1, 16, 20, 64, 96, 128)] == [16, 16, 16, 64, 16, 64]


@pytest.mark.parametrize(
    ("batch_size", "num_heads", "expected"),
    [
        (1, 16, MAX_SPLITS),
        (1, 20, MAX_SPLITS),
        (8, 20, 8),
        (8, 128, 8),
        (33, 16, 4),
        (64, 20, 1),
    ],
)
def test_splits_fill_the_processors(batch_size: int, num_heads: int, expected: int) -> None:
    assert num_splits(batch_size, num_heads, processors=132) == expected


@pytest.mark.parametrize("num_heads", [3, 16, 20, 128, 1024])
def test_every_batch_has_room_for_its_splits(num_heads: int) -> None:
    workspace = LatentWorkspace(40, num_heads, 8, CPU)
    places = len(workspace.outputs)
    assert workspace.outputs.shape[:2] == workspace.lses.shape
    for batch_size in range(1, 41):
        splits = num_splits(batch_size, num_heads, num_processors(CPU))
        assert splits == 1 or batch_size * splits <= places
