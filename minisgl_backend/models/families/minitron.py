"""Nemotron before its hybrids: Minitron, Nemotron-Mini and Nemotron-4."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import attention_biases, check_supported, layer_norms
from minisgl_backend.models.spec import ModelSpec


def read_nemotron(config: ConfigReader) -> ModelSpec:
    """``NemotronForCausalLM``: LayerNorms, whose weights are stored less 1, the square of ReLU in
    place of gates, and heads of which a part rotates, by default half."""
    check_supported(config, {"hidden_act": "relu2"})
    config = config.with_values(hidden_act="silu").with_defaults(
        partial_rotary_factor=0.5, max_position_embeddings=4096
    )
    fields = common_fields(config, partial=True)
    fields["norms"] = replace(layer_norms(config, "norm_eps"), offset=1.0)
    return ModelSpec(
        architecture="NemotronForCausalLM",
        gate=None,
        biases=attention_biases(config, mlp=config.flag("mlp_bias")),
        **fields,
    )
