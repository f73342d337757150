"""The decoder that all supported architectures share.

Tokens of all rows of a step go through it as one flat batch, [num_tokens, hidden_size]; only
attention tells rows apart. Everything that a forward pass depends on is an argument. Modules carry
the names of the checkpoint's tensors, so that their places do too.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from minisgl_backend.attention.base import ForwardContext
from minisgl_backend.layers.embedding import VocabEmbedding
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.mlp import GatedMLP
from minisgl_backend.layers.norm import HeadNorm, RMSNorm
from minisgl_backend.layers.rope import rotary_table, rotate, rotation
from minisgl_backend.layers.share import even_share, kv_head_share
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.moe.experts import ExpertsMLP
from minisgl_backend.parallel.group import Group


class Attention(nn.Module):
    """Project, rotate, attend, project back: [num_tokens, hidden_size] -> the same."""

    def __init__(self, spec: ModelSpec, layer: int, group: Group):
        super().__init__()
        self.layer = layer
        shape = spec.attention_shape(group.size)
        self.head_dim = shape.head_dim
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        queries = even_share(spec.num_heads * spec.head_dim, group, "the attention heads' outputs")
        keys = kv_head_share(spec.num_kv_heads, spec.head_dim, group)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = MergedColumnLinear(spec.hidden_size, parts, bias=spec.qkv_bias)
        self.o_proj = RowLinear(queries.total, spec.hidden_size, bias=spec.output_bias, group=group)
        self.qk_norm: HeadNorm | None = None
        if spec.qk_norm:
            heads = {"q_norm": self.num_heads, "k_norm": self.num_kv_heads}
            self.qk_norm = HeadNorm(heads, spec.head_dim, spec.norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        num_tokens, num_heads = x.shape[0], self.num_heads
        num_rotated = num_heads + self.num_kv_heads
        qkv = self.qkv_proj(x).view(num_tokens, -1, self.head_dim)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, *rotary)  # queries and keys at once: [num_tokens, num_rotated, head_dim]
        out = ctx.attention.forward(qk[:, :num_heads], qk[:, num_heads:], v, self.layer, ctx)
        return cast(Tensor, self.o_proj(out.reshape(num_tokens, -1)))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normalized residual stream and added to it."""

    def __init__(self, spec: ModelSpec, layer: int, group: Group):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec, layer, group)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = _feed_forward(spec, layer, group)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        """``x`` is overwritten."""
        x += self.self_attn(self.input_layernorm(x), rotary, ctx)
        x += self.mlp(self.post_attention_layernorm(x))
        return x


class _Body(nn.Module):
    """What the checkpoint's names put under ``model.``."""

    def __init__(self, spec: ModelSpec, group: Group):
        super().__init__()
        self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, group)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, group) for layer in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head.

    ``rotary_table`` is float32[num_positions, head_dim] and no parameter: it is computed, never
    loaded.
    """

    rotary_table: Tensor

    def __init__(self, spec: ModelSpec, group: Group):
        super().__init__()
        self.spec = spec
        self.group = group
        self.model = _Body(spec, group)
        if not spec.tie_embeddings:
            self.lm_head = VocabEmbedding(spec.vocab_size, spec.hidden_size, group)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def set_positions(self, num_positions: int, device: torch.device) -> None:
        """Compute the rotary table for sequences of up to ``num_positions`` tokens."""
        self.rotary_table = rotary_table(self.spec.rope, self.spec.head_dim, num_positions, device)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """int64[num_tokens] -> [num_tokens, hidden_size], not normalized yet."""
        x: Tensor = self.model.embed_tokens(token_ids)
        rotary = rotation(self.rotary_table, ctx.batch.positions, x.dtype)
        for layer in self.model.layers:
            x = layer(x, rotary, ctx)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in float32 (or float64)."""
        head = self.model.embed_tokens if self.spec.tie_embeddings else self.lm_head
        logits: Tensor = head.project(self.model.norm(hidden))
        return logits if logits.dtype == torch.float64 else logits.float()


def _feed_forward(spec: ModelSpec, layer: int, group: Group) -> nn.Module:
    moe = spec.moe
    if moe is None or layer not in moe.layers:
        return GatedMLP(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias, group=group)
    return ExpertsMLP(
        spec.hidden_size,
        moe.intermediate_size,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        normalize=moe.normalize,
        group=group,
    )
