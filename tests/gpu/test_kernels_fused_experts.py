"""Fused experts against their twin."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.gates import ClampedGate, ExpertsGate, LimitedGate
from minisgl_backend.kernels.experts import ExpertWeights, fused_experts, fused_experts_reference
from minisgl_backend.kernels.routing import Choices
from tests.gpu.compare import assert_close

HIDDEN_SIZE, INNER_SIZE = 96, 80


def weights_of(num_experts: int, device: torch.device, dtype: torch.dtype) -> ExpertWeights:
    gate_up = torch.randn(num_experts, 2 * INNER_SIZE, HIDDEN_SIZE, device=device) / 10
    down = torch.randn(num_experts, HIDDEN_SIZE, INNER_SIZE, device=device) / 10
    return ExpertWeights(gate_up.to(dtype), down.to(dtype))


def choices_of(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Choices:
    scores = torch.randn(num_tokens, num_experts, device=device).softmax(dim=-1)
    weights, ids = scores.topk(top_k, dim=-1)
    return Choices(ids, weights)


def check(x: torch.Tensor, experts: ExpertWeights, choices: Choices) -> None:
    expected = fused_experts_reference(x, experts, choices)
    actual = fused_experts(x, experts, choices)
    # the product of gate and up, and each expert's share, are rounded on the way
    assert_close(actual, expected, tolerance=1e-5 if x.dtype == torch.float32 else 1.5e-2)


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 150])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (8, 2), (16, 8)])
def test_fused_experts(
    device: torch.device, dtype: torch.dtype, num_tokens: int, num_experts: int, top_k: int
) -> None:
    x = torch.randn(num_tokens, HIDDEN_SIZE, device=device).to(dtype)
    experts = weights_of(num_experts, device, dtype)
    check(x, experts, choices_of(num_tokens, num_experts, top_k, device))


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_biases_and_a_clamped_gate(
    device: torch.device, dtype: torch.dtype, num_tokens: int
) -> None:
    x = 3 * torch.randn(num_tokens, HIDDEN_SIZE, device=device).to(dtype)
    plain = weights_of(8, device, dtype)
    experts = ExpertWeights(
        plain.gate_up,
        plain.down,
        gate_up_bias=torch.randn(8, 2 * INNER_SIZE, device=device).to(dtype),
        down_bias=torch.randn(8, HIDDEN_SIZE, device=device).to(dtype),
        gate=ClampedGate(alpha=1.702, limit=1.5),
    )
    check(x, experts, choices_of(num_tokens, 8, 2, device))


@pytest.mark.parametrize(
    "gate", ["gelu", LimitedGate(0.5), LimitedGate(0.5, on_input=True)], ids=str
)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_other_gates(
    device: torch.device, dtype: torch.dtype, num_tokens: int, gate: ExpertsGate
) -> None:
    x = 3 * torch.randn(num_tokens, HIDDEN_SIZE, device=device).to(dtype)
    plain = weights_of(8, device, dtype)
    experts = ExpertWeights(plain.gate_up, plain.down, gate=gate)
    check(x, experts, choices_of(num_tokens, 8, 2, device))


@pytest.mark.parametrize("num_tokens", [1, 40, 150])
def test_experts_without_gates(device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    x = torch.randn(num_tokens, HIDDEN_SIZE, device=device).to(dtype)
    ups = torch.randn(8, INNER_SIZE, HIDDEN_SIZE, device=device) / 10
    experts = ExpertWeights(ups.to(dtype), weights_of(8, device, dtype).down, gate=None)
    check(x, experts, choices_of(num_tokens, 8, 2, device))


@pytest.mark.parametrize("num_tokens", [2, 3, 40, 150])
def test_experts_of_other_ranks_add_nothing(
    device: torch.device, dtype: torch.dtype, num_tokens: int
) -> None:
    """Also if a rank holds none of a token's experts."""
    x = torch.randn(num_tokens, HIDDEN_SIZE, device=device).to(dtype)
    experts = weights_of(4, device, dtype)
    chosen = choices_of(num_tokens, 16, 4, device)
    here = torch.where(chosen.ids < 4, chosen.ids, -1)
    here[0] = -1
    check(x, experts, Choices(here, chosen.weights, elsewhere=True))
