"""The twin of in-graph sampling, and the noise that it draws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from minisgl_backend.kernels import noise
from minisgl_backend.kernels.sampling import (
    NO_TOKEN,
    Penalties,
    RowParameters,
    SamplingWorkspace,
    filter_threshold_reference,
    sample,
)


def rows(num_rows: int, **changed: float) -> RowParameters:
    plain = RowParameters(
        temperature=torch.ones(num_rows),
        top_k=torch.zeros(num_rows, dtype=torch.int32),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        seeds=torch.arange(num_rows),
        positions=torch.zeros(num_rows, dtype=torch.int64),
    )
    same = {name: torch.full_like(getattr(plain, name), value) for name, value in changed.items()}
    return dataclasses.replace(plain, **same)


def draw(
    logits: torch.Tensor, parameters: RowParameters, penalties: Penalties | None = None
) -> list[int]:
    workspace = SamplingWorkspace(len(logits), logits.device)
    tokens = sample(logits, parameters, workspace, penalties=penalties)
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
    assert draw(logits, rows(2, temperature=0.0)) == [1, 0]


@pytest.mark.parametrize("vocab_size", [3, 50])
def test_frequencies_are_those_of_the_softmax(vocab_size: int) -> None:
    """Of 50 tokens, 16 each are in one split, and 2 in the last."""
    num_rows = 20_000
    logits = torch.linspace(2.0, -1.0, vocab_size)
    tokens = draw(logits.expand(num_rows, vocab_size), rows(num_rows, temperature=0.7))
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
    assert set(draw(logits, rows(2000, **changed))) == allowed


def test_ties_at_the_threshold_are_kept() -> None:
    weights = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.1]])
    assert float(filter_threshold_reference(weights, rows(1, top_k=2))) == 0.5


def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other() -> None:
    logits = torch.zeros(4, 6)
    logits[0, 2] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 4] = 9.0
    for temperature in (0.0, 0.01):
        tokens = draw(logits, rows(4, temperature=temperature))
        assert tokens == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 4]


def test_penalties_by_hand() -> None:
    penalties = Penalties(
        lines=torch.tensor([-1, 0], dtype=torch.int32),
        output_counts=torch.tensor([[2, 0, 0, 0]], dtype=torch.int32),
        in_prompt=torch.tensor([[False, True, False, False]]),
        repetition=torch.full((2,), 2.0),
        presence=torch.full((2,), 0.5),
        frequency=torch.full((2,), 1.0),
    )
    # row 1: 9 / 2 - 2 * 1 - 0.5 = 2, and 4.2 / 2 = 2.1, so that the third token wins with 2.5
    logits = torch.tensor([[9.0, 4.2, 2.5, -3.0]] * 2)
    assert draw(logits, rows(2, temperature=0.0), penalties) == [0, 2]
