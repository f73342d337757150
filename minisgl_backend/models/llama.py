"""Llama 2 and 3."""

from __future__ import annotations

from minisgl_backend.models.config_json import ConfigReader, common_fields
from minisgl_backend.models.spec import ModelSpec


def read_llama(config: ConfigReader) -> ModelSpec:
    """``LlamaForCausalLM``: biases are optional, and then on all projections."""
    bias = config.flag("attention_bias")
    return ModelSpec(
        architecture="LlamaForCausalLM",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        **common_fields(config),
    )
