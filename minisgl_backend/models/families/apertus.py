"""Apertus: Llama with xIELU in place of gates, and with norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    check_supported,
    qk_normed_fields,
    with_rope,
)
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True}
)
"""The only supported values of these keys."""
_ROPE: Final[Mapping[str, object]] = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)
"""The rotary embedding if config.json has none."""


def read_apertus(config: ConfigReader) -> ModelSpec:
    """``ApertusForCausalLM``: each layer learns the numbers of its xIELU."""
    check_supported(config, _SUPPORTED)
    config = with_rope(config, _ROPE).with_values(hidden_act="silu")
    config = config.with_defaults(
        rms_norm_eps=1e-5, rope_theta=12e6, max_position_embeddings=65_536
    )
    return ModelSpec(
        architecture="ApertusForCausalLM",
        gate=None,
        activation="xielu",
        names=TensorNames(
            renamed=(
                (".attention_layernorm.", ".input_layernorm."),
                (".feedforward_layernorm.", ".post_attention_layernorm."),
            )
        ),
        **qk_normed_fields(config),
    )
