"""The decoder by kernels, for GPUs: the modules of ``decoder``, computed with fewer launches.

Holds no weights of its own: it reads those of a ``Decoder``, and gives the same values within
rounding. The residual stream is one tensor that is updated in place.

Three forms of a layer. Small (``small_batch``, up to 8 tokens): six kernels, each product with what
stands around it. ``tensor_core``, on Hopper for some sizes: the same for hundreds of tokens. Wide:
products by ``wide_linear`` where it is faster, else by the library, with the norms fused into the
residual adds.

Nothing here waits for the device or depends on values, so all of it may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.paged import PagedKV
from minisgl_backend.kernels.activation import silu_mul
from minisgl_backend.kernels.embedding import embedding
from minisgl_backend.kernels.moe import fused_experts
from minisgl_backend.kernels.rms_norm import rms_norm
from minisgl_backend.kernels.rope_store import qk_norm_rope_store
from minisgl_backend.kernels.small_batch import MAX_BATCH_SIZE, is_faster, small_batch_linear
from minisgl_backend.kernels.wide_linear import (
    add_rms_norm_parts,
    linear_parts,
    wide_linear,
)
from minisgl_backend.kernels.wide_linear import (
    is_faster as is_wide_faster,
)
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.rank_sum import add_rms_norm_of_sum
from minisgl_backend.moe.experts import ExpertsMLP
from minisgl_backend.parallel.group import Group

if TYPE_CHECKING:
    from minisgl_backend.models.tensor_core import TensorCoreLayers

_PDL_HIDDEN_SIZE: Final = 2048
_PDL_TOKENS: Final = 256
"""Up to here kernels are short enough to gain by an early start."""

Attend: TypeAlias = Callable[[Tensor, PagedKV, int], Tensor]
"""(q [num_tokens, num_heads, head_dim], pages of the layer, layer) -> the shape of q."""


class FusedDecoder:
    """Forward passes of ``model`` over tensors on a GPU (elsewhere by the kernels' twins)."""

    def __init__(self, model: Decoder, kv: list[PagedKV], *, fused_experts: bool = True):
        """``kv`` holds the pages of each layer.

        Without ``fused_experts`` experts are computed one by one, which waits for the device.
        """
        self._model = model
        self._kv = kv
        self._group = model.group
        self._experts = _fused_experts if fused_experts else ExpertsMLP.part
        self._layers: list[Any] = list(model.model.layers)
        self._head = model.model.embed_tokens if model.spec.tie_embeddings else model.lm_head
        self._tensor_core = _tensor_core_layers(model, kv)
        self.mark: Callable[[str], AbstractContextManager[object]] | None = None
        """Put around each layer, for profilers."""

    def hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """The residual stream after the last layer, [num_tokens, hidden_size], not normalized.

        ``tokens``, ``positions`` and ``slots`` are int32 or int64 [num_tokens].
        """
        embed = self._model.model.embed_tokens
        x = embedding(tokens, embed.weight, start=embed.start)
        x = self._group.all_reduce(x)
        tensor_core = self._tensor_core_for(len(tokens))
        if tensor_core is not None and positions.dtype == torch.int32:
            return tensor_core.hidden(x, positions, slots, self._each_layer(), attend)
        step = _Step(positions, slots, attend, pdl=self._gains_early(len(tokens)))
        if self._is_small(len(tokens)):
            for index, layer in self._each_layer():
                x = self._small_layer(layer, index, x, step)
            return x
        pending: _Pending | None = None  # what the last product left to be added
        for index, layer in self._each_layer():
            pending = self._wide_layer(layer, index, x, pending, step)
        assert pending is not None  # a model has layers
        _add_norm(pending, x, self._model.model.norm, step.pdl)
        return x

    def _each_layer(self) -> Iterator[tuple[int, Any]]:
        for index, layer in enumerate(self._layers):
            with nullcontext() if self.mark is None else self.mark(f"layer {index}"):
                yield index, layer

    def launches_early(self, num_tokens: int) -> bool:
        """Whether attention of a captured decode step may, and does, start before its predecessor
        ends."""
        if self._tensor_core_for(num_tokens) is not None:
            return self._group.size == 1 or self._sums_are_fused(num_tokens)
        return self._gains_early(num_tokens)

    def _gains_early(self, num_tokens: int) -> bool:
        """Whether small and wide layers gain by kernels that start early (measured on an H200).

        With several ranks they must not start early: the ranks' fused sums read the residual stream
        before they wait, and only the products on tensor cores ensure that it is written by then.
        """
        if self._group.size > 1 or self._model.spec.hidden_size > _PDL_HIDDEN_SIZE:
            return False
        return num_tokens == 1 if self._is_small(num_tokens) else num_tokens <= _PDL_TOKENS

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype.

        ``out``, of that shape, takes the result if that saves memory.
        """
        norm, weight = self._model.model.norm, self._head.weight
        if len(hidden) <= MAX_BATCH_SIZE:
            logits = small_batch_linear(hidden, weight, norm_weight=norm.weight, eps=norm.eps)
            return self._head.gather(logits, out)
        normalized = rms_norm(hidden, norm.weight, norm.eps)
        if out is not None and self._group.size == 1:
            return torch.mm(normalized, weight.t(), out=out)
        return self._head.gather(F.linear(normalized, weight), out)

    def _tensor_core_for(self, num_tokens: int) -> TensorCoreLayers | None:
        layers = self._tensor_core
        return layers if layers is not None and num_tokens <= layers.most_tokens else None

    def _is_small(self, num_tokens: int) -> bool:
        return num_tokens <= MAX_BATCH_SIZE and not self._sums_are_fused(num_tokens)

    def _sums_are_fused(self, num_tokens: int) -> bool:
        fused, hidden_size = self._group.fused, self._model.spec.hidden_size
        return fused is not None and fused.fits(num_tokens, hidden_size, self._model.dtype)

    def _wide_layer(
        self, layer: Any, index: int, x: Tensor, pending: _Pending | None, step: _Step
    ) -> _Pending:
        """Update the residual stream ``x``; the feed-forward's part is not added but returned."""
        attention, mlp, pdl = layer.self_attn, layer.mlp, step.pdl
        normalized = _add_norm(pending, x, layer.input_layernorm, pdl)
        qkv = _product(normalized, attention.qkv_proj.weight, attention.qkv_proj.bias, pdl)
        out = self._attend(attention, index, qkv, step)
        projected = _wide_sum(out, attention.o_proj, pdl)
        normalized = _add_norm(projected, x, layer.post_attention_layernorm, pdl)
        if isinstance(mlp, ExpertsMLP):
            return _Pending(self._experts(mlp, normalized), mlp.group)
        up = mlp.gate_up_proj
        if len(x) <= MAX_BATCH_SIZE and is_faster(len(x), x.shape[1], gated=True):
            inner = small_batch_linear(normalized, up.weight, bias=up.bias, gated=True, pdl=pdl)
        elif is_wide_faster(len(x), len(up.weight) // 2, x.shape[1], gated=True):
            inner = wide_linear(normalized, up.weight, bias=up.bias, gated=True, pdl=pdl)
        else:
            inner = silu_mul(up(normalized), pdl=pdl)
        return _wide_sum(inner, mlp.down_proj, pdl)

    def _small_layer(self, layer: Any, index: int, x: Tensor, step: _Step) -> Tensor:
        """The residual stream ``x`` after the layer; ``x`` itself may be overwritten."""
        attention, mlp, pdl = layer.self_attn, layer.mlp, step.pdl
        qkv = _norm_linear(x, layer.input_layernorm, attention.qkv_proj, pdl=pdl)
        out = self._attend(attention, index, qkv, step)
        x = _small_sum(out, attention.o_proj, x, pdl)
        norm = layer.post_attention_layernorm
        if isinstance(mlp, ExpertsMLP):
            part = self._experts(mlp, rms_norm(x, norm.weight, norm.eps))
            return mlp.group.all_reduce(part.add_(x) if mlp.group.rank == 0 else part)
        if is_faster(len(x), x.shape[1], gated=True):
            inner = _norm_linear(x, norm, mlp.gate_up_proj, gated=True, pdl=pdl)
        else:
            inner = silu_mul(mlp.gate_up_proj(rms_norm(x, norm.weight, norm.eps)))
        return _small_sum(inner, mlp.down_proj, x, pdl)

    def _attend(self, attention: Any, index: int, qkv: Tensor, step: _Step) -> Tensor:
        """[num_tokens, packed q, k and v] -> [num_tokens, num_heads * head_dim]."""
        kv, norm = self._kv[index], attention.qk_norm
        q = qk_norm_rope_store(
            qkv,
            step.positions,
            step.slots,
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
            pdl=step.pdl,
        )
        return step.attend(q, kv, index).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What all layers of a step share: where its tokens stand in their sequences and where their
    keys and values go, int [num_tokens] both; attention; whether kernels are launched early."""

    positions: Tensor
    slots: Tensor
    attend: Attend
    pdl: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """What is still to be added to the residual stream: the sum of ``value`` over the ranks of
    ``group``, [num_tokens, hidden_size] each. With one rank ``value`` may also be float32 parts
    [splits, num_tokens, hidden_size], to be summed up, and ``bias`` added."""

    value: Tensor
    group: Group
    bias: Tensor | None = None


def _add_norm(pending: _Pending | None, x: Tensor, norm: Any, pdl: bool) -> Tensor:
    """Add to the residual stream ``x`` in place; the norm of the sum."""
    if pending is None:
        return rms_norm(x, norm.weight, norm.eps, pdl=pdl)
    value, group = pending.value, pending.group
    if value.dim() == 3:
        return add_rms_norm_parts(value, x, norm.weight, norm.eps, bias=pending.bias, pdl=pdl)
    return add_rms_norm_of_sum(value, group, x, norm.weight, norm.eps, pdl=pdl)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, pdl: bool) -> Tensor:
    if len(x) <= MAX_BATCH_SIZE:
        return small_batch_linear(x, weight, bias=bias, pdl=pdl)
    if is_wide_faster(len(x), *weight.shape):
        return wide_linear(x, weight, bias=bias, pdl=pdl)
    return F.linear(x, weight, bias)


def _wide_sum(x: Tensor, linear: Any, pdl: bool) -> _Pending:
    """The product of a row-parallel layer, on its way to the residual stream."""
    if linear.group.size == 1 and is_wide_faster(len(x), *linear.weight.shape, parts=True):
        parts = linear_parts(x, linear.weight, pdl=pdl)
        return _Pending(parts, linear.group, linear.bias)
    bias = linear.bias if linear.group.rank == 0 else None
    return _Pending(_product(x, linear.weight, bias, pdl), linear.group)


def _small_sum(inner: Tensor, linear: Any, x: Tensor, pdl: bool) -> Tensor:
    """The residual stream ``x`` and the product of a row-parallel layer.

    Rank 0 adds ``x`` to its part of the sum, so that summing over the ranks adds everything.
    """
    group = linear.group
    residual, bias = (x, linear.bias) if group.rank == 0 else (None, None)
    part = small_batch_linear(inner, linear.weight, bias=bias, residual=residual, pdl=pdl)
    return cast(Tensor, group.all_reduce(part))


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


def _tensor_core_layers(model: Decoder, kv: list[PagedKV]) -> TensorCoreLayers | None:
    device = model.model.norm.weight.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from minisgl_backend.models.tensor_core import TensorCoreLayers
    except ImportError:  # a torch that came without cuda-bindings
        return None
    return TensorCoreLayers(model, kv) if TensorCoreLayers.can_take(model) else None


def _fused_experts(mlp: ExpertsMLP, normalized: Tensor) -> Tensor:
    """This rank's part of the experts' sum."""
    weights, experts = mlp.route(normalized)
    return fused_experts(normalized, mlp.gate_up, mlp.down, experts, weights.float())
