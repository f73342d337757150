"""RMSNorm (arXiv 1910.07467): alone, after a residual add, and before it. If ``centered``, the
mean is first subtracted from x, and a ``bias`` [hidden_size] may be added to the result: both make
it LayerNorm (arXiv 1607.06450)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.dispatch import use_triton


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    centered: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once.

    ``x`` [num_tokens, hidden_size], rows may be strided; ``weight`` [hidden_size]. The result has
    the shape and dtype of ``x``, and is in ``out`` if that is given; ``out`` may be ``x``.
    """
    if not use_triton(x):
        normed = rms_norm_reference(x, weight, eps, centered=centered, bias=bias)
        return normed if out is None else out.copy_(normed)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_rms_norm

    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rms_norm(out, x, None, weight, eps, centered=centered, bias=bias, pdl=pdl)
    return out


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, centered: bool = False, bias: Tensor | None = None
) -> Tensor:
    """The twin of ``rms_norm``, for weights in the dtype of ``x``; float64 stays float64."""
    if centered:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    assert bias is None
    return F.rms_norm(x, weight.shape, weight, eps)


def scales_of_squares(squares: Tensor, size: int, eps: float) -> Tensor:
    """The factors that complete a norm that is half done (``layers.norm.Normed``): each token's
    1 / sqrt(mean(x^2) + eps), [num_tokens]. ``squares`` [tiles, num_tokens] sum up over ``size``
    numbers."""
    return torch.rsqrt(squares.sum(dim=0) / size + eps)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    centered: bool = False,
    bias: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """residual += x in place; returns ``rms_norm`` of the sum, rounded to its dtype first.

    ``x``, ``residual`` [num_tokens, hidden_size] of one dtype; ``weight`` [hidden_size].
    """
    if not use_triton(x):
        return fused_add_rms_norm_reference(x, residual, weight, eps, centered=centered, bias=bias)
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_rms_norm

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rms_norm(out, x, residual, weight, eps, centered=centered, bias=bias, pdl=pdl)
    return out


def fused_add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    centered: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """The twin of ``fused_add_rms_norm``."""
    return rms_norm_reference(residual.add_(x), weight, eps, centered=centered, bias=bias)


def fused_rms_norm_add(
    x: Tensor,
    residual: Tensor,
    after: Tensor,
    eps: float,
    *,
    norms: Sequence[Tensor] = (),
    norms_eps: float | None = None,
    beside: tuple[Tensor, Tensor, Tensor] | None = None,
    factor: Tensor | None = None,
    pdl: bool = False,
) -> list[Tensor]:
    """residual = (residual + norm of ``x``) * ``factor``, in place; returns the result under each
    of ``norms``, of which there are at most three.

    ``x``, ``residual`` [num_tokens, hidden_size] of one dtype; ``after`` and ``norms`` are weights
    [hidden_size]; ``factor`` [1]. With ``beside``, which is another x and weights a and b, the sum
    of x under a and the other x under b takes the place of ``x``. The norms of the result have
    ``norms_eps``, all others ``eps``, which is also the default.
    """
    if not use_triton(x):
        return fused_rms_norm_add_reference(
            x, residual, after, eps, norms=norms, norms_eps=norms_eps, beside=beside, factor=factor
        )
    from minisgl_backend.kernels.triton_kernels.layer_kernels import launch_rms_norm_add

    out = torch.empty((len(norms), *x.shape), dtype=x.dtype, device=x.device)
    launch_rms_norm_add(
        out,
        x,
        residual,
        after,
        eps,
        norms=norms,
        norms_eps=eps if norms_eps is None else norms_eps,
        beside=beside,
        factor=factor,
        pdl=pdl,
    )
    return list(out)


def fused_rms_norm_add_reference(
    x: Tensor,
    residual: Tensor,
    after: Tensor,
    eps: float,
    *,
    norms: Sequence[Tensor] = (),
    norms_eps: float | None = None,
    beside: tuple[Tensor, Tensor, Tensor] | None = None,
    factor: Tensor | None = None,
) -> list[Tensor]:
    """The twin of ``fused_rms_norm_add``."""
    if beside is not None:
        other, x_weight, other_weight = beside
        x = rms_norm_reference(x, x_weight, eps) + rms_norm_reference(other, other_weight, eps)
    residual.add_(rms_norm_reference(x, after, eps))
    if factor is not None:
        residual.mul_(factor)
    norms_eps = eps if norms_eps is None else norms_eps
    return [rms_norm_reference(residual, weight, norms_eps) for weight in norms]
