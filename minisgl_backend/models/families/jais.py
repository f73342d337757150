"""Jais 2: Llama with biases, LayerNorms, and the square of ReLU in place of gates."""

from __future__ import annotations

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import attention_biases, check_supported, layer_norms
from minisgl_backend.models.spec import ModelSpec


def read_jais2(config: ConfigReader) -> ModelSpec:
    """``Jais2ForCausalLM``."""
    check_supported(config, {"hidden_act": "relu2"})
    config = config.with_values(hidden_act="silu")
    fields = common_fields(config.with_defaults(max_position_embeddings=8192))
    fields["norms"] = layer_norms(config, "layer_norm_eps")
    return ModelSpec(
        architecture="Jais2ForCausalLM",
        gate=None,
        biases=attention_biases(config, True, mlp=config.flag("mlp_bias", True)),
        **fields,
    )
