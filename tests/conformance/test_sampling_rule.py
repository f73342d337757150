"""The sampling rule, in each of its implementations: the oracle, which sorts; a CPU's; Triton's.

Results computed by hand and claims about distributions hold for all three; then the other two give
the oracle's tokens for batches of all kinds of rows. Triton's runs on a GPU (``-m gpu``), or under
its interpreter (TRITON_INTERPRET=1) with fewer rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl_backend.kernels.dispatch import has_triton, is_interpreted
from minisgl_backend.kernels.sampling import best_of_part, best_of_parts, sample
from minisgl_backend.kernels.sampling_cpu import sample_on_cpu
from minisgl_backend.kernels.sampling_rule import (
    Filters,
    filter_threshold_reference,
    sample_reference,
    split_size,
    splits_of_rank,
)
from minisgl_backend.kernels.sampling_table import (
    COLUMNS,
    IN_PROMPT,
    IS_STOP,
    ONCE,
    WORD,
    SamplingTable,
    num_words,
)
from minisgl_backend.kernels.sampling_workspace import SamplingWorkspace
from minisgl_backend.plan import NO_TOKEN
from minisgl_backend.request import LEAST_TEMPERATURE

LARGE_VOCAB: Final = 3000 if is_interpreted() else 151_936


@dataclass(frozen=True)
class Way:
    """An implementation on its device, with batches of at most ``most_rows``."""

    device: torch.device
    sample: Callable[[Tensor, SamplingTable, Tensor, Tensor], Tensor]
    most_rows: int = 20_000
    least_vocab: int = 1
    """Triton cannot compile its kernels for a single token."""

    def table(self, num_rows: int, vocab_size: int, **numbers: float) -> SamplingTable:
        """Rows with the same numbers, at temperature 1, each with its own seed."""
        table = SamplingTable.empty(num_rows, vocab_size, self.device)
        for name, value in {"temperature": 1.0, **numbers}.items():
            table.column(name).fill_(value)
        table.seeds.copy_(torch.arange(num_rows) * 2**40 - 7)
        return table

    def draw(self, logits: Tensor, table: SamplingTable, position: int = 0) -> list[int]:
        """A token for each row of the table, at the same position."""
        rows = torch.arange(len(logits), dtype=torch.int32, device=self.device)
        positions = torch.full_like(rows, position)
        tokens = self.sample(logits.to(self.device), table, rows, positions)
        assert tokens.dtype == torch.int32
        return tokens.tolist()


def _by_triton(logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor) -> Tensor:
    workspace = SamplingWorkspace(len(logits), table.vocab_size, logits.device)
    return sample(logits, table, rows, positions, workspace)


_CPU: Final = torch.device("cpu")
ORACLE: Final = Way(_CPU, sample_reference)
ON_CPU: Final = Way(_CPU, sample_on_cpu)
TRITON: Final = (
    Way(_CPU, _by_triton, most_rows=8, least_vocab=2)
    if is_interpreted()
    else Way(torch.device("cuda"), _by_triton, least_vocab=2)
)
_ON_GPU: Final = (
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (has_triton() and (torch.cuda.is_available() or is_interpreted())),
        reason="no GPU, or no Triton",
    ),
)


@pytest.fixture(
    params=[ORACLE, ON_CPU, pytest.param(TRITON, marks=_ON_GPU)], ids=["oracle", "cpu", "triton"]
)
def way(request: pytest.FixtureRequest) -> Way:
    torch.manual_seed(0)
    found = request.param
    assert isinstance(found, Way)
    return found


@pytest.fixture(params=[ON_CPU, pytest.param(TRITON, marks=_ON_GPU)], ids=["cpu", "triton"])
def fast_way(request: pytest.FixtureRequest) -> Way:
    """All but the oracle."""
    torch.manual_seed(0)
    found = request.param
    assert isinstance(found, Way)
    return found


def _logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def _most_different(way: Way, num_rows: int) -> int:
    """How many rows may differ from the oracle's: summing floats in another order may move a
    threshold by one token, which is rarely the one chosen. A CPU sums as the oracle does."""
    return 0 if way is ON_CPU else max(num_rows // 32, 1)


# Greedy rows


@pytest.mark.parametrize("vocab_size", [1, 7, 127, 128, 129, 2048, 2049, 5000])
def test_greedy_is_argmax(way: Way, vocab_size: int) -> None:
    num_rows, vocab_size = min(20, way.most_rows), max(vocab_size, way.least_vocab)
    logits = _logits(num_rows, vocab_size)
    table = way.table(num_rows, vocab_size, temperature=0.0)
    assert way.draw(logits, table) == logits.argmax(dim=-1).tolist()


def test_greedy_takes_the_first_of_equals(way: Way) -> None:
    logits = torch.zeros(4, 5000)
    logits[1, [30, 4000]] = 1
    logits[2, [4999]] = 1
    logits[3, [4090, 4999]] = 1
    assert way.draw(logits, way.table(4, 5000, temperature=0.0)) == [0, 30, 4999, 4090]


def test_greedy_rows_have_no_filters(way: Way) -> None:
    num_rows = min(20, way.most_rows)
    logits = _logits(num_rows, 300)
    table = way.table(num_rows, 300, temperature=0.0, top_k=3, top_p=0.5, min_p=0.9)
    assert way.draw(logits, table) == logits.argmax(dim=-1).tolist()


def test_the_least_temperature_is_greedy(way: Way) -> None:
    num_rows = min(20, way.most_rows)
    logits = _logits(num_rows, 300)
    for filters in ({}, {"top_k": 9.0}):
        table = way.table(num_rows, 300, temperature=LEAST_TEMPERATURE, **filters)
        assert way.draw(logits, table) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(
    way: Way, options: dict[str, float]
) -> None:
    logits = torch.zeros(5, 600)
    logits[0, 2] = torch.nan
    logits[1, 599] = torch.inf
    logits[2] = -torch.inf
    logits[3:, 4] = 90.0
    logits[4, 500:] = -torch.inf
    table = way.table(5, 600, **options)
    for marked in (0.0, 1.0):
        table.column("marked").fill_(marked)
        assert way.draw(logits, table) == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 4, 4]


# Random rows


@pytest.mark.parametrize("vocab_size", [3, 50])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_are_those_of_the_softmax(
    way: Way, vocab_size: int, temperature: float
) -> None:
    """50 tokens fill splits of 16 each, and the last one has 2."""
    draws = way.most_rows
    logits = torch.linspace(2.0, -1.0, vocab_size)
    table = way.table(draws, vocab_size, temperature=temperature)
    tokens = torch.tensor(way.draw(logits.repeat(draws, 1), table))
    assert _chi_squared(tokens, (logits.double() / temperature).softmax(dim=-1)) < 100


def test_impossible_tokens_are_never_chosen(way: Way) -> None:
    draws = min(200, way.most_rows)
    logits = torch.full((draws, 800), -torch.inf)
    logits[:, [2, 555]] = 0.0
    for filters in ({}, {"top_k": 50.0}, {"top_p": 0.99}, {"min_p": 0.001}):
        assert set(way.draw(logits, way.table(draws, 800, **filters))) == {2, 555}


FILTERS: Final = [
    {"top_k": 5.0},
    {"top_k": 1.0},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 8.0, "top_p": 0.8},
    {"top_k": 12.0, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 40.0, "top_p": 0.5},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_the_set_and_the_proportions(way: Way, filters: dict[str, float]) -> None:
    draws = way.most_rows
    logits = _logits(1, 40)
    table = way.table(draws, 40, temperature=0.9, **filters)
    tokens = torch.tensor(way.draw(logits.repeat(draws, 1), table))
    expected = _filtered_distribution(logits[0], 0.9, filters)
    assert set(tokens.tolist()) <= set(expected.nonzero().flatten().tolist())
    assert _chi_squared(tokens, expected) < 90  # up to 39 degrees of freedom: p < 1e-5


def test_tokens_that_tie_with_the_last_kept_one_are_kept(way: Way) -> None:
    draws = min(200, way.most_rows)
    logits = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.1]).log().repeat(draws, 1)
    for filters in ({"top_k": 2.0}, {"top_p": 0.5}, {"min_p": 0.5}):
        table = way.table(draws, 5, **filters)
        tokens = {token for at in range(4) for token in way.draw(logits, table, at)}
        assert tokens == {0, 1, 2, 3}


def test_ties_beyond_the_first_candidates_are_kept(way: Way) -> None:
    """All tokens but one tie, more than the candidates that a search begins with."""
    draws = min(400, way.most_rows)
    logits = torch.zeros(draws, 6000)
    logits[:, 17] = -1.0
    tokens = way.draw(logits, way.table(draws, 6000, top_k=10))
    assert 17 not in tokens and len(set(tokens)) > 0.9 * draws
    assert max(tokens) > 3000


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"min_p": 0.8}, {"top_p": 0.9, "min_p": 0.9}])
def test_a_flat_distribution_keeps_thousands(way: Way, filters: dict[str, float]) -> None:
    vocab_size, draws = 20_000, min(300, way.most_rows)
    logits = torch.linspace(0.5, 0.0, vocab_size)
    tokens = torch.tensor(
        way.draw(logits.repeat(draws, 1), way.table(draws, vocab_size, **filters))
    )
    expected = _filtered_distribution(logits, 1.0, filters)
    kept = int(expected.count_nonzero())
    assert kept > 4000 and int(tokens.max()) < kept
    ids = torch.arange(vocab_size)
    mean = float((expected * ids).sum())
    deviation = float((expected * (ids - mean) ** 2).sum()) ** 0.5
    assert abs(float(tokens.double().mean()) - mean) < 5 * deviation / draws**0.5


def test_wide_and_narrow_filters_side_by_side(way: Way) -> None:
    vocab_size = 20_000
    kept = [3, 15_000, 17_950, 1, 700]
    table = way.table(5, vocab_size)
    table.column("top_k")[:] = torch.tensor([3.0, 15_000.0, 0.0, 1.0, 700.0])
    table.column("top_p")[2] = 0.9
    logits = torch.linspace(0.1, 0.0, vocab_size).repeat(5, 1)
    seen = np.array([way.draw(logits, table, at) for at in range(min(30, way.most_rows))])
    assert (seen.max(axis=0) < kept).all()
    assert (seen.max(axis=0) + 1 >= np.array(kept) * 0.5).all()


# Rows whose logits are adjusted


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for, and what it has been given."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    stops: tuple[int, ...] = ()
    min_tokens: int = 0
    prompt: tuple[int, ...] = (1, 2, 3)
    output: tuple[int, ...] = ()

    def write(self, table: SamplingTable, row: int) -> None:
        """Give the request a row of the table, whatever is there."""
        numbers = {
            "repetition": self.repetition,
            "presence": self.presence,
            "frequency": self.frequency,
            "stops_from": len(self.prompt) + self.min_tokens,
            "marked": float(self.is_penalized or bool(self.stops)),
            "biased": float(bool(self.bias)),
            "masked": float(self.allowed is not None),
        }
        for name, value in numbers.items():
            table.column(name)[row] = value
        marks = torch.zeros(table.vocab_size, dtype=torch.int32)
        marks[list(self.prompt)] = IN_PROMPT
        for token in self.output:
            marks[token] += ONCE
        marks[list(self.stops)] += IS_STOP
        if numbers["marked"]:
            table.marks[row] = marks.to(table.marks.device)
        if self.bias:
            tokens, values = zip(*self.bias, strict=True)
            table.bias[row] = 0
            table.bias[row, list(tokens)] = torch.tensor(values, device=table.bias.device)

        if self.allowed is not None:
            write_mask(table, row, self.allowed)

    @property
    def is_penalized(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1, 0, 0)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def adjusted(self, logits: list[float]) -> list[float]:
        """The logits after penalties, bias and stop tokens, token by token."""
        adjusted = list(logits)
        for token, logit in enumerate(logits):
            count = self.output.count(token)
            if token in self.prompt or count:
                logit = logit / self.repetition if logit > 0 else logit * self.repetition
            adjusted[token] = logit - self.frequency * count - self.presence * (count > 0)
        for token, bias in self.bias:
            adjusted[token] += bias
        if len(self.output) < self.min_tokens:
            for token in self.stops:
                adjusted[token] = -math.inf
        if self.allowed is not None:
            adjusted = [x if t in self.allowed else -math.inf for t, x in enumerate(adjusted)]
        return adjusted


def write_mask(table: SamplingTable, sample: int, allowed: Iterable[int]) -> None:
    """Set the bits of these tokens, and clear all others."""
    line = np.zeros(num_words(table.vocab_size), np.uint32)
    for token in allowed:
        line[token // WORD] |= np.uint32(1 << token % WORD)
    table.masks[sample] = torch.from_numpy(line.view(np.int32)).to(table.masks.device)


ADJUSTED: Final = [
    Asked(repetition=1.8),
    Asked(repetition=0.6),
    Asked(presence=1.5),
    Asked(frequency=-0.7),
    Asked(repetition=1.3, presence=-1.0, frequency=0.9),
    Asked(bias=((7, 20.0), (8, -100.0), (9, 5.0))),
    Asked(min_tokens=5, stops=tuple(range(0, 50, 2))),
    Asked(min_tokens=4, stops=(3, 4), frequency=0.4),
    Asked(
        min_tokens=6,
        stops=tuple(range(25)),
        bias=((30, 4.0), (5, 50.0)),
        repetition=2.0,
        frequency=1.0,
    ),
    Asked(allowed=(0, 31, 32, 49)),
    Asked(allowed=(17,)),
    Asked(allowed=tuple(range(20, 45)), repetition=1.5, bias=((21, 9.0), (1, 90.0))),
    Asked(allowed=(2, 3, 40), min_tokens=5, stops=(2, 40)),
    Asked(),
]


def test_penalties_bias_masks_and_stop_tokens_one_by_one(way: Way) -> None:
    """All rows are in one batch, over several steps, so that counts of the output matter."""
    requests = [
        replace(asked, prompt=tuple(range(row, row + 5)), output=(4, 4, 9))
        for row, asked in enumerate(ADJUSTED)
    ]
    table = way.table(len(requests), 50, temperature=0.0)
    rows = torch.arange(len(requests), dtype=torch.int32, device=way.device)
    for step in range(12):
        for row, asked in enumerate(requests):
            asked.write(table, row)
        logits = 1.5 * _logits(len(requests), 50, seed=step).to(way.device)
        before, marks = logits.clone(), table.marks.clone()
        positions = torch.full_like(rows, requests[0].position)
        tokens = way.sample(logits, table, rows, positions).tolist()
        assert torch.equal(logits, before) and torch.equal(table.marks, marks)
        for row, asked in enumerate(requests):
            wanted = asked.adjusted(logits[row].tolist())
            assert tokens[row] == max(range(50), key=lambda token: wanted[token])
            requests[row] = replace(asked, output=(*asked.output, tokens[row]))


def test_only_allowed_tokens_are_drawn(way: Way) -> None:
    """With and without filters; a row that is allowed nothing gets no token."""
    allowed = [3, 64, 97]
    logits = torch.zeros(300, 98)
    logits[:, 5] = 40.0
    for options in ({}, {"top_k": 5.0}, {"top_p": 0.99}, {"min_p": 0.01}):
        table = way.table(300, 98, masked=1.0, **options)
        for row in range(300):
            write_mask(table, row, allowed)
        assert set(way.draw(logits, table)) == set(allowed)
    table.masks.zero_()
    assert set(way.draw(logits, table)) == {NO_TOKEN}


def test_each_sample_of_a_row_has_its_own_mask(way: Way) -> None:
    """With and without filters. The first row has no grammar."""
    table = SamplingTable.empty(2, 40, way.device, most_guesses=2)
    table.column("masked")[1] = 1
    rows = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=way.device)
    allowed = [[7], [], [8, 9], [31, 32]]
    for index, few in enumerate(allowed):
        write_mask(table, index, few)
    logits = torch.linspace(0.0, 3.0, 40, device=way.device).repeat(4, 1)
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 30)):
        table.column("temperature").fill_(temperature)
        table.column("top_k").fill_(top_k)
        tokens = way.sample(logits, table, rows, torch.arange(4, device=way.device).int()).tolist()
        assert [tokens[0], tokens[2] in (8, 9), tokens[3] in (31, 32)] == [7, True, True]
        assert tokens[1] not in (7, NO_TOKEN)
        if not temperature:
            assert tokens == [7, 39, 9, 32]


def test_stop_tokens_come_from_their_position_on(way: Way) -> None:
    table = way.table(1, 30)
    Asked(stops=(7,), min_tokens=2).write(table, 0)
    logits = torch.zeros(1, 30)
    logits[0, 7], logits[0, 8] = 50.0, 25.0
    for options in ({"temperature": 0.0}, {"temperature": 0.1}, {"top_k": 20.0}):
        for name, value in options.items():
            table.column(name)[0] = value
        assert [way.draw(logits, table, at)[0] for at in (3, 4, 5, 6)] == [8, 8, 7, 7]


def test_lines_of_rows_that_are_not_marked_or_biased_are_not_read(way: Way) -> None:
    table = way.table(2, 40, temperature=0.0, repetition=2.0, presence=0.5, frequency=1.0)
    table.marks[:, :2] = torch.tensor([2 * ONCE, IN_PROMPT])
    table.bias[:, 3] = 1e9
    table.column("marked")[1] = 1
    # row 1: 9 / 2 - 2 * 1 - 0.5 = 2, and 4.2 / 2 = 2.1, so the third token wins with 2.5
    logits = torch.full((2, 40), -5.0)
    logits[:, :3] = torch.tensor([9.0, 4.2, 2.5])
    assert way.draw(logits, table) == [0, 2]
    table.column("biased")[0] = 1
    assert way.draw(logits, table) == [3, 2]


def test_adjusted_logits_are_what_is_drawn_from(way: Way) -> None:
    """Adjusted by hand or by the table, every kind of row gets the same token."""
    bias = tuple((token, 2.0) for token in range(0, 400, 5))
    asked = Asked(repetition=1.4, presence=0.3, bias=bias, output=(9, 9, 200))
    num_rows = min(24, way.most_rows)
    logits = _logits(num_rows, 400)
    by_hand = torch.tensor([asked.adjusted(of_row) for of_row in logits.tolist()])
    for filters in ({"temperature": 0.0}, {}, {"top_k": 6.0}, {"top_p": 0.8}, {"min_p": 0.2}):
        table = way.table(num_rows, 400, **filters)
        expected = way.draw(by_hand, table, asked.position)
        for row in range(num_rows):
            asked.write(table, row)
        assert way.draw(logits, table, asked.position) == expected
        assert expected != way.draw(logits, way.table(num_rows, 400, **filters), asked.position)


def test_a_request_that_moves_to_another_row_goes_on_alike(way: Way) -> None:
    asked = Asked(frequency=0.8, repetition=1.2)
    table = way.table(6, 50, temperature=0.7)
    table.seeds.fill_(2**62 + 1)
    tokens = []
    for step in range(10):
        row = 0 if step < 4 else 5
        asked.write(table, row)
        ids = torch.tensor([[row], [asked.position]], dtype=torch.int32, device=way.device)
        logits = _logits(1, 50, seed=step).to(way.device)
        together = torch.cat([logits, -logits])
        tokens += way.sample(logits, table, *ids).tolist()
        both = torch.cat([ids, torch.tensor([[3], [0]], device=way.device)], dim=1).int()
        assert way.sample(together, table, *both).tolist()[0] == tokens[-1]
        asked = replace(asked, output=tuple(tokens))
    assert len(set(tokens)) > 1


# Batches of all kinds of rows


def _mixed_table(
    way: Way, num_rows: int, vocab_size: int, random: torch.Generator
) -> SamplingTable:
    def numbers(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num_rows, generator=random)

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=random)]

    table = way.table(num_rows, vocab_size)
    for name, values in {
        "temperature": torch.where(one_of(0, 1, 1) > 0, numbers(0.2, 2.0), 0),
        "top_k": one_of(0, 0, 1, 7, 60, 900, 2100, 2990, vocab_size).clamp_max(vocab_size),
        "top_p": torch.where(one_of(0, 1) > 0, numbers(0, 1), one_of(1, 0.95, 0, 0.5)),
        "min_p": one_of(0, 0, 0, 1e-6, 0.01, 0.9, 1),
        "repetition": one_of(1, 1.3, 0.7),
        "presence": one_of(0, 0.4),
        "frequency": one_of(0, -0.2),
        "stops_from": one_of(0, 2),
        "marked": one_of(0, 0, 1),
        "biased": one_of(0, 0, 1),
        "masked": one_of(0, 0, 1),
    }.items():
        table.column(name).copy_(values)
    shape = (num_rows, vocab_size)
    few = torch.rand(shape, generator=random) < 0.3
    table.marks.copy_(torch.randint(0, 9, shape, generator=random) * few)
    table.bias.copy_(torch.randn(shape, generator=random) * few)
    table.masks.copy_(torch.randint(-(2**31), 2**31, table.masks.shape, generator=random))
    table.seeds.copy_(torch.randint(-(2**62), 2**62, (num_rows,), generator=random))
    return table


def _mixed_logits(
    num_rows: int, vocab_size: int, random: torch.Generator, *, grain: float | None
) -> Tensor:
    """From flat to peaked, in steps of ``grain`` so that many tie; some broken or nearly empty."""
    spread = 10 ** (2.3 * torch.rand(num_rows, 1, generator=random) - 1)
    logits = torch.randn(num_rows, vocab_size, generator=random) * spread
    if grain is not None:
        logits = (logits / grain).round() * grain
    broken = torch.rand(num_rows, generator=random)
    at = int(torch.randint(vocab_size, (), generator=random))
    logits[broken < 0.05, at] = torch.nan
    logits[(broken >= 0.05) & (broken < 0.1), at] = torch.inf
    logits[(broken >= 0.1) & (broken < 0.15)] = -torch.inf
    logits[(broken >= 0.15) & (broken < 0.2)] = 1.0
    logits[(broken >= 0.2) & (broken < 0.3), at + 1 :] = -torch.inf
    return logits


@settings(max_examples=6 if is_interpreted() else 60)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 3, 50, 129, 2049, 5000, 12_345]),
    grain=st.sampled_from([None, 0.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def _holds_for_mixed_batches(
    way: Way, seed: int, vocab_size: int, grain: float | None, dtype: torch.dtype
) -> None:
    num_rows, vocab_size = min(24, way.most_rows), max(vocab_size, way.least_vocab)
    random = torch.Generator().manual_seed(seed)
    table = _mixed_table(way, num_rows, vocab_size, random)
    logits = _mixed_logits(num_rows, vocab_size, random, grain=grain)
    if way is ON_CPU or dtype != torch.float64:
        logits = logits.to(dtype)
    logits = logits.to(way.device)
    rows = torch.randperm(num_rows, generator=random).int().to(way.device)
    positions = torch.randint(0, 4, (num_rows,), generator=random).int().to(way.device)
    before, marks, bias = logits.clone(), table.marks.clone(), table.bias.clone()
    actual = way.sample(logits, table, rows, positions)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert torch.equal(table.marks, marks) and torch.equal(table.bias, bias)
    expected = sample_reference(logits, table, rows, positions)
    assert int((actual != expected).sum()) <= _most_different(way, num_rows)
    assert torch.equal(actual == NO_TOKEN, expected == NO_TOKEN)


def test_tokens_of_mixed_batches_are_the_oracles(fast_way: Way) -> None:
    _holds_for_mixed_batches(fast_way)


@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 2500},
        {"top_k": LARGE_VOCAB},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.5, "top_k": 2900, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "top_k": 3},
    ],
    ids=str,
)
def test_tokens_of_a_large_vocabulary_are_the_oracles(
    fast_way: Way, spread: float, options: dict[str, float]
) -> None:
    num_rows = 4 if fast_way is ON_CPU else min(64, fast_way.most_rows)
    logits = (torch.randn(num_rows, LARGE_VOCAB) * spread).to(fast_way.device)
    table = fast_way.table(num_rows, LARGE_VOCAB, **options)
    rows = torch.arange(num_rows, dtype=torch.int32, device=fast_way.device).flip(0)
    actual = fast_way.sample(logits, table, rows, rows % 3)
    expected = sample_reference(logits, table, rows, rows % 3)
    assert int((actual != expected).sum()) <= _most_different(fast_way, num_rows)
    assert bool((actual >= 0).all()) and bool((actual < LARGE_VOCAB).all())


def test_a_row_depends_on_itself_alone(way: Way) -> None:
    """The same alone and in a batch of another order, at other rows of another table."""
    num_rows, vocab_size = min(64, way.most_rows), 3000
    random = torch.Generator().manual_seed(5)
    table = _mixed_table(way, num_rows, vocab_size, random)
    logits = _logits(num_rows, vocab_size).to(way.device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=way.device)
    together = way.sample(logits, table, rows, rows % 3)
    turned = SamplingTable(*(of.flip(0) for of in table))
    reverse = way.sample(logits.flip(0), turned, rows, rows.flip(0) % 3)
    assert torch.equal(reverse.flip(0), together)
    for row in range(num_rows):
        own = slice(row, row + 1)
        with_its_mask = table._replace(masks=table.masks[own])
        alone = way.sample(logits[own], with_its_mask, rows[own], rows[own] % 3)
        assert torch.equal(alone, together[own])


def test_seeds_and_positions_draw_other_tokens(way: Way) -> None:
    logits = torch.zeros(1, 2000)
    table = way.table(1, 2000)
    at_positions = [way.draw(logits, table, position)[0] for position in range(8)]
    of_seeds = []
    for seed in range(8):
        table.seeds.fill_(seed)
        of_seeds += way.draw(logits, table)
    assert len(set(at_positions)) > 4 and len(set(of_seeds)) > 4


def test_float64_logits_are_not_rounded() -> None:
    """On a CPU, differences too small for float32 decide."""
    logits = torch.full((1, 3000), 1.0, dtype=torch.float64)
    logits[0, 1234] += 1e-12
    for way in (ORACLE, ON_CPU):
        table = way.table(1, 3000)
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1.0}):
            for name, value in options.items():
                table.column(name).fill_(value)
            for marked in (0.0, 1.0):
                table.column("marked").fill_(marked)
                table.column("presence").fill_(0.5)
                table.marks[0, 7] = ONCE
                assert way.draw(logits, table) == [1234]


def test_ties_at_the_threshold_are_kept_by_the_oracle() -> None:
    weights = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.1]])
    filters = Filters.of(ORACLE.table(1, 5, top_k=2), torch.zeros(1, dtype=torch.int64))
    assert float(filter_threshold_reference(weights, filters)) == 0.5


def test_all_columns_of_the_table_vary_in_the_mixed_batches() -> None:
    table = _mixed_table(ORACLE, 64, 50, torch.Generator().manual_seed(0))
    assert all(len(set(table.column(name).tolist())) > 1 for name in COLUMNS)


def _filtered_distribution(logits: Tensor, temperature: float, filters: dict[str, float]) -> Tensor:
    """Probabilities [vocab_size] after the filters, token by token in Python."""
    probabilities: list[float] = (logits.double() / temperature).softmax(dim=-1).tolist()
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
    """Pearson's statistic over tokens that are expected at least five times."""
    counts = chosen.bincount(minlength=len(expected)).double()
    wanted = expected * len(chosen)
    common = wanted >= 5
    return float(((counts - wanted)[common] ** 2 / wanted[common]).sum())


# Parts of the vocabulary


@pytest.mark.parametrize("vocab_size", [99, 199, 3000, LARGE_VOCAB])
@pytest.mark.parametrize("num_parts", [2, 3, 4, 8])
def test_the_best_part_has_the_token_of_the_whole(
    fast_way: Way, num_parts: int, vocab_size: int
) -> None:
    """For greedy and random rows; broken rows have no token. The last parts may be empty."""
    num_rows = min(64, fast_way.most_rows)
    table = fast_way.table(num_rows, vocab_size)
    table.column("temperature")[::3] = 0.0
    table.column("temperature")[1::3] = 0.6
    logits = _logits(num_rows, vocab_size).to(fast_way.device)
    logits[2, vocab_size // 2] = torch.nan
    logits[3, vocab_size - 1] = torch.inf
    logits[4] = -torch.inf
    logits[5, : vocab_size // 2] = -torch.inf
    logits[6] = 0.5  # among equals the first wins
    logits = logits.bfloat16()
    whole = fast_way.draw(logits, table, position=3)
    rows = torch.arange(num_rows, dtype=torch.int32, device=fast_way.device)
    workspace = SamplingWorkspace(num_rows, vocab_size, fast_way.device)
    positions, found, size = torch.full_like(rows, 3), [], split_size(vocab_size)
    for rank in range(num_parts):
        splits = splits_of_rank(vocab_size, rank, num_parts)
        held = logits[:, size * splits.start : size * splits.stop]
        part = logits.new_full((num_rows, held.shape[1] + 16), torch.nan)  # NaN is not to be read
        part[:, : held.shape[1]] = held
        found.append(best_of_part(part, table, rows, positions, workspace, splits))
    assert best_of_parts(torch.stack(found)).tolist() == whole
