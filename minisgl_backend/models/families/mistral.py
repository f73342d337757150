"""Mistral, Mixtral, Ministral, and Mistral Small 3.1 and later."""

from __future__ import annotations

from typing import Final

from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    read_routing,
    read_window,
    text_config,
    text_part,
    windows_by_kind,
)
from minisgl_backend.models.spec import ModelSpec, MoeSpec, QueryGrowth
from minisgl_backend.models.tensor_names import TensorNames

OF_MIXTRAL: Final = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
"""Names of experts in Mixtral's checkpoints, each with the decoder's."""


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


def read_mistral3(config: ConfigReader) -> ModelSpec:
    """``Mistral3ForConditionalGeneration``, the text part: Mistral Small 3.1 and later, and
    Ministral 3, as ``text_config`` says."""
    text = text_config(config, tied=True)
    readers = {"mistral": read_mistral, "ministral3": read_ministral3}
    kind = text.word("model_type", "mistral")
    if kind not in readers:
        raise text.error("model_type", "one of " + ", ".join(readers), kind)
    return text_part(readers[kind](text), "Mistral3ForConditionalGeneration")
