"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), a kind of token mixing.

Pages hold one latent for each position, of which every head's key and value are projections
(``kv_b_proj``), and one rotated key for all heads. The projections are *absorbed*: instead of
expanding latents, each query is projected into their space, where all heads attend to the same
latents, and the results are projected to the heads' values. So attention has one KV head. Knows the
names of the checkpoint and how heads are split over ranks; each rank holds all latents. Must not
know which page is whose, or how attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rms_norm import rms_norm
from minisgl_backend.kernels.rope_store import rope_store_latents
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.quantized_place import place_in
from minisgl_backend.layers.weight_place import (
    Place,
    Share,
    collect_places,
    empty_parameter,
    even_share,
)
from minisgl_backend.models.spec import LatentSpec, ModelSpec
from minisgl_backend.models.token_mixing import StepContext
from minisgl_backend.parallel.group import Group
from minisgl_backend.weight_format import Layout


class LatentAttention(nn.Module):
    """Softmax attention over paged latents, with rotary positions (``TokenMixer``).

    One GEMM makes the latents of keys and of queries; the latter become the heads' queries by
    another (``q_b_proj``). Without latents of queries the first GEMM makes the queries themselves.
    ``up`` [num_heads * (nope_dim + value_dim), latent_dim] is the weight of ``kv_b_proj`` for this
    rank's heads: of each head the rows of keys, then those of values.
    """

    kv: PagedKV

    def __init__(
        self, spec: ModelSpec, latent: LatentSpec, layer: int, group: Group, matrices: Matrices
    ):
        super().__init__()
        self.layer = layer
        self.latent = latent
        heads = even_share(spec.num_heads, group, "attention heads")
        self.num_heads = heads.size
        name = f"model.layers.{layer}.self_attn"
        queries = _times(heads, latent.query_dim)
        compressed = {"kv_a_proj_with_mqa": _all(latent.key_dim)}
        self.q_b_proj: MergedColumnLinear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        if latent.query_rank is None:
            parts = {"q_proj": queries, **compressed}
        else:
            parts = {"q_a_proj": _all(latent.query_rank), **compressed}
            self.q_a_layernorm = RMSNorm(latent.query_rank, latent.norm_eps)
            self.q_b_proj = MergedColumnLinear(
                name, latent.query_rank, {"q_b_proj": queries}, bias=False, matrices=matrices
            )
        self.a_proj = MergedColumnLinear(
            name, spec.hidden_size, parts, bias=False, matrices=matrices
        )
        self.kv_a_layernorm = RMSNorm(latent.latent_dim, latent.norm_eps)
        self._rows = _times(heads, latent.nope_dim + latent.value_dim)
        self._format = matrices.format_of(f"{name}.kv_b_proj")
        if self._format is not None and self._format.layout is Layout.CONVERTED:
            self._format = None  # it is plain in the checkpoint, and conversion would round it
        self.up = empty_parameter(self._rows.size, latent.latent_dim)
        self.o_proj = RowLinear(
            f"{name}.o_proj",
            spec.num_heads * latent.value_dim,
            spec.hidden_size,
            bias=False,
            group=group,
            matrices=matrices,
        )

    def bind(self, kv: PagedKV) -> None:
        """Store the latents of the layer's tokens in these pages from now on."""
        self.kv = kv

    def places(self) -> Iterator[tuple[str, Place]]:
        for name, child in self.named_children():
            yield from collect_places(child, name).items()
        ins = _all(self.latent.latent_dim)
        yield "kv_b_proj.weight", place_in(self.up.data, slice(None), self._format, self._rows, ins)

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        values = Normed(self._values(x, step))
        return self.o_proj.add_to(residual, values, norm, pdl=step.pdl)

    def rounding(self, num_tokens: int) -> int | None:
        return self.a_proj.matrix.rounding(num_tokens)

    def _values(self, x: Normed, step: StepContext) -> Tensor:
        """[num_tokens, num_heads * value_dim]"""
        queries = self._queries(x, step)  # [num_tokens, num_heads, latent_dim + rope_dim]
        if step.query_scale is not None:
            queries.mul_(step.query_scale)
        # [num_tokens, num_heads, latent_dim]
        attended = step.attend(queries, self.kv, self.layer)
        values = attended.new_empty(*attended.shape[:2], self.latent.value_dim)
        _, of_values = self._up_by_head
        torch.bmm(attended.transpose(0, 1), of_values.mT, out=values.transpose(0, 1))
        return values.flatten(1)

    def _queries(self, x: Normed, step: StepContext) -> Tensor:
        """The queries in the space of latents and, behind that, their rotated part, [num_tokens,
        num_heads, latent_dim + rope_dim]. Stores the tokens' latents and rotated keys.
        """
        latent, pdl = self.latent, step.pdl
        both = self.a_proj(x, pdl=pdl)  # [num_tokens, latents or heads of queries, latents of keys]
        q, compressed = both.tensor_split([both.shape[1] - latent.key_dim], dim=1)
        if self.q_b_proj is not None and (norm := self.q_a_layernorm) is not None:
            q = self.q_b_proj(Normed(rms_norm(q, norm.weight, norm.eps, pdl=pdl)), pdl=pdl)
        q = q.view(len(q), self.num_heads, latent.query_dim)
        unrotated, to_rotate = q.tensor_split([latent.nope_dim], dim=2)
        queries: Tensor = q.new_empty(len(q), self.num_heads, latent.key_dim)
        in_latents, rotated = queries.tensor_split([latent.latent_dim], dim=2)
        of_keys, _ = self._up_by_head
        torch.bmm(unrotated.transpose(0, 1), of_keys, out=in_latents.transpose(0, 1))
        rope_store_latents(
            rotated,
            to_rotate,
            compressed,
            step.places,
            self.kv,
            norm_weight=self.kv_a_layernorm.weight,
            eps=self.kv_a_layernorm.eps,
            pdl=pdl,
        )
        return queries

    @property
    def _up_by_head(self) -> tuple[Tensor, Tensor]:
        """The parts of ``up`` for keys and for values, [num_heads, nope_dim or value_dim,
        latent_dim]."""
        by_head = self.up.view(self.num_heads, -1, self.latent.latent_dim)
        of_keys, of_values = by_head.tensor_split([self.latent.nope_dim], dim=1)
        return of_keys, of_values


def _all(size: int) -> Share:
    """What every rank computes in full."""
    return Share(size, 0, size)


def _times(heads: Share, size: int) -> Share:
    """The outputs of these heads, of ``size`` each."""
    return Share(heads.total * size, heads.start * size, heads.size * size)
