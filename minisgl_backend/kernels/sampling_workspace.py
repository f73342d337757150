"""The memory that the launches of the sampling kernels share, and its sizes.

Kernels take each of its tuples as a whole.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from minisgl_backend.kernels.sampling_rule import SPLITS, split_size

BLOCK: Final = 1024
"""Tokens of a split that a program reads at once."""
ROUNDS: Final = 2
"""How many times the splits of a row with filters may count its tokens."""
BINS: Final = 64
SUMS: Final = 3
"""Masses of a split in one round: above its bins, in them, and below them."""
BRACKET: Final = 6
"""Numbers that bracket the threshold of a row."""
MAX_CANDIDATES: Final = 2048
"""The most tokens of a row among which its threshold is looked for."""


class Counted(NamedTuple):
    """For rows with filters: the largest weight of each block, and tokens and masses by bin."""

    heaviest: Tensor
    counts: Tensor
    sums: Tensor


class Collected(NamedTuple):
    """For the same rows: the bracket of the threshold; the mass above it and the best token there,
    for each split; and the candidates inside the bracket."""

    brackets: Tensor
    above: Tensor
    scores: Tensor
    tokens: Tensor
    scaled: Tensor
    candidates: Tensor


class SamplingWorkspace:
    """The best token of each split, in ``scores`` and ``tokens``, and what kernels find out about
    rows with filters. Each stream needs its own."""

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((max_batch_size, *shape), dtype=dtype, device=device)

        self.scores = empty(SPLITS)
        self.tokens = empty(SPLITS, dtype=torch.int32)
        self.counted = Counted(
            heaviest=empty(SPLITS, -(-split_size(vocab_size) // BLOCK)),
            counts=empty(ROUNDS, SPLITS, BINS, dtype=torch.int32),
            sums=empty(ROUNDS, SPLITS, SUMS),
        )
        self.collected = Collected(
            brackets=empty(BRACKET, dtype=torch.int32),
            above=empty(SPLITS),
            scores=empty(SPLITS),
            tokens=empty(SPLITS, dtype=torch.int32),
            scaled=empty(MAX_CANDIDATES),
            candidates=empty(MAX_CANDIDATES, dtype=torch.int32),
        )
