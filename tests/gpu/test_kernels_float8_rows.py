"""Tokens in float8, rounded alone and by the kernels that compute them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.float8_rows import (
    Float8Rows,
    float8_rows,
    float8_rows_reference,
    gated_float8,
    rms_norm_float8,
)
from minisgl_backend.kernels.rms_norm import fused_add_rms_norm_reference, rms_norm_reference
from tests.gpu.compare import relative_error

BATCHES = (2, 9) if is_interpreted() else (2, 5, 130)
PDL = [False] if is_interpreted() else [False, True]


@pytest.mark.parametrize(
    ("size", "group"), [(128, 128), (1024, 128), (384, 384), (17408, 128), (640, 640)]
)
@pytest.mark.parametrize("pdl", PDL)
def test_rows(device: torch.device, dtype: torch.dtype, size: int, group: int, pdl: bool) -> None:
    for batch in BATCHES:
        x = torch.randn(batch, size + 8, device=device).to(dtype)[:, :size]
        x[0, :group] = 0
        check(float8_rows(x, group, pdl=pdl), x, group)


@pytest.mark.parametrize(("size", "group"), [(512, 128), (1152, 128), (5120, 128), (1152, 1152)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("pdl", PDL)
def test_a_norm(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    group: int,
    adds: bool,
    pdl: bool,
) -> None:
    for batch in BATCHES:
        x, residual = (torch.randn(batch, size, device=device).to(dtype) for _ in range(2))
        weight = torch.rand(size, device=device).to(dtype)
        total = residual.clone()
        if adds:
            expected = fused_add_rms_norm_reference(x, total, weight, 1e-6)
        else:
            expected = rms_norm_reference(x, weight, 1e-6)
        added = residual if adds else None
        rows = rms_norm_float8(x, added, weight, 1e-6, group, pdl=pdl)
        assert torch.equal(residual, total)
        check(rows, expected, group, tolerance=2e-2)  # a 16-bit one may be rounded differently


@pytest.mark.parametrize(("size", "group"), [(512, 128), (17408, 128), (1408, 1408)])
@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("pdl", PDL)
def test_a_gate(
    device: torch.device, dtype: torch.dtype, size: int, group: int, gate: Gate, pdl: bool
) -> None:
    for batch in BATCHES:
        gate_up = torch.randn(batch, 2 * size, device=device).to(dtype)
        gate_up[0, :group] = 0
        rows = gated_float8(gate_up, group, gate, pdl=pdl)
        check(rows, open_gates(gate_up, gate), group)


def check(rows: Float8Rows, x: Tensor, group: int, *, tolerance: float = 1e-2) -> None:
    """``rows`` must be those of ``x``."""
    expected, num_rows = float8_rows_reference(x, group), len(x)
    assert rows.num_rows == num_rows and rows.group == group
    assert rows.scales.stride() == expected.scales.stride()
    scales, expected_scales = rows.scales[:num_rows], expected.scales[:num_rows]
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=tolerance)
    # a quotient at the edge between two numbers may be rounded differently; the interpreter also
    # forgets the carry if rounding makes a mantissa overflow, and halves such numbers
    if is_interpreted():
        tolerance = 0.1
    found = rows.numbers[:num_rows].float()
    assert relative_error(found, expected.numbers[:num_rows].float()) < tolerance
