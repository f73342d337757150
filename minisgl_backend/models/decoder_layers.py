"""Layers of a decoder: token mixing and feed-forward, with norms before or after each.

Modules have the names of the checkpoint's tensors. Gemma 4's layer is in ``gemma4_layer``. Must not
know the neighbouring layers, except for the norm of the next one, which kernels fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias, cast

from torch import Tensor, nn

from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.feed_forward import FeedForward, GatedMLP, UngatedMLP
from minisgl_backend.layers.hyper_connection import HyperConnection
from minisgl_backend.layers.norm import Normed, RMSNorm, add_normed, add_sum
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.models.gated_delta_net import GatedDeltaNet
from minisgl_backend.models.kimi_delta import KimiDeltaAttention
from minisgl_backend.models.latent_attention import LatentAttention
from minisgl_backend.models.mamba import MambaMixer
from minisgl_backend.models.parallel_mixer import ParallelMixer
from minisgl_backend.models.recurrent_mixer import RecurrentMixer
from minisgl_backend.models.recurrent_spec import (
    ConvSpec,
    DeltaSpec,
    KimiDeltaSpec,
    MambaSpec,
    RecurrentSpec,
)
from minisgl_backend.models.short_conv import ShortConv
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import SelfAttention, StepContext, TokenMixer
from minisgl_backend.parallel.group import Group

MakeExperts: TypeAlias = Callable[[str, int, ExpertsSpec], ExpertsMLP]
"""(name in the checkpoint, hidden_size, experts) -> their module."""
_MakeRecurrent: TypeAlias = Callable[[ModelSpec, int, Group, Matrices], RecurrentMixer]
_RECURRENT: Final[Mapping[type[RecurrentSpec], tuple[str, _MakeRecurrent]]] = MappingProxyType(
    {
        DeltaSpec: ("linear_attn", GatedDeltaNet),
        KimiDeltaSpec: ("self_attn", KimiDeltaAttention),
        MambaSpec: ("mamba", MambaMixer),
        ConvSpec: ("conv", ShortConv),
    }
)
"""The name in the checkpoint of each kind of recurrent layers, and their module."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecipe:
    """How to make the layer with the index ``layer`` of a model: ``spec`` describes it,
    ``matrices`` and ``experts`` make its modules, and ``group`` says which part a rank has."""

    spec: ModelSpec
    layer: int
    group: Group
    matrices: Matrices
    experts: MakeExperts

    @property
    def name(self) -> str:
        """The layer's in the checkpoint."""
        return f"model.layers.{self.layer}"


class _TwoPartLayer(nn.Module):
    """Token mixing and feed-forward, behind a norm of the layer's input."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__()
        self.input_layernorm = residual_norm(recipe.spec)
        self._mixer_name, mixer = _token_mixer(recipe)
        self.add_module(self._mixer_name, mixer)
        self.mlp = _feed_forward(recipe)

    @property
    def first_norm(self) -> RMSNorm | None:
        """The norm of the layer's input."""
        return self.input_layernorm

    @property
    def mixer(self) -> TokenMixer:
        """The token mixing, whose module is named as in the checkpoint."""
        return cast(TokenMixer, getattr(self, self._mixer_name))


class DecoderLayer(_TwoPartLayer):
    """Token mixing and feed-forward, each on the normalized residual stream and added to it."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__(recipe)
        self.post_attention_layernorm = residual_norm(recipe.spec)
        self.input_layernorm.rounding = self.mixer.rounding
        self.post_attention_layernorm.rounding = self.mlp.rounding

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm | None, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """``x`` is ``residual`` after this layer's norm. Returns the new residual stream, and the
        same after the next layer's norm, if it has one."""
        feed_forward: FeedForward = self.mlp
        residual, x = self.mixer(residual, x, self.post_attention_layernorm, step)
        if next_norm is None:  # the next layer normalizes what its parts add, not what they read
            residual += self.mlp.output(x, pdl=step.pdl, adapted=step.adapted)
            return residual, Normed(residual)
        return feed_forward(residual, x, next_norm, pdl=step.pdl, adapted=step.adapted)


class NormedExpertsLayer(DecoderLayer):
    """The same with one more norm, of the output of a mixture of experts (A.X K1)."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__(recipe)
        norms = recipe.spec.norms
        self.post_feedforward_layernorm = RMSNorm(
            recipe.spec.hidden_size, norms.eps, offset=norms.offset
        )

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm | None, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """As ``DecoderLayer.forward``."""
        residual, x = self.mixer(residual, x, self.post_attention_layernorm, step)
        part = self.mlp.output(x, pdl=step.pdl, adapted=step.adapted)
        after = self.post_feedforward_layernorm
        x, _ = add_normed(residual, part, after, next_norm, pdl=step.pdl)
        return residual, x


class HyperLayer(_TwoPartLayer):
    """Token mixing and feed-forward, each of which reads and writes several residual streams by a
    hyper-connection (Hy4). What it reads is normalized."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__(recipe)
        assert isinstance(self.mixer, (SelfAttention, LatentAttention))
        self.post_attention_layernorm = residual_norm(recipe.spec)
        self.attn_hc = hyper_connection(recipe.spec)
        self.ffn_hc = hyper_connection(recipe.spec)

    @property
    def first_norm(self) -> RMSNorm | None:
        """None: the layer normalizes what it reads of the streams."""
        return None

    @property
    def mixer(self) -> SelfAttention | LatentAttention:
        return cast("SelfAttention | LatentAttention", super().mixer)

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm | None, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """The streams [num_tokens, num_streams, hidden_size] with the outputs of both parts, not
        normalized."""
        read, weights = self.attn_hc.read(residual, pdl=step.pdl)
        part = self.mixer.output(Normed(read, self.input_layernorm), step)
        self.attn_hc.write(residual, part, weights, pdl=step.pdl)
        read, weights = self.ffn_hc.read(residual, pdl=step.pdl)
        x = Normed(read, self.post_attention_layernorm)
        part = self.mlp.output(x, pdl=step.pdl, adapted=step.adapted)
        self.ffn_hc.write(residual, part, weights, pdl=step.pdl)
        return residual, Normed(residual)


class SinglePartLayer(nn.Module):
    """A layer that is only token mixing or only a feed-forward block, on the normalized residual
    stream and added to it, as in Nemotron-H. The other part is None."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__()
        self.input_layernorm = residual_norm(recipe.spec)
        self._mixer_name: str | None = None
        self.mlp: UngatedMLP | GatedMLP | ExpertsMLP | None = None
        if recipe.spec.has_part(recipe.layer, "mixer"):
            self._mixer_name, mixer = _token_mixer(recipe)
            self.add_module(self._mixer_name, mixer)
            self.input_layernorm.rounding = mixer.rounding
        else:
            feed_forward = _feed_forward(recipe)
            self.mlp = feed_forward
            self.input_layernorm.rounding = feed_forward.rounding

    @property
    def first_norm(self) -> RMSNorm | None:
        """The norm of the layer's input."""
        return self.input_layernorm

    @property
    def mixer(self) -> TokenMixer | None:
        """The token mixing, if the layer is that."""
        name = self._mixer_name
        return None if name is None else cast(TokenMixer, getattr(self, name))

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm | None, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """As ``DecoderLayer.forward``."""
        assert next_norm is not None
        mixer: TokenMixer | None = self.mixer
        feed_forward: FeedForward | None = self.mlp
        if mixer is not None:
            return mixer(residual, x, next_norm, step)
        assert feed_forward is not None
        return feed_forward(residual, x, next_norm, pdl=step.pdl, adapted=step.adapted)


class PostNormLayer(nn.Module):
    """A layer that normalizes the outputs of both parts, instead of their inputs (OLMo 2) or in
    addition to them (Gemma 3). Both norms and the residual add between them are one kernel
    (``add_normed``)."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__()
        spec, norms = recipe.spec, recipe.spec.norms

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, norms.eps, offset=norms.offset)

        def output_norm() -> RMSNorm:
            eps, scale = norms.output_eps or norms.eps, spec.scales.branch
            return RMSNorm(spec.hidden_size, eps, scale=scale, offset=norms.offset)

        has_both = spec.norms_of(recipe.layer) == "around"
        self.input_layernorm = norm() if has_both else None
        self._mixer_name, mixer = _token_mixer(recipe)
        assert isinstance(mixer, (SelfAttention, ShortConv))  # others do not give their output
        self.add_module(self._mixer_name, mixer)
        self.post_attention_layernorm = output_norm()
        self.pre_feedforward_layernorm = norm() if has_both else None
        self.mlp = _feed_forward(recipe)
        self.post_feedforward_layernorm = output_norm()
        if self.input_layernorm is not None and self.pre_feedforward_layernorm is not None:
            self.input_layernorm.rounding = mixer.rounding
            self.pre_feedforward_layernorm.rounding = self.mlp.rounding

    @property
    def mixer(self) -> SelfAttention | ShortConv:
        """The token mixing, whose module is named as in the checkpoint."""
        return cast("SelfAttention | ShortConv", getattr(self, self._mixer_name))

    @property
    def first_norm(self) -> RMSNorm | None:
        """The norm of the layer's input, if it has one."""
        return self.input_layernorm

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm | None, step: StepContext
    ) -> tuple[Tensor, Normed]:
        part, after = self.mixer.output(x, step), self.post_attention_layernorm
        x, _ = add_normed(residual, part, after, self.pre_feedforward_layernorm, pdl=step.pdl)
        part = self.mlp.output(x, pdl=step.pdl, adapted=step.adapted)
        after = self.post_feedforward_layernorm
        x, _ = add_normed(residual, part, after, next_norm, pdl=step.pdl)
        return residual, x


class _SummedLayer(_TwoPartLayer):
    """A layer that adds the outputs of its parts to the residual stream itself: they are summed
    over the ranks of ``_group`` with the norm that follows."""

    self_attn: SelfAttention

    def __init__(self, recipe: LayerRecipe):
        super().__init__(recipe)
        assert isinstance(self.mixer, SelfAttention)  # others add their output themselves
        self._group = recipe.group


class LayerNormLayer(_SummedLayer):
    """Token mixing and feed-forward, each on a LayerNorm of the residual stream and added to it
    (StarCoder 2, Jais 2, Minitron). Each norm is complete before it is read."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__(recipe)
        self.post_attention_layernorm = residual_norm(recipe.spec)

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm | None, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """As ``DecoderLayer.forward``."""
        assert next_norm is not None
        group, pdl = self._group, step.pdl
        part = self.self_attn.part(Normed(x.normalized(pdl=pdl)), step)
        x = add_sum(residual, part, self.post_attention_layernorm, group, pdl=pdl)
        part = self.mlp.part(x, pdl=pdl, adapted=step.adapted)
        return residual, add_sum(residual, part, next_norm, group, pdl=pdl)


class ParallelLayer(_SummedLayer):
    """A layer whose parts read the same residual stream, under the same norm (Command) or each
    under its own (Pythia), and are both added to it. The ranks' sum of both is one."""

    def __init__(self, recipe: LayerRecipe):
        super().__init__(recipe)
        has_two = recipe.spec.parallel == "normed parts"
        self.post_attention_layernorm = residual_norm(recipe.spec) if has_two else None

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm | None, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """As ``DecoderLayer.forward``."""
        assert next_norm is not None
        x = of_block = Normed(x.normalized(pdl=step.pdl))
        if self.post_attention_layernorm is not None:
            own = Normed(residual, self.post_attention_layernorm)
            of_block = Normed(own.normalized(pdl=step.pdl))
        part = self.self_attn.part(x, step)
        part += self.mlp.part(of_block, pdl=step.pdl, adapted=step.adapted)
        return residual, add_sum(residual, part, next_norm, self._group, pdl=step.pdl)


def residual_norm(spec: ModelSpec, scale: float = 1.0, *, offset: float | None = None) -> RMSNorm:
    """A norm of the residual stream as ``Decoder`` keeps it; ``scale`` multiplies its weight, to
    which ``offset`` is added, by default that of all norms."""
    norms = spec.norms
    return RMSNorm(
        spec.hidden_size,
        spec.stream_eps,
        scale=scale,
        offset=norms.offset if offset is None else offset,
        centered=norms.centered,
        biased=norms.biased,
        weighted=norms.weighted,
    )


def hyper_connection(spec: ModelSpec, *, writes: bool = True) -> HyperConnection:
    """That of a part of a layer or, if it only reads, of the final norm."""
    assert spec.streams is not None
    return HyperConnection(
        spec.streams.count,
        spec.hidden_size,
        eps=spec.streams.eps,
        norm_eps=spec.norms.eps,
        magnitude=spec.streams.magnitude if writes else None,
    )


def plain_mlp(recipe: LayerRecipe) -> GatedMLP | UngatedMLP:
    """A layer's feed-forward block of all tokens."""
    spec, group, matrices = recipe.spec, recipe.group, recipe.matrices
    name = f"{recipe.name}.mlp"
    sizes = spec.hidden_size, spec.intermediate_size_of(recipe.layer)
    if spec.gate is None:
        return UngatedMLP(
            name,
            *sizes,
            bias=spec.biases.mlp,
            group=group,
            matrices=matrices,
            activation=spec.activation,
        )
    return GatedMLP(
        name, *sizes, bias=spec.biases.mlp, group=group, matrices=matrices, gate=spec.gate
    )


def _token_mixer(
    recipe: LayerRecipe,
) -> tuple[str, SelfAttention | LatentAttention | RecurrentMixer | ParallelMixer]:
    """The name in the checkpoint of a layer's token mixing, and the module, by its kind."""
    spec, layer, group, matrices = recipe.spec, recipe.layer, recipe.group, recipe.matrices
    if spec.recurrent is None or layer not in spec.recurrent.layers:
        if spec.latent is not None:
            return "self_attn", LatentAttention(spec, spec.latent, layer, group, matrices)
        return "self_attn", SelfAttention(spec, layer, group, matrices)
    name, make = _RECURRENT[type(spec.recurrent)]
    mixer = make(spec, layer, group, matrices)
    if spec.parallel != "mixers":
        return name, mixer
    attention = SelfAttention(spec, layer, group, matrices)
    return "mixers", ParallelMixer(attention, mixer, name)


def _feed_forward(recipe: LayerRecipe) -> GatedMLP | UngatedMLP | ExpertsMLP:
    spec, moe = recipe.spec, recipe.spec.moe
    if moe is None or recipe.layer not in moe.layers:
        return plain_mlp(recipe)
    return recipe.experts(f"{recipe.name}.mlp", spec.hidden_size, moe.of_layer(recipe.layer))
