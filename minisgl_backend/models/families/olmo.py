"""OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    attention_biases,
    kinds_by_pattern,
    read_local_rope,
    read_ropes_by_kind,
    read_routing,
    set_kinds,
)
from minisgl_backend.models.spec import ModelSpec, MoeSpec


def read_olmo2(config: ConfigReader) -> ModelSpec:
    """``Olmo2ForCausalLM``: the outputs of attention and feed-forward are normalized, not their
    inputs; queries and keys are normalized over all heads together."""
    return ModelSpec(architecture="Olmo2ForCausalLM", norms="after", **_olmo_fields(config))


def read_olmo3(config: ConfigReader) -> ModelSpec:
    """``Olmo3ForCausalLM``: OLMo 2 with windows in three of four layers, whose rotation is not
    stretched."""
    config = config.with_defaults(rope_theta=5e5)
    by_kind, fields = read_ropes_by_kind(config, _olmo_fields)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or kinds_by_pattern(num_layers, 4)
    given = by_kind.get("sliding_attention", {})
    local = read_local_rope(config, fields["rope"].max_positions, given)
    set_kinds(fields, kinds, config.integer("sliding_window", 4096), local)
    return ModelSpec(architecture="Olmo3ForCausalLM", norms="after", **fields)


def read_olmoe(config: ConfigReader) -> ModelSpec:
    """``OlmoeForCausalLM``: experts in every layer. The inputs of attention and of experts are
    normalized, and queries and keys over all heads together."""
    if "clip_qkv" in config.values:
        raise ConfigError(f"{config.where}: clip_qkv is not supported")
    fields = _olmo_fields(config.with_defaults(max_position_embeddings=4096))
    experts = ExpertsSpec(
        routing=read_routing(config, 64, 8, normalize=config.flag("norm_topk_prob")),
        intermediate_size=fields["intermediate_size"],
    )
    moe = MoeSpec(experts=experts, layers=frozenset(range(fields["num_layers"])))
    return ModelSpec(architecture="OlmoeForCausalLM", moe=moe, **fields)


def _olmo_fields(config: ConfigReader) -> dict[str, Any]:
    config = config.with_defaults(rms_norm_eps=1e-5)
    return {**common_fields(config), "qk_norm": "token", **attention_biases(config)}
