"""Norms, gate, embedding and small-batch GEMMs against their twins."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.gates import Gate, LimitedGate, OutputGate, PlainActivation
from minisgl_backend.kernels import (
    activation,
    embedding,
    likelihood,
    rms_norm,
    rope_store,
    small_batch,
)
from tests.gpu.compare import assert_close


@pytest.mark.parametrize("size", [96, 1024, 5120])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("centered", "biased"), [(False, False), (True, False), (True, True)])
def test_rms_norm(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    size: int,
    centered: bool,
    biased: bool,
) -> None:
    x = (torch.randn(num_tokens, size, device=device) + 3).to(dtype)
    weight, bias = torch.randn(2, size, device=device).to(dtype)
    given: dict[str, Any] = {"centered": centered, "bias": bias if biased else None}
    expected = rms_norm.rms_norm_reference(x, weight, 1e-6, **given)
    assert_close(rms_norm.rms_norm(x, weight, 1e-6, **given), expected)
    wide = torch.cat([x, x], dim=1)
    rms_norm.rms_norm(wide[:, size:], weight, 1e-6, **given, out=wide[:, size:])
    assert_close(wide, torch.cat([x, expected], dim=1))


@pytest.mark.parametrize("size", [96, 1024, 5120])
@pytest.mark.parametrize(("centered", "biased"), [(False, False), (True, False), (True, True)])
def test_fused_add_rms_norm(
    device: torch.device, dtype: torch.dtype, size: int, centered: bool, biased: bool
) -> None:
    x = torch.randn(3, size, device=device).to(dtype)
    residual = torch.randn(3, size, device=device).to(dtype)
    weight, bias = torch.randn(2, size, device=device).to(dtype)
    given: dict[str, Any] = {"centered": centered, "bias": bias if biased else None}
    expected_residual = residual.clone()
    expected = rms_norm.fused_add_rms_norm_reference(x, expected_residual, weight, 1e-6, **given)
    actual = rms_norm.fused_add_rms_norm(x, residual, weight, 1e-6, **given)
    assert torch.equal(residual, expected_residual)
    assert_close(actual, expected)


@pytest.mark.parametrize("size", [96, 2816, 5376])
@pytest.mark.parametrize("num_norms", [0, 1, 3])
@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_fused_rms_norm_add(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    num_norms: int,
    is_joined: bool,
    is_scaled: bool,
) -> None:
    x, other, residual = torch.randn(3, 5, size, device=device).to(dtype)
    weights = torch.rand(6, size, device=device).to(dtype)
    given: dict[str, Any] = {
        "norms": list(weights[3 : 3 + num_norms]),
        "norms_eps": 0.1 if is_scaled else None,
        "beside": (other, weights[1], weights[2]) if is_joined else None,
        "factor": torch.tensor([0.7], device=device, dtype=dtype) if is_scaled else None,
    }
    # in float64, since the twin rounds in between
    wide: dict[str, Any] = {
        "norms": [weight.double() for weight in given["norms"]],
        "norms_eps": given["norms_eps"],
        "beside": tuple(part.double() for part in given["beside"]) if is_joined else None,
        "factor": given["factor"].double() if is_scaled else None,
    }
    expected_residual = residual.double()
    expected = rms_norm.fused_rms_norm_add_reference(
        x.double(), expected_residual, weights[0].double(), 1e-6, **wide
    )
    found = rms_norm.fused_rms_norm_add(x, residual, weights[0], 1e-6, **given)
    assert_close(residual, expected_residual.to(dtype))
    assert len(found) == num_norms
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, wanted.to(dtype))


@pytest.mark.parametrize("size", [48, 3072])
@pytest.mark.parametrize("gate", ["silu", "gelu", LimitedGate(0.5)], ids=str)
def test_gates(
    device: torch.device, dtype: torch.dtype, size: int, gate: Gate | LimitedGate
) -> None:
    gate_up = torch.randn(7, 2 * size, device=device).to(dtype)
    expected = activation.open_gates_reference(gate_up, gate)
    assert_close(activation.open_gates(gate_up, gate), expected)
    closed, ups = gate_up[:, :size], torch.randn(7, 3, size, device=device).to(dtype)
    found = activation.gate_mul(closed, ups[:, 1], gate)
    assert_close(found, activation.gate_mul_reference(closed, ups[:, 1], gate))


@pytest.mark.parametrize("size", [48, 3072])
@pytest.mark.parametrize("function", get_args(PlainActivation))
def test_activations(
    device: torch.device, dtype: torch.dtype, size: int, function: PlainActivation
) -> None:
    x = torch.randn(7, size, device=device).to(dtype)
    assert_close(activation.activate(x, function), activation.activate_reference(x, function))


@pytest.mark.parametrize("size", [48, 3072])
def test_xielu(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """Among the inputs are small ones, which the exponential may not lose."""
    scales = torch.logspace(-6, 1, 7, device=device)[:, None]
    x = (scales * torch.randn(7, size, device=device)).to(dtype)
    numbers = torch.tensor([0.3, -0.4, 0.5, -1e-6], device=device).to(dtype)
    assert_close(activation.xielu(x, numbers), activation.xielu_reference(x, numbers))


@pytest.mark.parametrize("size", [48, 5000])
def test_soft_cap(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """Rows are parts of wider ones, which stay what they are beyond them."""
    wide = 40 * torch.randn(3, size + 8, device=device).to(dtype)
    expected = wide.clone()
    activation.soft_cap_reference(expected[:, :size], 30.0)
    activation.soft_cap(wide[:, :size], 30.0)
    assert_close(wide, expected)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 16), (24, 256)])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("function", ["sigmoid", "softplus"])
def test_gates_of_attention(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    apart: bool,
    function: OutputGate,
) -> None:
    """Gates stand between queries, as in the projection of both, or apart behind all others."""
    x = torch.randn(5, num_heads, head_dim, device=device).to(dtype)
    qkv = torch.randn(5, (2 * num_heads + 2) * head_dim, device=device).to(dtype)
    gates = rope_store.gates_of(qkv, num_heads, head_dim)
    if apart:
        gates = qkv[:, -num_heads * head_dim :].view(5, num_heads, head_dim)
    for given in (gates, gates[:, :, :1].expand_as(gates)):
        expected = activation.gate_output_reference(x, given, function)
        assert_close(activation.gate_output(x, given, function), expected)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 300), (9, 5000), (3, 4096), (40, 151_936)]
)
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_likelihoods(
    device: torch.device, dtype: torch.dtype, num_rows: int, vocab_size: int, num_top: int
) -> None:
    """Ties, of which logits in bf16 have many, may come in any order."""
    logits = (3 * torch.randn(num_rows, vocab_size, device=device)).to(dtype)
    logits[:, 7] = -torch.inf
    tokens = torch.randint(vocab_size, (num_rows,), device=device, dtype=torch.int32)
    tokens[0] = logits[0].argmax()
    actual = likelihood.likelihoods(logits, tokens, num_top)
    expected = likelihood.likelihoods_reference(logits, tokens, num_top)
    torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual.ranks, expected.ranks)
    assert actual.ranks[0] == 1
    torch.testing.assert_close(actual.top, expected.top, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.gather(1, actual.top_ids), logits.gather(1, expected.top_ids))
    for ids in actual.top_ids.tolist():
        assert len(set(ids)) == num_top


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_embedding_of_a_slice(
    device: torch.device, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    weight = torch.randn(50, 96, device=device).to(dtype)
    ids = torch.tensor([0, 99, 100, 120, 149, 150, 10**6], device=device, dtype=index_dtype)
    actual = embedding.embedding(ids, weight, start=100)
    assert torch.equal(actual, embedding.embedding_reference(ids, weight, start=100))
    assert not actual[[0, 1, 5, 6]].any() and actual[2:5].any(dim=1).all()


@pytest.mark.parametrize("batch_size", [1, 2, 7, 8])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(128, 96), (1024, 512), (3072, 40), (10240, 40)]
)
@pytest.mark.parametrize("fused", ["plain", "bias", "norm", "silu", "gelu", "residual", "all"])
def test_small_batch_linear(
    device: torch.device,
    dtype: torch.dtype,
    batch_size: int,
    in_features: int,
    out_features: int,
    fused: str,
) -> None:
    gates: dict[str, Gate] = {"silu": "silu", "gelu": "gelu", "all": "silu"}
    gate = gates.get(fused)
    x = torch.randn(batch_size, in_features, device=device).to(dtype)
    height = out_features * (2 if gate else 1)
    weight = (torch.randn(height, in_features, device=device) / in_features**0.5).to(dtype)
    norm = torch.rand(in_features, device=device).to(dtype) if fused in ("norm", "all") else None
    bias = torch.randn(height, device=device).to(dtype) if fused in ("bias", "all") else None
    residual = torch.randn(batch_size, out_features, device=device).to(dtype)
    into = residual.clone() if fused in ("residual", "all") else None
    expected_into = None if into is None else into.clone()
    expected = small_batch.small_batch_linear_reference(
        x, weight, bias=bias, norm_weight=norm, gate=gate, residual=expected_into
    )
    actual = small_batch.small_batch_linear(
        x, weight, bias=bias, norm_weight=norm, gate=gate, residual=into
    )
    assert_close(actual, expected)
    if into is not None:
        assert actual.data_ptr() == into.data_ptr()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_large_weights_get_normalized_rows(
    device: torch.device, dtype: torch.dtype, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_batch, "_LEAST_NORMALIZED_OUT_FEATURES", 40)
    x = torch.randn(batch_size, 2176, device=device).to(dtype)
    weight = (torch.randn(40, 2176, device=device) / 2176**0.5).to(dtype)
    norm = torch.rand(2176, device=device).to(dtype)
    assert small_batch.normalizes_before(batch_size, *weight.shape)
    rows = rms_norm.rms_norm_reference(x, norm, 1e-6)
    actual = small_batch.small_batch_linear(x, weight, norm_weight=norm)
    assert_close(actual, small_batch.small_batch_linear_reference(rows, weight))


@pytest.mark.parametrize("gate", [None, "silu"])
def test_one_row_whose_norm_is_half_done(
    device: torch.device, dtype: torch.dtype, gate: Gate | None
) -> None:
    x, squares = torch.randn(1, 500, device=device).to(dtype), torch.rand(5, 1, device=device) * 500
    weight = (torch.randn(44, 500, device=device) / 22).to(dtype)
    y = F.linear(x.float() / (squares.sum() / 500 + 1e-6).sqrt(), weight.float())
    expected = F.silu(y[:, :22]) * y[:, 22:] if gate else y
    actual = small_batch.small_batch_linear(x, weight, squares=squares, gate=gate)
    assert_close(actual, expected.to(dtype))
