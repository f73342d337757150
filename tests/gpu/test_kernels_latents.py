"""Attention over paged latents, and the store before it, against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl_backend.attention.expanded import HEADS_OF_FLASH_ATTN, FlashRagged
from minisgl_backend.kernels import latent_attention, rope_store
from minisgl_backend.kernels.decode_attention import decode_attention_reference
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.head_linear import head_linear
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.prefill_attention import prefill_attention_reference
from minisgl_backend.kernels.ragged_attention import Ragged, ragged_attention_reference
from tests.gpu.compare import assert_close
from tests.gpu.test_kernels_attention import paged_cache

FP8 = torch.float8_e4m3fn

HEADS = [
    pytest.param(20, 512, 64, id="glm-4.7-flash"),
    pytest.param(16, 512, 64, id="deepseek-v2-lite"),
    pytest.param(128, 512, 64, id="deepseek-v3"),
    pytest.param(32, 256, 64, id="mistral-small-4"),
    pytest.param(3, 40, 24, id="uneven"),
]
"""Query heads, size of latents, size of rotated keys."""


def paged_latents(
    lengths: list[int],
    sizes: tuple[int, int],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    sinks: Tensor | None = None,
) -> tuple[PagedKV, Tensor]:
    """Latents and rotated keys of these ``sizes`` in shuffled pages, and the pages' table;
    positions that no row holds are NaN. Pages of float8 have a scale."""
    kv, table = paged_cache(
        lengths,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=sum(sizes),
        dtype=dtype,
        device=device,
    )
    values = kv.keys[..., : sizes[0]]
    scale = kv.k_scale
    return PagedKV(keys=kv.keys, values=values, k_scale=scale, v_scale=scale, sinks=sinks), table


def sinks_of(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Some take hardly any weight, others nearly all."""
    return torch.linspace(-3, 9, num_heads, device=device).to(dtype)


def narrow_dtype(dtype: torch.dtype) -> torch.dtype:
    """16 bits, for which tiles are larger; the interpreter cannot multiply in bfloat16."""
    return torch.float16 if is_interpreted() else dtype


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "latent_dim", "rope_dim"), HEADS)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["plain", "fp8"])
def test_decode(
    device: torch.device,
    dtype: torch.dtype,
    has_sinks: bool,
    page_size: int,
    num_heads: int,
    latent_dim: int,
    rope_dim: int,
    kv_dtype: torch.dtype | None,
) -> None:
    dtype, sizes = narrow_dtype(dtype), (latent_dim, rope_dim)
    lengths = [1, 32, 33, 300]
    kv, table = paged_latents(
        lengths,
        sizes,
        page_size=page_size,
        dtype=kv_dtype or dtype,
        device=device,
        sinks=sinks_of(num_heads, dtype, device) if has_sinks else None,
    )
    q = torch.randn(len(lengths), num_heads, sum(sizes), device=device).to(dtype)
    workspace = latent_attention.LatentWorkspace(8, num_heads, latent_dim, device)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    scale = sum(sizes) ** -0.5
    rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
    actual, alone = (q.new_empty(number, num_heads, latent_dim) for number in (len(lengths), 1))
    latent_attention.latent_decode_attention(
        q, kv, table, on_device, workspace, rows=rows, scale=scale, out=actual
    )
    expected = decode_attention_reference(q, kv, table, on_device, rows=rows, scale=scale)
    assert_close(actual, expected)
    # one row has the most splits
    latent_attention.latent_decode_attention(
        q[3:], kv, table, on_device[3:], workspace, rows=rows[3:], scale=scale, out=alone
    )
    assert_close(alone, actual[3:])


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "latent_dim", "rope_dim"), HEADS)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["plain", "fp8"])
def test_prefill(
    device: torch.device,
    dtype: torch.dtype,
    has_sinks: bool,
    page_size: int,
    num_heads: int,
    latent_dim: int,
    rope_dim: int,
    kv_dtype: torch.dtype | None,
) -> None:
    """Tokens before and after the chunks are left alone; one chunk is empty."""
    dtype, sizes = narrow_dtype(dtype), (latent_dim, rope_dim)
    ends, counts = [70, 5, 40, 33], [30, 5, 0, 1]
    kv, table = paged_latents(
        ends,
        sizes,
        page_size=page_size,
        dtype=kv_dtype or dtype,
        device=device,
        sinks=sinks_of(num_heads, dtype, device) if has_sinks else None,
    )
    before, after = 3, 2
    total = before + sum(counts) + after
    q = torch.randn(total, num_heads, sum(sizes), device=device).to(dtype)
    offsets = before + torch.tensor([0, *counts], device=device).cumsum(0).int()
    out = torch.full((total, num_heads, latent_dim), 7.0, dtype=dtype, device=device)
    expected, scale = out.clone(), sum(sizes) ** -0.5
    rows = torch.arange(len(ends), dtype=torch.int32, device=device)
    of_ends = torch.tensor(ends, dtype=torch.int32, device=device)
    prefill_attention_reference(
        expected, q, kv, table, rows=rows, offsets=offsets, ends=of_ends, scale=scale
    )
    latent_attention.latent_prefill_attention(
        q, kv, table, rows=rows, offsets=offsets, ends=of_ends, scale=scale, out=out
    )
    assert_close(out, expected)
    assert (out[:before] == 7).all() and (out[-after:] == 7).all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("num_heads", "latent_dim", "rope_dim"), HEADS)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["plain", "fp8"])
def test_store(
    device: torch.device,
    dtype: torch.dtype,
    interleaved: bool,
    num_heads: int,
    latent_dim: int,
    rope_dim: int,
    kv_dtype: torch.dtype | None,
) -> None:
    """Inputs lie in wider rows, and one token has no slot."""
    key_dim, num_tokens = latent_dim + rope_dim, 5
    q = torch.randn(num_tokens, num_heads, 8 + rope_dim, device=device).to(dtype)
    compressed = torch.randn(num_tokens, 16 + key_dim, device=device).to(dtype)
    weight = torch.rand(latent_dim, device=device).to(dtype)
    places = rope_store.TokenPlaces(
        positions=torch.tensor([4, 0, 9, 2, 7], dtype=torch.int32, device=device),
        slots=torch.tensor([0, 13, -1, 6, 9], dtype=torch.int32, device=device),
        cos_sin=torch.randn(10, rope_dim, device=device),
        interleaved=interleaved,
    )
    scale = torch.tensor([0.5], device=device) if kv_dtype == FP8 else None
    found = []
    for store in (rope_store.rope_store_latents, rope_store.rope_store_latents_reference):
        keys = torch.zeros(4, 4, 1, key_dim, device=device).to(kv_dtype or dtype)
        kv = PagedKV(keys=keys, values=keys[..., :latent_dim], k_scale=scale, v_scale=scale)
        queries = torch.zeros(num_tokens, num_heads, key_dim, dtype=dtype, device=device)
        store(
            queries[..., latent_dim:],
            q[..., 8:],
            compressed[:, 16:],
            places,
            kv,
            norm_weight=weight,
            eps=1e-6,
        )
        found.append((queries, keys.float()))
    (queries, keys), (expected_queries, expected_keys) = found
    assert_close(queries, expected_queries, tolerance=8e-3)
    # a value on the edge may round to the next fp8 step; the interpreter does not round to nearest
    of_fp8 = 0.2 if is_interpreted() else 0.02
    assert_close(keys, expected_keys, tolerance=8e-3 if kv_dtype is None else of_fp8)


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64, 65])
@pytest.mark.parametrize(("num_heads", "nope_dim", "latent_dim"), [(20, 192, 512), (3, 24, 40)])
def test_head_linear(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    nope_dim: int,
    latent_dim: int,
) -> None:
    """Into the space of latents and back, by parts of one weight."""
    dtype = narrow_dtype(dtype)
    up = (torch.randn(num_heads, nope_dim + 16, latent_dim, device=device) / 16).to(dtype)
    of_keys, of_values = up[:, :nope_dim], up[:, nope_dim:]
    q = torch.randn(num_tokens, num_heads, nope_dim + 8, device=device).to(dtype)[..., :nope_dim]
    queries = torch.zeros(num_tokens, num_heads, latent_dim + 8, dtype=dtype, device=device)
    head_linear(queries[..., :latent_dim], q, of_keys.mT)
    expected = torch.einsum("thn,hnl->thl", q.float(), of_keys.float()).to(dtype)
    assert_close(queries[..., :latent_dim], expected, tolerance=8e-3)
    assert (queries[..., latent_dim:] == 0).all()
    values = torch.zeros(num_tokens, num_heads, 16, dtype=dtype, device=device)
    head_linear(values, expected, of_values)
    expected = torch.einsum("thl,hvl->thv", expected.float(), of_values.float()).to(dtype)
    assert_close(values, expected, tolerance=8e-3)


@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
@pytest.mark.parametrize(("key_dim", "value_dim"), HEADS_OF_FLASH_ATTN)
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_attention(device: torch.device, key_dim: int, value_dim: int, causal: bool) -> None:
    """FlashAttention-3 gives what its twin gives; values are a part of wider rows, and a run has no
    keys."""
    library = pytest.importorskip("sgl_kernel.flash_attn")
    of_q, of_keys = (
        Ragged(torch.tensor(offsets, dtype=torch.int32, device=device), longest)
        for offsets, longest in (([0, 70, 71, 300], 229), ([0, 600, 600, 900], 600))
    )
    q = torch.randn(300, 5, key_dim, device=device).bfloat16()
    keys = torch.randn(900, 5, key_dim, device=device).bfloat16()
    values = torch.randn(900, 5, value_dim + 32, device=device).bfloat16()[..., 32:]
    (out, lses), (expected, expected_lses) = (
        attend(q, keys, values, of_q, of_keys, scale=key_dim**-0.5, causal=causal)
        for attend in (FlashRagged(library), ragged_attention_reference)
    )
    assert_close(out, expected, tolerance=1e-2)
    torch.testing.assert_close(lses, expected_lses, atol=1e-2, rtol=1e-3)
