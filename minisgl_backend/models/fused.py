"""The decoder by kernels, for GPUs: the modules of ``decoder``, computed with fewer launches.

Holds no weights of its own: it reads those of a ``Decoder``, and gives the same values within
rounding. The residual stream is one tensor that is updated in place.

Two forms of a layer. Wide: library products, with the norms fused into the residual adds. Small
(``small_batch``, up to 8 tokens): six kernels, each product with what stands around it.

Nothing here waits for the device or depends on values, so all of it may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.paged import PagedKV
from minisgl_backend.kernels.activation import silu_mul
from minisgl_backend.kernels.embedding import embedding
from minisgl_backend.kernels.moe import fused_experts
from minisgl_backend.kernels.rms_norm import fused_add_rms_norm, rms_norm
from minisgl_backend.kernels.rope_store import qk_norm_rope_store
from minisgl_backend.kernels.small_batch import MAX_BATCH_SIZE, is_faster, small_batch_linear
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.moe.experts import ExpertsMLP

_PDL_HIDDEN_SIZE: Final = 2048
"""Up to here, for one token, a kernel gains by starting before its predecessor ends (measured)."""

Attend: TypeAlias = Callable[[Tensor, PagedKV, int], Tensor]
"""(q [num_tokens, num_heads, head_dim], pages of the layer, layer) -> the shape of q."""


class FusedDecoder:
    """Forward passes of ``model`` over tensors on a GPU (elsewhere by the kernels' twins)."""

    def __init__(self, model: Decoder, kv: list[PagedKV]):
        """``kv`` holds the pages of each layer."""
        self._model = model
        self._kv = kv
        self._layers: list[Any] = list(model.model.layers)
        self._head = model.model.embed_tokens if model.spec.tie_embeddings else model.lm_head

    def hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """The residual stream after the last layer, [num_tokens, hidden_size], not normalized.

        ``tokens``, ``positions`` and ``slots`` are int32 or int64 [num_tokens].
        """
        embed = self._model.model.embed_tokens
        x = embedding(tokens, embed.weight, start=embed.start)
        if embed.group.size > 1:
            x = embed.group.all_reduce(x)
        if self._is_small(len(tokens)):
            pdl = len(tokens) == 1 and x.shape[1] <= _PDL_HIDDEN_SIZE
            for index, layer in enumerate(self._layers):
                self._small_layer(layer, index, x, positions, slots, attend, pdl)
            return x
        pending: Tensor | None = None  # what the last product left to be added
        for index, layer in enumerate(self._layers):
            pending = self._wide_layer(layer, index, x, pending, positions, slots, attend)
        assert pending is not None  # a model has layers
        return x.add_(pending)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype.

        ``out`` of that shape is a place for them, which is used where that saves memory.
        """
        norm, weight = self._model.model.norm, self._head.weight
        if self._is_small(len(hidden)):
            return small_batch_linear(hidden, weight, norm_weight=norm.weight, eps=norm.eps)
        normalized = rms_norm(hidden, norm.weight, norm.eps)
        if out is not None and self._head.group.size == 1:
            return torch.mm(normalized, weight.t(), out=out)
        logits: Tensor = self._head.group.all_gather(F.linear(normalized, weight))
        return logits[:, : self._head.vocab_size]

    def _is_small(self, num_tokens: int) -> bool:
        return num_tokens <= MAX_BATCH_SIZE and self._head.group.size == 1

    def _wide_layer(
        self,
        layer: Any,
        index: int,
        x: Tensor,
        pending: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Update the residual stream ``x``, all but the feed-forward's part, which is returned."""
        attention = layer.self_attn
        normalized = _add_norm(pending, x, layer.input_layernorm)
        qkv = attention.qkv_proj(normalized)
        out = self._attend(attention, index, qkv, positions, slots, attend)
        projected = attention.o_proj(out)
        normalized = _add_norm(projected, x, layer.post_attention_layernorm)
        return _feed_forward(layer.mlp, normalized)

    def _small_layer(
        self,
        layer: Any,
        index: int,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        attend: Attend,
        pdl: bool,
    ) -> None:
        """Update the residual stream ``x``."""
        attention, mlp = layer.self_attn, layer.mlp
        qkv = _norm_linear(x, layer.input_layernorm, attention.qkv_proj, pdl=pdl)
        out = self._attend(attention, index, qkv, positions, slots, attend, pdl=pdl)
        o_proj = attention.o_proj
        small_batch_linear(out, o_proj.weight, bias=o_proj.bias, residual=x, pdl=pdl)
        norm = layer.post_attention_layernorm
        if isinstance(mlp, ExpertsMLP):
            x.add_(_feed_forward(mlp, rms_norm(x, norm.weight, norm.eps)))
            return
        if is_faster(len(x), x.shape[1], gated=True):
            inner = _norm_linear(x, norm, mlp.gate_up_proj, gated=True, pdl=pdl)
        else:
            inner = silu_mul(mlp.gate_up_proj(rms_norm(x, norm.weight, norm.eps)))
        down = mlp.down_proj
        small_batch_linear(inner, down.weight, bias=down.bias, residual=x, pdl=pdl)

    def _attend(
        self,
        attention: Any,
        index: int,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        attend: Attend,
        *,
        pdl: bool = False,
    ) -> Tensor:
        """[num_tokens, packed q, k and v] -> [num_tokens, num_heads * head_dim]."""
        kv, norm = self._kv[index], attention.qk_norm
        q = qk_norm_rope_store(
            qkv,
            positions,
            slots,
            self._model.rotary_table,
            kv.keys,
            kv.values,
            num_heads=attention.num_heads,
            # a HeadNorm holds its weight once a head
            q_weight=None if norm is None else norm.weight[0],
            k_weight=None if norm is None else norm.weight[attention.num_heads],
            eps=self._model.spec.norm_eps,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            pdl=pdl,
        )
        return attend(q, kv, index).flatten(1)


def _add_norm(pending: Tensor | None, x: Tensor, norm: Any) -> Tensor:
    """``x`` += ``pending`` in place; the norm of the sum."""
    if pending is None:
        return rms_norm(x, norm.weight, norm.eps)
    return fused_add_rms_norm(pending, x, norm.weight, norm.eps)


def _norm_linear(
    x: Tensor, norm: Any, linear: Any, *, gated: bool = False, pdl: bool = False
) -> Tensor:
    return small_batch_linear(
        x,
        linear.weight,
        bias=linear.bias,
        norm_weight=norm.weight,
        eps=norm.eps,
        gated=gated,
        pdl=pdl,
    )


def _feed_forward(mlp: Any, normalized: Tensor) -> Tensor:
    if isinstance(mlp, ExpertsMLP):
        weights, experts = mlp.route(normalized)
        out = fused_experts(normalized, mlp.gate_up, mlp.down, experts, weights.float())
        return mlp.group.all_reduce(out)
    return cast(Tensor, mlp.down_proj(silu_mul(mlp.gate_up_proj(normalized))))
