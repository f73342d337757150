"""Tokens in float8, which GEMMs multiply by weights in float8.

They are converted from existing rows (``float8_rows``), or written by the kernel that computes the
rows: RMSNorm, with or without a residual add, or the gate of a feed-forward block. The results are
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.packed_weight import PLACES_OF_BYTES
from minisgl_backend.kernels.quantized import FP8_MAX
from minisgl_backend.kernels.rms_norm import fused_add_rms_norm_reference, rms_norm_reference

_UNIT: Final = 8
"""The library takes a multiple of this number of tokens if a token has several scales."""


@dataclass(frozen=True, slots=True, eq=False)
class Float8Rows:
    """``num_rows`` tokens: numbers of 8 bits and their scales.

    ``numbers`` float8_e4m3fn [num_rows, in_features], permuted like packed weights. ``scales``
    float32 [num_rows, in_features / group] in column-major order: ``group`` neighbours share a
    scale. Both have more rows, up to a multiple of 8, whose contents are undefined.
    """

    numbers: Tensor
    scales: Tensor
    num_rows: int

    @property
    def group(self) -> int:
        return self.numbers.shape[1] // self.scales.shape[1]

    @classmethod
    def empty(cls, num_rows: int, in_features: int, group: int, device: torch.device) -> Float8Rows:
        height = -(-num_rows // _UNIT) * _UNIT
        numbers = torch.empty((height, in_features), dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty((in_features // group, height), dtype=torch.float32, device=device)
        return cls(numbers, scales.t(), num_rows)


def float8_rows(x: Tensor, group: int, *, pdl: bool = False) -> Float8Rows:
    """Round ``x`` [num_rows, in_features] to float8. Rows may be strided; in_features is a multiple
    of ``group``."""
    if not use_triton(x):
        return float8_rows_reference(x, group)
    from minisgl_backend.kernels.triton_kernels.float8_kernels import launch_float8_rows

    out = Float8Rows.empty(len(x), x.shape[1], group, x.device)
    launch_float8_rows(out.numbers, out.scales, x, group, pdl=pdl)
    return out


def float8_rows_reference(x: Tensor, group: int) -> Float8Rows:
    """The twin of ``float8_rows``."""
    out = Float8Rows.empty(len(x), x.shape[1], group, x.device)
    padded = F.pad(x, (0, 0, 0, len(out.numbers) - len(x)))
    groups = padded.float().reshape(len(padded), -1, group)  # [rows, columns, group]
    scales = groups.abs().amax(-1).clamp_min(1e-12) / FP8_MAX
    numbers = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    permuted = numbers.view(torch.uint8).reshape(len(padded), -1, 16)[..., PLACES_OF_BYTES]
    out.numbers.view(torch.uint8).copy_(permuted.flatten(1))
    out.scales.copy_(scales)
    return out


def rms_norm_float8(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int,
    *,
    pdl: bool = False,
) -> Float8Rows:
    """``float8_rows`` of ``rms_norm`` of ``x``, or of ``fused_add_rms_norm`` with ``residual``.

    ``x``, ``residual`` [num_rows, hidden_size] of one dtype.
    """
    if not use_triton(x):
        if residual is None:
            normed = rms_norm_reference(x, weight, eps)
        else:
            normed = fused_add_rms_norm_reference(x, residual, weight, eps)
        return float8_rows_reference(normed, group)
    from minisgl_backend.kernels.triton_kernels.float8_kernels import launch_rms_norm_float8

    out = Float8Rows.empty(len(x), x.shape[1], group, x.device)
    launch_rms_norm_float8(out.numbers, out.scales, x, residual, weight, eps, group, pdl=pdl)
    return out


def gated_float8(gate_up: Tensor, group: int, gate: Gate, *, pdl: bool = False) -> Float8Rows:
    """``float8_rows`` of ``open_gates`` of ``gate_up`` [num_rows, 2 * size]."""
    if not use_triton(gate_up):
        return float8_rows_reference(open_gates_reference(gate_up, gate), group)
    from minisgl_backend.kernels.triton_kernels.float8_kernels import launch_gated_float8

    num_rows, width = gate_up.shape
    out = Float8Rows.empty(num_rows, width // 2, group, gate_up.device)
    launch_gated_float8(out.numbers, out.scales, gate_up, group, gelu=gate == "gelu", pdl=pdl)
    return out
