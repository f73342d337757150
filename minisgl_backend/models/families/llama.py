"""Llama, and what adds little or nothing to it: Arcee, CWM, Helium, InternLM3, IQuest-Coder,
Seed-OSS and SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    attention_biases,
    check_supported,
    read_rotating,
    read_window,
    windows_by_kind,
    with_rope,
)
from minisgl_backend.models.spec import BiasesSpec, ModelSpec

_CWM_ROPE: Final[Mapping[str, object]] = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)
"""CWM's rotary embedding if config.json has none."""
_CWM_ENDS: Final = [128_001, 128_008, 128_009]
"""The same of ``eos_token_id``."""


def read_llama(config: ConfigReader) -> ModelSpec:
    """``LlamaForCausalLM``, Llama 2 and 3: biases are optional, and then in all projections."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        biases=attention_biases(config, mlp=config.flag("mlp_bias")),
        **common_fields(config),
    )


def read_arcee(config: ConfigReader) -> ModelSpec:
    """``ArceeForCausalLM``, AFM: Llama with the square of ReLU in place of gates."""
    check_supported(config, {"hidden_act": "relu2"})
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096)
    spec = read_llama(config.with_values(hidden_act="silu"))
    return replace(spec, architecture="ArceeForCausalLM", gate=None)


def read_cwm(config: ConfigReader) -> ModelSpec:
    """``CwmForCausalLM``, Code World Model: Llama with windows in three of four layers."""
    check_supported(config, {"attention_bias": False})
    config = with_rope(config, _CWM_ROPE)
    if "eos_token_id" not in config.values:
        config = config.with_values(eos_token_id=_CWM_ENDS)
    config = config.with_defaults(
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**17,
    )
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if layer % 4 else "full_attention" for layer in range(num_layers)
    ]
    fields["windows"] = windows_by_kind(kinds, config.integer("sliding_window", 8192))
    biases = BiasesSpec(mlp=config.flag("mlp_bias"))
    return ModelSpec(architecture="CwmForCausalLM", biases=biases, **fields)


def read_helium(config: ConfigReader) -> ModelSpec:
    """``HeliumForCausalLM``: Llama whose neighbouring dimensions rotate together."""
    config = config.with_defaults(
        rms_norm_eps=1e-8,
        rope_theta=1e5,
        num_key_value_heads=20,
        head_dim=128,
        max_position_embeddings=4096,
    )
    fields = common_fields(config)
    heads: LayerHeads = fields["heads"]
    if heads.num_heads * heads.head_dim != fields["hidden_size"]:  # its output projection is square
        raise config.error("head_dim", f"hidden_size / {heads.num_heads} heads", heads.head_dim)
    fields["rope"] = replace(fields["rope"], interleaved=True)
    return ModelSpec(
        architecture="HeliumForCausalLM",
        biases=BiasesSpec(qkv=config.flag("attention_bias"), mlp=config.flag("mlp_bias")),
        **fields,
    )


def read_internlm3(config: ConfigReader) -> ModelSpec:
    """``InternLM3ForCausalLM``: Llama with other names of the keys for biases."""
    bias = config.flag("mlp_bias", config.flag("bias"))
    of_attention = config.flag("attention_bias", config.flag("qkv_bias"))
    if of_attention != bias:  # the output projection would have the latter
        raise ConfigError(
            f"{config.where}: qkv_bias (or attention_bias) {of_attention} with bias (or mlp_bias) "
            f"{bias} is not supported"
        )
    config = config.with_defaults(
        rms_norm_eps=1e-5, num_key_value_heads=2, head_dim=128, max_position_embeddings=2**15
    )
    return ModelSpec(
        architecture="InternLM3ForCausalLM",
        biases=BiasesSpec(qkv=bias, output=bias, mlp=bias),
        **common_fields(config),
    )


def read_iquest_coder(config: ConfigReader) -> ModelSpec:
    """``IQuestCoderForCausalLM``, IQuest-Coder: Llama, whose heads have 128 elements if
    config.json has no ``head_dim``."""
    if "clip_qkv" in config.values:
        raise ConfigError(f"{config.where}: clip_qkv is not supported")
    if config.flag("use_sliding_window"):
        raise ConfigError(f"{config.where}: use_sliding_window is not supported")
    config = config.with_defaults(
        rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128, max_position_embeddings=2**17
    )
    return ModelSpec(
        architecture="IQuestCoderForCausalLM",
        biases=attention_biases(config, mlp=config.flag("mlp_bias")),
        **common_fields(config),
    )


def read_seed_oss(config: ConfigReader) -> ModelSpec:
    """``SeedOssForCausalLM``: Llama whose projections of queries, keys and values have biases, and
    whose heads have 128 elements if config.json has no ``head_dim``."""
    config = config.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2**19
    )
    return ModelSpec(
        architecture="SeedOssForCausalLM",
        biases=BiasesSpec(
            qkv=config.flag("attention_bias", True),
            output=config.flag("attention_out_bias"),
            mlp=config.flag("mlp_bias"),
        ),
        **common_fields(config),
    )


def read_smollm3(config: ConfigReader) -> ModelSpec:
    """``SmolLM3ForCausalLM``: Llama, but every fourth layer does not rotate. ``use_sliding_window``
    counts only if config.json has no ``layer_types``."""
    config = config.with_defaults(
        rope_theta=2e6,
        num_key_value_heads=4,
        max_position_embeddings=2**15,
        tie_word_embeddings=True,
    )
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    rotates = read_rotating(config, num_layers)
    fields["ropes"] = tuple(fields["rope"] if one else None for one in rotates)
    is_windowed = config.flag("use_sliding_window")
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or [
        "full_attention" if one or not is_windowed else "sliding_attention" for one in rotates
    ]
    if "sliding_attention" in kinds:
        fields["windows"] = windows_by_kind(kinds, read_window(config))
    return ModelSpec(
        architecture="SmolLM3ForCausalLM",
        biases=attention_biases(config, mlp=config.flag("mlp_bias")),
        **fields,
    )
