"""LFM2, dense and with experts: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from typing import Any, Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.mistral import OF_MIXTRAL
from minisgl_backend.models.spec import (
    MOST_EXPERTS,
    MOST_HEADS,
    MOST_WIDTH,
    ConvSpec,
    ModelSpec,
    MoeSpec,
)
from minisgl_backend.models.tensor_names import TensorNames

_KINDS: Final = ("conv", "full_attention")
_RENAMED: Final = (
    (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".feed_forward.", ".mlp."),
    *OF_MIXTRAL,
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    ("model.embedding_norm.", "model.norm."),
)
"""Names in the checkpoints, each with the decoder's."""


def read_lfm2(config: ConfigReader) -> ModelSpec:
    """``Lfm2ForCausalLM``: LFM2. Feed-forward blocks are two thirds as wide as config.json says,
    rounded up, unless it says otherwise."""
    inner = config.integer("intermediate_size", 12_288, maximum=MOST_WIDTH)
    inner = config.integer("block_ff_dim", inner, maximum=MOST_WIDTH)
    if config.flag("block_auto_adjust_ff_dim", True):
        least = int(config.number("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
        unit = config.integer("block_multiple_of", 256, maximum=MOST_WIDTH)
        inner = -(-least // unit) * unit
    fields = _hybrid_fields(config.with_values(intermediate_size=inner))
    return ModelSpec(architecture="Lfm2ForCausalLM", **fields)


def read_lfm2_moe(config: ConfigReader) -> ModelSpec:
    """``Lfm2MoeForCausalLM``: the same with experts by DeepSeek's router in all but the first
    layers, and blocks as wide as config.json says."""
    fields = _hybrid_fields(config)
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


def _hybrid_fields(config: ConfigReader) -> dict[str, Any]:
    """The fields that both have in common."""
    config = config.with_defaults(
        max_position_embeddings=128_000,
        num_key_value_heads=8,
        rms_norm_eps=config.number("norm_eps", 1e-5),
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    config = config.with_values(
        tie_word_embeddings=config.flag("tie_embedding", config.flag("tie_word_embeddings"))
    )
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(_KINDS, num_layers) or _kinds_by_index(config, num_layers)
    channels = fields["hidden_size"]
    conv = ConvSpec(
        num_channels=channels,
        conv_width=config.integer("conv_L_cache", 3, minimum=2, maximum=MOST_HEADS),
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        bias=config.flag("conv_bias"),
    )
    parts = {f"in_proj_{part}": channels for part in ("b", "c", "x")}
    more = {
        "qk_norm": "head",
        "recurrent": conv if conv.layers else None,
        "names": TensorNames(renamed=_RENAMED, merged={".conv.in_proj": parts}),
    }
    return fields | more


def _kinds_by_index(config: ConfigReader, num_layers: int) -> list[str]:
    """The kinds of layers by the indices of those with attention, which by default are all."""
    if "full_attn_idxs" not in config.values:
        return ["full_attention"] * num_layers
    attending = config.integers("full_attn_idxs")
    return ["full_attention" if layer in attending else "conv" for layer in range(num_layers)]
