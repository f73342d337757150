"""In-graph sampling against its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels import sampling
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.sampling_table import IS_STOP, SamplingTable

VOCAB = 3000 if is_interpreted() else 151_936
BATCH = 6 if is_interpreted() else 64


def table_of(device: torch.device, num_rows: int = BATCH, **numbers: float) -> SamplingTable:
    """Rows of the same numbers, each with a seed of its own."""
    table = SamplingTable.empty(num_rows, VOCAB, device)
    for name, value in {"temperature": 1.0, **numbers}.items():
        table.column(name).fill_(value)
    table.seeds.copy_(torch.arange(num_rows) * 2**40 - 7)
    return table


def batch_of(table: SamplingTable) -> tuple[Tensor, Tensor]:
    """All rows, the last one first, and a position for each."""
    rows = torch.arange(len(table.numbers), dtype=torch.int32, device=table.numbers.device).flip(0)
    return rows, rows % 3


def sampled(logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor) -> Tensor:
    workspace = sampling.SamplingWorkspace(len(logits), table.vocab_size, logits.device)
    return sampling.sample(logits, table, rows, positions, workspace)


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 2500},
        {"top_k": VOCAB},
        {"top_p": 0.0},
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
    table = table_of(device, **options)
    actual = sampled(logits, table, *batch_of(table))
    expected = sampling.sample_reference(logits, table, *batch_of(table))
    # the last bit of a sum may move a top-p threshold by one token, which rarely is the one chosen
    assert int((actual != expected).sum()) <= BATCH // 32
    assert bool((actual >= 0).all()) and bool((actual < VOCAB).all())


@pytest.mark.parametrize("seed", range(2 if is_interpreted() else 12))
def test_rows_of_all_kinds(device: torch.device, seed: int) -> None:
    """From flat to peaked, with any filters side by side."""
    random = torch.Generator().manual_seed(seed)

    def numbers(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(BATCH, generator=random)

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (BATCH,), generator=random)]

    logits = torch.randn(BATCH, VOCAB, generator=random) * 10 ** numbers(-2, 1.3)[:, None]
    table = table_of(device)
    table.column("temperature").copy_(numbers(0.2, 2.0))
    table.column("top_k").copy_(one_of(0, 0, 1, 7, 60, 900, 2100, 2990))
    table.column("top_p").copy_(torch.where(one_of(0, 1) > 0, numbers(0, 1), one_of(1, 0.95)))
    table.column("min_p").copy_(one_of(0, 0, 0, 1e-6, 0.01, 0.9))
    rows, positions = batch_of(table)
    expected = sampling.sample_reference(logits.to(device), table, rows, positions)
    actual = sampled(logits.to(device), table, rows, positions)
    assert int((actual != expected).sum()) <= BATCH // 32


def test_mixed_rows_ties_and_broken_rows(device: torch.device, dtype: torch.dtype) -> None:
    logits = (torch.randn(BATCH, VOCAB, device=device) * 2).to(dtype)
    logits[0] = 1.0  # all tie, at more places than there are candidates
    logits[1, 17] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    logits[4, 100:] = -torch.inf
    logits[5] = -2.0  # no top_k here: whatever the share, all are kept
    table = table_of(device, temperature=0.7, top_p=0.9)
    rows, positions = batch_of(table)
    table.column("top_k")[rows[0]] = 10
    table.column("temperature")[rows[4]] = 0.0
    actual = sampled(logits, table, rows, positions)
    assert actual[1:4].tolist() == [sampling.NO_TOKEN] * 3
    assert int(actual[4]) == int(logits[4].argmax())
    expected = sampling.sample_reference(logits, table, rows, positions)
    assert actual[[0, 5]].tolist() == expected[[0, 5]].tolist()


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 50}, {"top_p": 0.9, "min_p": 0.001}],
)
def test_adjusted_rows(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Rows with marks, with a bias, with both and with neither, side by side."""
    table = table_of(device, repetition=1.3, presence=0.4, frequency=0.2, **options)
    rows, positions = batch_of(table)
    table.column("marked")[::2] = 1
    table.column("biased")[: BATCH // 2] = 1
    table.column("stops_from")[: BATCH // 3] = 2
    table.marks.copy_(torch.randint(0, 9, table.marks.shape) * (torch.rand(VOCAB) < 0.5))
    table.bias.copy_(torch.randn(table.bias.shape) * 2)
    logits = (torch.randn(BATCH, VOCAB, device=device) * 2).to(dtype)
    expected = sampling.sample_reference(logits, table, rows, positions)
    actual = sampled(logits, table, rows, positions)
    assert int((actual != expected).sum()) <= (BATCH // 32 if "top_p" in options else 0)
    plain = table_of(device, **options)
    assert not torch.equal(actual, sampled(logits, plain, rows, positions))


def test_stop_tokens_do_not_come_early(device: torch.device) -> None:
    """Only one token stops nothing; from its row's position on, the best of the others may come."""
    for temperature in (0.0, 1.0):
        table = table_of(device, temperature=temperature, stops_from=2.0, marked=1.0)
        table.marks.fill_(IS_STOP)
        table.marks[:, 7] = 0
        rows, positions = batch_of(table)
        logits = torch.zeros(BATCH, VOCAB, device=device)
        logits[:, 3] = 50.0
        expected = torch.where(positions < 2, 7, 3)
        assert torch.equal(sampled(logits, table, rows, positions), expected)


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    logits = torch.randn(BATCH, VOCAB, device=device)
    table = table_of(device, temperature=0.9, top_k=40)
    rows, positions = batch_of(table)
    together = sampled(logits, table, rows, positions)
    turned = sampled(logits.flip(0), table, rows.flip(0), positions.flip(0))
    assert torch.equal(turned.flip(0), together)


def test_frequencies_are_those_of_the_softmax(device: torch.device) -> None:
    """Of 50 tokens, 16 each are in one split, and 2 in the last."""
    draws = 200 if is_interpreted() else 100_000
    table = SamplingTable.empty(draws, 50, device)
    table.column("temperature").fill_(0.7)
    table.seeds.copy_(torch.arange(draws))
    logits = torch.linspace(2.0, -1.0, 50, device=device)
    tokens = sampled(logits.repeat(draws, 1), table, *batch_of(table))
    frequency = torch.bincount(tokens, minlength=50) / draws
    expected = (logits / 0.7).softmax(dim=0)
    assert ((frequency - expected).abs() < 6 * (expected / draws).sqrt()).all()
