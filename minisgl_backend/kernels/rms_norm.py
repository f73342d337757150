"""RMSNorm (arXiv 1910.07467), alone and after a residual add."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once.

    ``x`` [num_tokens, hidden_size], rows may be strided; ``weight`` [hidden_size]. Returns a new
    tensor of the shape and dtype of ``x``.
    """
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_rms_norm

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rms_norm(out, x, None, weight, eps, pdl=pdl)
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin of ``rms_norm``, for weights in the dtype of ``x``; float64 stays float64."""
    return F.rms_norm(x, weight.shape, weight, eps)


def scales_of_squares(squares: Tensor, size: int, eps: float) -> Tensor:
    """The factors that complete a norm that is half done (``layers.norm.Normed``): each token's
    1 / sqrt(mean(x^2) + eps), [num_tokens]. ``squares`` [tiles, num_tokens] sum up over ``size``
    numbers."""
    return torch.rsqrt(squares.sum(dim=0) / size + eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False
) -> Tensor:
    """residual += x in place; returns ``rms_norm`` of the sum, rounded to its dtype first.

    ``x``, ``residual`` [num_tokens, hidden_size] of one dtype; ``weight`` [hidden_size].
    """
    if not use_triton(x):
        return fused_add_rms_norm_reference(x, residual, weight, eps)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_rms_norm

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rms_norm(out, x, residual, weight, eps, pdl=pdl)
    return out


def fused_add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin of ``fused_add_rms_norm``."""
    return rms_norm_reference(residual.add_(x), weight, eps)
