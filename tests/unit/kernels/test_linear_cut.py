"""``cuda/linear.cu`` compiles for every cut, and an H200 has the memory for it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl_backend.kernels.linear_cut import (
    BATCHES,
    BLOCK,
    MAX_TOKENS,
    Cut,
    Numbers,
    cut_of,
    cuts_of_many,
    invariant_cuts,
    largest_batch,
    why_not,
    why_not_invariant,
)

PROCESSORS = 132
SHARED_BYTES = 227 * 1024
"""What a thread block on Hopper may have."""


@given(
    batch=st.sampled_from(BATCHES),
    units=st.integers(1, 4096),
    in_features=st.integers(1, 512).map(lambda n: BLOCK * n),
    head_dim=st.sampled_from([None, 64, 128]),
)
@example(batch=256, units=2, in_features=2880, head_dim=None)
@example(batch=8, units=180, in_features=4096, head_dim=None)
def test_all_can_be_compiled(
    batch: int, units: int, in_features: int, head_dim: int | None
) -> None:
    """Including weights whose rows no tile divides."""
    height = units * (head_dim or 16)
    assert why_not(height, in_features, whole=False) is None
    cut = cut_of(batch, height, in_features, head_dim=head_dim)
    assert cut.features == (head_dim or cut.features)
    assert 0 <= cut.num_tiles(height) * cut.features - height < cut.features
    assert cut.tokens in (8, 16, 32, 64, 96, 128, 192)
    assert in_features >= cut.splits * BLOCK and cut.splits <= 8
    assert cut.own_tokens % 8 == 0 and cut.tokens % cut.own_tokens == 0
    if cut.even:
        assert cut.splits == 1 and cut.tokens == min(batch, 192)
        assert cut.num_steps(height, in_features) >= PROCESSORS  # each thread block has one
    else:
        assert cut.finished_bytes <= cut.stages * cut.stage_bytes
    assert cut.shared_bytes + cut.pushed_bytes <= SHARED_BYTES
    if not cut.even and batch <= 16 and cut.num_tiles(height) * cut.splits > PROCESSORS:
        assert cut.splits == 1 or 2 * (cut.shared_bytes + cut.pushed_bytes + 1024) <= 228 * 1024
    assert (cut.shared_bytes + cut.pushed_bytes) % 16 == 0


@given(
    batch=st.sampled_from(BATCHES),
    height=st.integers(1, 256).map(lambda n: 256 * n),
    blocks=st.integers(1, 256),
    head_dim=st.sampled_from([None, 64, 128]),
    numbers=st.sampled_from(
        [
            *(Numbers(8, 128, scales) for scales in (0, 8, 256)),
            *(Numbers(4, 128, scales) for scales in (0, 64, 256)),
            *(Numbers(4, 256, scales) for scales in (0, 128, 512)),
        ]
    ),
)
@example(batch=16, height=7168, blocks=20, head_dim=128, numbers=Numbers(4, 256, 512))
def test_all_of_codes_can_be_compiled(
    batch: int, height: int, blocks: int, head_dim: int | None, numbers: Numbers
) -> None:
    """A tile has at most 96 tokens, since sums of a group and of everything take registers."""
    in_features = blocks * numbers.block
    cut = cut_of(batch, height, in_features, head_dim=head_dim, numbers=numbers)
    assert cut.ways == (2 if batch <= 16 and height * in_features > 8 * 2**20 else 1)
    assert cut.stages * numbers.block // 128 % cut.ways == 0 and cut.threads <= 1024
    assert cut.shared_bytes % 16 == 0  # a way's sums are at the end
    assert cut.numbers == numbers and cut.features == (head_dim or cut.features)
    assert cut.tokens in (8, 16, 32, 64, 96) and height % cut.features == 0
    assert in_features % (cut.splits * cut.numbers.block) == 0 and cut.splits <= 8
    own_tokens = max(cut.tokens // cut.splits, 8)
    assert own_tokens % 8 == 0 and cut.tokens % own_tokens == 0
    if cut.even:
        assert cut.splits == 1 and cut.num_steps(height, in_features) >= PROCESSORS
    else:
        assert cut.finished_bytes <= cut.stages * cut.stage_bytes
    assert cut.shared_bytes <= SHARED_BYTES
    codes = cut.features * cut.numbers.block * numbers.bits // 8
    assert cut.stage_bytes == codes + 2 * cut.numbers.block * cut.tokens
    assert cut.stage_bytes % 1024 == 0  # the swizzle of the next stage counts from there


@given(
    height=st.integers(1, 256).map(lambda tiles: 256 * tiles),
    blocks=st.integers(1, 256),
    numbers=st.sampled_from([Numbers(8, 128, 0), Numbers(8, 128, 256), Numbers(4, 256, 512)]),
)
def test_all_for_many_tokens_of_codes_can_be_compiled(
    height: int, blocks: int, numbers: Numbers
) -> None:
    found = cuts_of_many(height, blocks * numbers.block, numbers)
    assert min(found) > MAX_TOKENS and max(found) == (768 if numbers.bits == 8 else 1024)
    for cut in found.values():
        assert cut.tokens in (64, 96, 128) and (cut.splits, cut.even, cut.ways) == (1, False, 1)
        assert cut.finished_bytes <= cut.stages * cut.stage_bytes
        assert cut.shared_bytes <= SHARED_BYTES


def test_many_tokens_take_tiles_that_fill_the_last_round() -> None:
    """GEMMs of Qwen3-14B in 4 bits, in the order of a layer, as they were the fastest."""
    numbers = Numbers(4, 256, 128)
    shapes = (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)
    assert [cuts_of_many(*shape, numbers)[320].tokens for shape in shapes] == [96, 128, 64, 128]
    assert [cuts_of_many(*shape, numbers)[512].tokens for shape in shapes] == [128, 96, 128, 96]


def test_what_was_measured() -> None:
    """GEMMs of Qwen3-0.6B, and the largest one of 14B."""
    assert cut_of(8, 1024, 2048) == Cut(64, 8, stages=8, splits=4)
    assert cut_of(64, 4096, 1024, head_dim=128) == Cut(128, 64, stages=8, splits=2)
    assert cut_of(64, 34816, 5120) == Cut(128, 64, stages=8, even=True)
    assert cut_of(256, 6144, 1024) == Cut(128, 128, stages=6)


def test_codes_take_even_parts_if_whole_tiles_left_multiprocessors_idle() -> None:
    """The output of attention of Qwen3-14B, and queries, keys and values."""
    numbers = Numbers(4, 256, 128)
    assert not cut_of(64, 5120, 5120, numbers=numbers).even
    assert all(cut_of(batch, 5120, 5120, numbers=numbers).even for batch in (128, 192, 256))
    assert not cut_of(256, 7168, 5120, head_dim=128, numbers=numbers).even


def test_many_tokens_take_most_multiprocessors() -> None:
    """Queries, keys and values and the output of attention of Qwen3-30B-A3B, and of 0.6B."""
    assert cut_of(128, 5120, 2048, head_dim=128) == Cut(128, 64, stages=8)  # 80 tiles
    assert cut_of(192, 5120, 2048, head_dim=128) == Cut(128, 64, stages=8)  # 120 tiles
    assert cut_of(256, 5120, 2048, head_dim=128) == Cut(128, 96, stages=7)  # 120 tiles
    for tokens, of_tile in ((128, 64), (192, 96), (256, 128)):  # 64 tiles, in two parts each
        assert cut_of(tokens, 2048, 4096) == Cut(64, of_tile, stages=8, splits=2)
    assert cut_of(128, 1024, 2048) == Cut(128, 64, stages=8, splits=4)  # half of them are enough
    assert cut_of(256, 1024, 2048) == Cut(64, 64, stages=8, splits=2)
    assert cut_of(256, 2048, 2048, gated=True) == Cut(128, 64, stages=8)
    assert cut_of(256, 2048, 2048, shared=False) == Cut(128, 64, stages=8)


def test_few_tokens_take_two_thread_blocks_a_multiprocessor() -> None:
    """Queries, keys and values of Qwen3-30B-A3B, and the inputs of a recurrent layer of 35B-A3B."""
    assert cut_of(8, 5120, 2048, head_dim=128) == Cut(128, 8, stages=5, splits=4)
    assert cut_of(8, 5120, 2048, head_dim=128, shared=False) == Cut(128, 8, stages=8, splits=2)
    assert cut_of(32, 5120, 2048, head_dim=128) == Cut(128, 32, stages=8, splits=2)
    assert cut_of(16, 12288, 2048) == Cut(128, 16, stages=5, splits=2)
    for tokens, stages in ((32, 8), (64, 6)):  # tiles of narrow heads, as gpt-oss-20b has
        assert cut_of(tokens, 5120, 2880, head_dim=64) == Cut(64, tokens, stages, splits=2)
    assert cut_of(8, 4096, 4096) == cut_of(8, 4096, 4096, shared=False)


def test_large_weights_of_codes_and_few_tokens_are_multiplied_in_two_ways() -> None:
    """Qwen3-14B in INT4 with groups of 128: gate and up, and queries, keys and values."""
    numbers = Numbers(4, 256, 128)
    of_gate_up = Cut(128, 8, stages=8, even=True, numbers=numbers, ways=2)
    assert cut_of(8, 34816, 5120, numbers=numbers) == of_gate_up
    of_heads = Cut(128, 16, stages=8, splits=2, numbers=numbers, ways=2)
    assert cut_of(16, 7168, 5120, head_dim=128, numbers=numbers) == of_heads
    assert of_heads.threads == 576
    assert cut_of(32, 34816, 5120, numbers=numbers).ways == 1
    assert cut_of(8, 2048, 2048, numbers=numbers).ways == 1
    assert cut_of(8, 34816, 5120).ways == 1


@pytest.mark.parametrize(
    ("elements", "expected"),
    [(15 * 2**20, 256), (32 * 2**20, 256), (50 * 2**20, 192), (330_301_440, 64), (2**32, 0)],
)
def test_the_larger_a_layer_the_smaller_the_batches(elements: int, expected: int) -> None:
    """Qwen3-0.6B's, the largest for all batches, those of 1.7B and 14B, and one too large."""
    assert largest_batch(elements) == expected
    assert largest_batch(elements, of_codes=True) == 256
    is_large = elements > 256 * 2**20
    assert largest_batch(elements, of_codes=True, float8=True) == (32 if is_large else 64)
    assert largest_batch(elements, of_codes=True, float8=True, adapted=True) == 64


@pytest.mark.parametrize(("height", "in_features"), [(4100, 1024), (1024, 1000)])
def test_what_cannot_be_taken(height: int, in_features: int) -> None:
    assert "multiple" in str(why_not(height, in_features))
    assert "multiple" in str(why_not(height, in_features, whole=False))


@given(
    height=st.integers(1, 512).map(lambda n: 64 * n),
    in_features=st.integers(1, 512).map(lambda n: BLOCK * n),
)
def test_invariant_cuts_add_up_in_one_part(height: int, in_features: int) -> None:
    """They are also among the cuts that can be compiled."""
    assert why_not_invariant(height, in_features) is None
    cuts = invariant_cuts(height, in_features)
    assert set(cuts) > set(BATCHES)
    for cut in cuts.values():
        assert cut.splits == 1 and not cut.even
        assert cut.features in (64, 128) and height % cut.features == 0
        assert cut.tokens in (8, 16, 32, 64, 96, 128, 192)
        assert cut.finished_bytes <= cut.stages * cut.stage_bytes
        assert cut.shared_bytes <= SHARED_BYTES


def test_what_was_measured_of_invariant_cuts() -> None:
    """GEMMs of Qwen3-0.6B and 14B."""
    cuts = invariant_cuts(4096, 1024)
    assert (cuts[64].features, cuts[64].tokens) == (64, 64)
    assert (cuts[256].features, cuts[256].tokens) == (128, 64)
    cuts = invariant_cuts(34816, 5120)
    assert (cuts[64].features, cuts[64].tokens) == (128, 64)
    assert (cuts[256].features, cuts[256].tokens) == (128, 128)


@pytest.mark.parametrize(("height", "in_features"), [(1000, 1024), (1024, 1000)])
def test_what_no_invariant_cut_takes(height: int, in_features: int) -> None:
    assert "multiple" in str(why_not_invariant(height, in_features))
