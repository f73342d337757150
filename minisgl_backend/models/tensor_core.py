"""The layers of a dense decoder on Hopper's tensor cores, for steps of up to 256 tokens.

Norms, rotation, storing of keys and values, activations and residual adds happen inside the GEMMs
(``kernels.cuda.linear``), so that a layer is four of them and attention. With several ranks the
sums over the ranks are launched as well, and include the residual adds and norms that follow them.
Compiles the kernels and gives them to the layers; holds no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.linear import (
    HeadsKernel,
    LinearKernel,
    Normalized,
    ResidualKernel,
)
from minisgl_backend.kernels.linear_cut import largest_batch, why_not
from minisgl_backend.layers.gemm import DenseMatrix, Normed
from minisgl_backend.layers.mlp import GatedMLP
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.models.decoder import Decoder, DecoderLayer
from minisgl_backend.models.token_mixing import SelfAttention, StepContext


def use_tensor_cores(model: Decoder) -> None:
    """Give the layers of ``model`` their kernels, if there are any for its shapes and they are
    faster. Compiles those that are not in the cache. Pages must be bound."""
    layers, spec = model.layers, model.spec
    if model.dtype != torch.bfloat16 or spec.head_dim not in (64, 128):
        return
    dense = [matrices for layer in layers if (matrices := _dense(layer)) is not None]
    if len(dense) < len(layers):
        return
    first = dense[0]
    weights = [matrix.weight for matrix in (first.qkv, first.out, first.gate_up, first.down)]
    most_tokens = largest_batch(sum(weight.numel() for weight in weights))
    if most_tokens == 0 or any(why_not(*weight.shape) is not None for weight in weights):
        return
    model.most_tensor_core_tokens = most_tokens
    attention, qkv, out, gate_up, down = first
    device, kv = qkv.weight.device, attention.kv
    heads = _Heads(
        HeadsKernel(
            attention.num_heads,
            attention.num_kv_heads,
            spec.head_dim,
            qkv.in_features,
            device,
            page_size=kv.keys.shape[1],
            fp8=kv.k_scale is not None,
            most_tokens=most_tokens,
        )
    )
    gated = _Gemm(LinearKernel(gate_up.weight.shape, device, gated=True, most_tokens=most_tokens))
    for matrices in dense:
        matrices.attention.heads_gemm = heads
        matrices.gate_up.tensor_core_gemm = gated
    for shape, same_shape in (
        (out.weight.shape, [matrices.out for matrices in dense]),
        (down.weight.shape, [matrices.down for matrices in dense]),
    ):
        if model.group.size == 1:
            add = _Add(ResidualKernel(shape, device, most_tokens=most_tokens))
            for matrix in same_shape:
                matrix.tensor_core_add = add
        else:
            gemm = _Gemm(LinearKernel(shape, device, most_tokens=most_tokens))
            for matrix in same_shape:
                matrix.tensor_core_gemm = gemm


class _Dense(NamedTuple):
    """The attention and the matrices of a dense layer, in the order of the forward pass."""

    attention: SelfAttention
    qkv: DenseMatrix
    out: DenseMatrix
    gate_up: DenseMatrix
    down: DenseMatrix


def _dense(layer: DecoderLayer) -> _Dense | None:
    """The parts of a layer of dense weights; None if it is of another kind."""
    attention, mlp = layer.mixer, layer.mlp
    if not isinstance(attention, SelfAttention) or not isinstance(mlp, GatedMLP):
        return None
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    matrices = [linear.matrix for linear in linears]
    dense = [matrix for matrix in matrices if isinstance(matrix, DenseMatrix)]
    return _Dense(attention, *dense) if len(dense) == len(matrices) else None


def _rows(x: Normed, eps: float) -> Normalized:
    """The input as the kernels take it. ``eps`` is that of the norms of heads."""
    if x.squares is None:
        return Normalized(x.normalized(pdl=True), eps=eps)
    assert x.norm is not None
    return Normalized(x.x, x.squares, x.norm.eps)


@dataclass(frozen=True, slots=True, eq=False)
class _Gemm:
    """``TensorCoreGemm``."""

    kernel: LinearKernel

    def __call__(self, x: Normed, weight: Tensor, *, bias: Tensor | None, pdl: bool) -> Tensor:
        return self.kernel(_rows(x, 0.0), weight, bias=bias, pdl=pdl)


@dataclass(frozen=True, slots=True, eq=False)
class _Add:
    """``TensorCoreAdd``."""

    kernel: ResidualKernel

    def __call__(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        norm: RMSNorm,
        *,
        bias: Tensor | None,
        pdl: bool,
    ) -> Normed:
        done = self.kernel(x, weight, residual, norm.weight, norm.eps, bias=bias, pdl=pdl)
        return Normed(done.x, norm, done.squares)


@dataclass(frozen=True, slots=True, eq=False)
class _Heads:
    """``HeadsGemm``."""

    kernel: HeadsKernel

    def __call__(self, x: Normed, attention: SelfAttention, step: StepContext) -> Tensor:
        kv, norm, linear = attention.kv, attention.qk_norm, attention.qkv_proj
        matrix = linear.matrix
        assert isinstance(matrix, DenseMatrix)
        return self.kernel(
            _rows(x, attention.eps),
            matrix.weight,
            step.positions,
            step.slots,
            step.rotary_table,
            kv.keys,
            kv.values,
            q_weight=None if norm is None else norm.q,
            k_weight=None if norm is None else norm.k,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            bias=linear.bias,
            pdl=step.launch.pdl,
        )
