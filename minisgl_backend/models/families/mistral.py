"""Mistral, Mixtral, Ministral, and Mistral Small 3.1 and later, Mistral Small 4 included."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    check_supported,
    read_routing,
    read_window,
    shared_experts,
    text_config,
    text_part,
    windows_by_kind,
)
from minisgl_backend.models.families.latents import latent_fields
from minisgl_backend.models.rope_spec import QueryGrowth
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

OF_MIXTRAL: Final = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
"""Names of experts in Mixtral's checkpoints, each with the decoder's."""
_ROPE_OF_MISTRAL_4: Final[Mapping[str, object]] = MappingProxyType(
    {
        "type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)
"""The rotation, if config.json names none."""


def read_mistral(config: ConfigReader) -> ModelSpec:
    """``MistralForCausalLM``; ``sliding_window`` null means none, as in versions since 0.2."""
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=2**17)
    fields = common_fields(config)
    window = config.integer_or_null("sliding_window", 4096)
    fields["windows"] = (window,) * fields["num_layers"]
    return ModelSpec(architecture="MistralForCausalLM", **fields)


def read_mixtral(config: ConfigReader) -> ModelSpec:
    """``MixtralForCausalLM``: experts in every layer, whose weights always sum to 1."""
    config = config.with_defaults(
        rms_norm_eps=1e-5, rope_theta=1e6, num_key_value_heads=8, max_position_embeddings=2**17
    )
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    fields["windows"] = (read_window(config),) * num_layers
    experts = ExpertsSpec(
        routing=read_routing(config, 8, 2, normalize=True),
        intermediate_size=fields["intermediate_size"],
    )
    moe = MoeSpec(experts=experts, layers=frozenset(range(num_layers)))
    names = TensorNames(renamed=OF_MIXTRAL)
    return ModelSpec(architecture="MixtralForCausalLM", moe=moe, names=names, **fields)


def read_ministral(config: ConfigReader) -> ModelSpec:
    """``MinistralForCausalLM``: Mistral with a window in the layers that ``layer_types`` names, by
    default in all."""
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=2**17)
    fields = common_fields(config)
    window, num_layers = config.integer_or_null("sliding_window", 4096), fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers)
    kinds = kinds or ["sliding_attention"] * num_layers
    fields["windows"] = windows_by_kind(kinds, window)
    return ModelSpec(architecture="MinistralForCausalLM", **fields)


def read_ministral3(config: ConfigReader) -> ModelSpec:
    """``Ministral3ForCausalLM``: Mistral whose queries may grow with their position."""
    config = config.with_defaults(
        rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128, max_position_embeddings=2**18
    )
    rope = config.part("rope_parameters")
    fields = common_fields(config)
    fields["windows"] = (read_window(config),) * fields["num_layers"]
    growth = QueryGrowth(
        factor=rope.number("llama_4_scaling_beta", or_zero=True),
        period=fields["rope"].original_max_positions or fields["rope"].max_positions,
    )
    return ModelSpec(architecture="Ministral3ForCausalLM", query_growth=growth, **fields)


def read_mistral4(config: ConfigReader) -> ModelSpec:
    """``Mistral4ForCausalLM``, the text part of Mistral Small 4: DeepSeek's attention with queries
    that grow, and experts by a softmax, perhaps from some groups only."""
    config = config.with_defaults(
        kv_lora_rank=256,
        max_position_embeddings=2**20,
        q_lora_rank=1024,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    rope = config.table("rope_parameters") or _ROPE_OF_MISTRAL_4
    table = ConfigReader(rope, f"{config.where}: rope_parameters")
    rope_dim = config.integer("qk_rope_head_dim")
    rotated = rope_dim / (rope_dim + config.integer("qk_nope_head_dim"))
    check_supported(table, {"partial_rotary_factor": rotated})
    own = {**table.values, "partial_rotary_factor": 1.0}  # of what rotates
    fields = latent_fields(config.with_values(rope_parameters=own))
    growth = QueryGrowth(
        factor=table.number("llama_4_scaling_beta", or_zero=True),
        period=fields["rope"].original_max_positions or fields["rope"].max_positions,
    )
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    layers = frozenset(range(first, fields["num_layers"]))
    moe = MoeSpec(experts=_experts_of_mistral_4(config), layers=layers) if layers else None
    return ModelSpec(architecture="Mistral4ForCausalLM", query_growth=growth, moe=moe, **fields)


def _experts_of_mistral_4(config: ConfigReader) -> ExpertsSpec:
    inner = config.integer("moe_intermediate_size", 2048, maximum=MOST_WIDTH)
    num_experts = config.integer("num_local_experts", 128, maximum=MOST_EXPERTS)
    rule = RoutingRule(
        num_experts=config.integer("n_routed_experts", num_experts, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 4),
        normalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1, maximum=MOST_EXPERTS),
        top_groups=config.integer("topk_group", 1, maximum=MOST_EXPERTS),
    )
    shared = shared_experts(config, inner)
    return ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)


def read_mistral3(config: ConfigReader) -> ModelSpec:
    """``Mistral3ForConditionalGeneration``, the text part: Mistral Small 3.1 and later, Mistral
    Small 4 and Ministral 3, as ``text_config`` says."""
    text = text_config(config, tied=True)
    readers = {
        "mistral": read_mistral,
        "ministral3": read_ministral3,
        "mistral4": read_mistral4,
    }
    kind = text.word("model_type", "mistral")
    if kind not in readers:
        raise text.error("model_type", "one of " + ", ".join(readers), kind)
    return text_part(readers[kind](text), "Mistral3ForConditionalGeneration")
