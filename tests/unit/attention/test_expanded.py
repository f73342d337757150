"""Prompt chunks over expanded latents: when, in which pieces, and that results are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minisgl_backend.attention import expanded
from minisgl_backend.attention.base import AttentionSetting, ExpandedHeads
from minisgl_backend.attention.expanded import ExpandedPrefill, cut_prefixes, most_positions, pays
from minisgl_backend.attention.sdpa import SdpaAttention
from minisgl_backend.device.base import HostArray
from minisgl_backend.kernels.ragged_attention import ragged_attention_reference
from tests.gpu.paged import Case, Prompts

CPU = torch.device("cpu")
LATENT, ROPE, NOPE, VALUE, HEADS = 24, 8, 12, 10, 5


def small_setting(*, fp8: bool = False, sinks: bool = False) -> AttentionSetting:
    case = Case(16, HEADS, LATENT + ROPE, fp8=fp8, sinks=sinks, latent_dim=LATENT)
    setting = case.setting(torch.float32, CPU)
    heads = ExpandedHeads(NOPE + ROPE, VALUE)
    return replace(setting, shape=replace(setting.shape, expanded=heads))


def lengths(*numbers: int) -> HostArray:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("most", [10_000, 50])
def test_expanded_latents_give_what_latents_give(
    fp8: bool, sinks: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that go into the space of latents, and results that come back from there."""
    bytes_of_position = 4 * HEADS * (2 * (NOPE + ROPE) + VALUE - ROPE)
    monkeypatch.setattr(expanded, "_PREFIX_BYTES", most * bytes_of_position)
    monkeypatch.setattr(expanded, "pays", lambda *_: True)
    torch.manual_seed(0)
    setting = small_setting(fp8=fp8, sinks=sinks)
    assert most_positions(setting.shape, 4) == most
    prompts = Prompts.of(setting)
    up = torch.randn(HEADS, NOPE + VALUE, LATENT) / LATENT**0.5
    of_keys, of_values = up.tensor_split([NOPE], dim=1)
    q = torch.randn(len(prompts.q), HEADS, NOPE + ROPE)
    unrotated, rotated = q.tensor_split([NOPE], dim=2)
    queries = torch.cat([torch.einsum("thn,hnl->thl", unrotated, of_keys), rotated], dim=2)
    absorbed = torch.empty(len(q), HEADS, LATENT)
    attention = SdpaAttention(setting)
    attention.plan_chunks(prompts.chunks())(absorbed, queries, prompts.paged.kv, 0)

    def expand(stored: Tensor) -> tuple[Tensor, Tensor]:
        latents, keys = stored.tensor_split([LATENT], dim=1)
        both = torch.einsum("pl,hkl->phk", latents, up)
        of_heads = keys[:, None].expand(-1, HEADS, -1)
        return torch.cat([both[..., :NOPE], of_heads], dim=2), both[..., NOPE:]

    chunks = ExpandedPrefill(setting, ragged_attention_reference).plan_chunks(prompts.chunks())
    assert chunks is not None
    out = torch.empty(len(q), HEADS, VALUE)
    chunks(out, q, prompts.paged.kv, expand)
    torch.testing.assert_close(out, torch.einsum("thl,hvl->thv", absorbed, of_values))


def test_steps_to_be_captured_expand_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "pays", lambda *_: True)
    setting = small_setting()
    chunks = replace(Prompts.of(setting).chunks(), host_offsets=None, host_ends=None)
    assert ExpandedPrefill(setting, ragged_attention_reference).plan_chunks(chunks) is None


def test_long_chunks_pay() -> None:
    """With the sizes of GLM-4.7-Flash."""
    case = Case(16, 20, 576, latent_dim=512)
    shape = replace(case.setting(torch.bfloat16, CPU).shape, expanded=ExpandedHeads(256, 256))
    assert pays(shape, lengths(1024), lengths(1024))
    assert pays(shape, lengths(512), lengths(512 + 8192))
    assert not pays(shape, lengths(64), lengths(64 + 8192))
    assert not pays(shape, lengths(64, 16), lengths(64 + 8192, 16))
    assert pays(shape, lengths(64, 4096), lengths(64 + 8192, 4096))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 50))
def test_pieces_have_each_position_of_the_prefixes_once(begins: list[int], most: int) -> None:
    found: list[set[int]] = [set() for _ in begins]
    for firsts, ends in cut_prefixes(np.array(begins, np.int64), most):
        assert 0 < (ends - firsts).sum() <= most
        for of_chunk, first, end in zip(found, firsts.tolist(), ends.tolist(), strict=True):
            assert of_chunk.isdisjoint(range(first, end))
            of_chunk.update(range(first, end))
    assert found == [set(range(begin)) for begin in begins]
