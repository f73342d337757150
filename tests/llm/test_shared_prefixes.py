"""Requests that share a prefix get the same tokens, however much of it they share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl_backend import LLM
from minisgl_backend.attention.sdpa import SdpaAttention

SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",  # steps of other sizes round differently; these prompts have near ties
    "num_pages": 600,
    "max_sequence_length": 512,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


def prompts() -> list[list[int]]:
    """Two groups of 16 prompts, half of one sharing more; and as many that share nothing."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(10, 2000, count)]

    stems = [tokens(160), tokens(200)]
    found = [stem + tokens(1 + index) for stem in stems for index in range(16)]
    longer = tokens(150)
    found[:8] = [stems[0] + longer + tokens(3) for _ in range(8)]
    found += [tokens(20) for _ in range(16)]
    return [found[index] for index in rng.permutation(len(found))]


def served(**options: Any) -> list[list[int]]:
    with LLM(**{**SMALL, **options}) as llm:
        return [output.token_ids for output in llm.generate(prompts(), GREEDY)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The tokens from an engine that shares nothing and keeps the order of arrival."""
    return served(cache="naive", max_overtaken=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_overtaken": 0}, {"max_running_requests": 9}, {"overlap": False}, {"num_pages": 90}],
    ids=str,
)
def test_pages_read_together_give_the_same_tokens(
    options: dict[str, Any], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, sizes = SdpaAttention._attend_grouped, []

    def counted(self: SdpaAttention, *args: Any) -> None:
        sizes.append(len(args[2]))
        attend(self, *args)

    monkeypatch.setattr(SdpaAttention, "_attend_grouped", counted)
    assert served(**options) == alone
    assert max(sizes) > 8


def test_two_ranks_read_them_together(alone: list[list[int]]) -> None:
    assert served(tensor_parallel_size=2) == alone


def test_group_attention_can_be_turned_off(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SdpaAttention, "_attend_grouped")
    assert served(group_attention=False) == alone
