"""Sums over the ranks, the residual add and the norm after them, as one operation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels.rms_norm import fused_add_rms_norm_reference
from minisgl_backend.kernels.sum_cut import slices
from minisgl_backend.parallel.group import Group
from minisgl_backend.parallel.torch_group import TorchGroup
from tests.parallel.threads import on_ranks
from tests.unit.models.test_kernels import a_prompt, check_prompt_then_token, load, write


class Twin:
    """A ``FusedSum`` in separate steps, for messages of up to ``most_tokens`` tokens."""

    def __init__(self, group: Group, most_tokens: int):
        self.group = group
        self.most_tokens = most_tokens
        self.num_calls = 0

    def fits(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> bool:
        return num_tokens <= self.most_tokens

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False
    ) -> Tensor:
        self.num_calls += 1
        return fused_add_rms_norm_reference(self.group.all_reduce(x), residual, weight, eps)

    def let_go(self) -> None:
        raise AssertionError("no rank is lost")


@pytest.mark.parametrize("case", ["llama-biases", "qwen3-moe", "granite-tied"])
@pytest.mark.parametrize("most_tokens", [1, 40])
def test_a_model_gives_the_same_with_them(case: str, most_tokens: int, tmp_path: Path) -> None:
    """A prompt of 40 tokens, then one token: the sums of one or both are fused, including that of
    the embedding."""
    prompt = a_prompt(write(case, tmp_path), 40)

    def check(group: Group) -> float:
        assert isinstance(group, TorchGroup)
        twin = Twin(group, most_tokens)
        group.fused = twin
        model = load(tmp_path, group, fused=True)
        check_prompt_then_token(model, *prompt)
        group.fused = None
        return twin.num_calls / (1 + 2 * model.spec.num_layers)

    assert on_ranks(2, check) == [1 if most_tokens == 1 else 2] * 2


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_rows", [1, 63, 256, 4096, 8192])
def test_slices_are_all_rows_and_fit(num_rows: int, num_ranks: int) -> None:
    size, buffer_bytes = 5120, 2**25
    end, others = 0, num_ranks - 1
    for begin, next_end, two_shot in slices(num_rows, size, num_ranks, buffer_bytes):
        assert begin == end < next_end
        end, count = next_end, next_end - begin
        groups = -(-count // num_ranks)
        num_places = (others + num_ranks) * groups if two_shot else others * count
        assert num_places * 2 * size <= buffer_bytes
        assert not two_shot or num_ranks > 2
    assert end == num_rows
