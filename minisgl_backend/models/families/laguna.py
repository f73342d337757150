"""Laguna: gates of attention by softplus, and a number of heads for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.models.attention_spec import AttentionGates
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_HEADS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields, read_rope
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    check_supported,
    layers_with_experts,
    read_ropes_by_kind,
    set_kinds,
)
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "attention_bias": False,
        "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0,
        "norm_topk_prob": True,
        "swa_attention_sink_enabled": False,
    }
)
"""The only supported values of these keys."""
_ROPES: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
)
"""The rotary embeddings if config.json has none."""
_NAMES: Final = TensorNames(
    renamed=(
        (".self_attn.g_proj.", ".self_attn.gate_proj."),
        (".mlp.experts.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
        (".mlp.shared_expert.", ".mlp.shared_experts."),
    )
)


def read_laguna(config: ConfigReader) -> ModelSpec:
    """``LagunaForCausalLM``: layers differ in their windows, rotations and numbers of heads, and
    all but the first have experts by DeepSeek's router without groups."""
    check_supported(config, _SUPPORTED)
    gating = config.values.get("gating", True)
    if gating is not True and gating not in ("per-head", "per-element"):
        raise config.error("gating", "true, 'per-head' or 'per-element'", gating)
    if (factor := config.values.get("partial_rotary_factor")) is not None:
        # transformers reads it in one way of loading, and not in another
        raise config.error("partial_rotary_factor", "in the tables of rope_parameters", factor)
    config = config.with_defaults(
        rope_parameters=dict(_ROPES),
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**17,
    )
    by_kind, fields = read_ropes_by_kind(config, _common_fields)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or ["full_attention"] * num_layers
    for kind in dict.fromkeys(kinds):
        if kind not in by_kind:
            wanted = f"a table for {kind}"
            raise config.error("rope_parameters", wanted, config.table("rope_parameters"))
    given = by_kind.get("sliding_attention", {})
    kind = "sliding_attention"
    local = read_rope(config, fields["rope"].max_positions, partial=True, given=given, kind=kind)
    set_kinds(fields, kinds, config.integer("sliding_window", 512), local)
    layers = layers_with_experts(config, num_layers, dense=1)
    return ModelSpec(
        architecture="LagunaForCausalLM",
        qk_norm="head",
        attention_gates=AttentionGates(
            apart=True, one_per_head=gating != "per-element", function="softplus"
        ),
        heads_by_layer=_heads(config, num_layers, fields["heads"]),
        moe=MoeSpec(experts=_experts(config), layers=layers) if layers else None,
        names=_NAMES,
        **fields,
    )


def _common_fields(config: ConfigReader) -> dict[str, Any]:
    return common_fields(config, partial=True)


def _heads(config: ConfigReader, num_layers: int, usual: LayerHeads) -> tuple[LayerHeads, ...]:
    """The heads of each layer, if config.json lists them and they are not all the same."""
    key, num_kv_heads = "num_attention_heads_per_layer", usual.num_kv_heads
    listed = config.integers(key)
    if not listed:
        return ()
    fit = all(0 < n <= MOST_HEADS and n % num_kv_heads == 0 for n in listed)
    if len(listed) != num_layers or not fit:
        wanted = f"{num_layers} numbers of heads that share {num_kv_heads} KV heads"
        raise config.error(key, wanted, listed)
    if set(listed) == {usual.num_heads}:
        return ()
    return tuple(replace(usual, num_heads=n) for n in listed)


def _experts(config: ConfigReader) -> ExpertsSpec:
    rule = RoutingRule(
        num_experts=config.integer("num_experts", 256, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 8),
        normalize=True,
        sigmoid=True,
        corrected=True,
        scale=config.number("moe_routed_scaling_factor", 1.0),
    )
    inner = config.integer("moe_intermediate_size", 512, maximum=MOST_WIDTH)
    of_shared = config.integer("shared_expert_intermediate_size", 512, maximum=MOST_WIDTH)
    shared = SharedExpert(name="shared_experts", intermediate_size=of_shared)
    return ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)
