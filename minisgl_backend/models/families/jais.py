"""Jais 2: Llama with biases, LayerNorms, and the square of ReLU in place of gates."""

from __future__ import annotations

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import attention_biases, check_supported
from minisgl_backend.models.spec import ModelSpec


def read_jais2(config: ConfigReader) -> ModelSpec:
    """``Jais2ForCausalLM``."""
    check_supported(config, {"hidden_act": "relu2"})
    eps = config.number("layer_norm_eps", 1e-5)
    config = config.with_values(hidden_act="silu", rms_norm_eps=eps)
    return ModelSpec(
        architecture="Jais2ForCausalLM",
        centered_norms=True,
        norm_biases=True,
        gate=None,
        mlp_bias=config.flag("mlp_bias", True),
        **attention_biases(config, True),
        **common_fields(config.with_defaults(max_position_embeddings=8192)),
    )
