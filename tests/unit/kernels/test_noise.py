"""Noise is a fixed function of seed, position and token, and is Gumbel distributed."""

from __future__ import annotations

import numpy as np
import torch

from minisgl_backend.kernels import noise


def test_keys_are_splitmix64() -> None:
    """Checks only the integer arithmetic, against Python integers of any size."""
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


def test_variables_are_those_of_their_32_bits() -> None:
    """Again in Python: the bits of a key and a token, then two logarithms in float64."""
    mask = 2**32 - 1

    def finalize(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B & mask
        x = (x ^ x >> 13) * 0xC2B2AE35 & mask
        return x ^ x >> 16

    key = noise.keys(torch.tensor([3]), torch.tensor([5]))
    tokens = torch.arange(0, 150_000, 7)
    low, high = (int(key) & mask, int(key) >> 32 & mask)
    bits = [finalize(finalize(low + token * 0x9E3779B1 & mask) ^ high) for token in tokens.tolist()]
    uniform = (np.array(bits).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    expected = -np.log(-np.log1p(-uniform.astype(np.float64)))
    actual = noise.gumbel(key, tokens)
    assert actual.dtype == torch.float32
    assert np.abs(actual.numpy() - expected).max() < 2e-6


def test_noise_is_gumbel_along_tokens_positions_and_seeds() -> None:
    count, steps = 100_000, torch.arange(100_000)
    zeros = torch.zeros(count, dtype=torch.int64)
    rows = [
        noise.gumbel(noise.keys(torch.tensor([3]), torch.tensor([0])), steps),
        noise.gumbel(noise.keys(torch.tensor([4]), torch.tensor([0])), steps),
        noise.gumbel(noise.keys(torch.tensor([3]), torch.tensor([1])), steps),
        noise.gumbel(noise.keys(zeros + 3, steps), zeros + 17),
        noise.gumbel(noise.keys(steps, zeros), zeros + 17),
    ]
    values = torch.stack(rows).double()
    assert values.isfinite().all()
    # P(g <= t) = exp(-exp(-t)); five standard errors of a frequency over 100,000 draws
    for t in (-1.5, 0.0, 1.0, 4.0):
        expected = float(np.exp(-np.exp(-t)))
        frequencies = (values <= t).double().mean(dim=1)
        assert float((frequencies - expected).abs().max()) < 5 * 0.5 / count**0.5
    correlations = torch.corrcoef(values).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 0.02
    for of_row in values:
        assert abs(float(torch.corrcoef(torch.stack([of_row[1:], of_row[:-1]]))[0, 1])) < 0.02
