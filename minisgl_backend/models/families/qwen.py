"""Qwen2, Qwen2.5 and Qwen3, dense and with experts; Mellum 2, which is Qwen3 with experts and
windows; and the text parts of Qwen's relatives that see.

The latter rotate by a token's time, row and column. In text all three are its position, so the
rotation is the usual one.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, SharedExpert
from minisgl_backend.models.bounds import MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    layers_with_experts,
    qk_normed_fields,
    read_local_rope,
    read_ropes_by_kind,
    read_routing,
    set_kinds,
    sparse_layers,
    text_of_vl,
    text_part,
    windows_by_kind,
)
from minisgl_backend.models.spec import BiasesSpec, ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames


def read_qwen2(config: ConfigReader) -> ModelSpec:
    """``Qwen2ForCausalLM``, also used by Qwen2.5: biases of queries, keys and values, and possibly
    a sliding window in the upper layers."""
    fields = common_fields(_qwen(config))
    fields["windows"] = _windows(config, fields["num_layers"])
    return ModelSpec(architecture="Qwen2ForCausalLM", biases=BiasesSpec(qkv=True), **fields)


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
        biases=BiasesSpec(qkv=config.flag("qkv_bias", True)),
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


def read_mellum(config: ConfigReader) -> ModelSpec:
    """``MellumForCausalLM``, Mellum 2: experts in every layer, and layers with windows, which have
    a rotation of their own."""
    config = config.with_defaults(
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=2**17,
    )
    if "rope_parameters" not in config.values:
        bases = {"full_attention": 5e5, "sliding_attention": 10_000.0}
        tables = {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        }
        config = config.with_values(rope_parameters=tables)
    if "rope_scaling" in config.values:
        raise ConfigError(f"{config.where}: rope_scaling is not supported, only rope_parameters")
    by_kind, fields = read_ropes_by_kind(config, qk_normed_fields)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or ["full_attention"] * num_layers
    if missing := set(kinds) - by_kind.keys():
        names = ", ".join(sorted(missing))
        raise ConfigError(f"{config.where}: rope_parameters lacks a table for {names}")
    if "sliding_attention" in kinds:
        given = by_kind["sliding_attention"]
        local = read_local_rope(config, fields["rope"].max_positions, given)
        set_kinds(fields, kinds, config.integer("sliding_window", 1024), local)
    experts = ExpertsSpec(
        routing=read_routing(config, 64, 8, normalize=config.flag("norm_topk_prob", True)),
        intermediate_size=config.integer("moe_intermediate_size", 896, maximum=MOST_WIDTH),
    )
    layers = layers_with_experts(config, num_layers, dense=0)
    return ModelSpec(
        architecture="MellumForCausalLM",
        moe=MoeSpec(experts=experts, layers=layers) if layers else None,
        names=TensorNames(left_out=("mtp.",)),
        **fields,
    )


def read_qwen2_vl(config: ConfigReader) -> ModelSpec:
    """``Qwen2VLForConditionalGeneration``, the text part: Qwen2."""
    return text_part(_of_qwen2_vl(config), "Qwen2VLForConditionalGeneration")


def read_qwen2_5_vl(config: ConfigReader) -> ModelSpec:
    """``Qwen2_5_VLForConditionalGeneration``, the text part: Qwen2."""
    return text_part(_of_qwen2_vl(config), "Qwen2_5_VLForConditionalGeneration")


def read_qwen3_vl(config: ConfigReader) -> ModelSpec:
    """``Qwen3VLForConditionalGeneration``, the text part: Qwen3 without windows."""
    defaults = {"rope_theta": 5e5, "num_key_value_heads": 32, "max_position_embeddings": 128_000}
    text = text_of_vl(config).with_defaults(**defaults)
    spec = read_qwen3(text.with_values(use_sliding_window=False))
    return text_part(spec, "Qwen3VLForConditionalGeneration")


def read_qwen3_vl_moe(config: ConfigReader) -> ModelSpec:
    """``Qwen3VLMoeForConditionalGeneration``, the text part: Qwen3 with experts, whose weights
    always sum to 1, and without windows. In the publisher's files inputs come before outputs of
    experts, in those of transformers behind them."""
    text = text_of_vl(config).with_defaults(
        rope_theta=5e5,
        num_key_value_heads=16,
        max_position_embeddings=128_000,
        moe_intermediate_size=1408,
        num_experts_per_tok=4,
    )
    if "num_local_experts" not in text.values:
        text = text.with_defaults(num_experts=60)
    spec = read_qwen3_moe(text.with_values(use_sliding_window=False, norm_topk_prob=True))
    names = replace(spec.names, order_by_hidden_size=spec.hidden_size)
    return text_part(replace(spec, names=names), "Qwen3VLMoeForConditionalGeneration")


def _of_qwen2_vl(config: ConfigReader) -> ModelSpec:
    text = text_of_vl(config).with_defaults(
        rope_theta=1e6, rms_norm_eps=1e-5, num_key_value_heads=8, max_window_layers=80
    )
    return read_qwen2(text)


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
