"""Token mixing: the part of a decoder layer in which the tokens of a row see each other.

A ``TokenMixer`` is one kind of it. ``SelfAttention``, here, keeps its state, keys and values, in
pages; recurrent mixers (``gated_delta_net``) keep theirs in a slot of the row. ``StepContext`` has
the places of a step's tokens. Must not know requests, or why a row has its pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from minisgl_backend.attention.base import Attend
from minisgl_backend.kernels.activation import gate_output
from minisgl_backend.kernels.adapters import AdaptedTokens
from minisgl_backend.kernels.checks import CheckedTokens
from minisgl_backend.kernels.chunk_runs import Runs
from minisgl_backend.kernels.linear_cut import HEAD_DIMS
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import (
    TokenPlaces,
    gates_of,
    qk_norm_rope_store,
    rotated_queries,
)
from minisgl_backend.layers.linear import (
    MergedColumnLinear,
    RowLinear,
    adaptation_of,
    adapters_shape,
)
from minisgl_backend.layers.norm import HeadNorm, Normed, RMSNorm, TokenNorm
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import (
    Place,
    Share,
    WeightPlace,
    collect_places,
    empty_parameter,
    even_share,
    kv_head_share,
)
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import Group

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.linear import HeadsKernel, TensorCores


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRows:
    """Which row each token of a step belongs to, for layers with recurrent states.

    ``decode_slots`` int64 [num_decodes]: the slots of the decoding rows, whose tokens come first;
    -1 for a token that does not belong to one. ``runs`` are the other tokens. ``checks``: if the
    step checks guesses, the checks of the decoding rows, with or without guesses; then these are
    slots of tokens, of which a row may have several.
    """

    decode_slots: Tensor
    runs: Runs | None = None
    checks: CheckedTokens | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """What all layers of a step share, or all layers that rotate in the same way.

    ``places``: positions of the tokens, and slots of their keys and values. ``pdl``: kernels may
    start before their predecessors have ended (``kernels``). The rotated queries are multiplied by
    ``query_scale``, a number or a tensor [num_tokens, 1, 1] of their type. ``recurrent`` is None if
    no layer has recurrent states. ``adapted``: the tokens by adapter, if any uses one.
    ``layer_inputs`` [num_tokens, num_layers, size] are what layers read besides the residual
    stream.
    """

    places: TokenPlaces
    attend: Attend
    pdl: bool
    query_scale: Tensor | float | None = None
    recurrent: RecurrentRows | None = None
    adapted: AdaptedTokens | None = None
    layer_inputs: Tensor | None = None


class TokenMixer(Protocol):
    """Mixes the tokens of each row and adds the result to the residual stream."""

    def __call__(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """The residual stream [num_tokens, hidden_size] after this part of the layer, and the same
        after ``norm``. ``x`` is ``residual`` after the layer's first norm; ``residual`` may be
        overwritten."""

    def rounding(self, num_tokens: int) -> int | None:
        """If ``x`` is read only in 8 bits: how many neighbours share a scale."""


class SelfAttention(nn.Module):
    """Softmax attention over paged keys and values, with rotary positions (``TokenMixer``)."""

    kv: PagedKV

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        group: Group,
        matrices: Matrices,
        *,
        in_features: int | None = None,
        place: int | None = None,
    ):
        """``in_features``: the size of inputs, by default that of the residual stream. ``place``:
        the layer's index among those with pages, if these are not ``spec``'s alone."""
        super().__init__()
        source, of_layer, rope = spec.kv_source(layer), spec.heads_of(layer), spec.rope_of(layer)
        of_rank = of_layer.of_rank(group.size)
        self.layer = spec.attention_layers.index(source) if place is None else place
        self.num_heads, self.num_kv_heads = of_rank.num_heads, of_rank.num_kv_heads
        self.head_dim = head_dim = of_layer.head_dim
        queries = even_share(of_layer.num_heads * head_dim, group, "the attention heads' outputs")
        keys = kv_head_share(of_layer.num_kv_heads, head_dim, group)
        self._gates = gates = spec.attention_gates
        self._gates_apart, self._gates_in_queries = spec.gates_apart, spec.gates_in_queries
        self._gate_dim = 1 if gates is not None and gates.one_per_head else head_dim
        self.has_own_kv, self.keys_are_values = source == layer, layer in spec.kv.keys_are_values
        self.value_norm = spec.kv.value_norm
        parts = _projections(spec, layer, queries, keys)
        hidden_size, name = spec.hidden_size, f"model.layers.{layer}.self_attn"
        self.qkv_proj = MergedColumnLinear(
            name, in_features or hidden_size, parts, bias=spec.biases.qkv, matrices=matrices
        )
        self.o_proj = RowLinear(
            f"{name}.o_proj",
            queries.total,
            hidden_size,
            bias=spec.biases.output,
            group=group,
            matrices=matrices,
        )
        self.eps = spec.norms.eps
        self.qk_norm: HeadNorm | TokenNorm | None = None
        self._norm_last = spec.qk_norm == "rotated"
        assert self.has_own_kv or not self._norm_last
        if spec.qk_norm == "token":
            self.qk_norm = TokenNorm(queries, keys, spec.norms.eps, group)
        elif spec.qk_norm is not None and (spec.qk_norm != "unweighted" or rope is not None):
            self.qk_norm = HeadNorm(
                self.num_heads,
                self.num_kv_heads if self.has_own_kv else 0,
                self.head_dim,
                offset=spec.norms.offset,
                weighted=not spec.qk_norm.startswith("unweighted"),
            )
        self._heads = even_share(of_layer.num_heads, group, "attention heads")
        self.sinks = empty_parameter(self.num_heads) if spec.scores.sinks else None
        self._are_heads_tiles = (
            head_dim in HEAD_DIMS
            and self.has_own_kv
            and spec.qk_norm not in ("token", "rotated")
            and gates is None
            and not self.value_norm
            and (rope is None or (rope.rotated == 1.0 and not rope.interleaved))
        )
        self._heads_kernel: HeadsKernel | None = None
        self._heads_take_adapters = False

    def bind(self, kv: PagedKV) -> None:
        """Store keys and values of the layer's tokens in these pages from now on."""
        self.kv = kv if self.sinks is None else replace(kv, sinks=self.sinks.data)

    def places(self) -> Iterator[tuple[str, Place]]:
        for name, child in self.named_children():
            yield from collect_places(child, name).items()
        if self.sinks is not None:
            heads = self._heads
            yield "sinks", WeightPlace(self.sinks.data, (heads.total,), 0, heads.start)

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit by ``kernels``, which the weights fit. Pages must be bound. The
        GEMM also normalizes, rotates and stores heads, if a head can be one of its tiles, rotates
        in full and after its norm, and has neither a gate nor a ``TokenNorm``."""
        self.o_proj.use_tensor_cores(kernels)
        if not self._are_heads_tiles:
            self.qkv_proj.use_tensor_cores(kernels)
            return
        adapters = adapters_shape(self.qkv_proj)
        self._heads_take_adapters = adapters is not None
        self._heads_kernel = kernels.heads(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.qkv_proj.matrix.in_features,
            page_size=self.kv.keys.shape[1],
            fp8=self.kv.k_scale is not None,
            codes=self.qkv_proj.matrix.arrange(),
            adapters=adapters,
        )
        if adapters is not None:
            self.qkv_proj.matrix.use_shrink(kernels)
        self.qkv_proj.matrix.use_for_many(kernels)

    def forward(
        self, residual: Tensor, x: Normed, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        attended = Normed(self._attended(x, step))
        return self.o_proj.add_to(residual, attended, norm, pdl=step.pdl, adapted=step.adapted)

    def rounding(self, num_tokens: int) -> int | None:
        kernel = self._heads_kernel
        if kernel is not None and num_tokens <= kernel.most_tokens:
            return None
        return self.qkv_proj.matrix.rounding(num_tokens)

    def output(self, x: Normed, step: StepContext) -> Tensor:
        """What ``forward`` adds to the residual stream, [num_tokens, hidden_size], for layers that
        change it first."""
        attended = Normed(self._attended(x, step))
        output: Tensor = self.o_proj(attended, pdl=step.pdl, adapted=step.adapted)
        return output

    def part(self, x: Normed, step: StepContext) -> Tensor:
        """This rank's part of ``output``, to be summed over the ranks by the caller."""
        attended = Normed(self._attended(x, step))
        return self.o_proj.part(attended, pdl=step.pdl, adapted=step.adapted)

    def _attended(self, x: Normed, step: StepContext) -> Tensor:
        """[num_tokens, num_heads * head_dim]"""
        q, gate = self._queries(x, step)  # [num_tokens, num_heads, head_dim]
        if step.query_scale is not None:
            q = q * step.query_scale
        attended = step.attend(q, self.kv, self.layer)
        if gate is None or self._gates is None:
            return attended.flatten(1)
        return gate_output(attended, gate, self._gates.function, pdl=step.pdl)

    def _queries(self, x: Normed, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """The rotated queries and, if there are any, the gates of attention's output, both
        [num_tokens, num_heads, head_dim]. Stores keys and values in their pages.
        """
        kv, norm, kernel = self.kv, self.qk_norm, self._heads_kernel
        head_norm = norm if isinstance(norm, HeadNorm) else None
        places = step.places
        if step.adapted is not None and not self._heads_take_adapters:
            kernel = None
        if kernel is not None and len(x.x) <= kernel.most_tokens:
            # GEMM, head norms, rotation and store in one kernel
            rows, squares = x.unscaled(pdl=step.pdl)
            q = kernel(
                rows,
                self.qkv_proj.matrix.operand,
                places,
                kv,
                squares=squares,
                eps=x.eps if norm is None else self.eps,  # without head norms, the input norm's
                q_weight=None if head_norm is None else head_norm.q,
                k_weight=None if head_norm is None else head_norm.k,
                bias=self.qkv_proj.bias,
                adaptation=adaptation_of(self.qkv_proj, step.adapted),
                pdl=step.pdl,
            )
            return q, None
        qkv = self.qkv_proj(x, pdl=step.pdl, adapted=step.adapted)
        if not self.has_own_kv:
            weights = None if head_norm is None else head_norm.weight
            q = rotated_queries(qkv, places, self.num_heads, weights, self.eps, pdl=step.pdl)
            return q, None
        gate: Tensor | None = None
        if self._gates_apart:
            qkv, gates = qkv.tensor_split([qkv.shape[1] - self.num_heads * self._gate_dim], dim=1)
            gate = gates.view(len(qkv), self.num_heads, self._gate_dim)
            gate = gate.expand(-1, -1, self.head_dim)  # some models have one for a whole head
        elif self._gates_in_queries:
            gate = gates_of(qkv, self.num_heads, self.head_dim)
        if isinstance(norm, TokenNorm):
            norm.apply_to(qkv)
        q = qk_norm_rope_store(
            qkv,
            places,
            kv,
            num_heads=self.num_heads,
            head_weights=None if head_norm is None else head_norm.weight,
            norm_last=self._norm_last,
            gated=self._gates_in_queries,
            value_norm=self.value_norm,
            keys_are_values=self.keys_are_values,
            eps=self.eps,
            pdl=step.pdl,
        )
        return q, gate


def _projections(spec: ModelSpec, layer: int, queries: Share, keys: Share) -> dict[str, Share]:
    """The projections of a layer's input by name, each with a rank's share of its outputs."""
    parts = {"q_proj": queries}
    if spec.gates_in_queries:
        # for each head the query, then the gate of its output
        parts["q_proj"] = Share(*(2 * n for n in astuple(queries)))
    if spec.kv_source(layer) == layer:
        parts["k_proj"] = keys
        if layer not in spec.kv.keys_are_values:
            parts["v_proj"] = keys
    if spec.gates_apart:
        assert "k_proj" in parts
        of_gate = queries.total // spec.num_gates(layer)  # the numbers that a gate multiplies
        parts["gate_proj"] = Share(*(n // of_gate for n in astuple(queries)))
    return parts
