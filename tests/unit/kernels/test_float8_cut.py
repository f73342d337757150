"""The kernel compiles for every cut of a float8 GEMM, and all its steps are done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.kernels.float8_cut import Float8Cut, cuts_of, why_not

QWEN3_14B = ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408))


@pytest.mark.parametrize("tokens", [64, 96, 128])
def test_a_ring_of_several_stages_fits(tokens: int) -> None:
    cut = Float8Cut(tokens)
    used = cut.stages * ((128 + tokens) * 128 + 2 * 32 + 16) + tokens * 4
    assert 4 <= cut.stages <= 8 and used <= cut.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("shape", QWEN3_14B)
def test_cuts_are_for_growing_numbers_of_rows(shape: tuple[int, int]) -> None:
    cuts = cuts_of(*shape, more_than=32)
    assert cuts and list(cuts) == sorted(cuts)
    for most, cut in cuts.items():
        assert cut.tokens in (64, 96, 128)
        assert cut.columns(most) * cut.blocks(most, *shape, 132) <= 132


def test_weights_that_do_not_fit() -> None:
    assert not cuts_of(2**20 + 64, 1024, more_than=64) and not cuts_of(2**20, 192, more_than=64)
    assert cuts_of(2048, 4096, more_than=64) and not cuts_of(2048, 2048, more_than=64)
    assert why_not(192, 1024) == "needs a multiple of 128 features, not 192"


def test_cuts_for_few_rows_are_left_out_if_others_multiply_these() -> None:
    assert list(cuts_of(5120, 5120, more_than=32)) == [64, 96, 128, 192]
    assert list(cuts_of(5120, 5120, more_than=64)) == [96, 128, 192]


def test_many_rows_take_the_kernel_if_the_library_has_few_tiles() -> None:
    """As the weights of Qwen3-30B-A3B and 14B."""
    assert not cuts_of(5120, 2048, more_than=64)
    assert list(cuts_of(2048, 4096, more_than=64)) == [96, 128, 192, 256]
    assert list(cuts_of(7168, 5120, more_than=64)) == [96, 128]
    assert list(cuts_of(34816, 5120, more_than=64)) == [96, 128, 192]
    assert list(cuts_of(5120, 17408, more_than=64)) == [96, 128, 192]


@given(
    tiles=st.integers(1, 80),
    steps=st.integers(1, 80),
    blocks=st.integers(1, 132),
    data=st.data(),
)
def test_even_parts(tiles: int, steps: int, blocks: int, data: st.DataObject) -> None:
    """As ``owner`` and ``take_tile`` of ``float8_linear.cu``: who has a step or finishes a tile."""
    total = tiles * steps
    blocks = min(blocks, total)

    def first_step(block: int) -> int:
        return total * block // blocks

    def owner(step: int) -> int:
        return ((step + 1) * blocks - 1) // total

    tile = data.draw(st.integers(0, tiles - 1))
    begin, end = tile * steps, (tile + 1) * steps
    first, last = owner(begin), owner(end - 1)
    assert all(first_step(owner(k)) <= k < first_step(owner(k) + 1) for k in range(begin, end))
    finishers = last - first + (first_step(last + 1) <= end)
    if first == last:
        return
    assert finishers >= 1
    for block in range(first, last + 1):
        # a thread block takes part in finishing its last tile only, and moves on from any other
        assert (first_step(block + 1) <= end) == (block - first < finishers)
