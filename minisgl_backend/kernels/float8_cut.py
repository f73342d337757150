"""How the GEMMs of ``cuda/float8_linear.cu`` are cut into tiles, and which weights they can take.

Pure arithmetic, without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from minisgl_backend.kernels.shared_memory import OF_HOPPER, most_bytes

_SHARED_BYTES: Final = most_bytes(OF_HOPPER)
_MOST_STAGES: Final = 8
_BLOCK: Final = 128
"""in_features per stage."""

FEATURES: Final = 128
"""Rows of the weight per tile."""


@dataclass(frozen=True, slots=True)
class Float8Cut:
    """A tile of 128 rows of the weight by ``tokens``. If ``shared``, two thread blocks have the
    same rows of the weight but different tokens, and each loads half of these rows for both."""

    tokens: int
    shared: bool = False

    @property
    def cluster(self) -> int:
        return 2 if self.shared else 1

    @property
    def loaded_rows(self) -> int:
        """Rows of the weight that a thread block loads at a time."""
        return FEATURES // self.cluster

    @property
    def stages(self) -> int:
        """Stages of the ring, each with 32 bytes of scales for 64 rows, and two barriers. A factor
        of each token lies beside the ring."""
        of_stage = (FEATURES + self.tokens) * _BLOCK + FEATURES // 64 * 32 + 16
        return min((_SHARED_BYTES - self.tokens * 4) // of_stage, _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        return _SHARED_BYTES

    def columns(self, num_rows: int) -> int:
        """The number of thread blocks that have the same steps, for different tokens."""
        return self.cluster * -(-num_rows // (self.cluster * self.tokens))

    def blocks(self, num_rows: int, height: int, in_features: int, processors: int) -> int:
        """Thread blocks per column; each takes at least one step."""
        steps = height // FEATURES * (in_features // _BLOCK)
        return min(processors // self.columns(num_rows), steps)


def why_not(height: int, in_features: int) -> str | None:
    """Why no cut can take a weight of these sizes; None if all can."""
    if height % FEATURES:
        return f"needs a multiple of {FEATURES} features, not {height}"
    if in_features % _BLOCK:
        return f"needs a multiple of {_BLOCK} in_features, not {in_features}"
    return None


_LEAST_ELEMENTS: Final = 8 * 2**20
"""The fewest elements of a weight. Smaller weights have too few steps to share."""

_LARGE: Final = 48 * 2**20


@dataclass(frozen=True, slots=True)
class _Choice:
    """Cuts for weights of fewer than ``_LARGE`` elements and for others, each with the most
    features per in_feature of a weight. If a weight has more, the library is faster: it has a tile
    for each multiprocessor. Multiplying 256 rows by large weights takes so much power that the
    clock slows down, and the library takes less."""

    small: Float8Cut
    most_of_small: float
    large: Float8Cut
    most_of_large: float

    def cut_of(self, height: int, in_features: int) -> Float8Cut | None:
        is_large = height * in_features >= _LARGE
        most = self.most_of_large if is_large else self.most_of_small
        if height > most * in_features:
            return None
        return self.large if is_large else self.small


_CHOICES: Final = {
    64: _Choice(Float8Cut(64), 2, Float8Cut(64), inf),
    96: _Choice(Float8Cut(96), 2, Float8Cut(96), inf),
    128: _Choice(Float8Cut(64, shared=True), 2, Float8Cut(128), inf),
    192: _Choice(Float8Cut(96, shared=True), 1, Float8Cut(96, shared=True), inf),
    256: _Choice(Float8Cut(64), 0.5, Float8Cut(64), 0),
}
"""By the largest number of rows. ``tools/gpu/sweep_float8`` found them on an H200, with the weights
of Qwen3-8B, 14B, 32B and 30B-A3B."""


def cuts_of(height: int, in_features: int, *, more_than: int) -> dict[int, Float8Cut]:
    """How to multiply ``more_than`` a number of rows by a weight [height, in_features], keyed by
    the largest number of rows that each cut is for; empty if the library does it."""
    if why_not(height, in_features) or height * in_features < _LEAST_ELEMENTS:
        return {}
    chosen = {
        most: choice.cut_of(height, in_features)
        for most, choice in _CHOICES.items()
        if most > more_than
    }
    return {most: cut for most, cut in chosen.items() if cut is not None}
