"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), a kind of token mixing.

Pages hold one latent for each position, of which every head's key and value are projections
(``kv_b_proj``), and one rotated key for all heads. The projections are *absorbed*: instead of
expanding latents, each query is projected into their space, where all heads attend to the same
latents, and the results are projected to the heads' values. So attention has one KV head. Latents
are expanded only for long prompt chunks, if the step says so (``attention.expanded``). Knows the
names of the checkpoint and how heads are split over ranks; each rank holds all latents. Must not
know which page is whose, or how attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.attention.base import AttendExpanded
from minisgl_backend.kernels.activation import gate_output
from minisgl_backend.kernels.head_linear import head_linear
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
    WeightPlace,
    collect_places,
    empty_parameter,
    even_share,
)
from minisgl_backend.models.indexer import Indexer
from minisgl_backend.models.latent_spec import LatentSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import StepContext
from minisgl_backend.parallel.group import Group
from minisgl_backend.weight_format import Layout


class LatentAttention(nn.Module):
    """Softmax attention over paged latents, with rotary positions (``TokenMixer``).

    One GEMM makes the latents of keys and of queries; the latter become the heads' queries by
    another (``q_b_proj``). Without latents of queries the first GEMM makes the queries themselves.
    It also makes the gates of values, if there are any (``g_proj``). If there is one for each head
    and other weights are quantized, they are too few for that, and have a projection of their own.
    ``up`` [num_heads * (nope_dim + value_dim), latent_dim] is the weight of ``kv_b_proj`` for this
    rank's heads: of each head the rows of keys, then those of values.
    """

    kv: PagedKV

    def __init__(
        self, spec: ModelSpec, latent: LatentSpec, layer: int, group: Group, matrices: Matrices
    ):
        super().__init__()
        self.layer = spec.attention_layers.index(layer)
        self.latent = latent
        heads = even_share(spec.heads.num_heads, group, "attention heads")
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
        self.g_proj: MergedColumnLinear | None = None
        self._gates = spec.attention_gates
        if self._gates is not None and not self._gates.one_per_head:
            parts["g_proj"] = _times(heads, latent.value_dim)
        elif self._gates is not None:
            matrices = matrices.unconverted(f"{name}.g_proj")
            gates, plain = {"g_proj": heads}, replace(matrices, keep_quantized=False)
            if any(matrices.stays_quantized(f"{name}.{part}") for part in parts):
                self.g_proj = MergedColumnLinear(
                    name, spec.hidden_size, gates, bias=False, matrices=plain, padded=True
                )
            else:
                parts |= gates
        self.a_proj = MergedColumnLinear(
            name,
            spec.hidden_size,
            parts,
            bias=False,
            matrices=matrices,
            padded=self._gates is not None,
        )
        self.kv_a_layernorm = RMSNorm(latent.latent_dim, latent.norm_eps)
        self._rows = _times(heads, latent.nope_dim + latent.value_dim)
        self._format = matrices.format_of(f"{name}.kv_b_proj")
        if self._format is not None and self._format.layout is Layout.CONVERTED:
            self._format = None  # it is plain in the checkpoint, and conversion would round it
        self.up = empty_parameter(self._rows.size, latent.latent_dim)
        self.o_proj = RowLinear(
            f"{name}.o_proj",
            spec.heads.num_heads * latent.value_dim,
            spec.hidden_size,
            bias=False,
            group=group,
            matrices=matrices,
        )
        self._heads = heads
        self.sinks = empty_parameter(heads.size) if spec.scores.sinks else None
        self.indexer: Indexer | None = None
        if (indexer := latent.indexer) is not None and layer in indexer.layers:
            assert latent.query_rank is not None
            self.indexer = Indexer(
                indexer, f"{name}.indexer", latent.query_rank, spec.hidden_size, matrices
            )

    def bind(self, kv: PagedKV) -> None:
        """Store the latents of the layer's tokens in these pages from now on."""
        self.kv = kv if self.sinks is None else replace(kv, sinks=self.sinks.data)

    def places(self) -> Iterator[tuple[str, Place]]:
        for name, child in self.named_children():
            yield from collect_places(child, name).items()
        ins = _all(self.latent.latent_dim)
        if self.sinks is not None:
            heads = self._heads
            yield "sinks", WeightPlace(self.sinks.data, (heads.total,), 0, heads.start)
        yield "kv_b_proj.weight", place_in(self.up.data, slice(None), self._format, self._rows, ins)

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        values = Normed(self._values(x, step))
        return self.o_proj.add_to(residual, values, norm, pdl=step.pdl)

    def output(self, x: Normed, step: StepContext) -> Tensor:
        """What ``forward`` adds to the residual stream, [num_tokens, hidden_size], for layers that
        change it first."""
        output: Tensor = self.o_proj(Normed(self._values(x, step)), pdl=step.pdl)
        return output

    def rounding(self, num_tokens: int) -> int | None:
        # others read inputs, too, and not all of their weights are of 8 bits
        if self.indexer is not None or self.g_proj is not None:
            return None
        return self.a_proj.matrix.rounding(num_tokens)

    def _values(self, x: Normed, step: StepContext) -> Tensor:
        """[num_tokens, num_heads * value_dim]"""
        q, compressed, gates = self._projected(x, step)
        values = self._of_heads(q, compressed, step)
        if self._gates is None:
            return values.flatten(1)
        # some models have one for a whole head
        by_head = gates.view(len(gates), self.num_heads, -1).expand_as(values)
        return gate_output(values, by_head, self._gates.function, pdl=step.pdl)

    def _of_heads(self, q: Tensor, compressed: Tensor, step: StepContext) -> Tensor:
        """The values of heads, [num_tokens, num_heads, value_dim], of what ``_projected`` gives.
        Stores latents and keys in their pages."""
        attend, latent = step.attend, self.latent
        if not isinstance(attend, AttendExpanded):
            queries, rotated = self._absorbed(q, pdl=step.pdl)
            self._rotate_and_store(rotated, q[..., latent.nope_dim :], compressed, step)
            return self._attended(queries, step)
        to_rotate = q[..., latent.nope_dim :]
        self._rotate_and_store(to_rotate, to_rotate, compressed, step)
        values = q.new_empty(*q.shape[:2], latent.value_dim)
        if (num_decodes := attend.num_decodes) > 0:
            queries, rotated = self._absorbed(q[:num_decodes], pdl=step.pdl)
            rotated.copy_(to_rotate[:num_decodes])
            values[:num_decodes] = self._attended(queries, step)
        attend.chunks(values, q, self.kv, self._expanded)
        return values

    def _projected(self, x: Normed, step: StepContext) -> tuple[Tensor, Tensor, Tensor]:
        """The queries before rotation, [num_tokens, num_heads, nope_dim + rope_dim], scaled; the
        latents and keys of tokens, not yet normalized and rotated, [num_tokens, latent_dim +
        rope_dim]; and the gates [num_tokens, num_heads or num_heads * value_dim], or none,
        [num_tokens, 0]."""
        latent, pdl = self.latent, step.pdl
        num_queries = latent.query_rank or self.num_heads * latent.query_dim
        begins = num_queries, num_queries + latent.key_dim
        if self.g_proj is not None and x.squares is None:  # its norm is not half done
            x = Normed(x.normalized(pdl=pdl))  # once for both
        # [num_tokens, latents or heads of queries, latents of keys, perhaps gates and padding]
        together = self.a_proj(x, pdl=pdl)
        q, compressed, gates = together.tensor_split(begins, dim=1)
        if self.g_proj is not None:
            gates = self.g_proj(x, pdl=pdl)
        if self.q_b_proj is not None and (norm := self.q_a_layernorm) is not None:
            latents = rms_norm(q, norm.weight, norm.eps, pdl=pdl)
            if self.indexer is not None and (index_keys := self.kv.index_keys) is not None:
                self.indexer(x, latents, index_keys, step)
            q = self.q_b_proj(Normed(latents), pdl=pdl)
        q = q.view(len(q), self.num_heads, latent.query_dim)
        if step.query_scale is not None:
            q.mul_(step.query_scale)
        return q, compressed, gates[:, : self._num_gates]

    @property
    def _num_gates(self) -> int:
        """The number of a token's gates of this rank's heads."""
        if self._gates is None:
            return 0
        return self.num_heads * (1 if self._gates.one_per_head else self.latent.value_dim)

    def _rotate_and_store(
        self, rotated: Tensor, to_rotate: Tensor, compressed: Tensor, step: StepContext
    ) -> None:
        """Rotate the queries' part ``to_rotate`` [num_tokens, num_heads, rope_dim] into
        ``rotated``, which may be the same; store the tokens' latents and rotated keys."""
        rope_store_latents(
            rotated,
            to_rotate,
            compressed,
            step.places,
            self.kv,
            norm_weight=self.kv_a_layernorm.weight,
            eps=self.kv_a_layernorm.eps,
            pdl=step.pdl,
        )

    def _absorbed(self, q: Tensor, *, pdl: bool) -> tuple[Tensor, Tensor]:
        """The queries in the space of latents, with room for their rotated part behind them,
        [num_tokens, num_heads, latent_dim + rope_dim]; and a view of that room."""
        latent, (of_keys, _) = self.latent, self._up_by_head
        queries = q.new_empty(len(q), self.num_heads, latent.key_dim)
        in_latents, rotated = queries.tensor_split([latent.latent_dim], dim=2)
        head_linear(in_latents, q[..., : latent.nope_dim], of_keys.mT, pdl=pdl)
        return queries, rotated

    def _attended(self, queries: Tensor, step: StepContext) -> Tensor:
        """The values of heads, [num_tokens, num_heads, value_dim], by queries in the space of
        latents."""
        attended = step.attend(queries, self.kv, self.layer)  # [num_tokens, num_heads, latent_dim]
        values = attended.new_empty(*attended.shape[:2], self.latent.value_dim)
        _, of_values = self._up_by_head
        head_linear(values, attended, of_values, pdl=step.pdl)
        return values

    def _expanded(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """The keys [num_positions, num_heads, query_dim] and values [num_positions, num_heads,
        value_dim] of heads (``Expand``)."""
        latent, num_heads = self.latent, self.num_heads
        latents, rotated = stored.tensor_split([latent.latent_dim], dim=1)
        both = F.linear(latents, self.up).view(len(stored), num_heads, -1)
        unrotated, values = both.tensor_split([latent.nope_dim], dim=2)
        of_heads = rotated[:, None].expand(-1, num_heads, -1)
        return torch.cat([unrotated, of_heads], dim=2), values

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
