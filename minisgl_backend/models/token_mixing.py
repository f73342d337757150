"""How tokens of a sequence see each other: the part of a decoder layer that tells rows apart.

A ``TokenMixer`` is one kind of it. ``SelfAttention`` here keeps its state, keys and values, in
pages; the positions and slots of a step's tokens come in ``StepContext``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from minisgl_backend.attention.base import PagedKV
from minisgl_backend.kernels.rope_store import qk_norm_rope_store
from minisgl_backend.layers.gemm import Form, Launch, Normed
from minisgl_backend.layers.linear import MakeMatrix, MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import HeadNorm, RMSNorm
from minisgl_backend.layers.share import even_share, kv_head_share
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import Group

Attend: TypeAlias = Callable[[Tensor, PagedKV, int], Tensor]
"""(q [num_tokens, num_heads, head_dim], pages of the layer, layer) -> the shape of q."""


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """What all layers of a step share.

    ``positions`` of the tokens in their sequences, and ``slots``, where their keys and values go
    (page * page_size + offset): int [num_tokens] both. ``rotary_table`` is the decoder's.
    """

    positions: Tensor
    slots: Tensor
    rotary_table: Tensor
    attend: Attend
    launch: Launch


class TokenMixer(Protocol):
    """Mixes the tokens of each row and adds the result to the residual stream."""

    def __call__(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """The residual stream [num_tokens, hidden_size] after this part of the layer, and under
        ``norm``. ``x`` is its input under the layer's first norm; ``residual`` may be overwritten.
        """

    def bind(self, kv: PagedKV) -> None:
        """Keep the state of the layer's tokens in these pages from now on."""


class HeadsGemm(Protocol):
    """GEMM, head norms, rotation and store of queries, keys and values in one kernel
    (``models.tensor_core``)."""

    def __call__(self, x: Normed, attention: SelfAttention, step: StepContext) -> Tensor:
        """The queries, [num_tokens, num_heads, head_dim]."""


class SelfAttention(nn.Module):
    """Softmax attention over paged keys and values, with rotary positions (``TokenMixer``)."""

    kv: PagedKV

    def __init__(self, spec: ModelSpec, layer: int, group: Group, make: MakeMatrix):
        super().__init__()
        self.layer = layer
        shape = spec.attention_shape(group.size)
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        queries = even_share(spec.num_heads * spec.head_dim, group, "the attention heads' outputs")
        keys = kv_head_share(spec.num_kv_heads, spec.head_dim, group)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        hidden_size, name = spec.hidden_size, f"model.layers.{layer}.self_attn"
        self.qkv_proj = MergedColumnLinear(name, hidden_size, parts, bias=spec.qkv_bias, make=make)
        self.o_proj = RowLinear(
            f"{name}.o_proj",
            queries.total,
            hidden_size,
            bias=spec.output_bias,
            group=group,
            make=make,
        )
        self.eps = spec.norm_eps
        self.qk_norm = HeadNorm(spec.head_dim) if spec.qk_norm else None
        self.heads_gemm: HeadsGemm | None = None

    def bind(self, kv: PagedKV) -> None:
        self.kv = kv

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        q = self._queries(x, step)  # [num_tokens, num_heads, head_dim]
        attended = step.attend(q, self.kv, self.layer).flatten(1)
        return self.o_proj.add_to(residual, attended, norm, step.launch)

    def _queries(self, x: Normed, step: StepContext) -> Tensor:
        """The rotated queries, [num_tokens, num_heads, head_dim]. Stores keys and values in their
        pages."""
        if step.launch.form is Form.TENSOR_CORE:
            assert self.heads_gemm is not None
            return self.heads_gemm(x, self, step)
        kv, norm = self.kv, self.qk_norm
        return qk_norm_rope_store(
            self.qkv_proj(x, step.launch),
            step.positions,
            step.slots,
            step.rotary_table,
            kv.keys,
            kv.values,
            num_heads=self.num_heads,
            q_weight=None if norm is None else norm.q,
            k_weight=None if norm is None else norm.k,
            eps=self.eps,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            pdl=step.launch.pdl,
        )


def token_mixer(
    spec: ModelSpec, layer: int, group: Group, make: MakeMatrix
) -> tuple[str, SelfAttention]:
    """The token mixing of a layer, and its name in the checkpoint. Here kinds are told apart."""
    return "self_attn", SelfAttention(spec, layer, group, make)
