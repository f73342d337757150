"""The layers of a dense decoder for decode steps on Hopper: four products, and attention.

Norms, rotation, storing of keys and values, activations and residual adds happen inside the
products (``kernels.cuda.linear``), so that between them nothing else is launched. The residual
stream is bfloat16, updated in place. Holds no weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.attention.paged import PagedKV
from minisgl_backend.kernels.cuda.linear import (
    HeadsKernel,
    LinearKernel,
    Normalized,
    ResidualKernel,
)
from minisgl_backend.kernels.linear_cut import MAX_TOKENS, why_not
from minisgl_backend.kernels.rms_norm import rms_norm
from minisgl_backend.models.decoder import Decoder

_MAX_ELEMENTS: Final = 8 * 2**20
"""Of a weight; they pay up to here on an H200, and were not measured beyond."""


class TensorCoreLayers:
    """The layers of ``model``, for up to ``MAX_TOKENS`` tokens; ``kv`` holds the pages of each."""

    def __init__(self, model: Decoder, kv: list[PagedKV]) -> None:
        """Compile the kernels, or find them compiled, of a model that ``can_take`` accepts."""
        layer: Any = model.model.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        keys = kv[0].keys
        device = keys.device
        self._heads = HeadsKernel(
            attention.num_heads,
            keys.shape[2],
            keys.shape[3],
            attention.qkv_proj.weight.shape[1],
            device,
            page_size=keys.shape[1],
            fp8=kv[0].k_scale is not None,
        )
        self._out = ResidualKernel(attention.o_proj.weight.shape, device)
        self._up = LinearKernel(mlp.gate_up_proj.weight.shape, device, gated=True)
        self._down = ResidualKernel(mlp.down_proj.weight.shape, device)
        self._model, self._kv = model, kv

    @staticmethod
    def can_take(model: Decoder) -> bool:
        """Whether the layers can be computed here, and gain by it."""
        spec = model.spec
        if model.group.size > 1 or model.dtype != torch.bfloat16 or spec.moe is not None:
            return False
        if spec.head_dim not in (64, 128):
            return False
        layer: Any = model.model.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        return all(
            linear.weight.numel() <= _MAX_ELEMENTS and why_not(*linear.weight.shape) is None
            for linear in products
        )

    @staticmethod
    def fits(positions: Tensor) -> bool:
        """Whether a step of these positions is one for here; those of captured steps are int32."""
        return len(positions) <= MAX_TOKENS and positions.dtype == torch.int32

    def hidden(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        layers: Iterable[tuple[int, Any]],
        attend: Callable[[Tensor, PagedKV, int], Tensor],
    ) -> Tensor:
        """The residual stream ``x`` [num_tokens, hidden_size] after all layers, in place."""
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
