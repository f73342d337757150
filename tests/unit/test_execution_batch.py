"""From plans to indices, pages to slots, and how many pages there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.batch import PageTable, StepIndices
from minisgl_backend.execution.storage import KVStorage, bytes_per_page, choose_num_pages
from minisgl_backend.plan import StepPlan
from minisgl_backend.request import IntArray


def _ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def make_plan(**arrays: IntArray) -> StepPlan:
    """A plan of these arrays; all others are empty."""
    names = (
        "released_rows broken_pages grant_rows grant_indices grant_pages prefill_rows "
        "prefill_starts prefill_lengths prefill_samples prefill_tokens decode_rows decode_positions"
    )
    values = {name: _ints() for name in names.split()} | arrays
    return StepPlan(step=0, admissions=(), **values)


def _page_table(page_size: int = 4) -> PageTable:
    return PageTable(max_rows=6, max_sequence_length=18, page_size=page_size, dummy_page=99)


def test_indices_of_a_mixed_step() -> None:
    table = _page_table()
    plan = make_plan(
        grant_rows=_ints(3, 3, 1, 5, 5),
        grant_indices=_ints(0, 1, 0, 0, 1),
        grant_pages=_ints(10, 11, 12, 13, 14),
        prefill_rows=_ints(3, 1),
        prefill_starts=_ints(2, 0),
        prefill_lengths=_ints(4, 3),
        prefill_samples=_ints(0, 1),
        prefill_tokens=_ints(*range(7)),
        decode_rows=_ints(5),
        decode_positions=_ints(4),
    )
    table.grant(plan)
    found = StepIndices.of(plan, table)
    assert found.flat.positions.tolist() == [4, 2, 3, 4, 5, 0, 1, 2]
    assert found.slots.tolist() == [56, 42, 43, 44, 45, 48, 49, 50]
    assert found.fresh_pages.tolist() == [14, 11, 12]
    assert found.flat.samples.tolist() == [7, 0]
    assert found.flat.sample_rows.tolist() == plan.sample_rows.tolist() == [1, 5]
    assert found.flat.sample_positions.tolist() == [3, 5]
    device = CpuDevice()
    batch = found.batch(table, device)
    device.close()
    assert len(batch.positions) == plan.num_tokens == 8
    assert batch.offsets.tolist() == [0, 1, 5]
    assert batch.page_table.tolist() == [[13, 14], [10, 11], [12, 99]]


def test_indices_of_a_decode_step() -> None:
    table = _page_table(page_size=1)
    table.grant(
        make_plan(
            grant_rows=_ints(0, 0, 2), grant_indices=_ints(0, 1, 0), grant_pages=_ints(7, 8, 9)
        )
    )
    found = StepIndices.of(make_plan(decode_rows=_ints(2, 0), decode_positions=_ints(0, 1)), table)
    assert found.slots.tolist() == found.fresh_pages.tolist() == [9, 8]
    assert found.flat.samples.tolist() == [0, 1]
    assert table.rows(found.rows, found.starts + found.lengths).tolist() == [[9, 99], [7, 8]]


def test_a_later_grant_replaces_a_page() -> None:
    table = _page_table()
    for page in (3, 4):
        table.grant(make_plan(grant_rows=_ints(1), grant_indices=_ints(0), grant_pages=_ints(page)))
    slots, _ = table.locate(np.array([1]), np.array([2]))
    assert slots.tolist() == [18]


SHAPE = AttentionShape(
    num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, windows=(None, None, None)
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_storage_has_a_page_of_its_own(dtype: torch.dtype) -> None:
    kv = KVStorage(SHAPE, num_pages=5, page_size=4, dtype=dtype, device=torch.device("cpu"))
    keys, values = kv.layer(1)
    assert keys.shape == values.shape == (6, 4, 2, 8)
    assert kv.dummy_page == 5
    assert not keys[5].float().any() and not values[5].float().any()
    kv.pages.copy_(torch.full(kv.pages.shape, float("nan")))
    kv.clear(torch.tensor([1, 3]))
    finite = kv.pages.float().isfinite().transpose(0, 2).flatten(1).all(dim=1)
    assert finite.tolist() == [False, True, False, True, False, False]


def test_bytes_of_a_page() -> None:
    assert bytes_per_page(SHAPE, 16, torch.float32) == 2 * 3 * 2 * 8 * 16 * 4
    assert bytes_per_page(SHAPE, 1, torch.bfloat16) == 2 * 3 * 2 * 8 * 2
    kv = KVStorage(
        SHAPE, num_pages=7, page_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    assert kv.pages.nbytes == 8 * bytes_per_page(SHAPE, 16, torch.float32)


def _choose(
    free_bytes: int,
    *,
    reserved_bytes: int = 0,
    cap_bytes: int | None = None,
    max_rows: int = 100,
    length: int = 160,
) -> int:
    return choose_num_pages(
        page_bytes=1000,
        page_size=16,
        free_bytes=free_bytes,
        reserved_bytes=reserved_bytes,
        memory_ratio=0.5,
        cap_bytes=cap_bytes,
        max_rows=max_rows,
        max_sequence_length=length,
    )


def test_number_of_pages() -> None:
    assert _choose(100_000) == 50
    assert _choose(100_000, cap_bytes=30_000) == 30
    assert _choose(100_000, reserved_bytes=20_000) == 40
    assert _choose(10**9) == 100 * 10  # all rows at full length
    assert _choose(10**9, max_rows=2, length=161) == 2 * 11


def test_no_memory_for_a_page_is_an_error_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1,000 bytes.*950 bytes.*0\.5 of 1,900 free"):
        _choose(1_900)


def test_pages_need_not_hold_a_full_sequence() -> None:
    assert _choose(10_000) == 5
