"""Step 3.5 and 3.7: Laguna's attention with other gates, and experts whose gates have limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.models.attention_spec import AttentionGates, ScoresSpec
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_HEADS, MOST_LAYERS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields, read_rope
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    check_supported,
    layers_with_experts,
    read_gate_limits,
    read_ropes_by_kind,
    set_kinds,
    text_of_vl,
    text_part,
)
from minisgl_backend.models.families.mtp_layers import names_behind
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {"att_impl_type": "GQA", "attention_bias": False, "mlp_bias": False, "sink": False}
    | {"moe_router_activation": "sigmoid", "norm_expert_weight": True, "use_moe_router_bias": True}
    | {"partial_rotary_factor": 1.0, "yarn_only_types": ["full_attention"], "use_rope_layers": []}
    | {"use_head_wise_attn_gate": True, "use_qk_norm": True, "zero_centered": True}
)
"""The only supported values of these keys."""
_KEYS: Final = MappingProxyType(
    {
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "num_attention_groups": "num_key_value_heads",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
        "share_expert_dims": "share_expert_dim",
    }
)
"""Keys of config.json, each with the one that transformers writes."""
_BY_LAYER: Final = (
    *("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors"),
    *("swiglu_limits", "swiglu_limits_shared"),
)
"""Keys whose lists may also have entries for the MTP layers, at the end."""
_NAMES: Final = TensorNames(
    renamed=(
        (".self_attn.g_proj.", ".self_attn.gate_proj."),
        (".moe.gate.", ".mlp.gate."),
        (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
        *(
            (f".moe.{part}_proj.weight", f".mlp.experts.{part}_proj")
            for part in ("gate", "up", "down")
        ),
        (".moe.experts.", ".mlp.experts."),
        (".share_expert.", ".mlp.shared_experts."),
    )
)


def read_step3p5(config: ConfigReader) -> ModelSpec:
    """``Step3p5ForCausalLM``, Step 3.5: layers with windows have more heads than the others and
    rotate otherwise, and all but the first have experts by DeepSeek's router without groups."""
    check_supported(config, _SUPPORTED)
    config = config.respelled(_KEYS).with_defaults(
        vocab_size=128_815,
        hidden_size=4096,
        intermediate_size=11_264,
        num_hidden_layers=45,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=128_000,
        rms_norm_eps=1e-5,
    )
    num_layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    num_mtp = config.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS)
    config = _without_mtp(config, num_layers, num_mtp)
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or ["full_attention"] * num_layers
    config = _with_ropes_by_kind(config, kinds)
    by_kind, fields = read_ropes_by_kind(config, _common_fields)
    kind = "sliding_attention"
    window = config.integer("sliding_window") if kind in kinds else None
    given, positions = by_kind.get(kind, {}), fields["rope"].max_positions
    local = read_rope(config, positions, partial=True, given=given, kind=kind)
    set_kinds(fields, kinds, window, local)
    usual = fields["heads"]
    return ModelSpec(
        architecture="Step3p5ForCausalLM",
        qk_norm="head",
        scores=ScoresSpec(scale=config.number("query_pre_attn_scalar", usual.head_dim) ** -0.5),
        attention_gates=AttentionGates(apart=True, one_per_head=True),
        heads_by_layer=_heads(config, kinds, usual),
        moe=_moe(config, num_layers),
        names=replace(_NAMES, left_out=names_behind(num_layers, num_mtp)),
        mtp="has MTP layers of a kind that is not supported",
        **fields,
    )


def read_step3p7(config: ConfigReader) -> ModelSpec:
    """``Step3p7ForConditionalGeneration``, Step 3.7: the same in a model that sees."""
    spec = read_step3p5(text_of_vl(config, flat=False))
    return text_part(spec, "Step3p7ForConditionalGeneration")


def _without_mtp(config: ConfigReader, num_layers: int, num_mtp: int) -> ConfigReader:
    """The same without the entries of MTP layers."""
    cut = {
        key: listed[:num_layers]
        for key in _BY_LAYER
        if isinstance(listed := config.values.get(key), list)
        and len(listed) == num_layers + num_mtp
    }
    return config.with_values(**cut)


def _with_ropes_by_kind(config: ConfigReader, kinds: Sequence[str]) -> ConfigReader:
    """The same with a table for each kind of attention, as transformers writes them, instead of the
    publisher's lists. ``rope_scaling`` is of layers without windows."""
    given = config.table("rope_parameters")
    if not given:
        thetas = _by_kind(config, "rope_theta", kinds, 10_000.0)
        shares = _by_kind(config, "partial_rotary_factors", kinds, 1.0)
        given = {
            kind: {"rope_theta": theta, "partial_rotary_factor": shares[kind]}
            for kind, theta in thetas.items()
        }
    for kind in dict.fromkeys(kinds):
        if not isinstance(given.get(kind), dict):
            raise config.error("rope_parameters", f"an object with a table for {kind}", given)
    return config.with_values(rope_parameters=given, rope_theta=None)


def _by_kind(
    config: ConfigReader, key: str, kinds: Sequence[str], default: float
) -> dict[str, float]:
    """The number of each kind of layers, from a list by layer or from a number of all."""
    if isinstance(config.values.get(key), list):
        listed = config.numbers(key)
    else:
        listed = (config.number(key, default),) * len(kinds)
    found = dict(zip(kinds, listed, strict=False))
    if listed != tuple(found.get(kind) for kind in kinds):
        wanted = f"{len(kinds)} numbers, the same for all layers of a kind"
        raise config.error(key, wanted, list(listed))
    return found


def _common_fields(config: ConfigReader) -> dict[str, Any]:
    fields = common_fields(config, partial=True)
    return {**fields, "norms": replace(fields["norms"], offset=1.0)}


def _heads(config: ConfigReader, kinds: Sequence[str], usual: LayerHeads) -> tuple[LayerHeads, ...]:
    """The heads of each layer, if those with windows have another number of them."""
    key = "attention_other_setting"
    other = ConfigReader(config.table(key), f"{config.where}: {key}")
    only = {"num_attention_groups": usual.num_kv_heads, "head_dim": usual.head_dim}
    check_supported(other, {"attention_type": "sliding_attention", **only})
    count = other.integer("num_attention_heads", usual.num_heads, maximum=MOST_HEADS)
    count = config.integer("num_sliding_attention_heads", count, maximum=MOST_HEADS)
    sliding = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    if listed := config.table("per_layer_config"):  # transformers writes this besides
        given = {layer.lstrip("0") or "0": own for layer, own in listed.items()}
        if given != {str(layer): {"num_attention_heads": count} for layer in sliding}:
            wanted = f"{count} num_attention_heads of layers with windows, and nothing else"
            raise config.error("per_layer_config", wanted, listed)
    if count == usual.num_heads or not sliding:
        return ()
    many = replace(usual, num_heads=count)
    return tuple(many if kind == "sliding_attention" else usual for kind in kinds)


def _moe(config: ConfigReader, num_layers: int) -> MoeSpec | None:
    """The experts, if any layer has them; ``ConfigError`` if gates of other layers have limits."""
    layers = _layers_with_experts(config, num_layers)
    limits = read_gate_limits(config, num_layers, "swiglu_limits", "swiglu_limits_shared")
    for layer, of_layer in limits.items():
        if of_layer.of_shared is not None and layer not in layers:
            wanted = f"0 for layer {layer}, which has no experts"
            raise config.error("swiglu_limits_shared", wanted, of_layer.of_shared)
    rule = RoutingRule(
        num_experts=config.integer("n_routed_experts", 288, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 8),
        normalize=True,
        sigmoid=True,
        corrected=True,
        scale=config.number("moe_router_scaling_factor", 1.0),
    )
    inner = config.integer("moe_intermediate_size", 1280, maximum=MOST_WIDTH)
    of_shared = config.integer("share_expert_dim", 1280, maximum=MOST_WIDTH)
    shared = SharedExpert(name="shared_experts", intermediate_size=of_shared)
    experts = ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)
    return MoeSpec(experts=experts, layers=layers, limits=limits) if layers else None


def _layers_with_experts(config: ConfigReader, num_layers: int) -> frozenset[int]:
    """Those that transformers lists by kinds, or those whose indices the publisher lists, in a list
    or in a string."""
    key = "moe_layers_enum"
    listed = config.values.get(key)
    if listed is None or "mlp_layer_types" in config.values:
        return layers_with_experts(config, num_layers, dense=3)
    if isinstance(listed, str):
        try:
            listed = [int(index) for index in listed.split(",") if index.strip()]
        except ValueError:
            raise config.error(key, "numbers with commas between them", listed) from None
    indices = config.with_values(**{key: listed}).integers(key)
    return frozenset(indices) & frozenset(range(num_layers))
