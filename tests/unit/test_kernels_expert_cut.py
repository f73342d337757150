"""Every cut is one that ``cuda/experts.cu`` compiles for, and that an H200 has the room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.experts_spec import ClampedGate, ExpertsSpec, RoutingRule
from minisgl_backend.kernels.expert_cut import bits_of, cut_of, cuts, fits, knows
from minisgl_backend.weight_format import CONVERTED_FP8, Encoding

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor on Hopper that one thread block has to itself; each needs 1 KiB more."""


@pytest.mark.parametrize("bits", [16, 8])
def test_all_can_be_compiled(bits: int) -> None:
    for cut in cuts(bits):
        assert cut.features in (64, 128) and cut.tokens in (8, 16, 32, 64, 128)
        assert cut.stages >= 2 and 1 <= cut.resident <= cut.per_processor
        assert cut.per_processor * (cut.shared_bytes(bits) + 1024) <= SHARED_BYTES + 1024


@given(
    num_tokens=st.integers(1, 8192),
    top_k=st.integers(1, 8),
    num_experts=st.integers(8, 512),
    bits=st.sampled_from([16, 8]),
)
def test_more_rows_take_tiles_of_more_rows(
    num_tokens: int, top_k: int, num_experts: int, bits: int
) -> None:
    cut = cut_of(num_tokens * top_k, num_experts, bits)
    more = cut_of((num_tokens + 1) * top_k, num_experts, bits)
    assert cut in cuts(bits) and cut.tokens <= more.tokens
    largest = max(one.tokens for one in cuts(bits))
    assert cut.tokens == largest or num_tokens * top_k <= cut.tokens * num_experts


def test_sizes() -> None:
    """Those of the published 30B model, on 1 to 4 ranks."""
    assert [fits(2048, 768 // ranks, 16) for ranks in (1, 2, 4)] == [True, True, True]
    assert [fits(2048, 768 // ranks, 8) for ranks in (1, 2, 4)] == [True, True, False]
    assert not fits(2048, 96, 16) and not fits(2048 + 64, 768, 16)


def test_what_kernels_know() -> None:
    rule = RoutingRule(num_experts=128, top_k=8, normalize=True)
    spec = ExpertsSpec(routing=rule, intermediate_size=768)
    assert knows(spec)
    assert knows(replace(spec, routing=replace(rule, sigmoid=True, corrected=True, scale=2.5)))
    assert not knows(replace(spec, biases=True))
    assert not knows(replace(spec, gate=ClampedGate(alpha=1.7, limit=7.0)))
    assert not knows(replace(spec, routing=replace(rule, num_groups=8, top_groups=4)))
    assert not knows(replace(spec, routing=replace(rule, num_experts=2048)))
    assert not knows(replace(spec, routing=replace(rule, top_k=64)))


def test_formats() -> None:
    assert bits_of(CONVERTED_FP8) == 8
    assert bits_of(replace(CONVERTED_FP8, block=(1, None))) == 8
    assert bits_of(replace(CONVERTED_FP8, block=(None, None))) == 8
    assert bits_of(replace(CONVERTED_FP8, block=(1, 64))) is None
    assert bits_of(replace(CONVERTED_FP8, encoding=Encoding.INT8)) is None
