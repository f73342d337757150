"""Qwen2, Qwen2.5 and Qwen3, dense and with experts."""

from __future__ import annotations

from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, SharedExpert
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    qk_normed_fields,
    read_routing,
    sparse_layers,
    windows_by_kind,
)
from minisgl_backend.models.spec import MOST_WIDTH, ModelSpec, MoeSpec


def read_qwen2(config: ConfigReader) -> ModelSpec:
    """``Qwen2ForCausalLM``, also used by Qwen2.5: biases of queries, keys and values, and possibly
    a sliding window in the upper layers."""
    fields = common_fields(_qwen(config))
    fields["windows"] = _windows(config, fields["num_layers"])
    return ModelSpec(architecture="Qwen2ForCausalLM", qkv_bias=True, **fields)


def read_qwen3(config: ConfigReader) -> ModelSpec:
    """``Qwen3ForCausalLM``: like Qwen2, but queries and keys are normalized by head. head_dim is
    128 unless given, whatever the hidden size."""
    config = _qwen(config)
    fields = qk_normed_fields(config, head_dim=128)
    fields["windows"] = _windows(config, fields["num_layers"])
    return ModelSpec(architecture="Qwen3ForCausalLM", **fields)


def read_qwen2_moe(config: ConfigReader) -> ModelSpec:
    """``Qwen2MoeForCausalLM``, Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts and a shared one,
    which is gated."""
    config = _qwen(config)
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    if config.flag("use_sliding_window"):
        raise ConfigError(f"{config.where}: use_sliding_window is not supported with experts")
    inner = config.integer("shared_expert_intermediate_size", 5632, maximum=MOST_WIDTH)
    experts = ExpertsSpec(
        routing=read_routing(config, 60, 4, normalize=config.flag("norm_topk_prob")),
        intermediate_size=config.integer("moe_intermediate_size", 1408, maximum=MOST_WIDTH),
        shared=SharedExpert(name="shared_expert", intermediate_size=inner, gated=True),
    )
    return ModelSpec(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias=config.flag("qkv_bias", True),
        moe=MoeSpec(experts=experts, layers=sparse_layers(config, num_layers)),
        **fields,
    )


def read_qwen3_moe(config: ConfigReader) -> ModelSpec:
    """``Qwen3MoeForCausalLM``: experts in every ``decoder_sparse_step``-th layer."""
    config = _qwen(config.with_defaults(num_key_value_heads=4))
    fields = qk_normed_fields(config)
    num_layers = fields["num_layers"]
    if config.flag("use_sliding_window"):
        fields["windows"] = (config.integer_or_null("sliding_window", 4096),) * num_layers
    experts = ExpertsSpec(
        routing=read_routing(config, 128, 8, normalize=config.flag("norm_topk_prob")),
        intermediate_size=config.integer("moe_intermediate_size", 768, maximum=MOST_WIDTH),
    )
    moe = MoeSpec(experts=experts, layers=sparse_layers(config, num_layers))
    return ModelSpec(architecture="Qwen3MoeForCausalLM", moe=moe, **fields)


def _qwen(config: ConfigReader) -> ConfigReader:
    """The config with Qwen's default for the context. If that is reached by dual chunk attention,
    which is attention as usual up to the context before (Qwen2.5-1M), it is that one."""
    config = config.with_defaults(max_position_embeddings=2**15)
    where = f"{config.where}: dual_chunk_attention_config"
    chunks = ConfigReader(config.table("dual_chunk_attention_config"), where)
    if not chunks.values:
        return config
    usual = chunks.integer("original_max_position_embeddings", chunks.integer("chunk_size"))
    context = min(usual, config.integer("max_position_embeddings", usual))
    return config.with_values(max_position_embeddings=context)


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by ``layer_types``, otherwise from ``max_window_layers`` on."""
    if not config.flag("use_sliding_window"):
        return (None,) * num_layers
    window = config.integer_or_null("sliding_window", 4096)
    first = config.integer("max_window_layers", 28, minimum=0)
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return windows_by_kind(kinds, window)
