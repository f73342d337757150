"""OLMo 1 to 3, OLMoE, FlexOlmo, and OLMo Hybrid."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.models.bounds import MOST_HEADS
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    attention_biases,
    hybrid_kinds,
    kinds_by_pattern,
    read_local_rope,
    read_ropes_by_kind,
    read_routing,
    set_kinds,
)
from minisgl_backend.models.norms_spec import NormsSpec
from minisgl_backend.models.recurrent_spec import DeltaSpec
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_RENAMED: Final = (
    (".attention_layer_norm.", ".input_layernorm."),
    (".feedforward_layer_norm.", ".post_attention_layernorm."),
    *((f".linear_attn.{part}_conv1d.", f".linear_attn.conv_{part}.") for part in "qkv"),
    *((f".linear_attn.{part}_proj.", f".linear_attn.in_proj_{part}.") for part in "qkvab"),
    (".linear_attn.g_proj.", ".linear_attn.in_proj_z."),
    (".linear_attn.o_proj.", ".linear_attn.out_proj."),
    (".linear_attn.o_norm.", ".linear_attn.norm."),
)
"""Names in the checkpoints of OLMo Hybrid, each with the decoder's."""
_DELTA_NORM_EPS: Final = 1e-5
"""Of the norms of outputs of Gated DeltaNet, which no key of config.json gives."""


def read_olmo(config: ConfigReader) -> ModelSpec:
    """``OlmoForCausalLM``: Llama whose norms subtract the mean and have no weights."""
    if config.values.get("clip_qkv") is not None:
        raise config.error("clip_qkv", "null", config.values["clip_qkv"])
    fields = common_fields(config.with_defaults(max_position_embeddings=2048))
    fields["norms"] = NormsSpec(eps=1e-5, centered=True, weighted=False)
    return ModelSpec(architecture="OlmoForCausalLM", biases=attention_biases(config), **fields)


def read_olmo2(config: ConfigReader) -> ModelSpec:
    """``Olmo2ForCausalLM``: the outputs of attention and feed-forward are normalized, not their
    inputs; queries and keys are normalized over all heads together."""
    return ModelSpec(architecture="Olmo2ForCausalLM", **_olmo_fields(config, place="after"))


def read_olmo3(config: ConfigReader) -> ModelSpec:
    """``Olmo3ForCausalLM``: OLMo 2 with windows in three of four layers, whose rotation is not
    stretched."""
    config = config.with_defaults(rope_theta=5e5)
    by_kind, fields = read_ropes_by_kind(config, partial(_olmo_fields, place="after"))
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or kinds_by_pattern(num_layers, 4)
    given = by_kind.get("sliding_attention", {})
    local = read_local_rope(config, fields["rope"].max_positions, given)
    set_kinds(fields, kinds, config.integer("sliding_window", 4096), local)
    return ModelSpec(architecture="Olmo3ForCausalLM", **fields)


def read_olmoe(config: ConfigReader) -> ModelSpec:
    """``OlmoeForCausalLM``: experts in every layer. The inputs of attention and of experts are
    normalized, and queries and keys over all heads together."""
    if "clip_qkv" in config.values:
        raise ConfigError(f"{config.where}: clip_qkv is not supported")
    fields = _olmo_fields(config.with_defaults(max_position_embeddings=4096))
    moe = _experts_everywhere(config, fields, num_experts=64, top_k=8)
    return ModelSpec(architecture="OlmoeForCausalLM", moe=moe, **fields)


def read_flex_olmo(config: ConfigReader) -> ModelSpec:
    """``FlexOlmoForCausalLM``: OLMo 2 with experts in every layer."""
    config = config.with_defaults(rms_norm_eps=1e-6, rope_theta=5e5, max_position_embeddings=4096)
    fields = _olmo_fields(config, place="after")
    moe = _experts_everywhere(config, fields, num_experts=7, top_k=5)
    return ModelSpec(architecture="FlexOlmoForCausalLM", moe=moe, **fields)


def _experts_everywhere(
    config: ConfigReader, fields: dict[str, Any], *, num_experts: int, top_k: int
) -> MoeSpec:
    """Experts in every layer, by default ``top_k`` of ``num_experts``."""
    experts = ExpertsSpec(
        routing=read_routing(config, num_experts, top_k, normalize=config.flag("norm_topk_prob")),
        intermediate_size=fields["intermediate_size"],
    )
    return MoeSpec(experts=experts, layers=frozenset(range(fields["num_layers"])))


def read_olmo_hybrid(config: ConfigReader) -> ModelSpec:
    """``OlmoHybridForCausalLM``: Gated DeltaNet in most layers, whose inputs are normalized, and
    OLMo 3's attention without windows in the others. Published models do not rotate: their
    ``rope_theta`` is null."""
    rotates = _has_base(config)
    if not rotates:
        config = config.with_values(rope_parameters={}, rope_scaling={})
    config = config.with_defaults(max_position_embeddings=65_536, rms_norm_eps=1e-6)
    fields = _olmo_fields(config, place="by mixer")
    num_layers = fields["num_layers"]
    kinds = hybrid_kinds(config, num_layers)
    linear = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    if not linear:
        raise config.error("layer_types", "linear_attention for some layers", kinds)
    return ModelSpec(
        architecture="OlmoHybridForCausalLM",
        ropes=() if rotates else (None,) * num_layers,
        recurrent=_delta(config, linear),
        names=TensorNames(renamed=_RENAMED),
        **fields,
    )


def _has_base(config: ConfigReader) -> bool:
    """Whether heads rotate at all: only if ``rope_theta`` is not null."""
    for key in ("rope_scaling", "rope_parameters"):  # of which the first counts
        if "rope_theta" in (table := config.table(key)):
            return table["rope_theta"] is not None
    return "rope_theta" not in config.nulls


def _delta(config: ConfigReader, layers: frozenset[int]) -> DeltaSpec:
    """The layers with Gated DeltaNet."""
    heads = config.integer("num_attention_heads", maximum=MOST_HEADS)
    key_heads = config.integer("linear_num_key_heads", heads, maximum=MOST_HEADS)
    num_heads = config.integer("linear_num_value_heads", heads, maximum=MOST_HEADS)
    if num_heads % key_heads:
        raise config.error(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})", num_heads
        )
    by_default = max(3 * config.integer("hidden_size") // (4 * key_heads), 1)
    key_dim = config.integer("linear_key_head_dim", by_default, maximum=MOST_HEADS)
    return DeltaSpec(
        num_key_heads=key_heads,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=config.integer("linear_value_head_dim", 2 * key_dim, maximum=MOST_HEADS),
        conv_width=config.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MOST_HEADS),
        layers=layers,
        rate_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=_DELTA_NORM_EPS,
    )


def _olmo_fields(
    config: ConfigReader, *, place: Literal["before", "after", "by mixer"] = "before"
) -> dict[str, Any]:
    """The common fields, with norms at this ``place``, and of queries and keys."""
    fields = common_fields(config.with_defaults(rms_norm_eps=1e-5))
    fields["norms"] = replace(fields["norms"], place=place)
    return {**fields, "qk_norm": "token", "biases": attention_biases(config)}
