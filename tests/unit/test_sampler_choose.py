"""Choosing tokens: the distributions, the filters, and that a row depends on itself alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from minisgl_backend.execution.choose import at_random, at_random_filtered, greedy
from minisgl_backend.execution.uniform import uniform
from torch import Tensor


def _logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def _column(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


def _draws(count: int, seed: int = 0) -> Tensor:
    seeds = np.full(count, seed, np.uint64)
    return torch.from_numpy(uniform(seeds, np.arange(count))).unsqueeze(1)


@pytest.mark.parametrize("vocab_size", [1, 7, 2048, 2049, 4096, 5000])
def test_greedy_is_argmax(vocab_size: int) -> None:
    logits = _logits(50, vocab_size)
    assert torch.equal(greedy(logits), logits.argmax(dim=-1))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(4, 5000)
    logits[1, [30, 4000]] = 1
    logits[2, [4999]] = 1
    logits[3, [4090, 4999]] = 1
    assert greedy(logits).tolist() == [0, 30, 4999, 4090]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_random_choice_follows_the_softmax(temperature: float) -> None:
    count = 200_000
    logits = _logits(1, 12)
    chosen = at_random(
        logits.expand(count, -1), _column(temperature).expand(count, 1), _draws(count)
    )
    expected = (logits[0].double() / temperature).softmax(dim=-1)
    assert _chi_squared(chosen, expected) < 45  # 11 degrees of freedom: p < 1e-5


def test_tiny_temperatures_are_greedy() -> None:
    logits = _logits(64, 300)
    chosen = at_random(logits, torch.full((64, 1), 1e-30), _draws(64))
    assert torch.equal(chosen, logits.argmax(dim=-1))


def test_impossible_tokens_are_never_chosen() -> None:
    logits = torch.full((1000, 8), float("-inf"))
    logits[:, [2, 5]] = 0.0
    extremes = torch.tensor([0.0, 1 - 2.0**-23]).repeat(500).unsqueeze(1)
    for uniforms in (_draws(1000), extremes):
        chosen = at_random(logits, torch.ones(1000, 1), uniforms)
        assert set(chosen.tolist()) == {2, 5}


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.8},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.05},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"top_k": 10**9, "top_p": 0.5},
        {"min_p": 1.0},
    ],
)
def test_filters_keep_the_reference_set(filters: dict[str, float]) -> None:
    count, logits, temperature = 50_000, _logits(1, 40), 0.9
    chosen = at_random_filtered(
        logits.expand(count, -1),
        _column(temperature).expand(count, 1),
        _draws(count),
        **_filter_columns(count, filters),
    )
    expected = _filtered_distribution(logits[0], temperature, filters)
    assert set(chosen.tolist()) <= set(expected.nonzero().flatten().tolist())
    assert _chi_squared(chosen, expected) < 90  # up to 39 degrees of freedom: p < 1e-5


def test_a_flat_distribution_needs_more_candidates_than_the_first_guess() -> None:
    """Far more tokens pass than there are candidates at first: the mean is the reference's."""
    vocab_size, count = 20_000, 300
    logits = torch.linspace(0.5, 0.0, vocab_size).expand(count, -1)
    for filters in ({"top_p": 0.5}, {"min_p": 0.8}, {"top_p": 0.9, "min_p": 0.9}):
        columns = _filter_columns(count, filters)
        chosen = at_random_filtered(logits, torch.ones(count, 1), _draws(count), **columns)
        expected = _filtered_distribution(logits[0], 1.0, filters)
        kept = int(expected.count_nonzero())
        assert kept > 4000
        assert int(chosen.max()) < kept
        mean = float((expected * torch.arange(vocab_size)).sum())
        assert float(chosen.double().mean()) == pytest.approx(mean, rel=0.05)


def test_a_wide_top_k_among_narrow_rows() -> None:
    vocab_size = 20_000
    columns = _filter_columns(3, {"top_p": 0.9})
    columns["top_k"][:, 0] = torch.tensor([3, 15_000, 0])
    chosen = at_random_filtered(
        torch.linspace(0.1, 0.0, vocab_size).expand(3, -1),
        torch.ones(3, 1),
        torch.full((3, 1), 0.999),
        **columns,
    ).tolist()
    assert chosen[0] == 2
    assert 13_000 < chosen[1] < 14_000
    assert 17_000 < chosen[2] < 18_500


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    count = 40
    logits, draws = _logits(count, 3000), _draws(count)
    columns: dict[str, Tensor] = {
        "top_k": torch.randint(0, 50, (count, 1), generator=torch.Generator().manual_seed(1)),
        "top_p": torch.rand(count, 1, generator=torch.Generator().manual_seed(2)),
        "min_p": torch.rand(count, 1, generator=torch.Generator().manual_seed(3)) / 20,
    }
    temperature = torch.rand(count, 1, generator=torch.Generator().manual_seed(4)) + 0.5
    together = at_random_filtered(logits, temperature, draws, **columns)
    plain = at_random(logits, temperature, draws)
    for row in range(count):
        own = slice(row, row + 1)
        args = logits[own], temperature[own], draws[own]
        alone = {name: column[own] for name, column in columns.items()}
        assert at_random_filtered(*args, **alone) == together[row]
        assert at_random(*args) == plain[row]


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    count = 100_000
    positions, seeds = np.arange(count), np.arange(count).astype(np.uint64)
    along = uniform(np.full(count, 3, np.uint64), positions)
    across = uniform(seeds, np.full(count, 3))
    for numbers in (along, across):
        assert numbers.min() >= 0 and numbers.max() <= 1 - 2.0**-23
        histogram = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert ((histogram - count / 50) ** 2 / (count / 50)).sum() < 110  # 49 degrees: p < 1e-6
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.015
    neighbours = uniform(np.full(count, 4, np.uint64), positions)
    assert abs(np.corrcoef(along, neighbours)[0, 1]) < 0.015


def test_uniform_is_a_fixed_function_of_seed_and_position() -> None:
    seeds = np.array([0, 0, 1, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, 0, 123456])
    # Of the integer arithmetic alone: written out in Python integers of any size.
    expected = [_reference_uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert uniform(seeds, positions).tolist() == expected


def _reference_uniform(seed: int, position: int) -> float:
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    stream = mix(seed + golden & mask)
    return (mix(stream + (position + 1) * golden & mask) >> 41) * 2.0**-23


def _filter_columns(count: int, filters: dict[str, float]) -> dict[str, Tensor]:
    return {
        "top_k": torch.full((count, 1), int(filters.get("top_k", 0))),
        "top_p": torch.full((count, 1), float(filters.get("top_p", 1.0))),
        "min_p": torch.full((count, 1), float(filters.get("min_p", 0.0))),
    }


def _filtered_distribution(logits: Tensor, temperature: float, filters: dict[str, float]) -> Tensor:
    """Probabilities [vocab_size] after the filters, token by token in Python."""
    probabilities: Any = (logits.double() / temperature).softmax(dim=-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    order = order[: int(filters.get("top_k", 0)) or None]
    total = sum(probabilities[token] for token in order)
    kept: list[int] = []
    reached = 0.0
    for token in order:
        if kept and reached >= filters.get("top_p", 1.0) * total:
            break
        kept.append(token)
        reached += probabilities[token]
    least = filters.get("min_p", 0.0) * probabilities[kept[0]]
    kept = [token for token in kept if probabilities[token] >= least]
    expected = torch.zeros(len(probabilities), dtype=torch.float64)
    expected[kept] = torch.tensor([probabilities[token] for token in kept], dtype=torch.float64)
    return expected / expected.sum()


def _chi_squared(chosen: Tensor, expected: Tensor) -> float:
    """Pearson's statistic over the tokens that are expected at least five times."""
    counts = chosen.bincount(minlength=len(expected)).double()
    wanted = expected * len(chosen)
    common = wanted >= 5
    return float(((counts - wanted)[common] ** 2 / wanted[common]).sum())
