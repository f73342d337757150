"""Linear layers of up to 8 tokens: weights are streamed once; norm, gate and residual are fused.

At these sizes a GEMM is bound by reading the weight. A program takes a few whole rows of it at a
time, so that all its loads are in flight at once. The norm before the GEMM, the gate after it and
the residual add need no launches of their own. Folding RMSNorm into the GEMM (scaling by 1 / rms
afterwards) and the gate into its end is known from fused decoders such as HazyResearch's
Megakernels.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates_reference
from minisgl_backend.kernels.dispatch import use_triton
from minisgl_backend.kernels.rms_norm import rms_norm, rms_norm_reference

MAX_TOKENS: Final = 8

_LEAST_ELEMENTS: Final = 16 * 2**20
_MOST_IN_FEATURES: Final = 5120
_MOST_ALONE: Final = 24 * 2**20
_MOST_IN_FEATURES_ALONE: Final = 8192
"""Bounds of ``is_faster_for_a_token``: of weights that gain even if tensor cores would fuse a norm
or an add, and of smaller ones that gain if these would not."""

_MOST_FOLDED_IN_FEATURES: Final = 2048
_LEAST_NORMALIZED_OUT_FEATURES: Final = 2**16
"""The fewest out_features of a weight that ``normalizes_before``."""


def is_faster(num_tokens: int, in_features: int, *, gated: bool = False) -> bool:
    """Whether this beats the library's GEMM with separate kernels around it, on an H200.

    It does for up to ``MAX_TOKENS``, except for wide gated layers of two tokens or more.
    """
    if num_tokens > MAX_TOKENS:
        return False
    return num_tokens == 1 or not gated or in_features <= 2048


def is_faster_for_a_token(
    out_features: int, in_features: int, *, gated: bool = False, alone: bool = False
) -> bool:
    """Whether one token times a plain weight is faster here than on tensor cores (H200). ``alone``:
    they do not save the kernels for norms and residual adds."""
    elements = out_features * in_features
    if alone and elements < _MOST_ALONE and in_features <= _MOST_IN_FEATURES_ALONE:
        return True
    return not gated and elements >= _LEAST_ELEMENTS and in_features <= _MOST_IN_FEATURES


def normalizes_before(num_tokens: int, out_features: int, in_features: int) -> bool:
    """Whether a separate kernel for the norm is faster than the norm in the GEMM.

    It is for the output heads of large vocabularies, whose many programs would each normalize the
    tokens. On an H200 the head of gpt-oss-20b takes 391 us for one token with the norm in the GEMM,
    and 257 us with a separate kernel; that of Qwen3-30B-A3B takes 157 us and 144 us for two. One
    short token is normalized as fast as it is read.
    """
    is_short = num_tokens == 1 and in_features <= _MOST_FOLDED_IN_FEATURES
    return out_features >= _LEAST_NORMALIZED_OUT_FEATURES and not is_short


def small_batch_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 1e-6,
    gate: Gate | None = None,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x W^T + bias,  norm(x) W^T,  gate(x G^T) * (x U^T),  residual + x W^T,  or a combination.

    ``x`` [num_tokens, in_features], at most ``MAX_TOKENS``; ``weight`` [out_features,
    in_features]. With a ``gate`` its first half is G, its second half the up U, and the result is
    half as wide. With ``norm_weight`` [in_features] x is normalized first (RMSNorm with
    ``eps``). ``squares`` [tiles, 1] complete a norm that is half done (``cuda.linear``), for a
    single token only. ``residual`` [num_tokens, out_features] is updated in place and returned.
    """
    if not use_triton(x):
        return small_batch_linear_reference(
            x,
            weight,
            bias=bias,
            norm_weight=norm_weight,
            squares=squares,
            eps=eps,
            gate=gate,
            residual=residual,
        )
    from minisgl_backend.kernels.triton_kernels.small_batch_kernels import launch_small_batch_linear

    if norm_weight is not None and normalizes_before(len(x), *weight.shape):
        x, norm_weight = rms_norm(x, norm_weight, eps, pdl=pdl), None
    out_features = len(weight) if gate is None else len(weight) // 2
    out = residual
    if out is None:
        out = torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
    launch_small_batch_linear(
        out,
        x,
        weight,
        bias=bias,
        norm_weight=norm_weight,
        squares=squares,
        eps=eps,
        gated=gate is not None,
        gelu=gate == "gelu",
        add=residual is not None,
        pdl=pdl,
    )
    return out


def small_batch_linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 1e-6,
    gate: Gate | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The twin of ``small_batch_linear``, accumulated in float32."""
    wide = x.float()
    if squares is not None:
        wide = wide * (squares.sum() / x.shape[1] + eps).rsqrt()
    if norm_weight is not None:
        wide = rms_norm_reference(wide, norm_weight.to(wide.dtype), eps)
    y = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if gate is not None:
        y = open_gates_reference(y, gate)
    if residual is None:
        return y.to(x.dtype)
    return residual.copy_((residual.float() + y).to(residual.dtype))
