"""In-graph sampling against its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels import sampling
from minisgl_backend.kernels.dispatch import is_interpreted

VOCAB = 3000 if is_interpreted() else 151_936
BATCH = 6 if is_interpreted() else 64


def parameters(
    device: torch.device,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> sampling.RowParameters:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((BATCH,), value, dtype=dtype, device=device)

    return sampling.RowParameters(
        temperature=full(temperature, torch.float32),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p, torch.float32),
        min_p=full(min_p, torch.float32),
        seeds=torch.arange(BATCH, device=device) * 2**40 - 7,
        positions=torch.arange(BATCH, dtype=torch.int32, device=device) % 3,
    )


def sampled(
    logits: Tensor, rows: sampling.RowParameters, penalties: sampling.Penalties | None = None
) -> Tensor:
    workspace = sampling.SamplingWorkspace(len(logits), logits.device)
    return sampling.sample(logits, rows, workspace, penalties=penalties)


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 2500},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.5, "top_k": 2900, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "top_k": 3},
    ],
)
def test_tokens_equal_the_twins(
    device: torch.device, spread: float, options: dict[str, Any]
) -> None:
    logits = torch.randn(BATCH, VOCAB, device=device) * spread
    rows = parameters(device, **options)
    actual = sampled(logits, rows)
    expected = sampling.sample_reference(logits, rows)
    # the last bit of a sum may move a top-p threshold by one token, which rarely is the one chosen
    assert int((actual != expected).sum()) <= BATCH // 32
    assert bool((actual >= 0).all()) and bool((actual < VOCAB).all())


def test_mixed_rows_ties_and_broken_rows(device: torch.device, dtype: torch.dtype) -> None:
    logits = (torch.randn(BATCH, VOCAB, device=device) * 2).to(dtype)
    logits[0] = 1.0  # all tie, at more places than there are candidates
    logits[1, 17] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    logits[4, 100:] = -torch.inf
    rows = parameters(device, temperature=0.7, top_p=0.9)
    rows.top_k[0] = 10
    rows.temperature[4] = 0.0
    actual = sampled(logits, rows)
    assert actual[1:4].tolist() == [sampling.NO_TOKEN] * 3
    assert int(actual[4]) == int(logits[4].argmax())
    assert int(actual[0]) == int(sampling.sample_reference(logits, rows)[0])


def test_penalties(device: torch.device) -> None:
    logits = torch.randn(BATCH, VOCAB, device=device) * 2
    counts = torch.randint(0, 3, (4, VOCAB), dtype=torch.int32, device=device)
    penalties = sampling.Penalties(
        lines=torch.tensor([-1, 3, 0] + [-1] * (BATCH - 3), dtype=torch.int32, device=device),
        output_counts=counts,
        in_prompt=torch.rand(4, VOCAB, device=device) < 0.3,
        repetition=torch.full((BATCH,), 1.3, device=device),
        presence=torch.full((BATCH,), 0.4, device=device),
        frequency=torch.full((BATCH,), 0.2, device=device),
    )
    choices: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 50}]
    for options in choices:
        rows = parameters(device, **options)
        expected = sampling.sample_reference(logits, rows, penalties=penalties)
        assert torch.equal(sampled(logits, rows, penalties), expected)


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    logits = torch.randn(BATCH, VOCAB, device=device)
    rows = parameters(device, temperature=0.9, top_k=40)
    together = sampled(logits, rows)
    order = torch.arange(BATCH - 1, -1, -1, device=device)
    reversed_rows = sampling.RowParameters(
        **{name: getattr(rows, name)[order] for name in rows.__dataclass_fields__}
    )
    assert torch.equal(sampled(logits[order].contiguous(), reversed_rows), together[order])


def test_frequencies_are_those_of_the_softmax(device: torch.device) -> None:
    """Of 50 tokens, 16 each are in one split, and 2 in the last."""
    draws = 200 if is_interpreted() else 100_000
    one = torch.ones(draws, device=device)
    rows = sampling.RowParameters(
        temperature=0.7 * one,
        top_k=torch.zeros_like(one, dtype=torch.int32),
        top_p=one,
        min_p=torch.zeros_like(one),
        seeds=torch.arange(draws, device=device),
        positions=torch.zeros_like(one, dtype=torch.int32),
    )
    logits = torch.linspace(2.0, -1.0, 50, device=device)
    tokens = sampled(logits.repeat(draws, 1), rows)
    frequency = torch.bincount(tokens, minlength=50) / draws
    expected = (logits / 0.7).softmax(dim=0)
    assert ((frequency - expected).abs() < 6 * (expected / draws).sqrt()).all()
