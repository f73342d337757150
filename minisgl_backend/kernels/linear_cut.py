"""How the GEMMs of ``cuda/linear.cu`` are cut into tiles, and which weights they can take.

Pure arithmetic, without a GPU. The constants were tuned on an H200, with the weights of Qwen3-0.6B
and 14B, between attention and the other GEMMs of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

BATCHES: Final = (8, 16, 32, 64, 96, 128, 192, 256)
"""The kernels' largest batches: a batch is taken by the first kernel that it fits."""

MAX_TOKENS: Final = BATCHES[-1]
ANY_BATCH: Final = 2**31 - 1
BLOCK: Final = 64
"""in_features in a stage of the ring."""

_MOST_BLOCKS: Final = 132
_FEW_BLOCKS: Final = 66
"""All, and half, of an H200's multiprocessors: the next kernel starts on the other half."""

_MOST_SMALL: Final = 8 * 2**20
"""Elements of a weight up to which its GEMM takes half of the multiprocessors."""

_LEAST_EVEN: Final = 40
"""From this many steps a multiprocessor on, all thread blocks take even parts. A step is a tile's
multiply-adds over 64 in_features."""

_MOST_OF_LAYER: Final = 32 * 2**20
_MOST_MULTIPLICATIONS: Final = 20 * 2**30
_MOST_TOKENS_OF_LARGE: Final = 192
"""Layers of up to the first number of elements take all batches; larger layers take batches of up
to the second number of multiply-adds (elements times tokens) and the third number of tokens."""

_RING_BYTES: Final = 200 * 1024
_MOST_STAGES: Final = 8
_SHARED_BYTES: Final = 227 * 1024
"""Shared memory of a thread block that has a multiprocessor to itself."""
_MOST_SPLITS: Final = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """A tile of ``features`` of the weight by ``tokens``, and the number of ``stages`` of the ring.

    ``splits`` thread blocks share a tile along in_features; if ``even``, there is one thread block
    a multiprocessor, and all take equal parts of all tiles.
    """

    features: int
    tokens: int
    stages: int
    splits: int = 1
    even: bool = False

    def num_steps(self, height: int, in_features: int) -> int:
        """Steps of all tiles of a weight [height, in_features]; one takes ``BLOCK`` in_features."""
        return height // self.features * (in_features // BLOCK)

    @property
    def stage_bytes(self) -> int:
        return 2 * BLOCK * (self.features + self.tokens)

    @property
    def shared_bytes(self) -> int:
        """The ring, two barriers a stage, a float32 a token and, if ``even``, a slice of a tile."""
        ring = self.stages * (self.stage_bytes + 16) + 4 * self.tokens
        return ring + (self._slice_bytes if self.even else 0)

    @property
    def finished_bytes(self) -> int:
        """What takes the ring's place: parts for other thread blocks, and a finished tile.

        Not with ``even`` parts: their ring is still in use.
        """
        parts = 4 * self.tokens * self.features if self.splits > 1 else 0
        own_tokens = max(self.tokens // self.splits, 8)
        return parts + own_tokens * (2 * self.features + 16)

    @property
    def _slice_bytes(self) -> int:
        """``SLICE * PITCH`` of ``linear.cu``, for the kind of GEMM that needs more: a gated one
        has half as many features, and twice the tokens."""
        most = 64 if self.tokens > 128 else 32
        gated = _halved(self.tokens, 2 * most) * (self.features + 16)
        return max(gated, _halved(self.tokens, most) * (2 * self.features + 16))


def _halved(tokens: int, most: int) -> int:
    return _halved(tokens // 2, most) if tokens > most else tokens


def cut_of(batch: int, height: int, in_features: int, *, head_dim: int | None = None) -> Cut:
    """How to multiply by a weight [height, in_features]; with ``head_dim`` a tile is a head.

    For small weights a tile has up to 64 tokens, or more if there would be too many tiles; if there
    are few, each is split. Large weights are read once: a tile has as many tokens as it can.
    """
    if height * in_features > _MOST_SMALL:
        return _cut_of_large(batch, height, in_features, head_dim or 128)
    features = head_dim or (64 if batch <= 8 else 128)
    tokens = min(batch, 64)
    while 64 <= tokens < 128 and height // features * -(-batch // tokens) > _MOST_BLOCKS:
        tokens += 32
    return _whole_or_split(batch, height, in_features, Cut(features, tokens, stages=1), _FEW_BLOCKS)


def _cut_of_large(batch: int, height: int, in_features: int, features: int) -> Cut:
    even = Cut(features, min(batch, _MOST_TOKENS_OF_LARGE), stages=1, even=True)
    if even.num_steps(height, in_features) >= _LEAST_EVEN * _MOST_BLOCKS:
        free = _SHARED_BYTES - even.shared_bytes
        return replace(even, stages=min(1 + free // (even.stage_bytes + 16), _MOST_STAGES))
    tile = Cut(features, min(batch, 128), stages=1)
    return _whole_or_split(batch, height, in_features, tile, _MOST_BLOCKS)


def _whole_or_split(batch: int, height: int, in_features: int, tile: Cut, most_blocks: int) -> Cut:
    """``tile`` with its stages; split, if tiles are few, into up to ``most_blocks`` in all."""
    blocks = height // tile.features * -(-batch // tile.tokens)
    splits = 1
    while (
        2 * splits * blocks <= most_blocks
        and splits < _MOST_SPLITS
        and in_features % (2 * splits * BLOCK) == 0
        and max(tile.tokens // (2 * splits), 8) % 8 == 0  # each split finishes tokens 8 at a time
    ):
        splits *= 2
    cut = replace(tile, splits=splits)
    steps = in_features // splits // BLOCK
    stages = min(steps, _RING_BYTES // cut.stage_bytes, _MOST_STAGES)
    return replace(cut, stages=max(stages, -(-cut.finished_bytes // cut.stage_bytes)))


def invariant_cuts(height: int, in_features: int) -> dict[int, Cut]:
    """How to multiply any number of tokens, keyed by the largest batch that each cut is for, so
    that an element has the same bits in all of them: nothing is split, and no parts are even.

    A tile is the smallest of which there are no more than multiprocessors, or the largest.
    """
    cuts = {}
    for batch in (*BATCHES, ANY_BATCH):
        few, many = min(batch, 64), min(batch, 128)
        tiles = [(64, few), (128, few), (128, many)]
        tiles = [tile for tile in tiles if height % tile[0] == 0]
        fitting = (
            (features, tokens)
            for features, tokens in tiles
            if height // features * -(-batch // tokens) <= _MOST_BLOCKS
        )
        features, tokens = next(fitting, tiles[-1])
        cut = Cut(features, tokens, stages=1)
        stages = min(in_features // BLOCK, _RING_BYTES // cut.stage_bytes, _MOST_STAGES)
        least = -(-cut.finished_bytes // cut.stage_bytes)
        cuts[batch] = replace(cut, stages=max(stages, least))
    return cuts


def largest_batch(elements: int) -> int:
    """The largest batch for which these GEMMs are faster than the library; 0 for none.

    ``elements`` counts all weights of a layer.
    """
    if elements <= _MOST_OF_LAYER:
        return MAX_TOKENS
    most = min(_MOST_MULTIPLICATIONS // elements, _MOST_TOKENS_OF_LARGE)
    return max((batch for batch in BATCHES if batch <= most), default=0)


def why_not(height: int, in_features: int) -> str | None:
    """Why no kernel can take a weight of these sizes; None if one can."""
    if height % 256:
        return f"needs a multiple of 256 features, not {height}"
    if in_features % BLOCK:
        return f"needs a multiple of {BLOCK} in_features, not {in_features}"
    return None


def why_not_invariant(height: int, in_features: int) -> str | None:
    """Why no kernel with ``invariant_cuts`` can take a weight of these sizes; None if one can."""
    if height % 64:
        return f"needs a multiple of 64 features, not {height}"
    if in_features % BLOCK:
        return f"needs a multiple of {BLOCK} in_features, not {in_features}"
    return None
