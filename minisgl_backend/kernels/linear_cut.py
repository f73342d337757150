"""How the products of ``cuda/linear.cu`` are cut into tiles, and which weights they can take.

Pure arithmetic: must not know a GPU. What comes out was measured on an H200, with Qwen3-0.6B's
weights, between attention and the other products of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

BATCHES: Final = (8, 16, 32, 64, 128, 192, 256)
"""Up to each of these a kernel of its own takes a batch."""

MAX_TOKENS: Final = BATCHES[-1]
BLOCK: Final = 64
"""in_features in a stage of the ring."""

_MOST_BLOCKS: Final = 132
_FEW_BLOCKS: Final = 66
"""All and half of an H200's multiprocessors: the next kernel begins on those that are left."""

_RING_BYTES: Final = 200 * 1024
_MOST_STAGES: Final = 8
_MOST_SPLITS: Final = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """``features`` of the weight and ``tokens`` in a tile, ``stages`` of the ring, ``share`` thread
    blocks that load their tokens together, ``splits`` that share a tile along in_features."""

    features: int
    tokens: int
    stages: int
    share: int
    splits: int

    @property
    def stage_bytes(self) -> int:
        return 2 * BLOCK * (self.features + self.tokens)

    @property
    def shared_bytes(self) -> int:
        """The ring, two barriers a stage and a float32 a token."""
        return self.stages * (self.stage_bytes + 16) + 4 * self.tokens

    @property
    def finished_bytes(self) -> int:
        """What takes the ring's place: parts for other thread blocks, and a finished tile."""
        parts = 4 * self.tokens * self.features if self.splits > 1 else 0
        own_tokens = max(self.tokens // self.splits, 8)
        return parts + own_tokens * (2 * self.features + 16)


def cut_of(batch: int, height: int, in_features: int, *, head_dim: int | None = None) -> Cut:
    """How to multiply by a weight [height, in_features]; with ``head_dim`` a tile is a head.

    A tile has up to 64 tokens, more where there would be too many tiles; it is split where there
    are few.
    """
    features = head_dim or (64 if batch <= 8 else 128)
    tokens = min(batch, 64)
    while 64 <= tokens < 128 and height // features * -(-batch // tokens) > _MOST_BLOCKS:
        tokens += 32
    blocks = height // features * -(-batch // tokens)
    splits = 1
    while (
        2 * splits * blocks <= _FEW_BLOCKS
        and splits < _MOST_SPLITS
        and in_features % (2 * splits * BLOCK) == 0
    ):
        splits *= 2
    cut = Cut(features, tokens, stages=1, share=1, splits=splits)
    steps = in_features // splits // BLOCK
    stages = min(steps, _RING_BYTES // cut.stage_bytes, _MOST_STAGES)
    return replace(cut, stages=max(stages, -(-cut.finished_bytes // cut.stage_bytes)))


def why_not(height: int, in_features: int) -> str | None:
    """Why no kernel can take a weight of these sizes; None where one can."""
    if height % 256:
        return f"needs a multiple of 256 features, not {height}"
    if in_features % BLOCK:
        return f"needs a multiple of {BLOCK} in_features, not {in_features}"
    return None
