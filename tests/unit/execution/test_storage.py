"""The tensors of KV pages, and how many pages there are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from minisgl_backend.attention.base import AttentionShape, LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.storage import (
    KVStorage,
    WindowRule,
    bytes_per_page,
    choose_num_pages,
)
from minisgl_backend.kernels.paged_kv import KVScale
from minisgl_backend.models.catalog import parse_spec
from minisgl_bench.dummy_model import SHAPES
from tests.unit.models.config_jsons import MISTRAL_7B

SHAPE = AttentionShape(
    num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, windows=(None, None, None)
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_storage_has_a_page_of_its_own(dtype: torch.dtype) -> None:
    kv = KVStorage(SHAPE, num_pages=5, page_size=4, dtype=dtype, device=torch.device("cpu"))
    keys, values = kv.layers[1].keys, kv.layers[1].values
    assert keys.shape == values.shape == (6, 4, 2, 8)
    assert kv.dummy_page == 5
    assert not kv.pages[0].float().any()
    kv.pages[0].copy_(torch.full(kv.pages[0].shape, float("nan")))
    kv.clear(torch.tensor([1, 3]))
    finite = kv.pages[0].float().isfinite().transpose(0, 2).flatten(1).all(dim=1)
    assert finite.tolist() == [False, True, False, True, False, False]


def test_bytes_of_a_page() -> None:
    assert bytes_per_page(SHAPE, 16, torch.float32) == 2 * 3 * 2 * 8 * 16 * 4
    assert bytes_per_page(SHAPE, 1, torch.bfloat16) == 2 * 3 * 2 * 8 * 2
    kv = KVStorage(
        SHAPE, num_pages=7, page_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    assert kv.pages[0].nbytes == 8 * bytes_per_page(SHAPE, 16, torch.float32)


def test_latents_are_keys_and_values_at_once() -> None:
    shape = replace(SHAPE, num_kv_heads=1, head_dim=12, latent_dim=8)
    assert bytes_per_page(shape, 4, torch.bfloat16) == 3 * 12 * 4 * 2
    kv = KVStorage(
        shape,
        num_pages=3,
        page_size=4,
        dtype=torch.float8_e4m3fn,
        device=torch.device("cpu"),
        scales=[KVScale(0.5, 2.0)] * 3,
    )
    assert kv.pages[0].nbytes == 4 * bytes_per_page(shape, 4, torch.float8_e4m3fn)
    for layer in kv.layers:
        assert layer.values.shape == (4, 4, 1, 8)
        assert layer.scale == KVScale(0.5, 0.5) and layer.v_scale == layer.k_scale
        layer.keys.copy_(torch.arange(12.0).expand(4, 4, 1, 12))
        assert layer.values[3, 3, 0].float().tolist() == list(range(8))
    kv.clear(torch.tensor([1]))
    kv.copy(torch.tensor([4]), torch.tensor([8]))
    for layer in kv.layers:
        assert not layer.keys[1].float().any() and not layer.values[2, 0].float().any()
        assert layer.keys[2, 1, 0].float().tolist() == list(range(12))


def test_layers_may_differ_in_their_heads() -> None:
    wide, narrow = LayerHeads(2, 1, 16), LayerHeads(4, 2, 8)
    shape = replace(SHAPE, by_layer=(narrow, wide, narrow), windows=(5, None, 7))
    kv = KVStorage(shape, num_pages=3, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    heads = [layer.keys.shape[2:] for layer in kv.layers]
    assert heads == [(2, 8), (1, 16), (2, 8)]
    assert bytes_per_page(shape, 4, torch.float32) == 2 * 4 * 4 * (16 + 16 + 16)
    (of_narrow, own), (of_wide, other) = shape.kinds
    assert (of_narrow.windows, own, of_wide.windows, other) == ((5, 7), (0, 2), (None,), (1,))
    for number, layer in enumerate(kv.layers):
        layer.keys.fill_(number)
        layer.values.fill_(number + 10)
    kv.clear(torch.tensor([1]))
    kv.copy(torch.tensor([0]), torch.tensor([8]))
    for number, layer in enumerate(kv.layers):
        assert layer.keys[:, 0, 0, 0].tolist() == [number, 0, number, number]
        assert not layer.values[1].any() and (layer.values[2] == number + 10).all()


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
    """One page fewer than fit: the dummy page."""
    assert _choose(100_000) == 49
    assert _choose(100_000, cap_bytes=30_000) == 29
    assert _choose(100_000, reserved_bytes=20_000) == 29
    assert _choose(10**9) == 499_999  # however few positions all rows can use
    assert _choose(10**15) == 2**31 // 16 - 1  # kernels number positions with int32


def test_layers_with_windows_have_pages_of_their_own() -> None:
    shape = replace(SHAPE, windows=(5, None, 7)).for_context(100)
    kv = KVStorage(
        shape,
        num_pages=6,
        num_window_pages=3,
        page_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert [len(layer.keys) for layer in kv.layers] == [4, 7, 4]
    assert (kv.dummy_page, kv.dummy_window_page) == (6, 3)
    for pages in kv.pages:
        pages.fill_(1)
    kv.clear(torch.tensor([5]))
    kv.clear(torch.tensor([0, 2]), window_pages=True)
    zeros = [(layer.keys == 0).flatten(1).all(dim=1).nonzero().flatten() for layer in kv.layers]
    assert [of_layer.tolist() for of_layer in zeros] == [[0, 2], [5], [0, 2]]
    assert not SHAPE.for_context(100).window_pages, "no layer has a window"
    assert not replace(SHAPE, windows=(5, 5, 5)).for_context(5).window_pages
    assert not replace(SHAPE, windows=(5, None, 7)).for_context(7).window_pages


def test_sections_are_windows() -> None:
    sections = replace(SHAPE, windows=(8, None, 8), sections=True)
    shape = sections.for_context(100)
    assert (shape.section, shape.window_pages) == (8, True)
    assert [(kind.section, layers) for kind, layers in shape.kinds] == [(8, (0, 2)), (None, (1,))]
    assert sections.for_context(8).section is None, "the first section is the whole context"
    everywhere = replace(SHAPE, windows=(8, 8, 8), sections=True).for_context(100)
    assert (everywhere.section, everywhere.window_pages) == (8, True)


@pytest.mark.parametrize(("max_rows", "gain"), [(256, 1.85), (16, 1.95)])
def test_long_contexts_take_the_memory_of_layers_without_windows(
    max_rows: int, gain: float
) -> None:
    """Tokens of context in 40 GiB: half of gpt-oss's layers have a window of 128."""
    shape = parse_spec(SHAPES["gpt-oss-20b"]).attention_shape()
    sliding = shape.for_context(2**17)
    rule = WindowRule(
        window=128,
        page_size=16,
        max_rows=max_rows,
        max_prefill_tokens=8192,
        page_bytes=bytes_per_page(sliding, 16, torch.bfloat16, window_pages=True),
    )
    kept, released = (
        choose_num_pages(
            page_bytes=bytes_per_page(of, 16, torch.bfloat16),
            page_size=16,
            free_bytes=40 * 2**30,
            reserved_bytes=0,
            memory_ratio=1.0,
            cap_bytes=None,
            max_rows=max_rows,
            windows=windows,
        )
        for of, windows in ((shape, None), (sliding, rule))
    )
    num_window_pages = rule.num_pages(released)
    print(f"{16 * kept:,} tokens before, {16 * released:,} now, {num_window_pages} window pages")
    assert gain < released / kept < 2
    assert num_window_pages >= max_rows * 10
    taken = (released + 1) * bytes_per_page(sliding, 16, torch.bfloat16)
    taken += (num_window_pages + 1) * rule.page_bytes
    page_bytes = bytes_per_page(shape, 16, torch.bfloat16)
    assert 40 * 2**30 - page_bytes < taken <= 40 * 2**30


def test_pages_take_no_memory_if_all_layers_have_windows() -> None:
    """Mistral 7B v0.1, with 256 rows: twice as many tokens of context in the same 40 GiB."""
    shape = parse_spec(MISTRAL_7B).attention_shape()
    sliding, page_bytes = shape.for_context(2**15), bytes_per_page(shape, 16, torch.bfloat16)
    assert bytes_per_page(sliding, 16, torch.bfloat16) == 0
    rule = WindowRule(
        window=4096,
        page_size=16,
        max_rows=256,
        max_prefill_tokens=8192,
        page_bytes=bytes_per_page(sliding, 16, torch.bfloat16, window_pages=True),
        in_all_layers=True,
    )
    assert rule.page_bytes == page_bytes
    chosen = partial(
        choose_num_pages,
        page_bytes=0,
        page_size=16,
        reserved_bytes=0,
        memory_ratio=1.0,
        cap_bytes=None,
        max_rows=256,
        windows=rule,
    )
    num_pages = chosen(free_bytes=40 * 2**30)
    assert rule.num_pages(num_pages) == 40 * 2**30 // page_bytes - 1  # as many as pages before
    assert num_pages // 2 == rule.num_pages(num_pages)
    with pytest.raises(ConfigError, match=f"takes {page_bytes:,} bytes, but only"):
        chosen(free_bytes=page_bytes - 1)


def test_number_of_window_pages() -> None:
    rule = WindowRule(window=1024, page_size=16, max_rows=8, max_prefill_tokens=512, page_bytes=1)
    assert rule.num_pages(20) == 20  # as many as a sequence of that length takes
    assert rule.num_pages(100) == 66  # a window, and two pages
    assert rule.num_pages(1000) == 500
    assert rule.num_pages(10_000) == 8 * 66 + 2 * 33


def test_no_memory_for_a_page_is_an_error_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1,000 bytes.*950 bytes.*0\.5 of 1,900 free"):
        _choose(1_900)


def test_pages_need_not_hold_a_full_sequence() -> None:
    assert _choose(10_000) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_slots_are_copied_in_all_layers(dtype: torch.dtype) -> None:
    """More slots than are copied at a time."""
    kv = KVStorage(SHAPE, num_pages=300, page_size=4, dtype=dtype, device=torch.device("cpu"))
    kv.pages[0].copy_(torch.randn(kv.pages[0].shape).to(dtype))
    before = kv.pages[0].float()
    sources, targets = torch.arange(600), torch.arange(600, 1200).flip(0)
    kv.copy(sources, targets)
    slots, old = kv.pages[0].float().flatten(2, 3), before.flatten(2, 3)
    assert torch.equal(slots[:, :, targets], old[:, :, sources])
    assert torch.equal(slots[:, :, :600], old[:, :, :600])
    assert torch.equal(slots[:, :, 1200:], old[:, :, 1200:])
