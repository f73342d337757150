"""The tensors of KV pages, and how many pages there are."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.storage import KVStorage, bytes_per_page, choose_num_pages

SHAPE = AttentionShape(
    num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, windows=(None, None, None)
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_storage_has_a_page_of_its_own(dtype: torch.dtype) -> None:
    kv = KVStorage(SHAPE, num_pages=5, page_size=4, dtype=dtype, device=torch.device("cpu"))
    keys, values = kv.layers[1].keys, kv.layers[1].values
    assert keys.shape == values.shape == (6, 4, 2, 8)
    assert kv.dummy_page == 5
    assert not kv.pages.float().any()
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
) -> int:
    return choose_num_pages(
        page_bytes=1000,
        page_size=16,
        free_bytes=free_bytes,
        reserved_bytes=reserved_bytes,
        memory_ratio=0.5,
        cap_bytes=cap_bytes,
        max_rows=100,
    )


def test_number_of_pages() -> None:
    """One page less than fit: the dummy page."""
    assert _choose(100_000) == 49
    assert _choose(100_000, cap_bytes=30_000) == 29
    assert _choose(100_000, reserved_bytes=20_000) == 39
    assert _choose(10**9) == 499_999  # however few positions all rows can take
    assert _choose(10**15) == 2**31 // 16 - 1  # kernels number positions by int32


def test_no_memory_for_a_page_is_an_error_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1,000 bytes.*950 bytes.*0\.5 of 1,900 free"):
        _choose(1_900)


def test_pages_need_not_hold_a_full_sequence() -> None:
    assert _choose(10_000) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_slots_are_copied_in_all_layers(dtype: torch.dtype) -> None:
    """More than go at a time."""
    kv = KVStorage(SHAPE, num_pages=300, page_size=4, dtype=dtype, device=torch.device("cpu"))
    kv.pages.copy_(torch.randn(kv.pages.shape).to(dtype))
    before = kv.pages.float()
    sources, targets = torch.arange(600), torch.arange(600, 1200).flip(0)
    kv.copy(sources, targets)
    slots, old = kv.pages.float().flatten(2, 3), before.flatten(2, 3)
    assert torch.equal(slots[:, :, targets], old[:, :, sources])
    assert torch.equal(slots[:, :, :600], old[:, :, :600])
    assert torch.equal(slots[:, :, 1200:], old[:, :, 1200:])
