"""Jais 2: Llama with biases, LayerNorms, and the square of ReLU in place of gates."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import attention_biases, check_supported
from minisgl_backend.models.spec import ModelSpec


def read_jais2(config: ConfigReader) -> ModelSpec:
    """``Jais2ForCausalLM``."""
    check_supported(config, {"hidden_act": "relu2"})
    eps = config.number("layer_norm_eps", 1e-5)
    config = config.with_values(hidden_act="silu", rms_norm_eps=eps)
    fields = common_fields(config.with_defaults(max_position_embeddings=8192))
    fields["norms"] = replace(fields["norms"], centered=True, biased=True)
    return ModelSpec(
        architecture="Jais2ForCausalLM",
        gate=None,
        biases=attention_biases(config, True, mlp=config.flag("mlp_bias", True)),
        **fields,
    )
