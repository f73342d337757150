"""A model as the engine sees it: plain numbers, the same for every architecture.

One decoder computes all architectures: each is a set of values here, and in the parts of a spec
that have modules of their own. Must not know files, tensors or how an architecture spells its
config.json (``families`` does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from minisgl_backend.attention.base import AttentionShape, IndexShape, LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, GateLimits
from minisgl_backend.gates import Activation, Gate
from minisgl_backend.models.attention_spec import AttentionGates, KVSpec, QKNorm, ScoresSpec
from minisgl_backend.models.bounds import MOST_POSITIONS
from minisgl_backend.models.latent_spec import LatentSpec
from minisgl_backend.models.norms_spec import NormPlace, NormsSpec
from minisgl_backend.models.recurrent_spec import RecurrentSpec
from minisgl_backend.models.rope_spec import LearnedPositions, QueryGrowth, RopeSpec
from minisgl_backend.models.tensor_names import TensorNames
from minisgl_backend.weight_format import WeightFormats

Part: TypeAlias = Literal["mixer", "feed-forward"]
"""A part of a layer: token mixing, or what computes each token for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Mixtures of experts; ``layers`` are those that have one instead of the plain MLP or, if
    ``beside``, next to it. If ``normed``, their outputs are normalized before they are added.
    ``limits`` are those of gates in some layers.
    """

    experts: ExpertsSpec
    layers: frozenset[int]
    beside: bool = False
    normed: bool = False
    limits: Mapping[int, GateLimits] = field(default_factory=dict)

    def of_layer(self, layer: int) -> ExpertsSpec:
        """The experts of a layer."""
        limits = self.limits.get(layer)
        return self.experts if limits is None else self.experts.limited(limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What each layer reads besides the residual stream (Gemma 4): for each token ``size`` numbers
    from an embedding of ``vocab_size`` ids."""

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Hyper-connections (arXiv 2409.19606): there are ``count`` residual streams, which all begin
    as the embedding. Each part of a layer reads a sum of them, and so does the final norm; and each
    takes the part's output, by weights that are made of the streams
    (``kernels.hyper_connections``)."""

    count: int
    magnitude: float
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasesSpec:
    """Which projections have biases: of queries, keys and values, of attention's output, of
    feed-forward blocks other than experts, and the output head."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalesSpec:
    """What is multiplied: the embeddings by ``embedding``, what each part of a layer adds to the
    residual stream by ``branch``, and the logits by ``logits``. If ``logit_cap`` c is not 0, it
    then bounds logits x as c tanh(x / c)."""

    embedding: float = 1.0
    branch: float = 1.0
    logits: float = 1.0
    logit_cap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPSpec:
    """The MTP layer of a checkpoint: one more layer, behind the last, that was trained to predict
    the token after the next. How the checkpoint names its tensors: ``renamed`` come before those of
    the model's ``TensorNames``, and ``left_out`` take the place of those."""

    renamed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """An EAGLE-3 layer (arXiv 2503.01840), from a checkpoint of its own: it guesses tokens of a
    model whose hidden size is ``target_size``.

    ``layer`` is a model of this layer alone; its ``vocab_size`` is that of the model, and the
    output head has ``num_drafted`` tokens of it. The layer reads the model's residual stream before
    each of ``read_layers``, where the number of layers stands for its end; None: where publishers
    take it by default. With ``norm_before_fc`` all that it reads is normalized together, with
    ``fc_norm`` the stream of each place by itself, before its state is made of it. With
    ``norm_before_residual`` the layer adds to its normalized state, not to the state itself; with
    ``norm_output`` the next state is its normalized output. Without ``own_embedding`` it takes the
    model's.
    """

    layer: ModelSpec
    target_size: int
    num_drafted: int
    read_layers: tuple[int, ...] | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = False

    def read_layers_in(self, num_layers: int) -> tuple[int, ...]:
        """``read_layers`` of a model with this number of layers; raises ``ConfigError`` if it does
        not have them."""
        found = self.read_layers or (2, num_layers // 2, num_layers - 3)
        is_ascending = all(one < other for one, other in pairwise(found))
        if not is_ascending or found[-1] > num_layers:
            raise ConfigError(
                f"the EAGLE-3 layer reads the residual stream before the layers "
                f"{', '.join(map(str, found))}, which must be in ascending order and at most "
                f"{num_layers}, the number of the model's layers"
            )
        return found

    @property
    def num_active_parameters(self) -> int:
        """How many weights of the layer a token is multiplied by."""
        size, heads = self.layer.hidden_size, self.layer.heads_of(0)
        # queries, keys and values are also made of the embedding
        of_embedding = size * heads.head_dim * (heads.num_heads + 2 * heads.num_kv_heads)
        num_read = 3 if self.read_layers is None else len(self.read_layers)
        inputs = num_read * self.target_size * size
        return self.layer.num_active_parameters + of_embedding + inputs

    @property
    def num_parameters(self) -> int:
        """Number of weights, without biases and norms."""
        num_rows = self.num_drafted + self.own_embedding * self.layer.vocab_size
        return self.num_active_parameters + num_rows * self.layer.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model.

    Each variation of the decoder is a field with a neutral default. If there is an MTP or EAGLE-3
    layer, its index is ``num_layers``, and its attention has an entry in what has one per layer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    dtype: str
    """The checkpoint's."""
    weights: WeightFormats | None = None
    """How projections are stored; None: all are plain."""
    names: TensorNames = field(default_factory=TensorNames)
    """How the checkpoint names its tensors."""
    tie_embeddings: bool = False
    generates: bool = True
    """Some embedding models do not: they have no output head, and the embedding takes its place."""
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    """From config.json and generation_config.json, or from the tokenizer."""

    # the residual stream
    norms: NormsSpec
    scales: ScalesSpec = field(default_factory=ScalesSpec)
    streams: StreamsSpec | None = None
    """None: there is one residual stream, to which parts of layers add what they compute."""
    positions: LearnedPositions | None = None
    """There are as many as ``rope`` says; then no layer rotates."""

    # what a layer is made of
    biases: BiasesSpec = field(default_factory=BiasesSpec)
    single_parts: tuple[Part, ...] = ()
    """If there are entries, one per layer: each layer is only token mixing, or only a feed-forward
    block, with one norm."""
    parallel: Literal["parts", "normed parts", "mixers"] | None = None
    """What layers compute side by side, to add both: attention and the feed-forward block, of the
    same input or each of an input with a norm of its own, or attention and the mixer that
    ``recurrent`` describes, of the same input."""
    layer_inputs: LayerInputs | None = None
    scaled_layers: bool = False
    """Whether each layer multiplies its output by a number."""

    # token mixing
    heads: LayerHeads
    """Those of all layers, unless ``heads_by_layer`` has one entry for each."""
    heads_by_layer: tuple[LayerHeads, ...] = ()
    rope: RopeSpec
    """The rotation of all layers, unless ``ropes`` has one entry for each."""
    ropes: tuple[RopeSpec | None, ...] = ()
    """None: the layer does not rotate."""
    windows: tuple[int | None, ...]
    """For each layer the number of positions that a token sees, including its own; None: all."""
    sections: bool = False
    """Windows do not slide: they are sections of the sequence, all of one size, and a token sees
    only positions of its own section."""
    qk_norm: QKNorm | None = None
    query_growth: QueryGrowth | None = None
    scores: ScoresSpec = field(default_factory=ScoresSpec)
    attention_gates: AttentionGates | None = None
    kv: KVSpec = field(default_factory=KVSpec)
    latent: LatentSpec | None = None
    """All attention is multi-head latent attention. Pages hold the latents: they are the only KV
    head, whose ``head_dim`` is that of latent and rotated key together."""
    recurrent: RecurrentSpec | None = None
    """The layers that mix tokens without attention, or by both (``parallel``)."""

    # feed-forward blocks
    intermediate_size: int
    """The width of all blocks, unless ``intermediate_sizes`` has one entry for each layer."""
    intermediate_sizes: tuple[int, ...] = ()
    gate: Gate | None = "silu"
    """Of blocks other than experts; None: they have no gates, but an ``activation``."""
    activation: Activation = "relu2"
    moe: MoeSpec | None = None

    # what guesses tokens
    mtp: MTPSpec | str = "has no MTP layer that is supported"
    """The checkpoint's MTP layer, or why it has none that is supported."""
    has_mtp_layer: bool = False
    """Whether the MTP layer is part of the model (``with_mtp``)."""
    eagle: EagleSpec | None = None
    """An EAGLE-3 layer in place of it (``with_eagle``)."""

    def __post_init__(self) -> None:
        if self.norms.centered and self.single_parts:
            raise ConfigError(
                "norms that subtract the mean are supported only of the inputs of layers with "
                "attention and a feed-forward block"
            )
        assert self.norms.place != "by mixer" or self.scales.branch == 1.0
        if self.moe is not None and self.moe.normed:
            assert self.norms.place == "before" and self.scales.branch == 1.0
        assert not self.norms.of_embedding or self.scales.embedding == self.stream_scale == 1.0
        assert not self.biases.head or not self.tie_embeddings
        if self.streams is not None:
            assert self.norms.place == "before" and not self.norms.centered
            assert not (self.single_parts or self.parallel or self.scaled_layers)
            assert self.stream_scale == self.scales.branch == 1.0 and self.recurrent is None
        if self.positions is not None:
            assert not any(self.ropes) and len(self.ropes) == self.num_layers
            assert self.scales.embedding == self.stream_scale == 1.0
        layers = [
            (self.rope_of(layer), self.heads_of(layer), self.rotary_head_dim(layer))
            for layer in self.all_layers
        ]
        for rope, heads, rotary_head_dim in dict.fromkeys(layers):
            if heads.num_heads % heads.num_kv_heads:
                raise ConfigError(
                    f"{heads.num_heads} attention heads cannot share {heads.num_kv_heads} "
                    "key-value heads (num_attention_heads, num_key_value_heads)"
                )
            if rotary_head_dim % 2:
                what = "head_dim" if self.latent is None else "qk_rope_head_dim"
                raise ConfigError(f"rotary embedding needs an even {what}, got {rotary_head_dim}")
            if rope is not None:
                rope.check(rotary_head_dim)
        if self.context > MOST_POSITIONS:
            raise ConfigError(
                f"max_position_embeddings {self.rope.max_positions} with a rotary factor of "
                f"{self.rope.factor:g} makes {self.context:,} positions, more than {MOST_POSITIONS}"
            )

    def with_mtp(self) -> ModelSpec:
        """The same model with its MTP layer; raises ``ConfigError`` if none is offered.

        The layer is one with attention over all positions and, if others have experts, with
        experts.
        """
        if isinstance(self.mtp, str):
            raise ConfigError(
                f"{self.architecture} {self.mtp} (speculative_mtp_tokens); "
                "speculative_mtp_model takes an EAGLE-3 layer that was made for the model"
            )
        assert not (self.has_mtp_layer or self.single_parts or self.parallel)
        assert not (self.ropes or self.heads_by_layer or self.intermediate_sizes)
        assert self.norms.place == "before" and not self.norms.centered
        assert self.scales == ScalesSpec() and not self.kv.sources
        assert self.layer_inputs is None and self.query_growth is None and not self.sections
        assert self.positions is None and self.streams is None
        moe = self.moe
        if moe is not None:
            moe = replace(moe, layers=moe.layers | {self.num_layers})
        renamed = (*self.mtp.renamed, *self.names.renamed)
        names = replace(self.names, renamed=renamed, left_out=self.mtp.left_out)
        windows = (*self.windows, None)
        return replace(self, has_mtp_layer=True, windows=windows, moe=moe, names=names)

    def with_eagle(self, eagle: EagleSpec) -> ModelSpec:
        """The same model with an EAGLE-3 layer; raises ``ConfigError`` if they do not fit."""
        assert not self.has_mtp_layer
        own, last = eagle.layer, self.num_layers
        reasons = {
            "latent attention, beside which the layer has no pages": self.latent is not None,
            "bounded attention scores, which the layer does not know": self.scores.cap != 0,
            "sections of attention, with which the layer was not tried": self.sections,
            "learned positions, with which the layer was not tried": self.positions is not None,
            "several residual streams, of which the layer reads one": self.streams is not None,
            "no output head": not self.generates,
            f"{self.vocab_size} tokens, and the layer {own.vocab_size} (vocab_size)": (
                own.vocab_size != self.vocab_size
            ),
            f"a hidden_size of {self.hidden_size}, and the layer was made for "
            f"{eagle.target_size}": eagle.target_size != self.hidden_size,
        }
        for reason, is_one in reasons.items():
            if is_one:
                raise ConfigError(f"option speculative_mtp_model: {self.architecture} has {reason}")
        eagle.read_layers_in(last)
        heads, ropes, kv = self.heads_by_layer, self.ropes, self.kv
        if heads or own.heads_of(0) != self.heads:
            heads = (*(self.heads_of(layer) for layer in range(last)), own.heads_of(0))
        if ropes or own.rope != self.rope:
            ropes = (*(self.rope_of(layer) for layer in range(last)), own.rope)
        return replace(
            self,
            eagle=eagle,
            windows=(*self.windows, None),
            heads_by_layer=heads,
            ropes=ropes,
            kv=replace(kv, sources=(*kv.sources, last) if kv.sources else ()),
            single_parts=(*self.single_parts, "mixer") if self.single_parts else (),
        )

    @property
    def all_layers(self) -> range:
        """The indices of all layers, those of an MTP or EAGLE-3 layer included."""
        return range(self.num_layers + (self.has_mtp_layer or self.eagle is not None))

    @property
    def own_layers(self) -> range:
        """The indices of the layers that the model's own checkpoint has."""
        return range(self.num_layers + self.has_mtp_layer)

    @property
    def context(self) -> int:
        """Number of tokens in the longest sequence, given the scaling of rotary positions."""
        rope = self.rope
        if rope.scaling in ("linear", "dynamic"):
            return int(rope.max_positions * rope.factor)
        if rope.scaling == "yarn" and rope.original_max_positions:
            return max(rope.max_positions, int(rope.original_max_positions * rope.factor))
        if rope.scaling == "longrope":
            return rope.original_max_positions or rope.max_positions
        return rope.max_positions

    @property
    def stream_scale(self) -> float:
        """By what ``Decoder`` divides the residual stream: ``scales.branch``, unless the norms
        of what parts of a layer add multiply by it."""
        return self.scales.branch if self.norms.place == "before" else 1.0

    @property
    def stream_eps(self) -> float:
        """The eps of norms of the residual stream as ``Decoder`` keeps it."""
        return self.norms.eps / self.stream_scale**2

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose keys and values are kept in pages."""
        return tuple(
            layer
            for layer in self.all_layers
            if self.attends(layer) and self.kv_source(layer) == layer
        )

    def has_part(self, layer: int, part: Part) -> bool:
        """Whether a layer has token mixing, or a feed-forward block."""
        return not self.single_parts or self.single_parts[layer] == part

    def attends(self, layer: int) -> bool:
        """Whether a layer mixes tokens by attention."""
        is_recurrent = self.recurrent is not None and layer in self.recurrent.layers
        return self.has_part(layer, "mixer") and (self.parallel == "mixers" or not is_recurrent)

    def norms_of(self, layer: int) -> NormPlace:
        """Where the norms of a layer's parts are."""
        if self.norms.place == "by mixer":
            return "after" if self.attends(layer) else "before"
        return self.norms.place

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer with attention reads, usually its own."""
        return self.kv.sources[layer] if self.kv.sources else layer

    def heads_of(self, layer: int) -> LayerHeads:
        return self.heads_by_layer[layer] if self.heads_by_layer else self.heads

    def num_gates(self, layer: int) -> int:
        """The number of a token's gates of a layer's attention."""
        heads, gates = self.heads_of(layer), self.attention_gates
        if gates is None:
            return 0
        value_dim = heads.head_dim if self.latent is None else self.latent.value_dim
        return heads.num_heads * (1 if gates.one_per_head else value_dim)

    @property
    def gates_in_queries(self) -> bool:
        """Whether the projection of queries also makes gates of attention's output."""
        return self.attention_gates is not None and not self.attention_gates.apart

    @property
    def gates_apart(self) -> bool:
        """Whether such gates have a projection of their own."""
        return self.attention_gates is not None and self.attention_gates.apart

    def rotary_head_dim(self, layer: int) -> int:
        """The size of what a layer's ``rope_of`` rotates."""
        return self.heads_of(layer).head_dim if self.latent is None else self.latent.rope_dim

    def intermediate_size_of(self, layer: int) -> int:
        """The width of a layer's feed-forward block."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    def rope_of(self, layer: int) -> RopeSpec | None:
        """How a layer rotates; None if it does not."""
        return self.ropes[layer] if self.ropes else self.rope

    @property
    def num_parameters(self) -> int:
        """Number of weights, without biases and norms."""
        inactive = tables = 0
        if self.moe is not None:
            experts = self.moe.experts
            of_layer = experts.num_weights(self.hidden_size)
            of_layer -= experts.num_active_weights(self.hidden_size)
            inactive = len(self.moe.layers) * of_layer
        if (inputs := self.layer_inputs) is not None:
            tables = self.num_layers * inputs.size * inputs.vocab_size
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        if self.positions is not None:
            embeddings += (self.rope.max_positions + self.positions.offset) * self.hidden_size
        if self.eagle is not None:
            embeddings += self.eagle.num_parameters - self.eagle.num_active_parameters
        return self.num_active_parameters + inactive + tables + embeddings

    @property
    def num_active_parameters(self) -> int:
        """How many weights of the layers a token is multiplied by."""
        mixers = 2 * self.hidden_size**2 if self.has_mtp_layer else 0  # its projection of inputs
        if self.eagle is not None:
            mixers += self.eagle.num_active_parameters
        if (streams := self.streams) is not None:
            # of the parts of layers, and of the final norm
            num_mixes = (4 * self.num_layers + 1) * streams.count
            mixers += num_mixes * streams.count * self.hidden_size
        for layer in self.own_layers:
            if not self.attends(layer):
                continue
            if self.latent is not None:
                mixers += self.latent.num_parameters(self.heads.num_heads, self.hidden_size)
                mixers += self.num_gates(layer) * self.hidden_size
                indexer, rank = self.latent.indexer, self.latent.query_rank
                if indexer is not None and rank is not None and layer in indexer.layers:
                    mixers += indexer.num_parameters(rank, self.hidden_size)
                continue
            # queries, outputs; keys, values
            own = self.heads_of(layer)
            heads = 2 * own.num_heads
            if self.kv_source(layer) == layer:
                heads += (1 if layer in self.kv.keys_are_values else 2) * own.num_kv_heads
            mixers += (heads * own.head_dim + self.num_gates(layer)) * self.hidden_size
        if (recurrent := self.recurrent) is not None:
            mixers += len(recurrent.layers) * recurrent.num_weights(self.hidden_size)
        with_experts, experts = frozenset[int](), 0
        if self.moe is not None:
            with_experts = frozenset() if self.moe.beside else self.moe.layers
            of_layer = self.moe.experts.num_active_weights(self.hidden_size)
            experts = len(self.moe.layers) * of_layer
        widths = (
            self.intermediate_size_of(layer)
            for layer in self.own_layers
            if self.has_part(layer, "feed-forward") and layer not in with_experts
        )
        mlp = (2 if self.gate is None else 3) * sum(widths) * self.hidden_size
        if (inputs := self.layer_inputs) is not None:
            mlp += 3 * self.num_layers * inputs.size * self.hidden_size
        return mixers + mlp + experts

    def attention_shape(self, num_ranks: int = 1) -> AttentionShape:
        """The heads of one of ``num_ranks`` ranks (``LayerHeads.of_rank``); raises ``ConfigError``
        if they do not split, or if no layer has any."""
        if not self.attention_layers:  # pages, and whatever is made for them, would be empty
            raise ConfigError(f"{self.architecture} is not supported if no layer has attention")
        by_layer = [self.heads_of(layer).of_rank(num_ranks) for layer in self.attention_layers]
        are_alike = len(set(by_layer)) == 1
        common = by_layer[0] if are_alike else self.heads.of_rank(num_ranks)
        return AttentionShape(
            num_heads=common.num_heads,
            num_kv_heads=common.num_kv_heads,
            head_dim=common.head_dim,
            scale=self.scores.scale or common.head_dim**-0.5,
            cap=self.scores.cap,
            windows=tuple(self.windows[layer] for layer in self.attention_layers),
            sections=self.sections,
            sinks=self.scores.sinks,
            one_pool=self.recurrent is not None,  # snapshots do not keep window pages
            by_layer=() if are_alike else tuple(by_layer),
            latent_dim=None if self.latent is None else self.latent.latent_dim,
            expanded=None if self.latent is None else self.latent.expanded,
            index=self._index_shape,
        )

    @property
    def _index_shape(self) -> IndexShape | None:
        if self.latent is None or (indexer := self.latent.indexer) is None:
            return None
        layers = (
            place for place, layer in enumerate(self.attention_layers) if layer in indexer.layers
        )
        return IndexShape(indexer.top_k, indexer.key_dim, tuple(layers))
