"""The layers of a dense decoder for decode steps on Hopper: four products, and attention.

Norms, rotation, storing of keys and values, activations and residual adds happen inside the
products (``kernels.cuda.linear``), so that between them nothing else is launched. With several
ranks the sums over the ranks are launched as well, and include the residual adds and norms that
follow them. The residual stream is bfloat16, updated in place. Holds no weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from minisgl_backend.attention.paged import PagedKV
from minisgl_backend.kernels.cuda.linear import (
    HeadsKernel,
    LinearKernel,
    Normalized,
    ResidualKernel,
)
from minisgl_backend.kernels.linear_cut import largest_batch, why_not
from minisgl_backend.kernels.rms_norm import rms_norm
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.rank_sum import add_rms_norm_of_sum
from minisgl_backend.parallel.group import Group


class TensorCoreLayers:
    """The layers of ``model``, for up to ``most_tokens``; ``kv`` holds the pages of each."""

    def __init__(self, model: Decoder, kv: list[PagedKV]) -> None:
        """Compile the kernels, or find them compiled, of a model that ``can_take`` accepts."""
        layer: Any = model.model.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        keys = kv[0].keys
        device, group = keys.device, model.group
        self.most_tokens = most = largest_batch(_num_elements(layer))
        self._heads = HeadsKernel(
            attention.num_heads,
            keys.shape[2],
            keys.shape[3],
            attention.qkv_proj.weight.shape[1],
            device,
            page_size=keys.shape[1],
            fp8=kv[0].k_scale is not None,
            most_tokens=most,
        )
        self._out = _residual_kernel(attention.o_proj.weight.shape, device, group, most)
        self._up = LinearKernel(mlp.gate_up_proj.weight.shape, device, gated=True, most_tokens=most)
        self._down = _residual_kernel(mlp.down_proj.weight.shape, device, group, most)
        self._model, self._kv = model, kv

    @staticmethod
    def can_take(model: Decoder) -> bool:
        """Whether the layers can be computed here, and gain by it."""
        spec = model.spec
        if model.dtype != torch.bfloat16 or spec.moe is not None:
            return False
        if spec.head_dim not in (64, 128):
            return False
        layer = model.model.layers[0]
        can_be_cut = all(why_not(*weight.shape) is None for weight in _weights(layer))
        return can_be_cut and largest_batch(_num_elements(layer)) > 0

    def hidden(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        layers: Iterable[tuple[int, Any]],
        attend: Callable[[Tensor, PagedKV, int], Tensor],
    ) -> Tensor:
        """The residual stream ``x`` [num_tokens, hidden_size] after all layers, in place.

        Up to ``most_tokens``; ``positions`` and ``slots`` are int32, as in captured steps.
        """
        decoder: Any = self._model.model
        norms = [layer.input_layernorm.weight for layer in decoder.layers] + [decoder.norm.weight]
        eps = self._model.spec.norm_eps
        rows = Normalized(rms_norm(x, norms[0], eps, pdl=True), eps=eps)
        for index, layer in layers:
            attention, mlp, kv = layer.self_attn, layer.mlp, self._kv[index]
            norm = attention.qk_norm
            q = self._heads(
                rows,
                attention.qkv_proj.weight,
                positions,
                slots,
                self._model.rotary_table,
                kv.keys,
                kv.values,
                # a HeadNorm holds its weight once a head
                q_weight=None if norm is None else norm.weight[0],
                k_weight=None if norm is None else norm.weight[attention.num_heads],
                k_scale=kv.k_scale,
                v_scale=kv.v_scale,
                bias=attention.qkv_proj.bias,
                pdl=True,
            )
            rows = self._out(
                attend(q, kv, index).flatten(1),
                attention.o_proj.weight,
                x,
                layer.post_attention_layernorm.weight,
                eps,
                bias=attention.o_proj.bias,
                pdl=True,
            )
            inner = self._up(rows, mlp.gate_up_proj.weight, bias=mlp.gate_up_proj.bias, pdl=True)
            rows = self._down(
                inner,
                mlp.down_proj.weight,
                x,
                norms[index + 1],
                eps,
                bias=mlp.down_proj.bias,
                pdl=True,
            )
        return x


class _SumKernel:
    """A ``ResidualKernel`` for several ranks: what their products add to the residual stream."""

    def __init__(
        self, shape: Sequence[int], device: torch.device, group: Group, most_tokens: int
    ) -> None:
        self._product = LinearKernel(shape, device, most_tokens=most_tokens)
        self._group = group

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        bias: Tensor | None = None,
        pdl: bool = False,
    ) -> Normalized:
        own_bias = bias if self._group.rank == 0 else None
        part = self._product(Normalized(x), weight, bias=own_bias, pdl=pdl)
        normalized = add_rms_norm_of_sum(part, self._group, residual, norm_weight, eps, pdl=pdl)
        return Normalized(normalized, eps=eps)


def _residual_kernel(
    shape: Sequence[int], device: torch.device, group: Group, most_tokens: int
) -> ResidualKernel | _SumKernel:
    if group.size == 1:
        return ResidualKernel(shape, device, most_tokens=most_tokens)
    return _SumKernel(shape, device, group, most_tokens)


def _weights(layer: Any) -> list[Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return [linear.weight for linear in products]


def _num_elements(layer: Any) -> int:
    return sum(weight.numel() for weight in _weights(layer))
