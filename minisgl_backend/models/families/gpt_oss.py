"""gpt-oss."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.gates import ClampedGate
from minisgl_backend.models.attention_spec import ScoresSpec
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    attention_biases,
    read_routing,
    windows_by_kind,
)
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_GPT_OSS_ROPE: Final = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)


def read_gpt_oss(config: ConfigReader) -> ModelSpec:
    """``GptOssForCausalLM``: attention with sinks, and with windows in every other layer; experts
    with biases and a special gate. config.json names no dtype: tensors that are not quantized are
    bfloat16."""
    config = config.with_defaults(
        torch_dtype="bfloat16",
        rms_norm_eps=1e-5,
        head_dim=64,
        num_key_value_heads=8,
        max_position_embeddings=2**17,
        rope_theta=150_000.0,
    )
    if not config.table("rope_scaling") and not config.table("rope_parameters"):
        config = config.with_defaults(rope_scaling=dict(_GPT_OSS_ROPE))
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
    ]
    fields["windows"] = windows_by_kind(kinds, config.integer_or_null("sliding_window", 128))
    gate = ClampedGate(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    experts = ExpertsSpec(
        routing=read_routing(config, 128, 4, normalize=True),
        intermediate_size=fields["intermediate_size"],
        gate=gate,
        biases=True,
        router="router",
        interleaved=True,
    )
    return ModelSpec(
        architecture="GptOssForCausalLM",
        scores=ScoresSpec(sinks=True),
        moe=MoeSpec(experts=experts, layers=frozenset(range(num_layers))),
        names=TensorNames(keeps_stacks=True),
        biases=attention_biases(config, default=True),
        **fields,
    )
