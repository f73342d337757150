"""Attention of prompt chunks and decoding rows, and the store before it, against their twins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.kernels import decode_attention, prefill_attention, rope_store
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.paged_kv import PagedKV
from tests.gpu.compare import assert_close


def each_row(q: Tensor) -> Tensor:
    """The rows of a page table that has one for each query, in order."""
    return torch.arange(len(q), dtype=torch.int32, device=q.device)


def paged_cache(
    lengths: list[int],
    *,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PagedKV, Tensor]:
    """Shuffled pages and their table; positions that no row holds are NaN. Pages of float8 have
    scales."""
    pages_of = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages_of) + 3
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    k = torch.full(shape, torch.nan, device=device)
    v = torch.full(shape, torch.nan, device=device)
    order = torch.randperm(num_pages)
    table = torch.full((len(lengths), max(pages_of) + 2), 0, dtype=torch.int32)
    start = 0
    for row, (length, count) in enumerate(zip(lengths, pages_of, strict=True)):
        pages = order[start : start + count]
        table[row, :count] = pages.int()
        for index, page in enumerate(pages.tolist()):
            used = min(length - index * page_size, page_size)
            k[page, :used] = torch.randn(used, *shape[2:], device=device)
            v[page, :used] = torch.randn(used, *shape[2:], device=device)
        start += count
    k_scale, v_scale = None, None
    if dtype == torch.float8_e4m3fn:
        k_scale, v_scale = torch.tensor([[0.5], [2.0]], device=device)
    kv = PagedKV(keys=k.to(dtype), values=v.to(dtype), k_scale=k_scale, v_scale=v_scale)
    return kv, table.to(device)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (8, 1), (10, 2)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 512])
@pytest.mark.parametrize("window", [None, 40])
def test_decode_attention(
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
) -> None:
    lengths = [1, 63, 64, 65, 300]
    kv, table = paged_cache(
        lengths,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    q = torch.randn(len(lengths), num_heads, head_dim, device=device).to(dtype)
    workspace = decode_attention.DecodeWorkspace(8, num_heads, head_dim, device)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    how: dict[str, Any] = {"rows": each_row(q), "scale": head_dim**-0.5, "window": window}
    expected = decode_attention.decode_attention_reference(q, kv, table, on_device, **how)
    for _ in range(2):  # the second launch finds the counters as the first one left them
        actual = torch.empty_like(q)
        decode_attention.decode_attention(q, kv, table, on_device, workspace, out=actual, **how)
        assert_close(actual, expected)
    assert not workspace.counters.any()


def test_decode_attention_of_permuted_rows_and_strided_q(
    device: torch.device, dtype: torch.dtype
) -> None:
    kv, table = paged_cache(
        [5, 150, 70], page_size=16, num_kv_heads=2, head_dim=64, dtype=dtype, device=device
    )
    packed = torch.randn(2, 8 * 64, device=device).to(dtype)
    q = packed[:, : 4 * 64].view(2, 4, 64)
    workspace = decode_attention.DecodeWorkspace(2, 4, 64, device)
    rows = torch.tensor([2, 1], dtype=torch.int32, device=device)
    lengths = torch.tensor([70, 150], dtype=torch.int32, device=device)
    how: dict[str, Any] = {"rows": rows, "scale": 64**-0.5}
    actual = torch.empty(q.shape, dtype=dtype, device=device)
    decode_attention.decode_attention(q, kv, table, lengths, workspace, out=actual, **how)
    expected = decode_attention.decode_attention_reference(q, kv, table, lengths, **how)
    assert_close(actual, expected)


def test_decode_attention_of_fp8(device: torch.device, dtype: torch.dtype) -> None:
    kv, table = paged_cache(
        [130, 7],
        page_size=16,
        num_kv_heads=2,
        head_dim=128,
        dtype=torch.float8_e4m3fn,
        device=device,
    )
    q = torch.randn(2, 4, 128, device=device).to(dtype)
    workspace = decode_attention.DecodeWorkspace(2, 4, 128, device)
    lengths = torch.tensor([130, 7], dtype=torch.int32, device=device)
    how: dict[str, Any] = {"rows": each_row(q), "scale": 128**-0.5}
    actual = torch.empty_like(q)
    decode_attention.decode_attention(q, kv, table, lengths, workspace, out=actual, **how)
    expected = decode_attention.decode_attention_reference(q, kv, table, lengths, **how)
    # fp8 is multiplied in float16, whatever the dtype of q
    assert_close(actual, expected, tolerance=8e-3)


@pytest.mark.parametrize("first", [0, 7, 64])
@pytest.mark.parametrize("window", [None, 40])
def test_prefill_attention_finds_each_chunk(
    device: torch.device, dtype: torch.dtype, first: int, window: int | None
) -> None:
    """More chunks than a program looks at together, with lengths around the 16 queries of its
    block, and empty ones between and after them."""
    kv, table = paged_cache(
        [70, 50, 33], page_size=16, num_kv_heads=1, head_dim=64, dtype=dtype, device=device
    )
    lengths = [16, 0, 1, 15, 0, 0, 17, 33, 32, *[1, 0, 3] * 50, 16, *[0] * 9]
    rows = torch.arange(len(lengths), dtype=torch.int32, device=device) % 3
    ends = [50 if length == 0 else min(length + 17, 33) for length in lengths]
    offsets = torch.tensor([first, *lengths], dtype=torch.int32).cumsum(0).int().to(device)
    q = torch.randn(first + sum(lengths) + 40, 8, 64, device=device).to(dtype)
    arguments: dict[str, Any] = {
        "rows": rows,
        "offsets": offsets,
        "ends": torch.tensor(ends, dtype=torch.int32, device=device),
        "scale": 0.125,
        "window": window,
    }
    before = torch.randn_like(q)
    actual, expected = before.clone(), before.clone()
    prefill_attention.prefill_attention(q, kv, table, max_length=len(q), out=actual, **arguments)
    prefill_attention.prefill_attention_reference(expected, q, kv, table, **arguments)
    assert_close(actual, expected)
    tokens = torch.arange(len(q), device=device)
    others = (tokens < first) | (tokens >= first + sum(lengths))
    assert torch.equal(actual[others], before[others])
    assert not (actual[~others] == before[~others]).all(dim=(1, 2)).any()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (3, 1), (10, 2)])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "interleaved"),
    [
        (64, 64, False),
        (128, 128, False),
        (128, 96, False),
        (128, 64, False),
        (64, 16, False),
        (64, 64, True),
        (128, 128, True),
        (256, 64, False),
        (512, 512, False),
        (96, 96, False),
        (96, 72, False),
        (80, 80, True),
        (128, 64, True),
        (96, 72, True),
    ],
)
@pytest.mark.parametrize("norm", [None, "first", "last"])
@pytest.mark.parametrize(
    ("gated", "values"), [(False, "own"), (True, "own"), (False, "normed"), (False, "keys")]
)
@pytest.mark.parametrize("fp8", [False, True])
def test_qk_norm_rope_store(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    norm: str | None,
    gated: bool,
    values: str,
    fp8: bool,
) -> None:
    num_tokens, page_size, num_pages = 6, 4, 5
    num_cached = num_kv_heads * (1 if values == "keys" else 2)
    width = (num_heads * (2 if gated else 1) + num_cached) * head_dim
    rows = torch.randn(num_tokens, width + head_dim, device=device).to(dtype)
    qkv = rows[:, :width]  # gates of a projection of their own may follow
    angle = torch.rand(50, rotary_dim // 2, device=device) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    cache_dtype = torch.float8_e4m3fn if fp8 else dtype
    # the layers of a real cache lie next to each other, so that pages are strided
    shape = (num_pages, 2, page_size, num_kv_heads, head_dim)
    k_caches = torch.zeros(shape, device=device).to(cache_dtype)
    v_caches = torch.zeros(shape, device=device).to(cache_dtype)
    expected_k, expected_v = k_caches.clone(), v_caches.clone()
    positions = torch.tensor([0, 1, 49, 7, 7, 3], device=device)
    slots = torch.tensor([3, 19, 0, 8, -1, 12], dtype=torch.int32, device=device)
    of_q, of_k = torch.rand(2, head_dim, device=device).to(dtype)
    head_weights = torch.stack([of_q] * num_heads + [of_k] * num_kv_heads)
    arguments: dict[str, Any] = {
        "places": rope_store.TokenPlaces(positions, slots, cos_sin, interleaved),
        "num_heads": num_heads,
        "head_weights": head_weights if norm else None,
        "norm_last": norm == "last",
        "gated": gated,
        "value_norm": values != "own",
        "keys_are_values": values == "keys",
    }
    k_scale, v_scale = torch.tensor([[0.5], [2.0]], device=device) if fp8 else (None, None)
    kv = PagedKV(keys=k_caches[:, 1], values=v_caches[:, 1], k_scale=k_scale, v_scale=v_scale)
    expected_kv = replace(kv, keys=expected_k[:, 1], values=expected_v[:, 1])
    before = qkv.clone()
    expected = rope_store.qk_norm_rope_store_reference(qkv, kv=expected_kv, **arguments)
    q = rope_store.qk_norm_rope_store(qkv, kv=kv, **arguments)
    assert_close(q, expected.contiguous())
    assert torch.equal(qkv, before)
    # a value on the edge may round to the next fp8 step; the interpreter does not round to nearest
    tolerance = (0.2 if is_interpreted() else 0.02) if fp8 else 8e-3
    for actual, wanted in ((k_caches, expected_k), (v_caches, expected_v)):
        assert_close(actual.float(), wanted.float(), tolerance=tolerance)
        assert not actual[:, 0].float().any()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (256, 256), (512, 512), (96, 72)])
def test_rotated_queries(
    device: torch.device, dtype: torch.dtype, norm: bool, head_dim: int, rotary_dim: int
) -> None:
    queries = torch.randn(5, 6 * head_dim, device=device).to(dtype)
    angle = torch.rand(50, rotary_dim // 2, device=device) * 6
    positions = torch.tensor([0, 1, 49, 7, 3], device=device)
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    places = rope_store.TokenPlaces(positions, positions, table)
    weights = torch.rand(1, head_dim, device=device).to(dtype).expand(6, -1) if norm else None
    expected = rope_store.rotated_queries_reference(queries, places, 6, weights, 1e-6)
    assert_close(rope_store.rotated_queries(queries, places, 6, weights, 1e-6), expected)
