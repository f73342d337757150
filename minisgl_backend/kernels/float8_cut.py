"""How the GEMMs of ``cuda/float8_linear.cu`` are cut into tiles, and which weights they can take.

Pure arithmetic, without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SHARED_BYTES: Final = 227 * 1024
_MOST_STAGES: Final = 8
_BLOCK: Final = 128
"""in_features per stage."""


@dataclass(frozen=True, slots=True)
class Float8Cut:
    """A tile of ``features`` of the weight by ``tokens``.

    ``shared`` says what the two thread blocks of a cluster load for each other: 1 for tokens, 2 for
    rows of the weight, 0 for nothing.
    """

    features: int
    tokens: int
    shared: int

    @property
    def cluster(self) -> int:
        return 2 if self.shared else 1

    @property
    def unit(self) -> int:
        """Rows of the weight per cluster."""
        return 2 * self.features if self.shared == 1 else self.features

    @property
    def stages(self) -> int:
        """Stages of the ring; each also has 32 bytes of scales for 64 rows, and two barriers."""
        of_stage = (self.features + self.tokens) * _BLOCK + self.features // 64 * 32 + 16
        return min(_SHARED_BYTES // of_stage, _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        return _SHARED_BYTES

    def columns(self, num_rows: int) -> int:
        """The number of thread blocks that have the same steps, for different tokens or rows of the
        weight."""
        tiles = -(-num_rows // self.tokens)
        if self.shared == 1:
            return 2 * tiles
        return tiles + tiles % self.cluster

    def blocks(self, num_rows: int, height: int, in_features: int, processors: int) -> int:
        """Thread blocks per column; each takes at least one step."""
        steps = height // self.unit * (in_features // _BLOCK)
        return min(processors // self.columns(num_rows), steps)


def why_not(height: int, in_features: int, cut: Float8Cut) -> str | None:
    """Why a GEMM cannot take a weight of these sizes; None if it can."""
    if height % cut.unit:
        return f"needs a multiple of {cut.unit} features, not {height}"
    if in_features % _BLOCK:
        return f"needs a multiple of {_BLOCK} in_features, not {in_features}"
    return None


_LEAST_ELEMENTS: Final = 8 * 2**20
"""The fewest elements of a weight. Smaller weights have too few steps to share."""

_CHOSEN: Final = {
    96: Float8Cut(128, 96, shared=1),
    128: Float8Cut(128, 128, shared=1),
}
"""Keyed by the largest number of rows. Tuned on an H200 with the weights of Qwen3-14B; for more
rows the library is as fast."""


def cuts_of(height: int, in_features: int) -> dict[int, Float8Cut]:
    """How to multiply by a weight [height, in_features], keyed by the largest number of rows that
    each cut is for; empty if the library does it."""
    if height * in_features < _LEAST_ELEMENTS:
        return {}
    return {most: cut for most, cut in _CHOSEN.items() if why_not(height, in_features, cut) is None}
