"""The kernels compile for every cut, and an H200 has room for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.kernels.expert_cut import MANY, are_many, cut_of, cuts, fits, fits_many, knows
from minisgl_backend.kernels.linear_cut import PLAIN, Numbers
from minisgl_backend.kernels.packed_weight import CodesKind
from minisgl_backend.weight_format import CONVERTED_FP8, Encoding, Layout, WeightFormat

SHARED_BYTES = 227 * 1024
"""What one thread block alone on a Hopper multiprocessor may have; each takes 1 KiB more."""


INT4 = WeightFormat(layout=Layout.AWQ, encoding=Encoding.INT4, block=(1, 128), symmetric=False)
MXFP4 = WeightFormat(layout=Layout.MX_STACKED, encoding=Encoding.E2M1, block=(1, 32))
NVFP4 = WeightFormat(layout=Layout.NV_PACKED, encoding=Encoding.E2M1, block=(1, 16))
NUMBERS = [
    (None, PLAIN),
    (Encoding.E4M3, Numbers(8, 128, 8)),
    *(
        (encoding, Numbers(encoding.bits, block, 64 * block // of))
        for encoding, block in ((Encoding.INT8, 128), (Encoding.INT4, 256))
        for of in (128, 64, 32)
    ),
    *((Encoding.E2M1, Numbers(4, 256, scales)) for scales in (128, 256)),
]
"""FP8 with a scale for 8 rows and 128 inputs; else one for each row and group of inputs, and with
E2M1 a word of scales for 128 inputs (MXFP4) or 64 (NVFP4)."""


@pytest.mark.parametrize(("encoding", "numbers"), NUMBERS)
def test_all_can_be_compiled(encoding: Encoding | None, numbers: Numbers) -> None:
    rounds = encoding is Encoding.E4M3
    for cut in cuts(encoding) + (cuts(encoding, rounds=True) if rounds else []):
        assert cut.features in (64, 128) and cut.tokens in (8, 16, 24, 64, 128)
        fitted = cut.fitted(numbers)
        assert 2 <= fitted.stages <= cut.stages and 1 <= cut.resident <= cut.per_processor
        assert cut.per_processor * (fitted.shared_bytes(numbers) + 1024) <= SHARED_BYTES + 1024


def test_only_small_groups_take_room_from_stages() -> None:
    """The groups of publishers have 128 inputs."""
    for encoding, numbers in (
        (None, PLAIN),
        (Encoding.E4M3, Numbers(8, 128, 8)),
        (Encoding.INT8, Numbers(8, 128, 64)),
        (Encoding.INT4, Numbers(4, 256, 128)),
        (Encoding.E2M1, Numbers(4, 256, 128)),
    ):
        assert all(cut.fitted(numbers) == cut for cut in cuts(encoding))
    cut, groups_of_32 = cut_of(16, 1, Encoding.INT8), Numbers(8, 128, 256)
    assert cut.fitted(groups_of_32).stages == cut.stages - 1


@given(
    num_tokens=st.integers(1, 8192),
    top_k=st.integers(1, 8),
    num_experts=st.integers(8, 512),
    encoding=st.sampled_from([None, *Encoding]),
)
def test_more_rows_take_tiles_of_more_rows(
    num_tokens: int, top_k: int, num_experts: int, encoding: Encoding | None
) -> None:
    cut = cut_of(num_tokens * top_k, num_experts, encoding)
    more = cut_of((num_tokens + 1) * top_k, num_experts, encoding)
    assert cut in cuts(encoding) and cut.tokens <= more.tokens
    largest = max(one.tokens for one in cuts(encoding))
    assert cut.tokens == largest or num_tokens * top_k <= cut.tokens * num_experts


def test_the_cut_for_many_rows() -> None:
    """A thread block has a multiprocessor to itself; decoding never uses this cut."""
    assert MANY.shared_bytes <= SHARED_BYTES
    for encoding in (None, *Encoding):
        assert not are_many(256 * 8, 128, encoding)
        assert are_many(4096 * 8, 128, encoding) == (encoding in (None, Encoding.E4M3))


def test_which_weights_are_for_many_rows() -> None:
    """Those of Qwen3-30B-A3B on 1 and 2 ranks, twice as many without gates; in FP8 only without
    smaller blocks."""
    assert [fits_many(2048, 768 // ranks) for ranks in (1, 2, 4)] == [True, True, False]
    assert [fits_many(2048, 768 // ranks, gated=False) for ranks in (1, 2)] == [True, False]
    assert not fits_many(128, 768) and not fits_many(2048, 128)
    in_blocks = CodesKind(Encoding.E4M3, group=128, shared_by=8, zeros=False)
    assert in_blocks.rounds_many_rows and replace(in_blocks, group=0).rounds_many_rows
    assert not replace(in_blocks, group=64).rounds_many_rows
    assert not replace(in_blocks, shared_by=1).rounds_many_rows
    assert not replace(in_blocks, encoding=Encoding.INT8).rounds_many_rows


def test_sizes() -> None:
    """The sizes of Qwen3-30B-A3B, gpt-oss-20b, Gemma 4 26B-A4B and Nemotron 3 Nano 30B-A3B, on 1 to
    8 ranks."""
    for form in (None, CONVERTED_FP8, INT4):
        assert all(fits(2048, 768 // ranks, form) for ranks in (1, 2, 4, 8))
        assert all(fits(2816, 704 // ranks, form) for ranks in (1, 2))
    for form in (MXFP4, NVFP4):
        assert [fits(2880, 2880 // ranks, form) for ranks in (1, 2, 4)] == [True, True, False]
    assert [fits(2048, 768 // ranks, NVFP4) for ranks in (1, 2, 4, 8)] == [True] * 4
    for form, most in ((None, 4), (replace(CONVERTED_FP8, block=(1, None)), 4), (CONVERTED_FP8, 2)):
        fitting = [ranks for ranks in (1, 2, 4, 8) if fits(2688, 1856 // ranks, form, gated=False)]
        assert max(fitting) == most and len(fitting) == most.bit_length()
    assert fits(2880, 2880, None) and not fits(2880 + 8, 2880, None)
    assert fits(2048, 768 + 8, None) and not fits(2048, 768 + 8, None, gated=False)
    assert not fits(2048, 768, replace(INT4, reorders=True))
    assert not fits(2048, 768, replace(INT4, block=(1, 48)))
    assert not fits(2048, 768 + 16, INT4) and not fits(2048 + 8, 768, INT4)
    for block in ((1, None), (None, None), (1, 64)):
        assert fits(2048, 768, replace(CONVERTED_FP8, block=block))


def test_routers_that_the_kernels_know() -> None:
    rule = RoutingRule(num_experts=256, top_k=8, normalize=True)
    assert knows(rule) and knows(replace(rule, sigmoid=True, corrected=True, scale=2.5))
    assert knows(replace(rule, num_groups=8, top_groups=4))
    assert knows(replace(rule, num_groups=64, top_groups=64))
    assert not knows(replace(rule, num_groups=64, top_groups=32))
    assert not knows(replace(rule, num_experts=2048))
    assert not knows(replace(rule, top_k=64))
    assert not knows(replace(rule, sigmoid=True, corrected=True, corrects_logits=True))
