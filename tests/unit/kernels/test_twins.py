"""The kernels' torch twins against other ways to compute the same."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.gates import Gate, LimitedGate
from minisgl_backend.kernels import (
    activation,
    decode_attention,
    embedding,
    hyper_connections,
    likelihood,
    rms_norm,
    rope_store,
    small_batch,
)
from minisgl_backend.kernels.experts import ExpertWeights, fused_experts
from minisgl_backend.kernels.hyper_connections import StreamWeights
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.routing import Choices, align


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_importing_the_kernels_imports_no_triton() -> None:
    modules = (
        "activation decode_attention embedding experts hyper_connections likelihood noise rms_norm "
        "rope_store routing sampling small_batch"
    )
    code = f"""
import importlib, sys
for name in {modules.split()!r}:
    importlib.import_module("minisgl_backend.kernels." + name)
assert not any(name.startswith("minisgl_backend.kernels.triton_kernels") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rms_norm_is_torchs() -> None:
    x, weight = torch.randn(3, 40), torch.randn(40)
    torch.testing.assert_close(
        rms_norm.rms_norm(x, weight, 1e-5), F.rms_norm(x, (40,), weight, 1e-5)
    )
    torch.testing.assert_close(
        rms_norm.rms_norm(x, weight, 1e-5, centered=True), F.layer_norm(x, (40,), weight, eps=1e-5)
    )
    bias, residual = torch.randn(2, 40)
    torch.testing.assert_close(
        rms_norm.fused_add_rms_norm(
            x, residual.repeat(3, 1), weight, 1e-5, centered=True, bias=bias
        ),
        F.layer_norm(x + residual, (40,), weight, bias, 1e-5),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_likelihoods_are_those_of_the_softmax(dtype: torch.dtype) -> None:
    logits, tokens = (5 * torch.randn(6, 50)).to(dtype), torch.randint(50, (6,)).int()
    expected = logits.to(torch.float64).log_softmax(dim=-1)
    found = likelihood.likelihoods(logits, tokens, 4)
    of_tokens = expected.gather(1, tokens.long()[:, None])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    torch.testing.assert_close(found.logprobs, of_tokens[:, 0].to(wide))
    assert found.ranks.tolist() == ((expected > of_tokens).sum(dim=-1) + 1).tolist()
    best = expected.topk(4)
    torch.testing.assert_close(found.top, best.values.to(wide))
    assert torch.equal(expected.gather(1, found.top_ids), best.values)
    nothing = likelihood.likelihoods(logits, tokens, 0)
    assert nothing.top.shape == nothing.top_ids.shape == (6, 0)


def test_fused_add_rms_norm_updates_the_residual() -> None:
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    total = x + residual
    out = rms_norm.fused_add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, F.rms_norm(total, (40,), weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norm_and_gate_round_once(dtype: torch.dtype) -> None:
    """The error is half a unit in the last place, without what intermediate rounding would add."""
    x, weight = torch.randn(64, 80).to(dtype), torch.rand(80).to(dtype) + 1
    residual = torch.randn(64, 80).to(dtype)
    total = (x.double() + residual.double()).to(dtype)
    normed = rms_norm.rms_norm(x, weight, 1e-6)
    wide = x.double()
    info = torch.finfo(dtype)
    bound = info.eps / 2 * 1.01 if dtype != torch.float64 else 1e-15
    for actual, expected in (
        (normed, wide / (wide.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()),
        (
            activation.open_gates(x, "silu"),
            wide[:, :40] / (1 + torch.exp(-wide[:, :40])) * wide[:, 40:],
        ),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=info.tiny * bound)
    out = rms_norm.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total) and out.dtype == dtype
    assert torch.equal(out, rms_norm.rms_norm(total, weight, 1e-6))


def test_fused_rms_norm_add() -> None:
    """Whatever is left out has no effect."""
    x, other, residual = torch.randn(3, 4, 24)
    after, of_x, of_other, first, second = torch.rand(5, 24)
    factor = torch.tensor([1.5])

    def under(rows: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return rows / (rows.pow(2).mean(1, keepdim=True) + eps).sqrt() * weight

    plain, joined = residual.clone(), residual.clone()
    assert rms_norm.fused_rms_norm_add(x, plain, after, 1e-6) == []
    torch.testing.assert_close(plain, residual + under(x, after))
    found = rms_norm.fused_rms_norm_add(
        x,
        joined,
        after,
        1e-6,
        norms=[first, second],
        beside=(other, of_x, of_other),
        factor=factor,
    )
    both = under(x, of_x) + under(other, of_other)
    torch.testing.assert_close(joined, 1.5 * (residual + under(both, after)))
    torch.testing.assert_close(found, [under(joined, first), under(joined, second)])
    found = rms_norm.fused_rms_norm_add(x, plain, after, 1e-6, norms=[first], norms_eps=0.1)
    torch.testing.assert_close(plain, residual + 2 * under(x, after))
    torch.testing.assert_close(found, [under(plain, first, 0.1)])


def test_gates_of_gelu() -> None:
    gate, up = torch.randn(2, 5, 40)
    out = activation.open_gates(torch.cat([gate, up], dim=1), "gelu")
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(out, 0.5 * gate * (1 + inner.tanh()) * up)


def test_gates_with_a_limit() -> None:
    """That of the gate is above it alone, and after SiLU."""
    gate, up = torch.tensor([[-9.0, 1.0, 5.0, 5.0]]), torch.tensor([[3.0, -3.0, 0.5, 9.0]])
    out = activation.open_gates(torch.cat([gate, up], dim=1), LimitedGate(2.0))
    silu = gate / (1 + torch.exp(-gate))
    expected = [silu[0, 0] * 2.0, silu[0, 1] * -2.0, torch.tensor(1.0), torch.tensor(4.0)]
    torch.testing.assert_close(out[0], torch.stack(expected))


def test_gates_with_a_limit_on_their_input() -> None:
    gate, up = torch.tensor([[-9.0, 1.0, 5.0, 5.0]]), torch.tensor([[3.0, -3.0, 0.5, 9.0]])
    out = activation.open_gates(torch.cat([gate, up], dim=1), LimitedGate(2.0, on_input=True))
    silu = gate.clamp(max=2.0) / (1 + torch.exp(-gate.clamp(max=2.0)))
    torch.testing.assert_close(out, silu * torch.tensor([[2.0, -2.0, 0.5, 2.0]]))


def test_gates_of_silu() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    out = activation.open_gates(torch.cat([gate, up], dim=1), "silu")
    torch.testing.assert_close(out, gate / (1 + torch.exp(-gate)) * up)


def test_soft_cap() -> None:
    x = torch.tensor([[-1000.0, -3.0, 0.0, 0.5, 30.0, 1000.0]])
    expected = torch.tensor([[30 * math.tanh(value / 30) for value in x[0].tolist()]])
    activation.soft_cap(x, 30.0)
    torch.testing.assert_close(x, expected)


def test_gelu() -> None:
    x = torch.randn(3, 5)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(activation.activate(x, "gelu"), x / 2 * (1 + inner.tanh()))
    exact = x / 2 * (1 + torch.erf(x / math.sqrt(2)))
    torch.testing.assert_close(activation.activate(x, "exact gelu"), exact)


def test_xielu() -> None:
    """Between ``eps`` and 0 the exponential is that of ``eps``."""
    p, n, beta, eps = numbers = [0.3, -0.4, 0.25, -0.125]
    x = [-8.0, -0.5, -0.0625, 0.0, 0.5, 3.0]
    above, below = math.log1p(math.exp(p)), beta + math.log1p(math.exp(n))
    expected = [
        above * y**2 + beta * y if y > 0 else below * (math.expm1(min(y, eps)) - y) + beta * y
        for y in x
    ]
    out = activation.xielu(torch.tensor([x]), torch.tensor(numbers))
    torch.testing.assert_close(out, torch.tensor([expected]))


def test_gates_of_attention() -> None:
    x, gate = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    out = activation.gate_output(x, gate, "sigmoid")
    torch.testing.assert_close(out, (x / (1 + torch.exp(-gate))).flatten(1))
    out = activation.gate_output(x, gate, "softplus")
    torch.testing.assert_close(out, (x * torch.log(1 + torch.exp(gate))).flatten(1))


def pages_of(caches: torch.Tensor) -> PagedKV:
    """Those of ``caches`` [2, num_pages, page_size, num_kv_heads, head_dim]: keys, then values."""
    keys, values = caches
    return PagedKV(keys=keys, values=values)


def test_rope_store_normalizes_values_which_may_be_keys() -> None:
    """A token has two query heads and one key head, which is the value as well."""
    qk, caches = torch.randn(2, 3 * 8), torch.zeros(4, 1, 4, 1, 8)
    first, second = pages_of(caches[:2]), pages_of(caches[2:])
    ids = torch.tensor([1, 0])
    places = rope_store.TokenPlaces(ids, ids, torch.randn(2, 8))
    weights = torch.rand(3, 8)
    keys = qk[:, 16:]
    values = keys / (keys.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
    given: dict[str, Any] = {"num_heads": 2, "head_weights": weights}
    qkv = torch.cat([qk, values], dim=1)
    expected = rope_store.qk_norm_rope_store(qkv, places, first, **given)
    given |= {"value_norm": True, "keys_are_values": True}
    found = rope_store.qk_norm_rope_store(qk, places, second, **given)
    assert torch.equal(found, expected)
    torch.testing.assert_close(caches[2:], caches[:2])
    alone = rope_store.rotated_queries(qk[:, :16], places, 2, weights[:2], 1e-6)
    torch.testing.assert_close(alone, expected)


def test_rope_store_leaves_gates_where_they_are() -> None:
    """A token has two query heads, each before its gate, one key head and one value head."""
    qkv, caches = torch.randn(2, 6 * 8), torch.zeros(4, 1, 4, 1, 8)
    first, second = pages_of(caches[:2]), pages_of(caches[2:])
    ids = torch.tensor([1, 0])
    places = rope_store.TokenPlaces(ids, ids, torch.randn(2, 8))
    plain = qkv.view(2, 6, 8)[:, [0, 2, 4, 5]].flatten(1)
    expected = rope_store.qk_norm_rope_store(plain, places, first, num_heads=2)
    found = rope_store.qk_norm_rope_store(qkv, places, second, num_heads=2, gated=True)
    assert torch.equal(found, expected) and torch.equal(caches[2:], caches[:2])
    # gates of a projection of their own are behind all others
    rows = torch.cat([plain, torch.randn(2, 2 * 8)], dim=1)[:, : 4 * 8]
    caches[2:].zero_()
    found = rope_store.qk_norm_rope_store(rows, places, second, num_heads=2)
    assert torch.equal(found, expected) and torch.equal(caches[2:], caches[:2])
    assert torch.equal(
        rope_store.gates_of(qkv, 2, 8).flatten(1), qkv[:, [*range(8, 16), *range(24, 32)]]
    )


def test_ranks_embeddings_sum_to_the_whole() -> None:
    weight, ids = torch.randn(10, 4), torch.tensor([0, 3, 9, 5, 4])
    parts = [embedding.embedding(ids, weight[start : start + 5], start=start) for start in (0, 5)]
    torch.testing.assert_close(parts[0] + parts[1], weight[ids])
    assert torch.equal(embedding.embedding(ids.int(), weight), weight[ids])
    assert embedding.embedding(ids[:0], weight).shape == (0, 4)


@pytest.mark.parametrize("window", [None, 5])
def test_decode_attention_is_torchs(window: int | None) -> None:
    num_kv_heads, group, head_dim, page_size = 2, 3, 16, 4
    lengths, pages = [1, 7, 12], [[5], [0, 3], [4, 1, 6]]
    k_cache = torch.full((8, page_size, num_kv_heads, head_dim), torch.nan)
    v_cache = k_cache.clone()
    table = torch.zeros(3, 3, dtype=torch.int32)
    q = torch.randn(3, num_kv_heads * group, head_dim)
    expected = []
    for row, (length, of_row) in enumerate(zip(lengths, pages, strict=True)):
        table[row, : len(of_row)] = torch.tensor(of_row)
        k, v = torch.randn(2, length, num_kv_heads, head_dim)
        for position in range(length):
            page = of_row[position // page_size]
            k_cache[page, position % page_size] = k[position]
            v_cache[page, position % page_size] = v[position]
        seen = slice(max(0, length - window) if window else 0, length)
        expected.append(
            F.scaled_dot_product_attention(
                q[row][:, None],
                k[seen].transpose(0, 1).repeat_interleave(group, dim=0),
                v[seen].transpose(0, 1).repeat_interleave(group, dim=0),
            )[:, 0]
        )
    workspace = decode_attention.DecodeWorkspace(3, 6, head_dim, q.device)
    order = torch.tensor([2, 0, 1])
    out = torch.empty_like(q)
    decode_attention.decode_attention(
        q[order],
        PagedKV(keys=k_cache, values=v_cache),
        table,
        torch.tensor(lengths, dtype=torch.int32)[order],
        workspace,
        rows=order,
        scale=head_dim**-0.5,
        window=window,
        out=out,
    )
    torch.testing.assert_close(out, torch.stack(expected)[order])


def test_splits_fill_the_processors_and_no_more() -> None:
    splits = [decode_attention.num_splits(batch, 8, 132) for batch in (1, 8, 16, 32, 49, 50, 256)]
    assert splits == [16, 16, 8, 4, 2, 1, 1]
    assert decode_attention.num_splits(1, 8, 132, max_length=40_960) == 32


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rope_store_rotates_norms_and_stores(dtype: torch.dtype, is_strided: bool) -> None:
    """``is_strided``: the cache's layers lie between the pages."""
    num_heads, num_kv_heads, head_dim = 4, 2, 8
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q, k, v = qkv.clone().view(3, -1, head_dim).tensor_split([4, 6], dim=1)
    positions, slots = torch.tensor([0, 6, 2]), torch.tensor([9, -1, 4])
    angle = torch.outer(torch.arange(10.0), 100 ** -(torch.arange(4.0) / 4))
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    q_weight, k_weight = torch.rand(2, head_dim, dtype=dtype)
    # [2, num_pages, num_layers, page_size, num_kv_heads, head_dim]
    caches = torch.zeros(2, 3, 2, 4, num_kv_heads, head_dim, dtype=dtype)
    k_cache, v_cache = caches[:, :, 1] if is_strided else caches[:, :, 1].clone()

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x, (head_dim,), weight, 1e-6)
        as_complex = torch.complex(*x.chunk(2, dim=-1))
        turns = torch.complex(*cos_sin[positions].to(dtype).chunk(2, dim=-1))
        turned = as_complex * turns[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    out = rope_store.qk_norm_rope_store(
        qkv,
        rope_store.TokenPlaces(positions, slots, cos_sin),
        PagedKV(keys=k_cache, values=v_cache),
        num_heads=num_heads,
        head_weights=torch.stack([q_weight] * num_heads + [k_weight] * num_kv_heads),
    )
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    assert_near = partial(torch.testing.assert_close, rtol=rounding, atol=rounding)
    assert_near(out, rotated(q, q_weight))
    assert_near(k_cache[2, 1], rotated(k, k_weight)[0])
    assert_near(k_cache[1, 0], rotated(k, k_weight)[2])
    assert torch.equal(v_cache[1, 0], v[2])
    assert torch.equal(qkv.view(3, -1, head_dim)[:, 4:], torch.cat([k, v], dim=1))
    assert int(k_cache.flatten(0, 1).any(dim=-1).any(dim=-1).sum()) == 2
    assert not caches[:, :, 0].any()


def test_rope_store_rotates_the_first_dimensions_of_a_head_only() -> None:
    x = torch.randn(3, 4, 16)  # two heads of queries, one of keys, one of values
    cos_sin = torch.randn(10, 12)
    positions = torch.tensor([4, 0, 9])

    def rotated(heads: torch.Tensor) -> torch.Tensor:
        pages = torch.zeros(2, 1, 3, 1, heads.shape[-1])
        places = rope_store.TokenPlaces(positions, torch.arange(3), cos_sin)
        qkv = heads.flatten(1).clone()
        q = rope_store.qk_norm_rope_store(qkv, places, pages_of(pages), num_heads=2)
        return torch.cat([q, pages[0, 0]], dim=1)

    found = rotated(x)
    assert torch.equal(found[..., :12], rotated(x[..., :12]))
    assert torch.equal(found[..., 12:], x[:, :3, 12:])


def test_rope_store_rotates_neighbouring_dimensions_together() -> None:
    """The result is as when halves rotate in heads whose even dimensions come first."""
    x, weight = torch.randn(3, 4, 16), torch.rand(3, 16)  # two heads of queries, one of keys
    cos_sin, positions = torch.randn(10, 16), torch.tensor([4, 0, 9])

    def rotated(heads: torch.Tensor, weight: torch.Tensor, interleaved: bool) -> torch.Tensor:
        pages = torch.zeros(2, 1, 3, 1, 16)
        places = rope_store.TokenPlaces(positions, torch.arange(3), cos_sin, interleaved)
        qkv = heads.flatten(1).clone()
        q = rope_store.qk_norm_rope_store(
            qkv, places, pages_of(pages), num_heads=2, head_weights=weight
        )
        return torch.cat([q, pages[0, 0]], dim=1)

    def sorted_halves(heads: torch.Tensor) -> torch.Tensor:
        return torch.cat([heads[..., ::2], heads[..., 1::2]], dim=-1)

    expected = rotated(sorted_halves(x), sorted_halves(weight), False)
    torch.testing.assert_close(sorted_halves(rotated(x, weight, True)), expected)


def test_rope_store_rotates_neighbours_among_the_first_dimensions_of_a_head() -> None:
    x, positions = torch.randn(3, 4, 16), torch.tensor([4, 0, 9])
    places = rope_store.TokenPlaces(positions, torch.arange(3), torch.randn(10, 8), True)

    def rotated(heads: torch.Tensor) -> torch.Tensor:
        pages = torch.zeros(2, 1, 3, 1, heads.shape[-1])
        qkv = heads.flatten(1).clone()
        q = rope_store.qk_norm_rope_store(qkv, places, pages_of(pages), num_heads=2)
        return torch.cat([q, pages[0, 0]], dim=1)

    found = rotated(x)
    assert torch.equal(found[..., :8], rotated(x[..., :8]))
    assert torch.equal(found[..., 8:], x[:, :3, 8:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_store_may_normalize_what_it_has_rotated(interleaved: bool) -> None:
    x, weight = torch.randn(3, 4, 16), torch.rand(3, 16)  # two heads of queries, one of keys
    ids = torch.arange(3)
    # factors of more than 1 lengthen what is rotated
    places = rope_store.TokenPlaces(ids, ids, 2 * torch.randn(3, 12), interleaved)

    def computed(**norm: Any) -> torch.Tensor:
        pages = torch.zeros(2, 1, 3, 1, 16)
        qkv = x.flatten(1).clone()
        q = rope_store.qk_norm_rope_store(qkv, places, pages_of(pages), num_heads=2, **norm)
        return torch.cat([q, pages[0, 0]], dim=1)

    rotated = computed()
    expected = rotated * (rotated.square().mean(-1, keepdim=True) + 0.1).rsqrt() * weight
    found = computed(head_weights=weight, norm_last=True, eps=0.1)
    torch.testing.assert_close(found, expected)


def test_rope_store_without_a_norm_only_rotates() -> None:
    qkv = torch.randn(2, 3 * 8)
    q, k, _v = qkv.clone().chunk(3, dim=1)
    caches = torch.zeros(2, 1, 4, 1, 8)
    cos_sin = torch.tensor([[0.0] * 4 + [1.0] * 4] * 2)  # a quarter turn
    ids = torch.tensor([1, 0], dtype=torch.int32)
    places = rope_store.TokenPlaces(ids, ids, cos_sin)
    out = rope_store.qk_norm_rope_store(qkv, places, pages_of(caches), num_heads=1)
    torch.testing.assert_close(out[:, 0], torch.cat([-q[:, 4:], q[:, :4]], dim=1))
    turned = torch.cat([-k[:, 4:], k[:, :4]], dim=1)
    torch.testing.assert_close(caches[0, 0, [1, 0], 0], turned)


def test_latents_are_normalized_and_stored_before_their_rotated_keys() -> None:
    """The third token has no slot."""
    pages = torch.zeros(2, 2, 1, 6)
    kv = PagedKV(keys=pages, values=pages[..., :4])
    q, compressed, weight = torch.randn(3, 2, 2), torch.randn(3, 6), torch.rand(4)
    cos_sin = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])  # a quarter turn at position 1
    places = rope_store.TokenPlaces(torch.tensor([1, 2, 0]), torch.tensor([3, 0, -1]), cos_sin)
    queries = torch.zeros(3, 2, 5)
    rope_store.rope_store_latents(
        queries[..., 3:], q, compressed, places, kv, norm_weight=weight, eps=0.1
    )
    assert not queries[..., :3].any()
    turned = torch.stack([-q[0, :, 1], q[0, :, 0]], dim=-1)
    torch.testing.assert_close(queries[0, :, 3:], turned)
    torch.testing.assert_close(queries[2, :, 3:], q[2])
    latents = F.rms_norm(compressed[:, :4], (4,), weight, 0.1)
    torch.testing.assert_close(kv.values[1, 1, 0], latents[0])
    torch.testing.assert_close(kv.values[0, 0, 0], latents[1])
    key = torch.stack([-compressed[0, 5], compressed[0, 4]])
    torch.testing.assert_close(pages[1, 1, 0, 4:], key)
    assert not pages[1, 0].any() and not pages[0, 1].any()


def test_fp8_store_clamps_and_scales() -> None:
    qkv = torch.tensor([[0.0, 0.0, 3.0, -4000.0, 1.0, 2.0]])
    caches = torch.zeros(2, 1, 1, 1, 2).to(torch.float8_e4m3fn)
    rope_store.qk_norm_rope_store(
        qkv,
        rope_store.TokenPlaces(torch.tensor([0]), torch.tensor([0]), torch.tensor([[1.0, 0.0]])),
        PagedKV(
            keys=caches[0],
            values=caches[1],
            k_scale=torch.tensor([2.0]),
            v_scale=torch.tensor([0.5]),
        ),
        num_heads=1,
    )
    assert caches[0].float().flatten().tolist() == [1.5, -448.0]
    assert caches[1].float().flatten().tolist() == [2.0, 4.0]


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_small_batch_linear_fuses_what_it_says(gate: Gate) -> None:
    x, weight, norm = torch.randn(2, 12), torch.randn(10, 12), torch.rand(12)
    bias, residual = torch.randn(10), torch.randn(2, 5)
    y = F.linear(F.rms_norm(x, (12,), norm, 1e-6), weight, bias)
    opened = F.silu(y[:, :5]) if gate == "silu" else F.gelu(y[:, :5], approximate="tanh")
    expected = residual + opened * y[:, 5:]
    out = small_batch.small_batch_linear(
        x, weight, bias=bias, norm_weight=norm, gate=gate, residual=residual
    )
    assert out is residual
    torch.testing.assert_close(out, expected)


def test_small_batch_linear_says_where_it_pays() -> None:
    assert small_batch.is_faster(1, 5120, gated=True) and small_batch.is_faster(8, 5120)
    assert not small_batch.is_faster(2, 5120, gated=True)
    assert not small_batch.is_faster(9, 1024)
    assert small_batch.normalizes_before(1, 151936, 5120)
    assert not small_batch.normalizes_before(1, 151936, 2048)  # a short row
    assert small_batch.normalizes_before(2, 151936, 2048)
    assert not small_batch.normalizes_before(2, 34816, 2048)  # few programs


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (1, 4), (37, 2), (5, 8)])
def test_alignment_holds_every_pair_once_with_its_expert(num_tokens: int, top_k: int) -> None:
    num_experts, block = 8, 4
    ids = torch.rand(num_tokens, num_experts).topk(top_k, dim=1).indices
    ids[:, 0] = 3  # one expert that all share
    alignment = align(ids, num_experts, block)
    pairs = alignment.pairs.view(-1, block)
    assert len(pairs) == len(alignment.experts)
    held = pairs < num_tokens * top_k
    assert sorted(pairs[held].tolist()) == list(range(num_tokens * top_k))
    for expert, of_block in zip(alignment.experts.tolist(), pairs, strict=True):
        for pair in of_block[of_block < num_tokens * top_k].tolist():
            assert int(ids.flatten()[pair]) == expert


def test_fused_experts_of_equal_experts_is_one_feed_forward() -> None:
    x, gate_up, down = torch.randn(6, 8), torch.randn(2, 12, 8), torch.randn(2, 8, 6)
    gate_up[1], down[1] = gate_up[0], down[0]
    ids = torch.tensor([[0, 1]] * 6)
    weights = torch.tensor([[0.25, 0.75]] * 6)
    expected = F.linear(activation.open_gates(F.linear(x, gate_up[0]), "silu"), down[0])
    actual = fused_experts(x, ExpertWeights(gate_up, down), Choices(ids, weights))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_experts_go_token_by_token(dtype: torch.dtype) -> None:
    x = torch.randn(7, 8, dtype=dtype)
    gate_up, down = torch.randn(5, 12, 8, dtype=dtype), torch.randn(5, 8, 6, dtype=dtype)
    weights, ids = torch.rand(7, 4).topk(3)  # no token takes the last expert
    expected = torch.zeros_like(x)
    for token in range(7):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    experts, choices = ExpertWeights(gate_up, down), Choices(ids.int(), weights)
    actual = fused_experts(x, experts, choices)
    torch.testing.assert_close(actual, expected)
    assert actual.dtype == dtype


@pytest.mark.parametrize("num_streams", [1, 3])
def test_streams_are_read_and_written_by_weights(num_streams: int) -> None:
    streams = torch.randn(5, num_streams, 6, dtype=torch.float64)
    weights = StreamWeights(
        matrix=torch.randn(2 * num_streams, num_streams * 6),
        base=torch.randn(2 * num_streams),
        scale=torch.tensor([0.5, -2.0]),
        eps=0.25,
        norm_eps=0.1,
        magnitude=3.0,
    )
    before = streams.clone()
    read, for_writing = hyper_connections.read_streams(streams, weights)
    part = torch.randn(5, 6, dtype=torch.float64)
    hyper_connections.add_to_streams(streams, part, for_writing)
    for token, own in enumerate(before):
        flat = own.flatten()
        mixes = weights.matrix.double() @ flat / (flat.square().mean() + 0.1).sqrt()
        of_read = (0.5 * mixes[:num_streams] + weights.base[:num_streams]).sigmoid() + 0.25
        of_write = 3 * (weights.base[num_streams:] - 2 * mixes[num_streams:]).sigmoid() + 0.25
        torch.testing.assert_close(read[token], of_read @ own)
        torch.testing.assert_close(streams[token], own + torch.outer(of_write, part[token]))
