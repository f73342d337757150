"""The twin of in-graph sampling, and the noise that it draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels import noise
from minisgl_backend.kernels.sampling import (
    NO_TOKEN,
    Filters,
    SamplingWorkspace,
    filter_threshold_reference,
    sample,
)
from minisgl_backend.kernels.sampling_table import IN_PROMPT, IS_STOP, ONCE, SamplingTable


def table_of(num_rows: int, vocab_size: int, **numbers: float) -> SamplingTable:
    """Rows of the same numbers, each with a seed of its own."""
    table = SamplingTable.empty(num_rows, vocab_size, torch.device("cpu"))
    for name, value in {"temperature": 1.0, **numbers}.items():
        table.column(name).fill_(value)
    table.seeds.copy_(torch.arange(num_rows))
    return table


def draw(logits: Tensor, table: SamplingTable, position: int = 0) -> list[int]:
    """A token for each row of the table."""
    num_rows = len(logits)
    rows = torch.arange(num_rows, dtype=torch.int32)
    workspace = SamplingWorkspace(num_rows, table.vocab_size, logits.device)
    tokens = sample(logits, table, rows, torch.full_like(rows, position), workspace)
    assert tokens.dtype == torch.int32
    return tokens.tolist()


def test_keys_are_splitmix64() -> None:
    seeds = np.array([0, 1, -5, 2**62], np.int64)
    positions = np.array([0, 3, 100_000, 7], np.int64)

    def mix(x: int) -> int:
        mask = 2**64 - 1
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        return x ^ x >> 31

    expected = []
    for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
        stream = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
        expected.append(mix((stream + (position + 1) * 0x9E3779B97F4A7C15) % 2**64))
    keys = noise.keys(torch.from_numpy(seeds), torch.from_numpy(positions))
    assert keys.numpy().view(np.uint64).tolist() == expected


def test_noise_is_gumbel() -> None:
    key = noise.keys(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    values = noise.gumbel(key[:, None], torch.arange(100_000)).double()
    assert values.isfinite().all()
    # P(g <= t) = exp(-exp(-t)); five standard errors of a frequency over 400,000 draws
    for t in (-1.5, 0.0, 1.0, 4.0):
        expected = float(np.exp(-np.exp(-t)))
        assert abs(float((values <= t).double().mean()) - expected) < 5 * 0.5 / 400_000**0.5
    assert abs(float(torch.corrcoef(values)[0, 1])) < 0.02


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [0.0, -1.0, -2.0, -3.0]])
    assert draw(logits, table_of(2, 4, temperature=0.0)) == [1, 0]


@pytest.mark.parametrize("vocab_size", [3, 50])
def test_frequencies_are_those_of_the_softmax(vocab_size: int) -> None:
    """Of 50 tokens, 16 each are in one split, and 2 in the last."""
    num_rows = 20_000
    logits = torch.linspace(2.0, -1.0, vocab_size)
    table = table_of(num_rows, vocab_size, temperature=0.7)
    tokens = draw(logits.expand(num_rows, vocab_size), table)
    frequency = torch.bincount(torch.tensor(tokens), minlength=vocab_size) / num_rows
    expected = (logits / 0.7).softmax(dim=0)
    assert ((frequency - expected).abs() < 5 * (expected / num_rows).sqrt()).all()


@pytest.mark.parametrize(
    ("changed", "allowed"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 4}),
        ({"top_p": 0.5}, {1, 2}),
        ({"top_p": 0.0}, {1}),
        ({"min_p": 0.5}, {1, 2}),
        ({"min_p": 1.0}, {1}),
        # of the first three, which have 0.87 of all, two have 0.80
        ({"top_k": 3, "top_p": 0.8}, {1, 2}),
        ({"top_k": 9, "top_p": 0.999, "min_p": 0.2}, {1, 2, 4}),
    ],
)
def test_filters_keep_what_they_should(changed: dict[str, float], allowed: set[int]) -> None:
    probabilities = torch.tensor([0.07, 0.45, 0.25, 0.06, 0.17])
    logits = probabilities.log().expand(2000, 5)
    assert set(draw(logits, table_of(2000, 5, **changed))) == allowed


def test_ties_at_the_threshold_are_kept() -> None:
    weights = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.1]])
    filters = Filters.of(table_of(1, 5, top_k=2), torch.zeros(1, dtype=torch.int64))
    assert float(filter_threshold_reference(weights, filters)) == 0.5


def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other() -> None:
    logits = torch.zeros(4, 6)
    logits[0, 2] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 4] = 9.0
    for temperature in (0.0, 0.01):
        tokens = draw(logits, table_of(4, 6, temperature=temperature))
        assert tokens == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 4]


def test_penalties_by_hand() -> None:
    table = table_of(2, 4, temperature=0.0, repetition=2.0, presence=0.5, frequency=1.0)
    table.marks[:] = torch.tensor([2 * ONCE, IN_PROMPT, 0, 0])
    table.column("marked")[1] = 1
    # row 1: 9 / 2 - 2 * 1 - 0.5 = 2, and 4.2 / 2 = 2.1, so that the third token wins with 2.5
    assert draw(torch.tensor([[9.0, 4.2, 2.5, -3.0]] * 2), table) == [0, 2]


def test_bias_by_hand() -> None:
    table = table_of(2, 3, temperature=0.0)
    table.bias[:] = torch.tensor([-5.0, 0.0, 0.5])
    table.column("biased")[1] = 1
    assert draw(torch.tensor([[9.0, 4.2, 4.0]] * 2), table) == [0, 2]


def test_stop_tokens_come_from_their_position_on() -> None:
    table = table_of(1, 3, temperature=0.0, stops_from=7, marked=1)
    table.marks[0, 1] = IS_STOP
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    assert [draw(logits, table, position)[0] for position in (5, 6, 7, 8)] == [2, 2, 1, 1]
