"""Fused experts against their twin."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels import moe
from tests.gpu.compare import assert_close


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 150])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (8, 2), (16, 8)])
def test_fused_experts(
    device: torch.device, dtype: torch.dtype, num_tokens: int, num_experts: int, top_k: int
) -> None:
    hidden_size, intermediate_size = 96, 80
    x = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    gate_up = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device)
    down = torch.randn(num_experts, hidden_size, intermediate_size, device=device)
    gate_up, down = (gate_up / 10).to(dtype), (down / 10).to(dtype)
    scores = torch.randn(num_tokens, num_experts, device=device).softmax(dim=-1)
    weights, ids = scores.topk(top_k, dim=-1)
    expected = moe.fused_experts_reference(x, gate_up, down, ids, weights)
    actual = moe.fused_experts(x, gate_up, down, ids, weights)
    # the product of gate and up, and each expert's share, are rounded on the way
    assert_close(actual, expected, tolerance=1e-5 if dtype == torch.float32 else 1.5e-2)
