"""Granite 3, dense and with experts: Llama with multipliers."""

from __future__ import annotations

from typing import Any

from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import attention_biases, read_routing
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames


def read_granite(config: ConfigReader) -> ModelSpec:
    """``GraniteForCausalLM``, Granite 3."""
    return ModelSpec(
        architecture="GraniteForCausalLM",
        mlp_bias=config.flag("mlp_bias"),
        **granite_fields(config),
    )


def read_granite_moe(config: ConfigReader) -> ModelSpec:
    """``GraniteMoeForCausalLM``, Granite 3 with experts in every layer: a softmax over the logits
    of a token's experts, which is that over all logits if the weights sum to 1."""
    fields = granite_fields(config)
    experts = ExpertsSpec(
        routing=read_routing(config, 8, 2, normalize=True),
        intermediate_size=fields["intermediate_size"],
        router="router",
    )
    renamed = (
        (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
        (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
        (".block_sparse_moe.router.layer.", ".mlp.router."),
        (".block_sparse_moe.", ".mlp."),
    )
    return ModelSpec(
        architecture="GraniteMoeForCausalLM",
        moe=MoeSpec(experts=experts, layers=frozenset(range(fields["num_layers"]))),
        names=TensorNames(renamed=renamed),
        **fields,
    )


def granite_fields(config: ConfigReader) -> dict[str, Any]:
    """The common fields with Granite's multipliers, and perhaps biases of attention."""
    return {
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "branch_scale": config.number("residual_multiplier", 1.0),
        "logit_scale": 1 / config.number("logits_scaling", 1.0),
        **attention_biases(config),
        **common_fields(config),
    }
