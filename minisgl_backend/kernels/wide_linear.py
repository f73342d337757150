"""Linear layers of 9 to a few hundred tokens, for which the library's GEMMs are slow.

For weights of a few million elements the library leaves much of the GPU idle. Here a GEMM is cut
into about as many tiles as there are multiprocessors. If its output is too small for that, it is
also cut along in_features ("split-K"): then it returns float32 parts, which are summed up by the
residual add with RMSNorm that follows.
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
from minisgl_backend.kernels.rms_norm import rms_norm_reference

MAX_TOKENS: Final = 128
"""Up to this many tokens, ``wide_linear`` beats the library on an H200; ``linear_parts`` does up to
twice as many."""

_MAX_ELEMENTS: Final = 8 * 2**20
"""Weights beyond this are large enough for the library."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a GEMM is cut; the cuts were the fastest on an H200."""

    rows: int
    columns: int
    block: int
    swap: bool
    stages: int
    num_warps: int = 4
    splits: int = 1


def tiling(num_tokens: int, *, gated: bool = False, parts: bool = False) -> Tiling:
    """The cut for ``num_tokens``."""
    splits = 1 if not parts else 4 if num_tokens <= 128 else 2
    if num_tokens <= 32:
        rows = 16 if num_tokens <= 16 else 32
        return Tiling(rows, 64, 128, True, 4, splits=splits)
    if num_tokens <= 64 and (gated or parts):
        block, stages = (64, 5) if parts else (128, 4)
        return Tiling(64, 32, block, False, stages, splits=splits)
    if num_tokens <= 128 and (gated or parts):
        return Tiling(64, 64, 64, False, 5, splits=splits)
    return Tiling(64, 64, 128, parts, 4, splits=splits)


def is_faster(
    num_tokens: int,
    out_features: int,
    in_features: int,
    *,
    gated: bool = False,
    parts: bool = False,
) -> bool:
    """Whether a GEMM of these sizes can be computed here, and beats the library."""
    most = 2 * MAX_TOKENS if parts else MAX_TOKENS
    if num_tokens > most or out_features * in_features > _MAX_ELEMENTS:
        return False
    cut = tiling(num_tokens, gated=gated, parts=parts)
    return out_features % cut.columns == 0 and in_features % (cut.splits * cut.block) == 0


def wide_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gate: Gate | None = None,
    pdl: bool = False,
) -> Tensor:
    """x W^T + bias, or with a ``gate``, gate(x G^T) * (x U^T): W holds G and then U.

    ``x`` [num_tokens, in_features], rows may be strided; ``weight`` [out_features, in_features], or
    twice as many rows with a ``gate``; only sizes for which ``is_faster``. Returns
    [num_tokens, out_features].
    """
    if not use_triton(x):
        return wide_linear_reference(x, weight, bias=bias, gate=gate)
    out_features = len(weight) if gate is None else len(weight) // 2
    out = torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
    cut = tiling(len(x), gated=gate is not None)
    _launch(out, x, weight, bias, cut, gate=gate, pdl=pdl)
    return out


def wide_linear_reference(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, gate: Gate | None = None
) -> Tensor:
    """The twin of ``wide_linear``, accumulated in float32."""
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gate is not None:
        y = open_gates_reference(y, gate)
    return y.to(x.dtype)


def linear_parts(x: Tensor, weight: Tensor, *, pdl: bool = False) -> Tensor:
    """float32 [splits, num_tokens, out_features], whose sum over the first dimension is x W^T."""
    cut = tiling(len(x), parts=True)
    if not use_triton(x):
        return linear_parts_reference(x, weight, cut.splits)
    shape = (cut.splits, len(x), len(weight))
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch(out, x, weight, None, cut, gate=None, pdl=pdl)
    return out


def linear_parts_reference(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """The twin of ``linear_parts``."""
    pairs = zip(x.float().chunk(splits, 1), weight.float().chunk(splits, 1), strict=True)
    return torch.stack([F.linear(part, of_part) for part, of_part in pairs])


def add_rms_norm_parts(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """residual += sum of ``parts`` + bias, in place; returns RMSNorm of it, rounded to its dtype.

    ``parts`` float32 [splits, num_tokens, hidden_size]; ``residual`` [num_tokens, hidden_size];
    ``weight`` and ``bias`` [hidden_size].
    """
    if not use_triton(parts):
        return add_rms_norm_parts_reference(parts, residual, weight, eps, bias=bias)
    from minisgl_backend.kernels.triton_kernels.wide_linear_kernels import launch_add_rms_norm_parts

    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    launch_add_rms_norm_parts(out, parts, bias, residual, weight, eps, pdl=pdl)
    return out


def add_rms_norm_parts_reference(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None
) -> Tensor:
    """The twin of ``add_rms_norm_parts``."""
    total = residual.float() + parts.sum(dim=0)
    if bias is not None:
        total += bias.float()
    residual.copy_(total.to(residual.dtype))
    return rms_norm_reference(residual, weight, eps)


def _launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cut: Tiling,
    *,
    gate: Gate | None,
    pdl: bool,
) -> None:
    from minisgl_backend.kernels.triton_kernels.wide_linear_kernels import launch_wide_linear

    launch_wide_linear(
        out,
        x,
        weight,
        bias,
        gated=gate is not None,
        gelu=gate == "gelu",
        splits=cut.splits,
        rows=cut.rows,
        columns=cut.columns,
        block=cut.block,
        swap=cut.swap,
        stages=cut.stages,
        num_warps=cut.num_warps,
        pdl=pdl,
    )
