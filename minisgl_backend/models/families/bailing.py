"""Ling 3.0: Kimi Delta Attention in most layers, multi-head latent attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from minisgl_backend.models.attention_spec import AttentionGates
from minisgl_backend.models.bounds import MOST_HEADS
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.deepseek_experts import deepseek_experts
from minisgl_backend.models.families.fields import (
    check_supported,
    hybrid_kinds,
    layers_with_experts,
    read_gate_limits,
)
from minisgl_backend.models.families.kimi_linear import KEYS
from minisgl_backend.models.families.latents import latent_fields
from minisgl_backend.models.families.mtp_layers import left_out_mtp, mtp_behind
from minisgl_backend.models.recurrent_spec import KimiDeltaSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {"score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    | {"moe_router_enable_expert_bias": True, "scale_router_input": False}
    | {"gated_attention_proj_granularity_type": "head_wise", "use_mla_nope": False}
    | {"no_kda_lora": True, "use_kda_lora": False, "num_kv_heads_for_linear_attn": 0}
    | {"use_bias": False, "use_qkv_bias": False, "mtp_use_kda": False, "use_nGPT": False}
    | {"up_proj_norm": False, "value_norm": False}
)
"""The only supported values of these keys."""
_KEYS: Final = MappingProxyType({**KEYS, "num_mtp_layers": "num_nextn_predict_layers"})
"""Keys of config.json, each with the one that other families have."""
_NAMES: Final = TensorNames(
    renamed=(
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        (".self_attn.dense.", ".self_attn.o_proj."),
        (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
    ),
    vectors=(".A_log",),
)


def read_bailing_hybrid(config: ConfigReader) -> ModelSpec:
    """``BailingMoeV3ForCausalLM``, to transformers ``BailingHybridForCausalLM``: DeepSeek-V3 with
    Kimi Delta Attention in most layers, and gates of heads in the others."""
    check_supported(config, _SUPPORTED)
    names_there = config.values.get("architectures", ())
    spelling = "MoeV3" if "BailingMoeV3ForCausalLM" in names_there else "Hybrid"
    config = _rotating_in_full(config.respelled(_KEYS)).with_defaults(
        max_position_embeddings=2**18,
        moe_intermediate_size=768,
        n_group=8,
        n_routed_experts=config.values.get("num_local_experts", 512),
        q_lora_rank=None,
        qk_nope_head_dim=128,
        rope_theta=6e6,
        routed_scaling_factor=2.5,
        topk_group=4,
        v_head_dim=128,
    )
    fields = latent_fields(config)
    num_layers = fields["num_layers"]
    delta = _delta(config, num_layers)
    dense = config.integer("first_k_dense_replace", 2, minimum=0)
    with_experts = layers_with_experts(config, num_layers, dense=dense)
    # transformers does not read these; what the publisher gave to other engines does
    limits = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
    moe = replace(
        deepseek_experts(config, with_experts),
        limits=read_gate_limits(config, num_layers, *limits),
    )
    inner = moe.experts.intermediate_size
    check_supported(config, {"moe_shared_expert_intermediate_size": inner})
    return ModelSpec(
        architecture=f"Bailing{spelling}ForCausalLM",
        attention_gates=AttentionGates(apart=True, one_per_head=True),
        recurrent=delta if delta.layers else None,
        moe=moe if with_experts else None,
        names=replace(_NAMES, left_out=left_out_mtp(config, num_layers)),
        mtp=mtp_behind(config, num_layers, norm="final_layernorm"),
        **fields,
    )


def _rotating_in_full(config: ConfigReader) -> ConfigReader:
    """The same without ``partial_rotary_factor``, the share of ``head_dim`` that
    ``qk_rope_head_dim`` is: all of the latter rotates."""
    key = "partial_rotary_factor"
    tables = {
        name: {other: value for other, value in config.table(name).items() if other != key}
        for name in ("rope_parameters", "rope_scaling")
    }
    return config.with_values(**{key: None}, **tables)


def _delta(config: ConfigReader, num_layers: int) -> KimiDeltaSpec:
    """The layers with Kimi Delta Attention, in the publisher's keys or in those of transformers,
    which takes ``head_dim`` for the part of latent attention that rotates."""

    def size(key: str, of_transformers: str, default: int, minimum: int = 1) -> int:
        given = config.integer(key, default, minimum=minimum, maximum=MOST_HEADS)
        return config.integer(of_transformers, given, minimum=minimum, maximum=MOST_HEADS)

    every = config.integer("layer_group_size", 6)
    if num_layers % every and "layer_types" not in config.values:
        # layers behind the last whole group: the publisher's code and transformers differ
        wanted = f"a divisor of num_hidden_layers ({num_layers}) unless layer_types are given"
        raise config.error("layer_group_size", wanted, every)
    kinds = hybrid_kinds(config, num_layers, every)
    num_heads, dim = (
        size("num_attention_heads", "linear_num_heads", 32),
        size("head_dim", "linear_head_dim", 128),
    )
    return KimiDeltaSpec(
        num_key_heads=num_heads,
        num_heads=num_heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, minimum=2),
        layers=frozenset(n for n, kind in enumerate(kinds) if kind == "linear_attention"),
        direct=True,
        least_decay=_least_decay(config) if config.flag("kda_safe_gate", True) else None,
    )


def _least_decay(config: ConfigReader) -> float:
    bound = config.values.get("kda_lower_bound", -5.0)
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not -1e3 < bound < 0:
        raise config.error("kda_lower_bound", "a number below 0 and above -1000", bound)
    return float(bound)
