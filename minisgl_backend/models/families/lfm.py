"""LFM2, dense and with experts, and LFM3: short convolutions in many layers, attention in the
others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule
from minisgl_backend.models.attention_spec import AttentionGates
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_HEADS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    attention_biases,
    check_supported,
    read_local_rope,
    read_ropes_by_kind,
    set_kinds,
)
from minisgl_backend.models.families.mistral import OF_MIXTRAL
from minisgl_backend.models.recurrent_spec import ConvSpec
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_KINDS: Final = ("conv", "full_attention")
_KINDS_OF_LFM3: Final = ("conv", "sliding_attention", "full_attention")
_COMMON_NAMES: Final = (
    (".operator_norm.", ".input_layernorm."),
    ("model.embedding_norm.", "model.norm."),
)
"""Names in the checkpoints, each with the decoder's."""
_RENAMED: Final = (
    # before ".feed_forward.", which is a part of it
    (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".feed_forward.", ".mlp."),
    *OF_MIXTRAL,
    *_COMMON_NAMES,
    (".ffn_norm.", ".post_attention_layernorm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
)
"""The same for LFM2."""
_RENAMED_OF_LFM3: Final = (
    *_COMMON_NAMES,
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".post_operator_norm.", ".post_attention_layernorm."),
    (".ffn_norm.", ".pre_feedforward_layernorm."),
    (".post_ffn_norm.", ".post_feedforward_layernorm."),
    (".self_attn.gate_proj.", ".self_attn.gate_proj."),  # in files, and so in errors about them
    (".self_attn.g_proj.", ".self_attn.gate_proj."),  # in transformers, and so in adapters
)
"""The same for LFM3."""
_ROPES_OF_LFM3: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        },
    }
)
"""The rotations, if config.json names none."""


def read_lfm2(config: ConfigReader) -> ModelSpec:
    """``Lfm2ForCausalLM``: LFM2. Feed-forward blocks are two thirds as wide as config.json says,
    rounded up, unless it says otherwise. Without a multiplier (null) they are not rounded."""
    inner = config.integer("intermediate_size", 12_288, maximum=MOST_WIDTH)
    inner = config.integer("block_ff_dim", inner, maximum=MOST_WIDTH)
    if config.flag("block_auto_adjust_ff_dim", True):
        inner = 2 * inner // 3
        if "block_ffn_dim_multiplier" not in config.nulls:
            least = int(config.number("block_ffn_dim_multiplier", 1.0) * inner)
            unit = config.integer("block_multiple_of", 256, maximum=MOST_WIDTH)
            inner = -(-least // unit) * unit
    fields = _fields_of_lfm2(config.with_values(intermediate_size=inner))
    return ModelSpec(architecture="Lfm2ForCausalLM", **fields)


def read_lfm2_moe(config: ConfigReader) -> ModelSpec:
    """``Lfm2MoeForCausalLM``: the same with experts by DeepSeek's router in all but the first
    layers, and blocks as wide as config.json says."""
    fields = _fields_of_lfm2(config)
    routing = RoutingRule(
        num_experts=config.integer("num_experts", 32, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 4),
        normalize=config.flag("norm_topk_prob", True),
        sigmoid=True,
        corrected=config.flag("use_expert_bias", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    inner = config.integer("moe_intermediate_size", 1792, maximum=MOST_WIDTH)
    experts = ExpertsSpec(routing=routing, intermediate_size=inner)
    first = config.integer("num_dense_layers", 2, minimum=0)
    layers = frozenset(range(first, fields["num_layers"]))
    moe = MoeSpec(experts=experts, layers=layers) if layers else None
    return ModelSpec(architecture="Lfm2MoeForCausalLM", moe=moe, **fields)


def read_lfm3(config: ConfigReader) -> ModelSpec:
    """``Lfm3ForCausalLM``: LFM2 with windows in some layers, which have a rotation of their own,
    with a gate for each head of attention, and with norms on both sides of a layer's parts."""
    check_supported(config, {"use_sandwich_norm": True})
    config = _in_usual_keys(config.with_defaults(num_key_value_heads=4, head_dim=128))
    if "rope_parameters" not in config.values:
        config = config.with_values(rope_parameters={**_ROPES_OF_LFM3})
    by_kind, fields = read_ropes_by_kind(config, common_fields)
    num_layers = fields["num_layers"]
    of_four = ("sliding_attention", "conv", "full_attention", "conv")
    by_default = ["conv", *(of_four[layer % 4] for layer in range(1, num_layers))]
    kinds = config.layer_kinds(_KINDS_OF_LFM3, num_layers) or by_default
    given = by_kind.get("sliding_attention", {})
    local = read_local_rope(config, fields["rope"].max_positions, given)
    set_kinds(fields, kinds, config.integer_or_null("sliding_window", 256), local)
    is_gated = config.flag("use_attention_gate", True)
    fields |= _conv_fields(config, kinds, fields["hidden_size"], 7, _RENAMED_OF_LFM3)
    fields["norms"] = replace(fields["norms"], place="around")
    return ModelSpec(
        architecture="Lfm3ForCausalLM",
        attention_gates=AttentionGates(apart=True, one_per_head=True) if is_gated else None,
        biases=attention_biases(config),
        **fields,
    )


def _in_usual_keys(config: ConfigReader) -> ConfigReader:
    """The config with the defaults, and in the keys, that other families have."""
    config = config.with_defaults(
        max_position_embeddings=128_000,
        rms_norm_eps=config.number("norm_eps", 1e-5),
        tie_word_embeddings=True,
    )
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings"))
    return config.with_values(tie_word_embeddings=tied)


def _fields_of_lfm2(config: ConfigReader) -> dict[str, Any]:
    """The fields that both have in common."""
    config = _in_usual_keys(config.with_defaults(num_key_value_heads=8, rope_theta=1e6))
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(_KINDS, num_layers) or _kinds_by_index(config, num_layers)
    return fields | _conv_fields(config, kinds, fields["hidden_size"], 3, _RENAMED)


def _conv_fields(
    config: ConfigReader,
    kinds: Sequence[str],
    channels: int,
    width: int,
    renamed: tuple[tuple[str, str], ...],
) -> dict[str, Any]:
    """The layers with convolutions, of ``width`` by default, and the names in the checkpoint:
    those that are ``renamed``, and the merged projection of these layers."""
    conv = ConvSpec(
        num_channels=channels,
        conv_width=config.integer("conv_L_cache", width, minimum=2, maximum=MOST_HEADS),
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        bias=config.flag("conv_bias"),
    )
    parts = {f"in_proj_{part}": channels for part in ("b", "c", "x")}
    return {
        "qk_norm": "head",
        "recurrent": conv if conv.layers else None,
        "names": TensorNames(renamed=renamed, merged={".conv.in_proj": parts}),
    }


def _kinds_by_index(config: ConfigReader, num_layers: int) -> list[str]:
    """The kinds of layers by the indices of those with attention, which by default are all."""
    if "full_attn_idxs" not in config.values:
        return ["full_attention"] * num_layers
    attending = config.integers("full_attn_idxs")
    return ["full_attention" if layer in attending else "conv" for layer in range(num_layers)]
