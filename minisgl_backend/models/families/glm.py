"""GLM-4, dense: merged projections of feed-forward in the file, and heads of which the first half
rotates, neighbouring dimensions together. Also the text parts of GLM-4.1V and later, whose experts
are GLM-4.5's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.deepseek_experts import read_glm4_moe
from minisgl_backend.models.families.fields import check_supported, text_of_vl, text_part
from minisgl_backend.models.spec import BiasesSpec, ModelSpec
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
    fields["norms"] = replace(fields["norms"], place="around")
    return ModelSpec(architecture="Glm4ForCausalLM", **fields)


def read_glm4v(config: ConfigReader) -> ModelSpec:
    """``Glm4vForConditionalGeneration``, the text part of GLM-4.1V: GLM-4-0414."""
    return text_part(_dense_text(text_of_vl(config)), "Glm4vForConditionalGeneration")


def read_glm4v_moe(config: ConfigReader) -> ModelSpec:
    """``Glm4vMoeForConditionalGeneration``, the text part of GLM-4.5V: GLM-4.5."""
    return text_part(_text_with_experts(text_of_vl(config)), "Glm4vMoeForConditionalGeneration")


def read_glm46v(config: ConfigReader) -> ModelSpec:
    """``Glm46VForConditionalGeneration``, the text part of GLM-4.6V: either of the two."""
    text = text_of_vl(config)
    match kind := text.word("model_type", "glm4v_text"):
        case "glm4v_text":
            spec = _dense_text(text)
        case "glm4v_moe_text":
            spec = _text_with_experts(text)
        case _:
            raise text.error("model_type", "glm4v_text or glm4v_moe_text", kind)
    return text_part(spec, "Glm46VForConditionalGeneration")


def _dense_text(text: ConfigReader) -> ModelSpec:
    check_supported(text, {"attention_bias": True})
    head_dim = text.integer("hidden_size") // max(1, text.integer("num_attention_heads"))
    return read_glm4(
        text.with_defaults(
            rms_norm_eps=1e-5,
            head_dim=head_dim,
            partial_rotary_factor=1.0,
            max_position_embeddings=2**15,
        )
    )


def _text_with_experts(text: ConfigReader) -> ModelSpec:
    check_supported(text, {"use_qk_norm": False})
    return read_glm4_moe(text.with_defaults(attention_bias=True, max_position_embeddings=2**16))


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
        "biases": BiasesSpec(qkv=config.flag("attention_bias", True)),
        "names": TensorNames(merged=merged),
    }
