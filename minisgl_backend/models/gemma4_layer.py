"""Gemma 4's layer: Gemma 3's with its own scale, and perhaps with an input or experts.

Smaller models of this family have a second embedding, with a part for each layer. Together with a
projection of the first embedding it makes the *layer inputs* of a token, which the layers read
through a gate computed from the residual stream. Every rank computes all of this. In another model
of the family each layer has a mixture of experts beside its feed-forward block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.layers.embedding import VocabEmbedding
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.linear import MergedColumnLinear
from minisgl_backend.layers.norm import Normed, RMSNorm, add_normed
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import Place, Share, empty_parameter, whole
from minisgl_backend.models.decoder_layers import LayerRecipe, plain_mlp
from minisgl_backend.models.spec import LayerInputs, ModelSpec
from minisgl_backend.models.token_mixing import SelfAttention, StepContext
from minisgl_backend.parallel.group import Group


class Gemma4Layer(nn.Module):
    """Attention and feed-forward, each between two norms; then, if the model has them, the layer's
    inputs; finally the residual stream is multiplied by the layer's own number."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__()
        spec, layer, group, matrices = recipe.spec, recipe.layer, recipe.group, recipe.matrices

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.norms.eps)

        self.layer = layer
        self.input_layernorm = norm()
        self.self_attn = SelfAttention(spec, layer, group, matrices)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = plain_mlp(recipe)
        self.pre_feedforward_layernorm.rounding = self.mlp.rounding
        self.post_feedforward_layernorm = norm()
        self.experts: ExpertsBeside | None = None
        if spec.moe is not None and layer in spec.moe.layers:
            self.experts = ExpertsBeside(
                spec, recipe.experts(recipe.name, spec.hidden_size, spec.moe.of_layer(layer))
            )
        self.has_inputs = spec.layer_inputs is not None
        if spec.layer_inputs is not None:
            size = spec.layer_inputs.size
            self.gate = _replicated(
                recipe.name, "per_layer_input_gate", spec.hidden_size, size, matrices
            )
            self.projection = _replicated(
                recipe.name, "per_layer_projection", size, spec.hidden_size, matrices
            )
            self.post_per_layer_input_norm = norm()
        self.layer_scalar = _Scalar()

    @property
    def mixer(self) -> SelfAttention:
        return self.self_attn

    @property
    def first_norm(self) -> RMSNorm:
        """The norm of the layer's input."""
        return self.input_layernorm

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm | None, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """``x`` is ``residual`` under this layer's norm. The second result is under the next
        layer's."""
        pdl, experts = step.pdl, self.experts
        part, after = self.self_attn.output(x, step), self.post_attention_layernorm
        others = () if experts is None else (experts.before, experts.router_norm)
        x, rows = add_normed(
            residual, part, after, self.pre_feedforward_layernorm, others=others, pdl=pdl
        )
        part = self.mlp.output(x, pdl=pdl, adapted=step.adapted)
        after = self.post_feedforward_layernorm
        beside = None if experts is None else experts.output(*rows, pdl=pdl)
        if self.has_inputs:
            assert step.layer_inputs is not None
            add_normed(residual, part, after, None, beside=beside, pdl=pdl)
            gate = self.gate(Normed(residual), pdl=pdl)  # [num_tokens, size]
            gated = gate_mul(gate, step.layer_inputs[:, self.layer], "gelu", pdl=pdl)
            part, after = self.projection(Normed(gated), pdl=pdl), self.post_per_layer_input_norm
            beside = None
        factor = self.layer_scalar.value
        x, _ = add_normed(residual, part, after, next_norm, beside=beside, factor=factor, pdl=pdl)
        return residual, x


class ExpertsBeside(nn.Module):
    """Experts beside a feed-forward block: the outputs of both are normalized and added.

    The experts read the residual stream under a different norm than the block (``before``), and
    their router under yet another (``router_norm``). Parts are named as in the checkpoint's layer.
    """

    def __init__(self, spec: ModelSpec, experts: ExpertsMLP):
        super().__init__()

        def norm(*, scale: float = 1.0) -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.norms.eps, scale=scale)

        self.experts = experts
        self.before = norm()
        self.router_norm = norm(scale=spec.hidden_size**-0.5)
        self.after_block = norm()
        self.after = norm()

    def output(self, rows: Tensor, routed: Tensor, *, pdl: bool) -> tuple[Tensor, RMSNorm, RMSNorm]:
        """The experts' output, and the norms of the block's output and of this one, which are to be
        added (``add_normed``). Experts read ``rows`` and their router ``routed``, both normalized;
        all [num_tokens, hidden_size]."""
        part = self.experts.part_of(rows, routed, pdl=pdl)
        return self.experts.group.all_reduce(part), self.after_block, self.after

    def places(self) -> Iterator[tuple[str, Place]]:
        for name, place in self.experts.places():
            yield f"../{name}", place
        names = {
            "pre_feedforward_layernorm_2.weight": self.before,
            "router.scale": self.router_norm,
            "post_feedforward_layernorm_1.weight": self.after_block,
            "post_feedforward_layernorm_2.weight": self.after,
        }
        for name, norm in names.items():
            yield f"../{name}", whole(norm.weight, scale=norm.scale, neutral=1.0)


class LayerInputsMaker(nn.Module):
    """Makes the layer inputs of tokens; its parts are named as in the checkpoint's ``model``.

    The result is (norm(projection of the embedding) + second embedding) / sqrt(2).
    """

    def __init__(self, spec: ModelSpec, inputs: LayerInputs, group: Group, matrices: Matrices):
        super().__init__()
        width = spec.num_layers * inputs.size
        self.num_layers = spec.num_layers
        self.hidden_scale = spec.hidden_size**-0.5
        self.embedding_scale = inputs.size**0.5
        self.embedding = VocabEmbedding(
            "model.embed_tokens_per_layer",
            inputs.vocab_size,
            width,
            group=group,
            matrices=matrices,
        )
        self.projection = _replicated(
            "model", "per_layer_model_projection", spec.hidden_size, width, matrices
        )
        self.norm = RMSNorm(inputs.size, spec.norms.eps)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """[num_tokens, num_layers, size]; ``embedded`` [num_tokens, hidden_size] are the tokens'
        embeddings, scaled."""
        projected = self.projection(Normed(embedded), pdl=False) * self.hidden_scale
        projected = projected.view(len(tokens), self.num_layers, -1)
        normed = F.rms_norm(projected, projected.shape[-1:], self.norm.weight, self.norm.eps)
        own = self.embedding(tokens).view_as(normed) * self.embedding_scale
        inputs: Tensor = (normed + own) * 2**-0.5
        return inputs

    def places(self) -> Iterator[tuple[str, Place]]:
        for name, place in self.embedding.places():
            yield f"../embed_tokens_per_layer.{name}", place
        yield from self.projection.places()
        for name, place in self.norm.places():
            yield f"../per_layer_projection_norm.{name}", place


class _Scalar(nn.Module):
    """A number of the parent's, with this module's name in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.value = empty_parameter(1)

    def places(self) -> Iterator[tuple[str, Place]]:
        yield "../layer_scalar", whole(self.value, neutral=1.0)


def _replicated(
    name: str, part: str, in_features: int, out_features: int, matrices: Matrices
) -> MergedColumnLinear:
    """A projection that all ranks compute in full."""
    parts = {part: Share(out_features, 0, out_features)}
    return MergedColumnLinear(name, in_features, parts, bias=False, matrices=matrices)
