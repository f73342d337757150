"""Kolibri 1: experts in every layer, which also normalizes the outputs of its parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    check_supported,
    kinds_by_pattern,
    ropes_by_window,
    windows_by_kind,
)
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_NAMES: Final = TensorNames(
    renamed=(
        (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        (".post_attn_norm.", ".post_attention_layernorm."),
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_ffn_norm.", ".post_feedforward_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
        (".moe.router.expert_bias", ".mlp.gate.e_score_correction_bias"),
    )
)
"""The publisher's names, and those of transformers."""


def read_kolibri1(config: ConfigReader) -> ModelSpec:
    """``Kolibri1ForCausalLM``: only the layers with windows rotate, which are four of five. The
    corrections of routers are added to logits."""
    check_supported(config, {"attention_bias": False})
    inner = config.integer("moe_intermediate_size", 512, maximum=MOST_WIDTH)
    config = config.with_defaults(
        num_key_value_heads=4, head_dim=128, max_position_embeddings=2**18
    ).with_values(intermediate_size=inner)  # no layer is dense
    fields = common_fields(config)
    num_layers, rope = fields["num_layers"], fields["rope"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or kinds_by_pattern(num_layers, 5)
    if (window := config.integer_or_null("sliding_window", 513)) is None:
        raise config.error("sliding_window", "an integer", window)
    fields["windows"] = windows_by_kind(kinds, window)
    fields["ropes"] = ropes_by_window(fields["windows"], rope)
    fields["norms"] = replace(fields["norms"], place="around")
    return ModelSpec(
        architecture="Kolibri1ForCausalLM",
        qk_norm="head",
        moe=MoeSpec(experts=_experts(config, inner), layers=frozenset(range(num_layers))),
        names=_NAMES,
        **fields,
    )


def _experts(config: ConfigReader, inner: int) -> ExpertsSpec:
    num_experts = config.integer("num_local_experts", 384, maximum=MOST_EXPERTS)
    rule = RoutingRule(
        num_experts=config.integer("num_experts", num_experts, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 6),
        normalize=config.flag("norm_topk_prob"),
        sigmoid=True,
        corrected=True,
        corrects_logits=True,
    )
    of_shared = config.integer("shared_expert_intermediate_size", 512, maximum=MOST_WIDTH)
    shared = SharedExpert(name="shared_experts", intermediate_size=of_shared)
    return ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)
