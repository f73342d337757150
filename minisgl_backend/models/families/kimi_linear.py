"""Kimi Linear: Kimi Delta Attention in most layers, multi-head latent attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl_backend.models.bounds import MOST_HEADS
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.deepseek_experts import deepseek_experts
from minisgl_backend.models.families.fields import (
    HYBRID_KINDS,
    check_supported,
    layers_with_experts,
)
from minisgl_backend.models.families.latents import latent_fields
from minisgl_backend.models.families.mistral import OF_MIXTRAL
from minisgl_backend.models.families.mtp_layers import left_out_mtp
from minisgl_backend.models.recurrent_spec import KimiDeltaSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {"mla_use_nope": True, "rope_parameters": None, "rope_scaling": None}
    | {"moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
)
"""The only supported values of these keys."""
KEYS: Final = MappingProxyType(
    {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
)
"""Keys of config.json, each with the one that other families have."""


def read_kimi_linear(config: ConfigReader) -> ModelSpec:
    """``KimiLinearForCausalLM``: DeepSeek-V3 with Kimi Delta Attention in three of four layers, and
    attention that does not rotate in the others."""
    check_supported(config, _SUPPORTED)
    config = config.respelled(KEYS).with_defaults(
        max_position_embeddings=2**20,
        moe_intermediate_size=1024,
        n_routed_experts=config.values.get("num_local_experts", 256),
        num_nextn_predict_layers=0,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        rms_norm_eps=1e-5,
        routed_scaling_factor=2.446,
        v_head_dim=128,
    )
    fields = latent_fields(config)
    num_layers = fields["num_layers"]
    dense = config.integer("first_k_dense_replace", 1, minimum=0)
    with_experts = layers_with_experts(config, num_layers, dense=dense)
    moe = deepseek_experts(config, with_experts)
    delta = _delta(config, num_layers)
    return ModelSpec(
        architecture="KimiLinearForCausalLM",
        ropes=(None,) * num_layers,
        recurrent=delta if delta.layers else None,
        moe=moe if with_experts else None,
        names=TensorNames(
            renamed=OF_MIXTRAL,
            left_out=left_out_mtp(config, num_layers),
            vectors=(".A_log",),
        ),
        **fields,
    )


def _delta(config: ConfigReader, num_layers: int) -> KimiDeltaSpec:
    """The layers with Kimi Delta Attention, in the publisher's keys or in those of transformers."""
    table = config.table("linear_attn_config")
    linear = ConfigReader(table, f"{config.where}: linear_attn_config")

    def size(key: str, of_transformers: str, default: int, minimum: int = 1) -> int:
        beside = config.integer(of_transformers, default, minimum=minimum, maximum=MOST_HEADS)
        return linear.integer(key, beside, minimum=minimum, maximum=MOST_HEADS)

    num_heads, dim = (
        size("num_heads", "linear_num_heads", 32),
        size("head_dim", "linear_head_dim", 128),
    )
    kinds = config.layer_kinds(HYBRID_KINDS, num_layers) or _listed_kinds(linear, num_layers)
    return KimiDeltaSpec(
        num_key_heads=num_heads,
        num_heads=num_heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, minimum=2),
        layers=frozenset(n for n, kind in enumerate(kinds) if kind == "linear_attention"),
    )


def _listed_kinds(linear: ConfigReader, num_layers: int) -> list[str]:
    """The kinds of layers by their numbers, which count from 1. Without lists every fourth layer
    after the first one has attention."""
    if not {"full_attn_layers", "kda_layers"} <= linear.values.keys():
        return [HYBRID_KINDS[layer > 0 and layer % 4 == 0] for layer in range(num_layers)]
    attending, of_delta = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    if sorted([*attending, *of_delta]) != list(range(1, num_layers + 1)):
        wanted = f"the layers from 1 to {num_layers} that are not in full_attn_layers"
        raise linear.error("kda_layers", wanted, of_delta)
    return [HYBRID_KINDS[layer + 1 in attending] for layer in range(num_layers)]
