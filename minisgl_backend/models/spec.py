"""A model as the engine sees it: plain numbers, the same for every architecture.

One decoder computes all architectures: each is a set of values here. Must not know files, tensors
or how an architecture spells its config.json (``families`` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Literal, TypeAlias

from minisgl_backend.attention.base import AttentionShape, ExpandedHeads, IndexShape, LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.gates import Activation, Gate, OutputGate
from minisgl_backend.models.recurrent_spec import RecurrentSpec
from minisgl_backend.models.tensor_names import TensorNames
from minisgl_backend.weight_format import WeightFormats

MOST_VOCABULARY: Final = 2**24
MOST_WIDTH: Final = 2**20
MOST_LAYERS: Final = 2**10
MOST_HEADS: Final = 2**12
MOST_EXPERTS: Final = 2**12
MOST_POSITIONS: Final = 2**27
"""Limits beyond any model: larger numbers are mistakes, refused before they exhaust memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding (RoFormer, arXiv 2104.09864) and how it is stretched to longer contexts.

    ``scaling`` is one of
    - ``default``: it is not stretched;
    - ``linear``: positions are divided by ``factor`` (arXiv 2306.15595);
    - ``dynamic``: the base grows with the sequence beyond ``max_positions`` (NTK-aware scaling);
    - ``llama3``: low frequencies are divided by ``factor``, high ones kept, others blended;
    - ``yarn``: the same idea by dimension, and cos and sin are multiplied by ``attention_factor``
      (arXiv 2309.00071);
    - ``proportional``: only the share ``rotated`` of the pairs of dimensions rotates, with the
      frequencies of a head that rotates as a whole (Gemma 4);
    - ``longrope``: each frequency is divided by one of ``short_factors``, which are for sequences
      up to ``original_max_positions`` (arXiv 2402.13753). Longer sequences would need different
      frequencies at all positions, which is impossible with keys in shared pages, so they are not
      supported.

    ``max_positions`` is max_position_embeddings of config.json, and ``original_max_positions`` the
    context before stretching, both in tokens. ``rotated`` is the share of a head's dimensions that
    rotates, from the first dimension on. The first half of these are paired with the second half
    or, if ``interleaved``, each even dimension with the next. If ``reversed``, pairs rotate the
    other way round.
    """

    scaling: str = "default"
    theta: float = 10_000.0
    max_positions: int
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    rotated: float = 1.0
    interleaved: bool = False
    reversed: bool = False

    def dims(self, head_dim: int) -> int:
        """Number of dimensions of a head in the table of angles; some angles may be 0."""
        return head_dim if self.scaling == "proportional" else int(head_dim * self.rotated)

    def check(self, head_dim: int) -> None:
        """Raise ``ConfigError`` if heads of this size cannot be rotated in this way."""
        rotated = self.dims(head_dim)
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise ConfigError(
                f"partial_rotary_factor {self.rotated:g} of head_dim {head_dim} makes "
                f"{rotated} rotary dimensions, which must be an even number up to head_dim"
            )
        if self.scaling == "dynamic" and rotated < 4:
            raise ConfigError(f"dynamic scaling needs 4 rotary dimensions or more, got {rotated}")
        if self.short_factors and len(self.short_factors) != rotated // 2:
            raise ConfigError(
                f"longrope needs {rotated // 2} short factors, one for each frequency, "
                f"got {len(self.short_factors)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries of ``layers`` (None for all) are multiplied by 1 + ``factor`` * log(1 + n), with n
    the number of whole ``period``s up to their position, counting positions from ``first``."""

    factor: float
    period: int
    first: int = 0
    layers: frozenset[int] | None = None

    def has(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Mixtures of experts; ``layers`` are those that have one instead of the plain MLP or, if
    ``beside``, next to it."""

    experts: ExpertsSpec
    layers: frozenset[int]
    beside: bool = False


QKNorm: TypeAlias = Literal["head", "rotated", "token", "unweighted", "unweighted everywhere"]
"""How queries and keys are normalized."""

Norms: TypeAlias = Literal["before", "after", "around"]
"""Where the norms of a layer's parts are."""

Part: TypeAlias = Literal["mixer", "feed-forward"]
"""A part of a layer: token mixing, or what computes each token for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556): tokens attend to the ``top_k``
    positions with the highest scores (``kernels.indexer``).

    A token has ``num_heads`` index queries of ``key_dim`` numbers, which are made of its latent of
    queries. The first numbers rotate, as many as those of attention, by halves unless
    ``interleaved``. ``layers`` choose positions; each other layer takes those that the last one
    before it chose (IndexCache, arXiv 2603.12201).
    """

    num_heads: int
    key_dim: int
    top_k: int
    layers: frozenset[int]
    interleaved: bool = False

    def num_parameters(self, query_rank: int, hidden_size: int) -> int:
        """Number of weights of a layer's projections."""
        of_tokens = (self.key_dim + self.num_heads) * hidden_size
        return of_tokens + self.num_heads * self.key_dim * query_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Each position has a latent of ``latent_dim`` numbers, of which all heads make their keys and
    values, and one rotated key of ``rope_dim`` numbers for all heads. A head's query has
    ``nope_dim`` numbers that do not rotate and ``rope_dim`` that do; its value has ``value_dim``.
    With a ``query_rank`` queries are made of a latent, too, which has this size. Both latents are
    normalized, with ``norm_eps``. Only models with a ``query_rank`` have an ``indexer``.
    """

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6
    indexer: IndexerSpec | None = None

    @property
    def query_dim(self) -> int:
        """The size of a head's query, as the projection gives it."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """The numbers of a position in a page."""
        return self.latent_dim + self.rope_dim

    @property
    def expanded(self) -> ExpandedHeads:
        """The keys and values of heads that are made of a latent."""
        return ExpandedHeads(self.query_dim, self.value_dim)

    def num_parameters(self, num_heads: int, hidden_size: int) -> int:
        """Number of weights of a layer's projections."""
        queries, rank = num_heads * self.query_dim, self.query_rank
        of_queries = hidden_size * queries
        if rank is not None:
            of_queries = rank * (hidden_size + queries)
        of_heads = num_heads * (self.nope_dim + self.value_dim) * self.latent_dim
        outputs = num_heads * self.value_dim * hidden_size
        return of_queries + hidden_size * self.key_dim + of_heads + outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What each layer reads besides the residual stream (Gemma 4): for each token ``size`` numbers
    from an embedding of ``vocab_size`` ids."""

    size: int
    vocab_size: int


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

    ``windows`` has one entry per layer: the number of positions that a token sees, including its
    own, or None for all. With ``sections`` windows do not slide: they are sections of the sequence,
    all of one size, and a token sees only positions of its own section. ``dtype`` is the
    checkpoint's. ``eos_token_ids`` come from config.json and generation_config.json, or from the
    tokenizer. ``weights`` says how projections are stored; None: all are plain. ``names``: how the
    checkpoint names its tensors. A model that does not generate (``generates``), as some embedding
    models do not, has no output head; the embedding takes its place.

    ``ropes`` has one entry per layer, unless all layers rotate by ``rope``; None: the layer does
    not rotate. ``qk_norm``: queries and keys are normalized, each head separately or all heads of a
    token together; "rotated": each head separately, after its rotation; "unweighted": each head
    separately, without weights, in layers that rotate, or "unweighted everywhere".
    ``query_growth``: queries grow with their position. ``norms``: whether a layer's parts normalize
    their inputs, or their outputs before they are added to the residual stream, or both; "by
    mixer": outputs in layers with attention, and inputs in the others. Norms of outputs have
    ``output_norm_eps``, if it is not that of all others. ``norm_offset`` is added to the weights of
    all norms, or of all but the final one if that has a ``final_norm_offset``. With
    ``embedding_norm`` the embeddings are normalized, without weights; with ``unweighted_norms`` no
    norm of the residual stream has any, and all ``norms`` are those of inputs. With
    ``parallel_parts`` both parts of a layer read the same norm of its input, and both are added to
    it. With ``centered_norms`` norms of the residual stream first subtract the mean: they are
    LayerNorms, whose biases are ``norm_biases``. With either, ``norms`` are those of inputs, and
    each layer has attention and a feed-forward block. ``gate``: that of feed-forward blocks other
    than experts; None: they have no gates, but an ``activation``. ``attention_scale`` multiplies
    the scores, by default head_dim to the power of -1/2; ``score_cap`` then bounds them as
    ``logit_cap`` bounds logits. ``embedding_scale`` multiplies the embeddings, ``branch_scale``
    what each part of a layer adds to the residual stream, and ``logit_scale`` the logits.
    ``gated_attention``: attention's output is multiplied by a gate computed from its input; with
    ``gates_apart`` by a projection of its own, otherwise by that of the queries. With
    ``head_gates``, which are apart, the gate of a head is one number. ``output_gate`` is the gate's
    function. ``sinks``: the softmax of each head has one more score, which is learned.
    ``recurrent`` describes the layers that mix tokens without attention or, with
    ``parallel_mixers``, by both: the layer adds what attention and the other make of the same
    input. With ``single_parts`` each layer is only token mixing, or only a feed-forward block, with
    one norm; there is one entry per layer.

    ``heads`` has one entry per layer, unless all layers have ``num_heads`` heads of queries and
    ``num_kv_heads`` of keys and values, of size ``head_dim``; so has ``intermediate_sizes``, unless
    all feed-forward blocks have the same width. The last layers may lack their own keys and values:
    for each layer, ``kv_sources`` has the layer whose keys and values it reads. With ``value_norm``
    values are normalized by head, without weights; in the layers of ``keys_are_values`` the values
    are the projections of keys. ``layer_inputs`` describes what layers read besides the residual
    stream. With ``scaled_layers`` each layer multiplies its output by a number. If ``logit_cap`` c
    is not 0, it bounds logits x as c tanh(x / c).

    With ``latent`` all attention is multi-head latent attention. Pages hold the latents: they are
    the only KV head, whose ``head_dim`` is that of latent and rotated key together.

    ``mtp`` describes the MTP layer of the checkpoint, if it has one that is supported; ``no_mtp``
    says why it has none. It is not part of the model unless ``has_mtp_layer`` (``with_mtp``); then
    its index is ``num_layers``, and it has an entry in whatever has one per layer. ``eagle`` is an
    EAGLE-3 layer in place of it (``with_eagle``).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    dtype: str
    windows: tuple[int | None, ...]
    sections: bool = False
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    query_growth: QueryGrowth | None = None
    norms: Norms | Literal["by mixer"] = "before"
    output_norm_eps: float | None = None
    norm_offset: float = 0.0
    final_norm_offset: float | None = None
    embedding_norm: bool = False
    unweighted_norms: bool = False
    centered_norms: bool = False
    norm_biases: bool = False
    parallel_parts: bool = False
    gate: Gate | None = "silu"
    activation: Activation = "relu2"
    ropes: tuple[RopeSpec | None, ...] = ()
    attention_scale: float | None = None
    score_cap: float = 0.0
    embedding_scale: float = 1.0
    branch_scale: float = 1.0
    logit_scale: float = 1.0
    gated_attention: bool = False
    output_gate: OutputGate = "sigmoid"
    gates_apart: bool = False
    head_gates: bool = False
    sinks: bool = False
    recurrent: RecurrentSpec | None = None
    parallel_mixers: bool = False
    single_parts: tuple[Part, ...] = ()
    heads: tuple[LayerHeads, ...] = ()
    intermediate_sizes: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()
    value_norm: bool = False
    keys_are_values: frozenset[int] = frozenset()
    layer_inputs: LayerInputs | None = None
    scaled_layers: bool = False
    logit_cap: float = 0.0
    latent: LatentSpec | None = None
    generates: bool = True
    names: TensorNames = field(default_factory=TensorNames)
    weights: WeightFormats | None = None
    moe: MoeSpec | None = None
    mtp: MTPSpec | None = None
    no_mtp: str = "has no MTP layer that is supported"
    has_mtp_layer: bool = False
    eagle: EagleSpec | None = None
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.centered_norms and (self.norms != "before" or self.single_parts):
            raise ConfigError(
                "norms that subtract the mean are supported only of the inputs of layers with "
                "attention and a feed-forward block"
            )
        assert self.norms != "by mixer" or self.branch_scale == 1.0
        assert not self.unweighted_norms or (self.norms == "before" and not self.centered_norms)
        assert not self.embedding_norm or self.embedding_scale == self.stream_scale == 1.0
        if self.norm_biases and not self.centered_norms:
            raise ConfigError("norms with biases are supported only if they subtract the mean")
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
        if self.mtp is None:
            raise ConfigError(
                f"{self.architecture} {self.no_mtp} (speculative_mtp_tokens); "
                "speculative_mtp_model takes an EAGLE-3 layer that was made for the model"
            )
        assert not (self.has_mtp_layer or self.single_parts or self.parallel_mixers)
        assert not (self.ropes or self.heads or self.intermediate_sizes or self.kv_sources)
        assert self.norms == "before" and not (self.parallel_parts or self.centered_norms)
        assert self.embedding_scale == self.branch_scale == self.logit_scale == 1.0
        assert not self.logit_cap
        assert self.layer_inputs is None and self.query_growth is None and not self.sections
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
            "bounded attention scores, which the layer does not know": self.score_cap != 0,
            "sections of attention, with which the layer was not tried": self.sections,
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
        heads, ropes = self.heads, self.ropes
        if heads or own.heads_of(0) != self._same_heads:
            heads = (*(self.heads_of(layer) for layer in range(last)), own.heads_of(0))
        if ropes or own.rope != self.rope:
            ropes = (*(self.rope_of(layer) for layer in range(last)), own.rope)
        return replace(
            self,
            eagle=eagle,
            windows=(*self.windows, None),
            heads=heads,
            ropes=ropes,
            kv_sources=(*self.kv_sources, last) if self.kv_sources else (),
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
        """By what ``Decoder`` divides the residual stream: ``branch_scale``, unless the norms of
        what parts of a layer add multiply by it."""
        return self.branch_scale if self.norms == "before" else 1.0

    @property
    def stream_eps(self) -> float:
        """The eps of norms of the residual stream as ``Decoder`` keeps it."""
        return self.norm_eps / self.stream_scale**2

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
        return self.has_part(layer, "mixer") and (self.parallel_mixers or not is_recurrent)

    def norms_of(self, layer: int) -> Norms:
        """Where the norms of a layer's parts are."""
        if self.norms == "by mixer":
            return "after" if self.attends(layer) else "before"
        return self.norms

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer with attention reads, usually its own."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def heads_of(self, layer: int) -> LayerHeads:
        return self.heads[layer] if self.heads else self._same_heads

    @property
    def _same_heads(self) -> LayerHeads:
        return LayerHeads(self.num_heads, self.num_kv_heads, self.head_dim)

    def num_gates(self, layer: int) -> int:
        """The number of a token's gates of a layer's attention."""
        heads = self.heads_of(layer)
        of_head = 1 if self.head_gates else heads.head_dim
        return heads.num_heads * of_head if self.gated_attention else 0

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
        if self.eagle is not None:
            embeddings += self.eagle.num_parameters - self.eagle.num_active_parameters
        return self.num_active_parameters + inactive + tables + embeddings

    @property
    def num_active_parameters(self) -> int:
        """How many weights of the layers a token is multiplied by."""
        mixers = 2 * self.hidden_size**2 if self.has_mtp_layer else 0  # its projection of inputs
        if self.eagle is not None:
            mixers += self.eagle.num_active_parameters
        for layer in self.own_layers:
            if not self.attends(layer):
                continue
            if self.latent is not None:
                mixers += self.latent.num_parameters(self.num_heads, self.hidden_size)
                indexer, rank = self.latent.indexer, self.latent.query_rank
                if indexer is not None and rank is not None and layer in indexer.layers:
                    mixers += indexer.num_parameters(rank, self.hidden_size)
                continue
            # queries, outputs; keys, values
            own = self.heads_of(layer)
            heads = 2 * own.num_heads
            if self.kv_source(layer) == layer:
                heads += (1 if layer in self.keys_are_values else 2) * own.num_kv_heads
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
        common = by_layer[0] if are_alike else self._same_heads.of_rank(num_ranks)
        return AttentionShape(
            num_heads=common.num_heads,
            num_kv_heads=common.num_kv_heads,
            head_dim=common.head_dim,
            scale=self.attention_scale or common.head_dim**-0.5,
            cap=self.score_cap,
            windows=tuple(self.windows[layer] for layer in self.attention_layers),
            sections=self.sections,
            sinks=self.sinks,
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
