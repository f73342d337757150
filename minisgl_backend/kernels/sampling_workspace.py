"""The memory that the launches of the sampling kernels share, and its sizes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.sampling_rule import SPLITS, split_size

BLOCK: Final = 1024
"""Tokens of a split that a program reads at once."""
ROUNDS: Final = 2
"""How many times the splits of a row with filters may count its tokens."""
BINS: Final = 64
SUMS: Final = 3
"""Masses of a split in one round: above its bins, in them, and below."""
BRACKET: Final = 6
"""Numbers that bracket the threshold of a row."""
MAX_CANDIDATES: Final = 2048
"""The most tokens of a row among which its threshold is searched for."""


class SamplingWorkspace:
    """Partial results of the splits, and for rows with filters: the largest weight of each block,
    tokens and masses by bin, the bracket of the threshold, the best of what lies above it, and the
    candidates in it; one a stream.
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((max_batch_size, *shape), dtype=dtype, device=device)

        self.best = empty(SPLITS)
        self.tokens = empty(SPLITS, dtype=torch.int32)
        self.heaviest = empty(SPLITS, -(-split_size(vocab_size) // BLOCK))
        self.counts = empty(ROUNDS, SPLITS, BINS, dtype=torch.int32)
        self.sums = empty(ROUNDS, SPLITS, SUMS)
        self.brackets = empty(BRACKET, dtype=torch.int32)
        self.above = empty(SPLITS)
        self.above_scores = empty(SPLITS)
        self.above_tokens = empty(SPLITS, dtype=torch.int32)
        self.scaled = empty(MAX_CANDIDATES)
        self.candidates = empty(MAX_CANDIDATES, dtype=torch.int32)
