"""How the GEMMs of ``cuda/linear.cu`` are cut into tiles, and which weights they can take.

Pure arithmetic, without a GPU. The constants were tuned on an H200 with the weights of Qwen3-0.6B
and 14B, with each GEMM running between attention and the other GEMMs of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from minisgl_backend.kernels.shared_memory import OF_HOPPER, most_bytes

BATCHES: Final = (8, 16, 32, 64, 96, 128, 192, 256)
"""The largest batch of each kernel; a batch takes the first kernel that it fits."""

MAX_TOKENS: Final = BATCHES[-1]
ANY_BATCH: Final = 2**31 - 1
BLOCK: Final = 64
CODES_BLOCK: Final = 128
"""in_features per stage of the ring, for plain and for quantized weights; for 4-bit weights twice
as many if possible."""
FEW_TOKENS: Final = 16
"""Up to this many tokens, each warp multiplies codes on its own."""

_FEATURES: Final = 256
_FEATURES_OF_PLAIN: Final = 16
"""Any weight has a multiple of the first number of features; a plain one that is not gated needs
only a multiple of the second."""

HEAD_DIMS: Final = (64, 128)
"""The sizes of heads that can be tiles."""

_MOST_BLOCKS: Final = 132
_FEW_BLOCKS: Final = 66
"""All of an H200's multiprocessors, and half of them: the next kernel starts on the other half."""

_MOST_SMALL: Final = 8 * 2**20
"""The GEMM of a weight of up to this many elements takes half of the multiprocessors."""

_MOST_OF_NARROW: Final = 64
"""Up to this many tokens, two thread blocks with tiles of 64 features fit on a multiprocessor."""

_LEAST_EVEN: Final = 40
"""If each multiprocessor has at least this number of steps, of 64 in_features of a tile, all thread
blocks take even parts."""

_MOST_OF_LAYER: Final = 32 * 2**20
_MOST_MULTIPLICATIONS: Final = 20 * 2**30
_MOST_TOKENS_OF_LARGE: Final = 192
"""Layers of up to the first number of elements take all batches. Larger layers take batches of up
to the second number of multiply-adds (elements times tokens) and the third number of tokens."""

_LEAST_ALONE: Final = 4 * 2**20
"""The fewest elements of a plain weight that ``gains_alone``."""

_LEAST_MANY: Final = 128
"""From this number of tokens on, multiplying takes longer than reading the weight."""

_RING_BYTES: Final = 200 * 1024
_RING_OF_TWO: Final = 96 * 1024
"""Bytes of the ring of a thread block, and of each thread block if two share a multiprocessor."""
_MOST_STAGES: Final = 8
_SHARED_BYTES: Final = most_bytes(OF_HOPPER)
"""Of a thread block that has a multiprocessor to itself."""
_MOST_SPLITS: Final = 8

_MOST_TOKENS_BEFORE_FLOAT8: Final = 64
_MOST_BEFORE_FLOAT8_OF_LARGE: Final = 32
_LARGE_LAYER: Final = 256 * 2**20
"""Up to the first number of tokens, these GEMMs multiply weights in float8; the second number is
for layers of more than the third number of elements. More tokens are themselves rounded to 8
bits."""

_MOST_TOKENS_OF_CODES: Final = 96
"""The most tokens per tile of a quantized weight whose results are fused with what follows: its
sums take twice the registers."""

_TOKENS_OF_MANY: Final = (64, 96, 128)
_TOKENS_BESIDE: Final = 27
"""Tokens per tile of a quantized weight for ``cuts_of_many``; and in how many tokens' time a thread
block does what its tile takes beside multiplying (found with Qwen3-14B on an H200)."""
_MOST_OF_MANY: Final = {4: 1024, 8: 768}
"""By bits of a code, the most tokens with which these GEMMs beat the library's for the dequantized
weight; ``_STEP_OF_MANY`` is that of the batches that have a cut each."""
_STEP_OF_MANY: Final = 64


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a weight is stored: the ``bits`` of a number, the in_features of a stage of the ring
    (``block``), and how many ``scales`` a stage has for 64 rows. 16 bits are plain numbers, fewer
    are codes."""

    bits: int = 16
    block: int = BLOCK
    scales: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a row in a stage."""
        return self.block * self.bits // 8


PLAIN: Final = Numbers()


@dataclass(frozen=True, slots=True)
class Cut:
    """A tile of ``features`` of the weight by ``tokens``, and the number of ``stages`` of the ring.

    ``splits`` thread blocks share a tile along in_features. If ``even``, there is one thread block
    per multiprocessor, and all take equal parts of all tiles. ``numbers`` are those of the weight.
    For codes, a thread block may have warps for two ``ways``, which take turns of 128 in_features;
    its ring holds an even number of these.
    """

    features: int
    tokens: int
    stages: int
    splits: int = 1
    even: bool = False
    numbers: Numbers = PLAIN
    ways: int = 1

    def num_tiles(self, height: int) -> int:
        """Tiles of a weight of ``height`` rows; the last may have fewer than ``features`` rows."""
        return -(-height // self.features)

    def num_blocks(self, height: int, batch: int) -> int:
        """Tiles of a GEMM of ``batch`` tokens, each of which a thread block may take."""
        return self.num_tiles(height) * -(-batch // self.tokens)

    def num_steps(self, height: int, in_features: int) -> int:
        """Steps of all tiles of a weight [height, in_features]; a step takes one block."""
        return self.num_tiles(height) * (in_features // self.numbers.block)

    @property
    def threads(self) -> int:
        """Threads of a thread block: those that multiply, and two warps that help."""
        return 2 * self.features * self.ways + 64

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the ring, without scales."""
        block = self.numbers.block
        return block * (self.features * self.numbers.bits // 8 + 2 * self.tokens)

    @property
    def in_stage_bytes(self) -> int:
        """Bytes of a stage with its scales and its two barriers."""
        return self.stage_bytes + self.features // 64 * 4 * self.numbers.scales + 16

    @property
    def shared_bytes(self) -> int:
        """The ring, a float32 per token, if ``even`` a slice of a tile, the second way's sums."""
        ring = self.stages * self.in_stage_bytes + 4 * self.tokens
        of_way = (self.ways - 1) * 4 * self.tokens * self.features
        return ring + (self._slice_bytes if self.even else 0) + of_way

    @property
    def own_tokens(self) -> int:
        """Tokens of a tile that a thread block finishes."""
        return max(self.tokens // self.splits, 8)

    @property
    def pushed_bytes(self) -> int:
        """More shared memory, for the sums that splits push to each other. 0 if there is not enough
        left: then sums are read where they are."""
        num_bytes = (self.splits - 1) * self.own_tokens * self.features * 4 + 16
        fits = self.shared_bytes + num_bytes <= _SHARED_BYTES
        return num_bytes if self.splits > 1 and fits else 0

    @property
    def finished_bytes(self) -> int:
        """Bytes of what takes the ring's place: parts for other thread blocks, and a finished tile.

        Not with ``even`` parts, whose ring is still in use.
        """
        parts = 4 * self.tokens * self.features if self.splits > 1 else 0
        return parts + self.own_tokens * (2 * self.features + 16)

    @property
    def _slice_bytes(self) -> int:
        """``SLICE * PITCH`` of ``linear.cu``, for the kind of GEMM that needs more: a gated one has
        half the features and twice the tokens."""
        most = 64 if self.tokens > 128 else 32
        gated = _halved(self.tokens, 2 * most) * (self.features + 16)
        return max(gated, _halved(self.tokens, most) * (2 * self.features + 16))


def _halved(tokens: int, most: int) -> int:
    return _halved(tokens // 2, most) if tokens > most else tokens


def cut_of(
    batch: int,
    height: int,
    in_features: int,
    *,
    head_dim: int | None = None,
    numbers: Numbers = PLAIN,
    gated: bool = False,
    shared: bool = True,
) -> Cut:
    """How to multiply by a weight [height, in_features], which may be ``gated``. With ``head_dim``
    a tile is a head. Unless ``shared``, there are no more thread blocks than multiprocessors.

    For small weights a tile has up to 64 tokens, or more if there would be too many tiles. If there
    are few tiles, each is split. Large weights are read once, so a tile has as many tokens as
    possible, unless multiplying takes longer than reading. With few tokens a warp mostly waits, so
    large weights in codes are multiplied in two ways, and large plain weights by twice as many
    thread blocks.
    """
    multiplies = batch >= _LEAST_MANY and numbers == PLAIN and shared and not gated
    if multiplies and (cut := _cut_of_many(batch, height, in_features, head_dim)):
        return cut
    if height * in_features > _MOST_SMALL:
        features = head_dim or (64 if batch <= 8 and height % 128 else 128)
        return _cut_of_large(batch, height, in_features, features, numbers, shared)
    features = head_dim or (64 if batch <= 8 or height <= 64 else 128)
    tokens = min(batch, 64)
    while (
        64 <= tokens < (128 if numbers == PLAIN else _MOST_TOKENS_OF_CODES)
        and -(-height // features) * -(-batch // tokens) > _MOST_BLOCKS
    ):
        tokens += 32
    tile = Cut(features, tokens, stages=1, numbers=numbers)
    return _whole_or_split(batch, height, in_features, tile, _FEW_BLOCKS)


def cuts_of_many(height: int, in_features: int, numbers: Numbers) -> dict[int, Cut]:
    """How to multiply more than ``MAX_TOKENS`` tokens by a quantized weight, if nothing but a gate
    is fused, keyed by the largest batch that each cut is for. Tiles are whole. They have the number
    of tokens with which all rounds of thread blocks together take the least time."""
    cuts = {}
    for batch in range(MAX_TOKENS + _STEP_OF_MANY, _MOST_OF_MANY[numbers.bits] + 1, _STEP_OF_MANY):

        def time(tile: Cut, batch: int = batch) -> int:
            rounds = -(-tile.num_blocks(height, batch) // _MOST_BLOCKS)
            return rounds * (tile.tokens + _TOKENS_BESIDE)

        tiles = (Cut(128, tokens, stages=1, numbers=numbers) for tokens in _TOKENS_OF_MANY)
        cuts[batch] = _whole_or_split(batch, height, in_features, min(tiles, key=time), 0)
    return cuts


def _cut_of_many(batch: int, height: int, in_features: int, head_dim: int | None) -> Cut | None:
    """The smallest tiles that take the multiprocessors once. Those that are not heads are split in
    two and take most multiprocessors, so they are only for weights with few features. None if there
    are no such tiles."""
    for tokens in (64, 96, 128):
        tile = Cut(head_dim or 64, tokens, stages=1)
        blocks = tile.num_blocks(height, batch)
        if head_dim is not None and blocks <= _MOST_BLOCKS:
            return _whole_or_split(batch, height, in_features, tile, _FEW_BLOCKS)
        if head_dim is None and _FEW_BLOCKS < 2 * blocks <= _MOST_BLOCKS and height <= in_features:
            return _whole_or_split(batch, height, in_features, tile, _MOST_BLOCKS)
    return None


def _cut_of_large(
    batch: int, height: int, in_features: int, features: int, numbers: Numbers, shared: bool
) -> Cut:
    tokens = _tokens_of(batch, _MOST_TOKENS_OF_LARGE, numbers)
    ways = 2 if numbers != PLAIN and batch <= FEW_TOKENS else 1
    even = Cut(features, tokens, stages=1, even=True, numbers=numbers, ways=ways)
    steps = even.num_steps(height, in_features) * numbers.block // BLOCK
    blocks = even.num_blocks(height, batch)
    idle = -blocks % _MOST_BLOCKS  # in the last round, if tiles were whole
    if numbers != PLAIN and 4 * idle > blocks + idle:
        steps *= blocks // even.num_tiles(height)
    if steps >= _LEAST_EVEN * _MOST_BLOCKS:
        return replace(even, stages=_most_stages(even))
    tile = Cut(features, _tokens_of(batch, 128, numbers), stages=1, numbers=numbers, ways=ways)
    # not with few tiles: a multiprocessor has no room for two thread blocks of as many splits
    are_many = 4 * tile.num_tiles(height) > _MOST_BLOCKS
    most = _MOST_OF_NARROW if features == 64 else FEW_TOKENS
    two = shared and numbers == PLAIN and batch <= most and are_many
    return _whole_or_split(batch, height, in_features, tile, _MOST_BLOCKS * (2 if two else 1))


def _tokens_of(batch: int, most: int, numbers: Numbers) -> int:
    """Tokens per tile of a large weight. For codes, a batch larger than a tile can be is cut into
    equal tiles."""
    if numbers == PLAIN:
        return min(batch, most)
    return batch if batch <= _MOST_TOKENS_OF_CODES else 96 if batch % 96 == 0 else 64


def _whole_or_split(batch: int, height: int, in_features: int, tile: Cut, most_blocks: int) -> Cut:
    """``tile`` with its stages. If tiles are few, each is split, into up to ``most_blocks`` in
    total. The splits of a plain weight may differ by a step."""
    blocks = tile.num_blocks(height, batch)
    splits, block = 1, tile.numbers.block
    is_plain, steps_of_tile = tile.numbers == PLAIN, in_features // block
    while (
        2 * splits * blocks <= most_blocks
        and splits < _MOST_SPLITS
        and (is_plain or steps_of_tile % (2 * splits) == 0)
        and steps_of_tile >= 2 * splits
        and max(tile.tokens // (2 * splits), 8) % 8 == 0  # each split finishes tokens 8 at a time
    ):
        splits *= 2
    cut = replace(tile, splits=splits)
    steps = -(-steps_of_tile // splits)
    share_processors = splits > 1 and splits * blocks > _MOST_BLOCKS
    ring = _RING_OF_TWO if share_processors else _RING_BYTES
    stages = min(steps, ring // cut.stage_bytes, _most_stages(cut))
    stages = max(stages, -(-cut.finished_bytes // cut.stage_bytes))
    if block == CODES_BLOCK:
        stages += stages % cut.ways
    return replace(cut, stages=stages)


def _most_stages(cut: Cut) -> int:
    """The number of stages that there is memory for, in place of the single stage of ``cut``."""
    free = _SHARED_BYTES - cut.shared_bytes
    return min(1 + free // cut.in_stage_bytes, _MOST_STAGES)


def invariant_cuts(height: int, in_features: int) -> dict[int, Cut]:
    """How to multiply any number of tokens, keyed by the largest batch that each cut is for. An
    element has the same bits with all of them: nothing is split, and no parts are even.

    A tile is the smallest one that makes no more tiles than there are multiprocessors, or the
    largest.
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


def largest_batch(
    elements: int, *, of_codes: bool = False, float8: bool = False, adapted: bool = False
) -> int:
    """The largest batch for which these GEMMs are faster than the library; 0 for none.

    ``elements`` counts all weights of a layer. ``of_codes``: they are quantized. ``float8``: also,
    other GEMMs multiply all of them by tokens in 8 bits. ``adapted``: tokens may have adapters,
    which only these GEMMs add by themselves.
    """
    if float8:
        is_large = elements > _LARGE_LAYER and not adapted
        return _MOST_BEFORE_FLOAT8_OF_LARGE if is_large else _MOST_TOKENS_BEFORE_FLOAT8
    if of_codes or elements <= _MOST_OF_LAYER:
        return MAX_TOKENS
    most = min(_MOST_MULTIPLICATIONS // elements, _MOST_TOKENS_OF_LARGE)
    return max((batch for batch in BATCHES if batch <= most), default=0)


def takes_codes(height: int, in_features: int) -> bool:
    """Whether there are kernels for quantized weights of these sizes."""
    return why_not(height, in_features) is None and in_features % CODES_BLOCK == 0


def gains_alone(height: int, in_features: int) -> bool:
    """Whether these GEMMs are faster for a plain weight, even if norms and residual adds around
    them are separate kernels. For one row another kernel may be faster still
    (``small_batch.is_faster_for_a_token``). Found on an H200 with Gemma 4 E4B, 26B-A4B and 31B."""
    return height * in_features >= _LEAST_ALONE


def padded(height: int) -> int:
    """``height``, rounded up to a number of rows that a kernel can take."""
    return -(-height // _FEATURES) * _FEATURES


def why_not(height: int, in_features: int, *, whole: bool = True) -> str | None:
    """Why no kernel can take a weight of these sizes; None if one can. Unless ``whole``, the weight
    is plain and not gated, and its last tile may have fewer rows than the others."""
    features = _FEATURES if whole else _FEATURES_OF_PLAIN
    if height % features:
        return f"needs a multiple of {features} features, not {height}"
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
