"""Qwen2 and 2.5, Qwen3, and Qwen3 with experts.

What differs from Llama: Qwen2 has biases on queries, keys and values; Qwen3 normalizes queries and
keys by head instead; both may let the upper layers see a sliding window only.
"""

from __future__ import annotations

from typing import Any

from minisgl_backend.models.config_json import ConfigReader, common_fields
from minisgl_backend.models.spec import MOST_EXPERTS, MOST_WIDTH, ModelSpec, MoeSpec


def read_qwen2(config: ConfigReader) -> ModelSpec:
    """``Qwen2ForCausalLM``, which Qwen2.5 uses too."""
    fields = common_fields(config)
    fields["windows"] = _windows(config, fields["num_layers"])
    return ModelSpec(architecture="Qwen2ForCausalLM", qkv_bias=True, **fields)


def read_qwen3(config: ConfigReader) -> ModelSpec:
    """``Qwen3ForCausalLM``; head_dim is 128 unless given, whatever the hidden size."""
    fields = _qwen3_fields(config, head_dim=128)
    fields["windows"] = _windows(config, fields["num_layers"])
    return ModelSpec(architecture="Qwen3ForCausalLM", **fields)


def read_qwen3_moe(config: ConfigReader) -> ModelSpec:
    """``Qwen3MoeForCausalLM``: experts on every ``decoder_sparse_step``-th layer."""
    fields = _qwen3_fields(config)
    num_layers = fields["num_layers"]
    if config.flag("use_sliding_window"):
        fields["windows"] = (config.integer_or_null("sliding_window", 4096),) * num_layers
    num_experts = config.integer(
        "num_experts", config.integer("num_local_experts", 128), maximum=MOST_EXPERTS
    )
    top_k = config.integer("num_experts_per_tok", 8)
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"at most num_experts ({num_experts})", top_k)
    step, plain = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=config.integer("moe_intermediate_size", 768, maximum=MOST_WIDTH),
        normalize=config.flag("norm_topk_prob"),
        layers=frozenset(
            layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in plain
        ),
    )
    return ModelSpec(architecture="Qwen3MoeForCausalLM", moe=moe, **fields)


def _qwen3_fields(config: ConfigReader, *, head_dim: int | None = None) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    fields = common_fields(config, head_dim=head_dim)
    return {**fields, "qk_norm": True, "qkv_bias": bias, "output_bias": bias}


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by ``layer_types``, else from ``max_window_layers`` upwards."""
    if not config.flag("use_sliding_window"):
        return (None,) * num_layers
    window = config.integer_or_null("sliding_window", 4096)
    types = config.values.get("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise config.error("layer_types", f"{num_layers} of {', '.join(known)}", types)
    return tuple(known[kind] for kind in types)
