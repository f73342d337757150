"""The decoder that all supported architectures share, on every device.

The tokens of all rows of a step go through it as one flat batch, [num_tokens, hidden_size]; only
token mixing distinguishes rows. Modules have the names of the checkpoint's tensors, by which the
loader finds their places. The residual stream, or several, is one tensor, updated in place if a
kernel can do so.

Each matrix chooses its kernel by the number of tokens (``layers.matrix``); all kernels give the
same values up to rounding. Nothing here waits for a GPU or depends on values there, so all of it
can be captured in a CUDA graph. Must not know requests, or who holds a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.attention.base import Attend
from minisgl_backend.kernels import small_batch
from minisgl_backend.kernels.activation import soft_cap
from minisgl_backend.kernels.adapters import AdaptedTokens
from minisgl_backend.kernels.dispatch import can_start_early
from minisgl_backend.kernels.layer_states import LayerStates
from minisgl_backend.kernels.linear_cut import MAX_TOKENS
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import TokenPlaces
from minisgl_backend.layers.embedding import OutputHead, PositionEmbedding, VocabEmbedding
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.feed_forward import GatedMLP
from minisgl_backend.layers.matrix import DenseMatrix, pack_matrices
from minisgl_backend.layers.norm import Normed, add_sum, is_sum_fused
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.models.decoder_layers import (
    DecoderLayer,
    HyperLayer,
    LayerNormLayer,
    LayerRecipe,
    MakeExperts,
    NormedExpertsLayer,
    ParallelLayer,
    PostNormLayer,
    SinglePartLayer,
    hyper_connection,
    residual_norm,
)
from minisgl_backend.models.eagle import EagleLayer
from minisgl_backend.models.gemma4_layer import Gemma4Layer, LayerInputsMaker
from minisgl_backend.models.latent_attention import LatentAttention
from minisgl_backend.models.mtp import GuessingLayer, MTPLayer
from minisgl_backend.models.recurrent_mixer import RecurrentMixer
from minisgl_backend.models.rope import query_scales, rotary_table
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import RecurrentRows, SelfAttention, StepContext
from minisgl_backend.parallel.group import Group

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.invariant_linear import InvariantKernels
    from minisgl_backend.kernels.cuda.linear import TensorCores

_PDL_HIDDEN_SIZE_OF_A_TOKEN: Final = 5120
_PDL_HIDDEN_SIZE: Final = 5376
_PDL_TOKENS: Final = 256
"""Up to these sizes, starting kernels early (PDL) is at least as fast on an H200."""

Layer: TypeAlias = (
    DecoderLayer
    | HyperLayer
    | SinglePartLayer
    | ParallelLayer
    | LayerNormLayer
    | PostNormLayer
    | Gemma4Layer
)


@dataclass(frozen=True, slots=True, eq=False)
class LayersOutput:
    """What the layers return of a step's tokens.

    ``residual`` [num_tokens, hidden_size] is the residual stream after the last layer, not
    normalized. ``for_mtp`` is what an MTP layer reads: the same, or the stream before each of its
    ``read_layers``, side by side [num_tokens, number of these * hidden_size].
    """

    residual: Tensor
    for_mtp: Tensor


class _Body(nn.Module):
    """The modules whose names in the checkpoint begin with ``model.``."""

    def __init__(self, spec: ModelSpec, group: Group, matrices: Matrices, experts: MakeExperts):
        super().__init__()
        self.embed_tokens = VocabEmbedding(
            "model.embed_tokens", spec.vocab_size, spec.hidden_size, group=group, matrices=matrices
        )
        self.embed_positions: PositionEmbedding | None = None
        if (positions := spec.positions) is not None:
            self.embed_positions = PositionEmbedding(
                spec.rope.max_positions, spec.hidden_size, offset=positions.offset
            )
        self.layers = nn.ModuleList(
            _layer(LayerRecipe(spec, layer, group, matrices, experts)) for layer in spec.own_layers
        )
        self.layer_inputs: LayerInputsMaker | None = None
        if spec.layer_inputs is not None:
            self.layer_inputs = LayerInputsMaker(spec, spec.layer_inputs, group, matrices)
        self.hc_head = None if spec.streams is None else hyper_connection(spec, writes=False)
        self.norm = residual_norm(spec, spec.scales.logits, offset=spec.norms.final_offset)


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head.

    The tables of positions (``set_positions``) are computed, not loaded, so they are not
    parameters. A forward pass needs pages (``bind_pages``).

    If the spec's ``stream_scale`` s is not 1, the residual stream is that of the publisher's model
    divided by s: embeddings are divided by s, so that what the parts of layers add need not be
    multiplied. Norms undo the division if their eps is divided by s^2.
    """

    def __init__(
        self,
        spec: ModelSpec,
        group: Group,
        *,
        matrices: Matrices,
        fused_experts: bool,
        whole_experts: bool = False,
    ):
        """``matrices`` makes the matrices. With ``fused_experts``, this package's kernels compute
        experts, otherwise PyTorch does, operation by operation. With ``whole_experts``, a rank
        holds some of the experts, otherwise a slice of each."""
        super().__init__()
        self.spec = spec
        self.group = group
        experts = partial(
            ExpertsMLP,
            fused=fused_experts,
            whole_experts=whole_experts,
            group=group,
            matrices=matrices,
        )
        self.model = _Body(spec, group, matrices, experts)
        if not spec.tie_embeddings:
            self.lm_head = OutputHead(
                "lm_head",
                spec.vocab_size,
                spec.hidden_size,
                bias=spec.biases.head,
                group=group,
                matrices=matrices,
            )
        self.eagle: EagleLayer | None = None
        if spec.eagle is not None:
            self.eagle = EagleLayer(spec, spec.eagle, group, matrices)
        # tables float32[num_positions, rotary dimensions], and whether these are interleaved
        self._rotations: list[tuple[Tensor, bool]] = []
        # layers differ in their rotation, and in whether they have a window and growing queries
        self._places: list[tuple[int, bool, bool]] = []
        self._places_of: list[int] = []  # indices of ``_places``, by layer
        self._query_scales: Tensor | None = None  # float32[num_positions]
        self.mark: Callable[[str], AbstractContextManager[object]] | None = None
        """A context to put around each layer, for profilers."""
        self._most_tensor_core_tokens = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @property
    def layers(self) -> list[Layer]:
        """All layers of the checkpoint; the last one may be an MTP layer."""
        return cast("list[Layer]", list(self.model.layers))

    @property
    def main_layers(self) -> list[Layer]:
        """The layers of ``forward``: all but an MTP layer."""
        return self.layers[: self.spec.num_layers]

    @property
    def mtp(self) -> MTPLayer | EagleLayer | None:
        """The layer that guesses, if one is loaded: the MTP layer, or what takes its place."""
        return cast(MTPLayer, self.layers[-1]) if self.spec.has_mtp_layer else self.eagle

    @property
    def head(self) -> OutputHead:
        """The output head, which may be the embedding."""
        return self.model.embed_tokens if self.spec.tie_embeddings else self.lm_head

    def pack(self) -> None:
        """Arrange the loaded weights for GEMMs, after which nothing else may read them."""
        for layer in self.layers:
            pack_matrices(layer)
        self.head.matrix.pack(keep=self.spec.tie_embeddings)
        if self.eagle is not None:
            self.eagle.pack()
        for module in self.modules():
            # as plain attributes, since nn.Module's lookup takes as long as a small operation
            vars(module).update(module.named_parameters(recurse=False))
            vars(module).update(module.named_children())

    def set_positions(self, num_positions: int, device: torch.device) -> None:
        """Compute the tables of positions for sequences of up to ``num_positions`` tokens."""
        spec = self.spec
        ropes = [(spec.rope_of(layer), spec.rotary_head_dim(layer)) for layer in spec.all_layers]
        kinds = list(dict.fromkeys(ropes))
        self._rotations = [
            (
                rotary_table(rope, head_dim, num_positions, device),
                rope is not None and rope.interleaved,
            )
            for rope, head_dim in kinds
        ]
        growth = spec.query_growth
        of_layers = [
            (kinds.index(rope), window is not None, growth is not None and growth.has(layer))
            for layer, (rope, window) in enumerate(zip(ropes, spec.windows, strict=True))
        ]
        self._places = list(dict.fromkeys(of_layers))
        self._places_of = [self._places.index(places) for places in of_layers]
        if growth is not None:
            self._query_scales = query_scales(growth, num_positions, device)

    def bind_pages(self, pages: Sequence[PagedKV]) -> None:
        """Give each layer with attention the pages of its keys and values."""
        for module in self.modules():
            if isinstance(module, (SelfAttention, LatentAttention)):
                module.bind(pages[module.layer])

    def bind_states(self, states: Sequence[LayerStates]) -> None:
        """Give each recurrent layer the states of rows."""
        modules = self.model.layers.modules()
        mixers = [module for module in modules if isinstance(module, RecurrentMixer)]
        for mixer, of_layer in zip(mixers, states, strict=True):
            mixer.bind(of_layer)

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit by ``kernels``. All layers must be ``DecoderLayer``s whose weights
        fit, each with a ``GatedMLP`` or an ``ExpertsMLP`` that ``has_half_norms``; pages must be
        bound. The projection of an MTP layer's inputs is none of these weights."""
        for layer in self.layers:
            assert isinstance(layer.mixer, (SelfAttention, RecurrentMixer))
            assert isinstance(layer.mlp, (GatedMLP, ExpertsMLP))
            layer.mixer.use_tensor_cores(kernels)
            layer.mlp.use_tensor_cores(kernels)
        self._most_tensor_core_tokens = kernels.most_tokens

    def start_early(self, most_tokens: int) -> None:
        """Start the kernels of layers early in all steps of up to ``most_tokens``, whose GEMMs are
        on tensor cores. Only with one rank."""
        self._most_tensor_core_tokens = most_tokens

    def use_invariant_kernels(self, kernels: InvariantKernels) -> None:
        """Compute each token in an order that does not depend on the others. Only for models with
        dense weights that ``models.kernel_choice.use_invariant_kernels`` knows."""
        for layer in self.layers:
            for module in layer.modules():
                if isinstance(module, (DenseMatrix, ExpertsMLP)):
                    module.use_invariant_kernels(kernels)
        assert isinstance(self.head.matrix, DenseMatrix)
        self.head.matrix.use_invariant_kernels(kernels)
        self._most_tensor_core_tokens = MAX_TOKENS

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        attend: Attend,
        recurrent: RecurrentRows | None = None,
        adapted: AdaptedTokens | None = None,
        *,
        window_slots: Tensor | None = None,
    ) -> LayersOutput:
        """The residual stream after the last layer, and what an MTP layer reads of it.

        ``tokens``, ``positions`` and ``slots`` are int32 or int64 [num_tokens]. ``recurrent`` is
        needed if a layer has recurrent states. ``adapted``: the tokens by adapter, if any uses one;
        the model must have been given memory for adapters. ``window_slots`` are the slots in window
        pages, if there are any.
        """
        spec = self.spec
        residual, x = self._embedded(tokens, positions)
        if spec.streams is not None:
            # [num_tokens, num_streams, hidden_size]
            residual = residual[:, None].repeat(1, spec.streams.count, 1)
        layer_inputs: Tensor | None = None
        if self.model.layer_inputs is not None:
            layer_inputs = self.model.layer_inputs(tokens, residual)
        layers, pdl = self.main_layers, self._starts_early(len(tokens))
        query_scale: Tensor | None = None
        if self._query_scales is not None:
            query_scale = self._query_scales[positions, None, None].to(residual.dtype)
        steps = [
            StepContext(
                TokenPlaces(
                    positions,
                    window_slots if in_window and window_slots is not None else slots,
                    *self._rotations[rotation],
                ),
                attend,
                pdl,
                query_scale if grows else None,
                recurrent,
                adapted,
                layer_inputs,
            )
            for rotation, in_window, grows in self._places
        ]
        for_mtp: Tensor | None = None
        parts: dict[int, Tensor] = {}
        if self.mtp is not None and (read_layers := self.mtp.read_layers):
            width = len(read_layers) * spec.hidden_size
            for_mtp = residual.new_empty(len(residual), width)
            streams = for_mtp.tensor_split(len(read_layers), dim=1)
            parts = dict(zip(read_layers, streams, strict=True))
        next_norms = [layer.first_norm for layer in layers[1:]] + [self.model.norm]
        for index, (layer, norm) in enumerate(zip(layers, next_norms, strict=True)):
            if index in parts:
                self._keep_stream(residual, parts[index])
            with nullcontext() if self.mark is None else self.mark(f"layer {index}"):
                residual, x = layer(residual, x, norm, steps[self._places_of[index]])
        if len(layers) in parts:
            self._keep_stream(residual, parts[len(layers)])
        if self.model.hc_head is not None:
            residual, _ = self.model.hc_head.read(residual, pdl=pdl)
        return LayersOutput(residual, residual if for_mtp is None else for_mtp)

    def _keep_stream(self, residual: Tensor, out: Tensor) -> None:
        """Copy the residual stream of the publisher's model, which later layers overwrite."""
        if (scale := self.spec.stream_scale) == 1.0:
            out.copy_(residual)
        else:
            torch.mul(residual, scale, out=out)

    def first_mtp_states(self, layer_input: Tensor) -> Tensor:
        """The states that the MTP layer's first pass takes, [num_tokens, state_size], from
        ``LayersOutput.for_mtp``."""
        return self._guessing.first_states(layer_input, self.model.norm)

    def forward_mtp(
        self, tokens: Tensor, states: Tensor, positions: Tensor, slots: Tensor, attend: Attend
    ) -> Tensor:
        """The MTP layer's states, [num_tokens, state_size].

        ``states``, of the same shape, are those of the ``positions``: made of what the layers
        return (``first_mtp_states``) or, of a position that follows a guess, this layer's. They may
        be overwritten. ``tokens`` are those after the positions; the result predicts the ones after
        these. Keys and values of the layer go to ``slots``. The shapes are those of ``forward``.
        """
        mtp, layer = self._guessing, self.spec.num_layers
        rotation, _, _ = self._places[self._places_of[layer]]
        places = TokenPlaces(positions, slots, *self._rotations[rotation])
        embedded = (mtp.embedding or self.model.embed_tokens)(tokens)
        with nullcontext() if self.mark is None else self.mark("MTP layer"):
            return mtp.states(embedded, states, StepContext(places, attend, pdl=False))

    def best_mtp_tokens(self, states: Tensor) -> Tensor:
        """The likeliest tokens by the MTP layer's states, int32[num_rows]."""
        return self._guessing.best_tokens(states, self.head).int()

    @property
    def _guessing(self) -> GuessingLayer:
        """The MTP layer, which must be loaded."""
        assert self.mtp is not None
        return self.mtp

    def _embedded(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Normed]:
        """The residual stream before the layers, [num_tokens, hidden_size], and its first norm, if
        possible in one kernel with the sum over the ranks."""
        spec, group, norm = self.spec, self.group, self.layers[0].first_norm
        part = self.model.embed_tokens.own_rows(tokens)
        if self.model.embed_positions is not None and group.rank == 0:  # once in the ranks' sum
            part += self.model.embed_positions(positions)
        if spec.norms.of_embedding:  # of the sum, of which a rank has a part
            whole = group.all_reduce(part)
            residual = F.rms_norm(whole, (spec.hidden_size,), eps=spec.norms.eps)
            return residual, Normed(residual, norm)
        if (scale := spec.scales.embedding / spec.stream_scale) != 1.0:
            part.mul_(scale)
        if norm is not None and is_sum_fused(group, norm, len(part), self.dtype):
            residual = torch.zeros_like(part)
            return residual, add_sum(residual, part, norm, group, pdl=False)
        residual = group.all_reduce(part)
        return residual, Normed(residual, norm)

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of the residual stream under the final norm, [num_rows, hidden_size]."""
        return Normed(hidden, self.model.norm).normalized(pdl=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype."""
        return self.head.gathered(self.logits_part(hidden))

    def logits_part(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The same for this rank's part of the vocabulary, [num_rows, head.share], from which
        ``head.gathered`` makes the whole. ``out``, of that shape, takes the result if that saves
        memory."""
        x = Normed(hidden, self.model.norm)
        if self.model.norm.centered:
            x = Normed(x.normalized(pdl=False))
        logits = self.head.part(x, out)
        if cap := self.spec.scales.logit_cap:
            soft_cap(logits, cap)
        return logits

    def attention_starts_early(self, num_tokens: int) -> bool:
        """Whether decode attention may start before its predecessor ends, in captured steps of this
        number of tokens."""
        group, norm = self.group, self.model.norm
        return self._starts_early(num_tokens) and (
            group.size == 1 or is_sum_fused(group, norm, num_tokens, self.dtype)
        )

    def _starts_early(self, num_tokens: int) -> bool:
        """Whether kernels of the layers may start early, and are faster if they do.

        With several ranks, only steps on tensor cores may: the ranks' fused sums read the residual
        stream before they wait, and no other GEMM ensures that it is written by then.
        """
        if not can_start_early(self.model.norm.weight.device):
            return False
        if num_tokens <= self._most_tensor_core_tokens:
            return True
        if self.group.size > 1:
            return False
        if num_tokens == 1:
            return self.spec.hidden_size <= _PDL_HIDDEN_SIZE_OF_A_TOKEN
        is_small = self.spec.hidden_size <= _PDL_HIDDEN_SIZE
        return is_small and small_batch.MAX_TOKENS < num_tokens <= _PDL_TOKENS


def _layer(recipe: LayerRecipe) -> Layer:
    spec, layer = recipe.spec, recipe.layer
    if layer == spec.num_layers:
        return MTPLayer(recipe)
    if spec.scaled_layers:
        return Gemma4Layer(recipe)
    if spec.streams is not None:
        return HyperLayer(recipe)
    if spec.single_parts:
        return SinglePartLayer(recipe)
    if spec.parallel in ("parts", "normed parts"):
        return ParallelLayer(recipe)
    if spec.norms.centered:
        return LayerNormLayer(recipe)
    if spec.norms_of(layer) == "before":
        moe = spec.moe
        is_normed = moe is not None and moe.normed and layer in moe.layers
        return NormedExpertsLayer(recipe) if is_normed else DecoderLayer(recipe)
    return PostNormLayer(recipe)
