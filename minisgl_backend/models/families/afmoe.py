"""Arcee's Trinity: experts by sigmoids, between norms of their inputs and outputs, and attention
with gates of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule
from minisgl_backend.models.attention_spec import AttentionGates
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    check_supported,
    kinds_by_pattern,
    shared_experts,
    windows_by_kind,
)
from minisgl_backend.models.spec import ModelSpec, MoeSpec, ScalesSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "attention_bias": False,
        "n_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "route_norm": True,
        "score_func": "sigmoid",
        "topk_group": 1,
    }
)
"""The only supported values of these keys."""


def read_afmoe(config: ConfigReader) -> ModelSpec:
    """``AfmoeForCausalLM``, Trinity: only the layers with windows rotate, and all but the first
    have experts. Transformers rounds their routers' logits to 16 bits if the model has 16."""
    check_supported(config, _SUPPORTED)
    config = config.with_defaults(rms_norm_eps=1e-5, head_dim=128, max_position_embeddings=2**14)
    fields = common_fields(config)
    num_layers, rope = fields["num_layers"], fields["rope"]
    every = config.integer("global_attn_every_n_layers", 4)
    listed = config.layer_kinds(ATTENTION_KINDS, num_layers)
    kinds = listed or kinds_by_pattern(num_layers, every)
    fields["windows"] = windows_by_kind(kinds, config.integer("sliding_window", 1024))
    fields["ropes"] = tuple(rope if kind == "sliding_attention" else None for kind in kinds)
    fields["norms"] = replace(fields["norms"], place="around")
    if config.flag("mup_enabled"):
        fields["scales"] = ScalesSpec(embedding=fields["hidden_size"] ** 0.5)
    dense = config.integer("num_dense_layers", 1, minimum=0)
    layers = frozenset(range(dense, num_layers))
    names = TensorNames(
        renamed=(
            (".pre_mlp_layernorm.", ".pre_feedforward_layernorm."),
            (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
            (".mlp.router.gate.", ".mlp.gate."),
            (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
        )
    )
    return ModelSpec(
        architecture="AfmoeForCausalLM",
        qk_norm="head",
        attention_gates=AttentionGates(apart=True),
        moe=MoeSpec(experts=_experts(config), layers=layers) if layers else None,
        names=names,
        **fields,
    )


def _experts(config: ConfigReader) -> ExpertsSpec:
    inner = config.integer("moe_intermediate_size", 1408, maximum=MOST_WIDTH)
    rule = RoutingRule(
        num_experts=config.integer("num_experts", 64, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 6),
        normalize=True,
        sigmoid=True,
        corrected=True,
        scale=config.number("route_scale", 1.0),
    )
    shared = shared_experts(config, inner, "num_shared_experts", 2)
    return ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)
