"""GLM-4, dense: merged projections of feed-forward in the file, and heads of which the first half
rotates, neighbouring dimensions together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_NORMS: Final = (
    (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
    (".post_self_attn_layernorm.", ".post_attention_layernorm."),
    (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
)
"""Names of norms in layers that also normalize the outputs of their parts."""


def read_glm(config: ConfigReader) -> ModelSpec:
    """``GlmForCausalLM``, GLM-4 and GLM-Edge."""
    return ModelSpec(architecture="GlmForCausalLM", **_glm_fields(config))


def read_glm4(config: ConfigReader) -> ModelSpec:
    """``Glm4ForCausalLM``, GLM-4-0414 and GLM-Z1: the outputs of attention and feed-forward are
    normalized, too."""
    fields = _glm_fields(config)
    fields["names"] = replace(fields["names"], renamed=_NORMS)
    return ModelSpec(architecture="Glm4ForCausalLM", norms="around", **fields)


def _glm_fields(config: ConfigReader) -> dict[str, Any]:
    config = config.with_defaults(
        rms_norm_eps=1.5625e-7,
        head_dim=128,
        partial_rotary_factor=0.5,
        num_key_value_heads=2,
        max_position_embeddings=2**17,
        eos_token_id=[151329, 151336, 151338],
    )
    fields = common_fields(config, partial=True)
    inner = fields["intermediate_size"]
    merged = {".mlp.gate_up_proj": {"gate_proj": inner, "up_proj": inner}}
    return {
        **fields,
        "rope": replace(fields["rope"], interleaved=True),
        "qkv_bias": config.flag("attention_bias", True),
        "names": TensorNames(merged=merged),
    }
