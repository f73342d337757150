"""GEMMs of medium batches against their twins, and the state of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_backend.gates import Gate
from minisgl_backend.kernels import rows, wide_linear
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.sampling_table import Samples
from minisgl_backend.plan import MTP_GUESS
from tests.gpu.compare import assert_close

BATCHES = [9, 40] if is_interpreted() else [9, 16, 17, 32, 33, 64, 100, 128]
SIZES = [(128, 512)] if is_interpreted() else [(128, 512), (4096, 1024), (1024, 3072)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("gate", [None, "silu", "gelu"])
@pytest.mark.parametrize("pdl", [False, True])
def test_wide_linear(
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    sizes: tuple[int, int],
    gate: Gate | None,
    pdl: bool,
) -> None:
    out_features, in_features = sizes
    assert wide_linear.is_faster(batch, out_features, in_features, gated=gate is not None)
    x = torch.randn(batch, in_features, device=device).to(dtype)
    height = out_features * (2 if gate else 1)
    weight = (torch.randn(height, in_features, device=device) * in_features**-0.5).to(dtype)
    bias = torch.randn(height, device=device).to(dtype)
    launch: dict[str, Any] = {"bias": bias, "gate": gate}
    actual = wide_linear.wide_linear(x, weight, pdl=pdl and not is_interpreted(), **launch)
    expected = wide_linear.wide_linear_reference(x, weight, **launch)
    assert_close(actual, expected)


@pytest.mark.parametrize("batch", [*BATCHES, 200, 256] if not is_interpreted() else BATCHES)
@pytest.mark.parametrize("sizes", SIZES)
def test_parts_and_their_norm(
    device: torch.device, dtype: torch.dtype, batch: int, sizes: tuple[int, int]
) -> None:
    out_features, in_features = sizes
    assert wide_linear.is_faster(batch, out_features, in_features, parts=True)
    x = torch.randn(batch, in_features, device=device).to(dtype)
    weight = (torch.randn(out_features, in_features, device=device) * in_features**-0.5).to(dtype)
    parts = wide_linear.linear_parts(x, weight)
    expected = wide_linear.linear_parts_reference(x, weight, len(parts))
    assert_close(parts, expected, tolerance=1e-4)

    residual = torch.randn(batch, out_features, device=device).to(dtype)
    norm, bias = torch.randn(2, out_features, device=device).to(dtype)
    expected_residual = residual.clone()
    actual = wide_linear.add_rms_norm_parts(parts, residual, norm, 1e-6, bias=bias)
    reference = wide_linear.add_rms_norm_parts_reference(
        parts, expected_residual, norm, 1e-6, bias=bias
    )
    assert_close(actual, reference)
    assert_close(residual, expected_residual)


def test_large_weights_are_left_to_the_library() -> None:
    assert not wide_linear.is_faster(64, 17408, 5120)
    assert not wide_linear.is_faster(129, 1024, 1024)
    assert not wide_linear.is_faster(64, 100, 1024)


@pytest.mark.parametrize("dummy_window_page", [None, 77])
@pytest.mark.parametrize("batch", [1, 3, 40, 150])
def test_state_of_rows(device: torch.device, batch: int, dummy_window_page: int | None) -> None:
    num_rows, max_pages, page_size = 200, 6, 16
    tables = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(1)
        table = rows.RowTable.empty(
            num_rows,
            max_pages=max_pages,
            dummy_page=99,
            vocab_size=1000,
            device=device,
            dummy_window_page=dummy_window_page,
            mtp_tokens=3,
        )
        if table.window_pages is not None:
            pages = torch.randint(0, 1000, (num_rows, max_pages), generator=generator)
            table.window_pages[:-1] = pages.int()
        table.known[:, :-1] = torch.randint(0, 1000, (4, num_rows), generator=generator).int()
        table.lengths[:-1] = torch.randint(0, 90, (num_rows,), generator=generator).int()
        table.sampling.column("marked")[:-1:2] = 1
        tables.append(table)
    givens = [rows.StepInputs.empty(160, 160, device) for _ in range(2)]
    chosen = torch.randperm(num_rows, generator=generator)[:batch].int()
    chosen[-(batch // 3 + 1) :] = tables[0].dummy_row  # padding
    pages = torch.where(chosen == tables[0].dummy_row, 99, torch.arange(batch)).int()
    grants = torch.stack([chosen, torch.full_like(chosen, 2), pages], dim=1)
    for given in givens:
        given.buffer[0] = batch
        given.lines[0, :batch] = chosen
        given.lines[1, : batch // 2 : 2] = 7  # in place of the last token, at this position
        given.lines[1, 1 : batch // 2 : 2] = MTP_GUESS - 2
        given.lines[2, :batch] = 40
        given.grants[:batch] = grants
    actual = rows.begin_decode(tables[0], givens[0], batch, page_size)
    names = ["tokens", "positions", "slots", "lengths"]
    if dummy_window_page is not None:
        names.append("window_slots")
    numbers = torch.empty((len(names), batch), dtype=torch.int32, device=device)
    expected = rows.DecodeInputs(givens[1].lines[0, :batch], *numbers)
    rows.begin_decode_reference(expected, tables[1], givens[1], page_size)
    for name in names:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    sampled = torch.randint(-1, 1000, (batch,), generator=generator).int().to(device)
    samples = Samples(actual.rows, actual.lengths, actual.tokens)
    rows.keep_sampled(tables[0], samples, sampled)
    rows.keep_sampled_reference(tables[1], samples, sampled)
    for name in ("lengths", "pages"):
        assert torch.equal(getattr(tables[0], name), getattr(tables[1], name)), name
    assert torch.equal(tables[0].tokens[:-1], tables[1].tokens[:-1])  # padding may keep any token
    assert torch.equal(tables[0].sampling.marks, tables[1].sampling.marks)
    assert givens[0].buffer[0] == 0


@pytest.mark.parametrize("num_guesses", [1, 7, 63])
@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_state_of_rows_after_guesses(device: torch.device, num_rows: int, num_guesses: int) -> None:
    """Rows have up to ``num_guesses``, most of which are right. Many samples are the same token."""
    generator = torch.Generator().manual_seed(num_rows)
    counts = torch.randint(1, num_guesses + 2, (num_rows,), generator=generator)
    chosen = torch.randperm(50, generator=generator)[:num_rows].repeat_interleave(counts)
    chosen = torch.cat([chosen, torch.full((9,), 50)]).int().to(device)  # padding
    tables = []
    for _ in range(2):
        table = rows.RowTable.empty(50, max_pages=1, dummy_page=0, vocab_size=30, device=device)
        table.sampling.column("marked")[:-1:2] = 1
        tables.append(table)
    positions = torch.arange(len(chosen), dtype=torch.int32, device=device)
    sampled = torch.randint(-1, 3, (len(chosen),), generator=generator).int().to(device)
    is_wrong = torch.rand(len(chosen), generator=generator).to(device) < 0.1
    previous = torch.where(is_wrong, 7, sampled.roll(1).clamp_min(0))
    samples = Samples(chosen, positions, previous)
    rows.keep_sampled(tables[0], samples, sampled)
    rows.keep_sampled_reference(tables[1], samples, sampled)
    assert torch.equal(tables[0].tokens[:-1], tables[1].tokens[:-1])
    assert torch.equal(tables[0].lengths, tables[1].lengths)
    assert torch.equal(tables[0].sampling.marks, tables[1].sampling.marks)
