"""GLM-4.5, Solar Open, dots.llm1, MiniMax-M2 and Hy3: attention as in other families, and experts
by DeepSeek's router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_HEADS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    check_supported,
    layers_with_experts,
    qk_normed_fields,
    read_window,
    rotated_share,
    shared_experts,
    windows_by_kind,
)
from minisgl_backend.models.families.mistral import OF_MIXTRAL
from minisgl_backend.models.families.mtp_layers import (
    left_out_mtp,
    mtp_behind,
    names_behind,
)
from minisgl_backend.models.spec import BiasesSpec, ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames


def read_glm4_moe(config: ConfigReader) -> ModelSpec:
    """``Glm4MoeForCausalLM``, GLM-4.5 and GLM-4.6: experts by DeepSeek's router in all but the
    first layers, heads that rotate by half, and perhaps norms of queries and keys."""
    config = config.with_defaults(
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        num_key_value_heads=8,
        max_position_embeddings=2**17,
    )
    fields = common_fields(config, partial=True)
    num_layers = fields["num_layers"]
    dense = config.integer("first_k_dense_replace", 1, minimum=0)
    return ModelSpec(
        architecture="Glm4MoeForCausalLM",
        biases=BiasesSpec(qkv=config.flag("attention_bias")),
        qk_norm="head" if config.flag("use_qk_norm") else None,
        moe=deepseek_experts(config, range(dense, num_layers)),
        names=TensorNames(left_out=left_out_mtp(config, num_layers)),
        mtp=mtp_behind(config, num_layers),
        **fields,
    )


def read_solar_open(config: ConfigReader) -> ModelSpec:
    """``SolarOpenForCausalLM``, Solar Open: Llama's attention, and experts in every layer."""
    check_supported(config, {"first_k_dense_replace": 0, "use_qk_norm": False})
    inner = config.integer("moe_intermediate_size", 1280, maximum=MOST_WIDTH)
    config = config.with_defaults(
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**17,
        moe_intermediate_size=inner,
        intermediate_size=inner,  # required, though no layer is dense
    )
    fields = common_fields(config)
    return ModelSpec(
        architecture="SolarOpenForCausalLM",
        biases=BiasesSpec(qkv=config.flag("attention_bias")),
        moe=deepseek_experts(config, range(fields["num_layers"])),
        **fields,
    )


def read_dots1(config: ConfigReader) -> ModelSpec:
    """``Dots1ForCausalLM``, dots.llm1: Qwen3's attention, and experts by DeepSeek's router."""
    config = config.with_defaults(norm_topk_prob=False)
    fields = qk_normed_fields(config)
    num_layers = fields["num_layers"]
    window = read_window(config)
    first = config.integer("max_window_layers", 62, minimum=0)
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if window and layer >= first else "full_attention"
        for layer in range(num_layers)
    ]
    fields["windows"] = windows_by_kind(kinds, window)
    dense = config.integer("first_k_dense_replace", 0, minimum=0)
    moe = deepseek_experts(config, range(dense, num_layers))
    return ModelSpec(architecture="Dots1ForCausalLM", moe=moe, **fields)


_OF_MINIMAX_M2: Final[Mapping[str, object]] = MappingProxyType(
    {
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_routing_bias": True,
        "use_qk_norm": True,
    }
)
"""The only supported values of these keys."""
_OF_HY_V3: Final[Mapping[str, object]] = MappingProxyType(
    {
        "mlp_bias": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "qk_norm": True,
        "route_norm": True,
    }
)
"""The same."""


def read_minimax_m2(config: ConfigReader) -> ModelSpec:
    """``MiniMaxM2ForCausalLM``, MiniMax-M2: Mixtral's experts by DeepSeek's router without groups,
    norms over all heads of queries and of keys, and heads that rotate in part (``rotary_dim``)."""
    config = config.with_defaults(
        head_dim=128, rope_theta=5e6, num_key_value_heads=8, max_position_embeddings=196_608
    )
    if "rotary_dim" in config.values:
        head_dim = config.integer("head_dim", maximum=MOST_HEADS)
        config = config.with_defaults(partial_rotary_factor=rotated_share(config, head_dim))
    check_supported(config, _OF_MINIMAX_M2)
    if set(kinds := config.integers("attn_type_list")) - {1}:
        raise config.error("attn_type_list", "1 for each layer", kinds)
    fields = common_fields(config, partial=True)
    num_layers = fields["num_layers"]
    rule = RoutingRule(
        num_experts=config.integer("num_local_experts", 256, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 8),
        normalize=True,
        sigmoid=True,
        corrected=True,
    )
    experts = ExpertsSpec(routing=rule, intermediate_size=fields["intermediate_size"])
    correction = "e_score_correction_bias"
    renamed = (f".block_sparse_moe.{correction}", f".mlp.gate.{correction}")
    num_mtp = config.integer("num_mtp_modules", 0, minimum=0)
    return ModelSpec(
        architecture="MiniMaxM2ForCausalLM",
        qk_norm="token",
        moe=MoeSpec(experts=experts, layers=frozenset(range(num_layers))),
        names=TensorNames(
            renamed=(renamed, *OF_MIXTRAL), left_out=names_behind(num_layers, num_mtp)
        ),
        **fields,
    )


def read_hy_v3(config: ConfigReader) -> ModelSpec:
    """``HYV3ForCausalLM``, Hy3: Qwen3's attention, and experts by DeepSeek's router without groups
    in all layers but the first. Published files name no dtype; their weights are in bfloat16."""
    check_supported(config, _OF_HY_V3)
    inner = config.integer("moe_intermediate_size", 1536, maximum=MOST_WIDTH)
    check_supported(config, {"expert_hidden_dim": inner})
    config = config.with_defaults(
        torch_dtype="bfloat16",
        rms_norm_eps=1e-5,
        rope_theta=11_158_840.0,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**17,
    )
    fields = qk_normed_fields(config)
    num_layers = fields["num_layers"]
    layers = layers_with_experts(config, num_layers, dense=1)
    if "mlp_layer_types" not in config.values:  # transformers does not read the other key
        check_supported(config, {"first_k_dense_replace": 1})
    num_experts = config.integer("num_local_experts", 192, maximum=MOST_EXPERTS)
    rule = RoutingRule(
        num_experts=config.integer("num_experts", num_experts, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 8),
        normalize=True,
        sigmoid=True,
        corrected=True,
        scale=config.number("router_scaling_factor", 2.826),
    )
    shared = shared_experts(config, inner, "num_shared_experts")
    names = TensorNames(
        renamed=(
            (".mlp.router.gate.", ".mlp.gate."),
            (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
            (".mlp.shared_mlp.", ".mlp.shared_experts."),
        ),
        left_out=left_out_mtp(config, num_layers),
    )
    experts = ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)
    return ModelSpec(
        architecture="HYV3ForCausalLM",
        moe=MoeSpec(experts=experts, layers=layers) if layers else None,
        names=names,
        mtp=mtp_behind(config, num_layers, norm="final_layernorm"),
        **fields,
    )


def deepseek_experts(config: ConfigReader, layers: Iterable[int]) -> MoeSpec:
    """The experts of DeepSeek-V3 and of models that adopted its router: corrected sigmoids, in
    groups; and shared experts, which are merged into a single wide one."""
    inner = config.integer("moe_intermediate_size", 1408, maximum=MOST_WIDTH)
    num_experts = config.integer("num_local_experts", 128, maximum=MOST_EXPERTS)
    rule = RoutingRule(
        num_experts=config.integer("n_routed_experts", num_experts, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 8),
        normalize=config.flag("norm_topk_prob", True),
        sigmoid=True,
        corrected=True,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1, maximum=MOST_EXPERTS),
        top_groups=config.integer("topk_group", 1, maximum=MOST_EXPERTS),
    )
    shared = shared_experts(config, inner)
    experts = ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)
    return MoeSpec(experts=experts, layers=frozenset(layers))
