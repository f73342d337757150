"""Attention of runs in contiguous memory, against PyTorch's for each run."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.kernels import ragged_attention
from minisgl_backend.kernels.ragged_attention import Ragged, ragged_attention_reference

QUERIES, KEYS = [0, 3, 4, 9, 11], [0, 7, 8, 20, 20]
"""Where runs of queries and of keys begin; the last has no keys."""


def ragged(offsets: list[int]) -> Ragged:
    longest = max(end - begin for begin, end in pairwise(offsets))
    return Ragged(torch.tensor(offsets, dtype=torch.int32), longest)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("most_scores", [2**24, 3 * 12 * 2], ids=["whole", "in blocks"])
def test_each_run_attends_to_its_keys(
    causal: bool, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged_attention, "_MOST_SCORES", most_scores)
    torch.manual_seed(0)
    q, keys = torch.randn(QUERIES[-1], 3, 8), torch.randn(KEYS[-1], 3, 8)
    values = torch.randn(KEYS[-1], 3, 5)
    out, lses = ragged_attention_reference(
        q, keys, values, ragged(QUERIES), ragged(KEYS), scale=0.3, causal=causal
    )
    for (first, end), (first_key, end_key) in zip(pairwise(QUERIES), pairwise(KEYS), strict=True):
        if first_key == end_key:
            assert (out[first:end] == 0).all() and (lses[:, first:end] == -torch.inf).all()
            continue
        of_q, of_keys = q[first:end].transpose(0, 1), keys[first_key:end_key].transpose(0, 1)
        mask = torch.ones(end - first, end_key - first_key, dtype=torch.bool)
        if causal:
            mask = mask.tril(end_key - first_key - (end - first))
        expected = F.scaled_dot_product_attention(
            of_q, of_keys, values[first_key:end_key].transpose(0, 1), attn_mask=mask, scale=0.3
        )
        torch.testing.assert_close(out[first:end], expected.transpose(0, 1))
        scores = (of_q @ of_keys.mT * 0.3).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(lses[:, first:end], scores.logsumexp(dim=-1))
