"""Fields of a ``ModelSpec`` that several families read from config.json in the same way.

What all families share is in ``models.common_fields``. Must not know any particular architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import GateLimits, RoutingRule, SharedExpert
from minisgl_backend.gates import PlainActivation
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields, read_rope
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.norms_spec import NormsSpec
from minisgl_backend.models.rope_spec import LearnedPositions, RopeSpec
from minisgl_backend.models.spec import BiasesSpec, ModelSpec
from minisgl_backend.models.tensor_names import MULTIMODAL

ATTENTION_KINDS: Final = ("sliding_attention", "full_attention")
HYBRID_KINDS: Final = ("linear_attention", "full_attention")
_LAYER_NORM_EPS: Final = 1e-5
_ACTIVATIONS: Final[Mapping[str, PlainActivation]] = MappingProxyType(
    {
        "gelu": "exact gelu",
        "gelu_fast": "gelu",
        "gelu_new": "gelu",
        "gelu_pytorch_tanh": "gelu",
        "relu": "relu",
        "relu2": "relu2",
    }
)
_STATE_DTYPES: Final = ("float32", "bfloat16", "float16")


def text_config(config: ConfigReader, *, tied: bool) -> ConfigReader:
    """``text_config``, plus what checkpoints of this kind say outside of it; ``tied`` is the
    default for tie_word_embeddings."""
    text = config.part("text_config")
    outer: dict[str, Any] = {
        key: config.values[key]
        for key in ("dtype", "torch_dtype", "mamba_ssm_dtype", "eos_token_id")
        if key in config.values
    }
    tie = config.flag("tie_word_embeddings", tied)
    nulls = dict.fromkeys(text.nulls)
    values: dict[str, Any] = {**nulls, **outer, **text.values, "tie_word_embeddings": tie}
    return ConfigReader(values, text.where)


def text_of_vl(config: ConfigReader, *, flat: bool = True) -> ConfigReader:
    """The config of a text part that rotates tokens of images by three positions (mrope), with the
    usual rotation, which that is for text. If ``flat``, it may also lie beside the config of the
    vision part. Embeddings are tied if either level says so."""
    if not flat or "text_config" in config.values:
        tied = config.part("text_config").flag("tie_word_embeddings")
        outer = config.with_values(tie_word_embeddings=True) if tied else config
        config = text_config(outer, tied=False)
    for key in ("rope_scaling", "rope_parameters"):
        if table := config.table(key):
            kinds = {
                kind: "default" for kind in ("type", "rope_type") if table.get(kind) == "mrope"
            }
            config = config.with_values(**{key: {**table, **kinds}})
    return config


def text_part(spec: ModelSpec, architecture: str) -> ModelSpec:
    """The same model as a part of a larger one, with the names that its tensors have there."""
    renamed = tuple(dict.fromkeys((*MULTIMODAL.renamed, *spec.names.renamed)))
    names = replace(spec.names, renamed=renamed, multimodal=True)
    return replace(spec, architecture=architecture, names=names)


def check_supported(config: ConfigReader, supported: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` if a key has another value than the only one that is ``supported``;
    keys may be absent."""
    for key, only in supported.items():
        if (given := config.values.get(key, only)) != only:
            raise ConfigError(f"{config.where}: {key} {given!r} is not supported, only {only!r}")


def rotated_share(config: ConfigReader, head_dim: int) -> float:
    """The share of a head whose first ``rotary_dim`` dimensions rotate."""
    rotary_dim = config.integer("rotary_dim", maximum=head_dim)
    share = rotary_dim / head_dim
    if int(head_dim * share) < rotary_dim:  # the quotient was rounded down
        share = math.nextafter(share, 1.0)
    return share


def with_wide_blocks(config: ConfigReader, width: str, hidden_size: str) -> ConfigReader:
    """The same with blocks of four times the hidden size, unless config.json gives their width.
    Both are the names of keys."""
    if width in config.values:
        return config
    return config.with_values(**{width: 4 * config.integer(hidden_size, maximum=MOST_WIDTH)})


def outputs_of_qkv(heads: LayerHeads) -> dict[str, int]:
    """The numbers of outputs of queries, keys and values in one projection."""
    keys = heads.num_kv_heads * heads.head_dim
    return {"q_proj": heads.num_heads * heads.head_dim, "k_proj": keys, "v_proj": keys}


def read_activation(config: ConfigReader, key: str, default: str) -> PlainActivation:
    """What a block without gates has in their place, from transformers' name for it."""
    name = config.word(key, default)
    if name not in _ACTIVATIONS:
        raise config.error(key, "one of " + ", ".join(_ACTIVATIONS), name)
    return _ACTIVATIONS[name]


def layer_norms(config: ConfigReader, eps_key: str | None = None) -> NormsSpec:
    """LayerNorms with biases, whose eps is PyTorch's unless config.json has one."""
    eps = _LAYER_NORM_EPS if eps_key is None else config.number(eps_key, _LAYER_NORM_EPS)
    return NormsSpec(eps=eps, centered=True, biased=True)


def positions_by_table(fields: Mapping[str, Any], *, offset: int = 0) -> dict[str, Any]:
    """``fields`` of a model that learns positions by a table, in place of rotations."""
    no_ropes = (None,) * fields["num_layers"]
    return {**fields, "ropes": no_ropes, "positions": LearnedPositions(offset=offset)}


def attention_biases(
    config: ConfigReader, default: bool = False, *, mlp: bool = False
) -> BiasesSpec:
    """Whether all projections of attention have biases: ``attention_bias``; and whether those of
    feed-forward blocks do."""
    bias = config.flag("attention_bias", default)
    return BiasesSpec(qkv=bias, output=bias, mlp=mlp)


def qk_normed_fields(config: ConfigReader, *, head_dim: int | None = None) -> dict[str, Any]:
    """The common fields, with queries and keys normalized by head, and perhaps biases."""
    fields = common_fields(config, head_dim=head_dim)
    return {**fields, "qk_norm": "head", "biases": attention_biases(config)}


def read_routing(
    config: ConfigReader, num_experts: int, top_k: int, *, normalize: bool
) -> RoutingRule:
    """A softmax router; by default it takes ``top_k`` of ``num_experts`` experts."""
    default = config.integer("num_local_experts", num_experts, maximum=MOST_EXPERTS)
    return RoutingRule(
        num_experts=config.integer("num_experts", default, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", top_k),
        normalize=normalize,
    )


def shared_experts(
    config: ConfigReader, inner: int, key: str = "n_shared_experts", default: int = 1
) -> SharedExpert:
    """The experts that all tokens take, as one block: as many as ``key`` says, of ``inner``."""
    count = config.integer(key, default, maximum=MOST_EXPERTS)
    return SharedExpert(name="shared_experts", intermediate_size=count * inner)


def sparse_layers(config: ConfigReader, num_layers: int) -> frozenset[int]:
    """The layers that have experts: every ``decoder_sparse_step``-th layer."""
    step, plain = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    return frozenset(
        layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in plain
    )


def layers_with_experts(config: ConfigReader, num_layers: int, *, dense: int) -> frozenset[int]:
    """The layers that are ``sparse`` by ``mlp_layer_types``; by default all but the first ``dense``
    ones."""
    kinds = config.layer_kinds(("dense", "sparse"), num_layers, "mlp_layer_types") or [
        "dense" if layer < dense else "sparse" for layer in range(num_layers)
    ]
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def read_gate_limits(
    config: ConfigReader, num_layers: int, of_experts: str, of_shared: str
) -> dict[int, GateLimits]:
    """The limits of gates in each layer that has any. Each key lists those of all layers, and
    perhaps of more; 0 or null for none."""
    both = []
    for key in (of_experts, of_shared):
        listed = config.values.get(key)
        if isinstance(listed, list):
            listed = [0 if limit is None else limit for limit in listed]
        limits = config.with_values(**{key: listed}).numbers(key, or_zero=True)
        if limits and len(limits) < num_layers:
            raise config.error(key, f"{num_layers} numbers or more", listed)
        both.append({layer: limit for layer, limit in enumerate(limits) if limit})
    experts, shared = both
    return {
        layer: GateLimits(of_experts=experts.get(layer), of_shared=shared.get(layer))
        for layer in experts | shared
    }


def read_rotating(config: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers rotate: in spite of its name, those for which ``no_rope_layers`` has a 1. By
    default every ``no_rope_layer_interval``-th layer, which is every fourth, does not."""
    every = config.integer("no_rope_layer_interval", 4)
    rotates = config.integers("no_rope_layers") or [
        int((layer + 1) % every != 0) for layer in range(num_layers)
    ]
    if len(rotates) < num_layers or not set(rotates) <= {0, 1}:
        raise config.error("no_rope_layers", f"{num_layers} of 0 and 1", rotates)
    return [bool(one) for one in rotates[:num_layers]]


def read_state_dtype(config: ConfigReader, key: str) -> str:
    """The type that the checkpoint names for states, if slots can have it."""
    named = config.values.get(key)
    return named if named in _STATE_DTYPES else "float32"


def read_window(config: ConfigReader) -> int | None:
    """The window of all layers, none by default."""
    return config.integer("sliding_window") if "sliding_window" in config.values else None


def kinds_by_pattern(num_layers: int, every: int) -> list[str]:
    """Layers with windows, of which every ``every``-th has none instead."""
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(num_layers)
    ]


def hybrid_kinds(config: ConfigReader, num_layers: int, every: int = 4) -> list[str]:
    """The kind of each layer, of ``HYBRID_KINDS``: as config.json lists them or, by default, with
    attention in the last of ``every`` layers."""
    return config.layer_kinds(HYBRID_KINDS, num_layers) or [
        "linear_attention" if (layer + 1) % every else "full_attention"
        for layer in range(num_layers)
    ]


def windows_by_kind(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer: ``window`` for those that slide, none for the others."""
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def ropes_by_window(windows: Sequence[int | None], rope: RopeSpec) -> tuple[RopeSpec | None, ...]:
    """The rotation of each layer, if only those with windows rotate."""
    return tuple(None if window is None else rope for window in windows)


def with_rope(config: ConfigReader, table: Mapping[str, object]) -> ConfigReader:
    """The same with the rotary embedding of ``table`` if config.json has none."""
    if config.table("rope_parameters") or config.table("rope_scaling"):
        return config
    return config.with_values(rope_parameters=dict(table))


def read_ropes_by_kind(
    config: ConfigReader, read: Callable[[ConfigReader], dict[str, Any]]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The tables of ``rope_parameters`` by kind of attention, if it has several, and what ``read``
    finds if only the table of layers without a window is in their place."""
    tables = ConfigReader(config.table("rope_parameters"), f"{config.where}: rope_parameters")
    by_kind: dict[str, Mapping[str, Any]]
    by_kind = {kind: tables.table(kind) for kind in ATTENTION_KINDS if kind in tables.values}
    if not by_kind:
        return by_kind, read(config)
    return by_kind, read(config.with_values(rope_parameters=by_kind.get("full_attention", {})))


def read_local_rope(config: ConfigReader, max_positions: int, given: Mapping[str, Any]) -> RopeSpec:
    """The rotation of the layers with a window, from the table that is ``given`` for it."""
    return read_rope(config, max_positions, given=given, kind="sliding_attention")


def set_kinds(
    fields: dict[str, Any], kinds: Sequence[str], window: int | None, local: RopeSpec
) -> None:
    """Give the layers that slide their window and the rotation ``local``."""
    rope = fields["rope"]
    fields["windows"] = windows_by_kind(kinds, window)
    fields["ropes"] = tuple(local if kind == "sliding_attention" else rope for kind in kinds)
