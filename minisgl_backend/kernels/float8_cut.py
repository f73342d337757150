"""How the GEMMs of ``cuda/float8_linear.cu`` are cut into tiles, and which weights they can take.

Pure arithmetic, without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SHARED_BYTES: Final = 227 * 1024
_MOST_STAGES: Final = 8
_BLOCK: Final = 128
"""in_features of a stage."""


@dataclass(frozen=True, slots=True)
class Float8Cut:
    """A tile of ``features`` of the weight by ``tokens``.

    ``shared`` is what the two thread blocks of a cluster load for each other: 1 tokens, 2 rows of
    the weight, 0 nothing.
    """

    features: int
    tokens: int
    shared: int

    @property
    def cluster(self) -> int:
        return 2 if self.shared else 1

    @property
    def unit(self) -> int:
        """Rows of the weight that a cluster has."""
        return 2 * self.features if self.shared == 1 else self.features

    @property
    def stages(self) -> int:
        """Of the ring; with scales of 64 rows in 32 bytes, and two barriers."""
        of_stage = (self.features + self.tokens) * _BLOCK + self.features // 64 * 32 + 16
        return min(_SHARED_BYTES // of_stage, _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        return _SHARED_BYTES

    def columns(self, num_rows: int) -> int:
        """Thread blocks that have the same steps, each of other rows of the weight or tokens."""
        tiles = -(-num_rows // self.tokens)
        if self.shared == 1:
            return 2 * tiles
        return tiles + tiles % self.cluster

    def blocks(self, num_rows: int, height: int, in_features: int, processors: int) -> int:
        """Thread blocks of a column: one takes at least a step."""
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
"""Of a weight. Smaller ones have too few steps to share out."""

_CHOSEN: Final = {
    96: Float8Cut(128, 96, shared=1),
    128: Float8Cut(128, 128, shared=1),
}
"""By the largest number of rows. Tuned on an H200 with the weights of Qwen3-14B; for more rows the
library is as fast."""


def cuts_of(height: int, in_features: int) -> dict[int, Float8Cut]:
    """How to multiply by a weight [height, in_features], keyed by the largest number of rows that
    each cut is for; none if the library is taken."""
    if height * in_features < _LEAST_ELEMENTS:
        return {}
    return {most: cut for most, cut in _CHOSEN.items() if why_not(height, in_features, cut) is None}
