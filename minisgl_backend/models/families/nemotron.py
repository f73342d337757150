"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: Mamba 2 in most layers, of which each is a single
part."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_HEADS, MOST_LAYERS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import check_supported, read_state_dtype
from minisgl_backend.models.families.mamba import (
    merged_parts,
    read_kinds,
    read_time_steps,
)
from minisgl_backend.models.recurrent_spec import MambaSpec
from minisgl_backend.models.spec import BiasesSpec, ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_MODULES: Final = MappingProxyType(
    {"linear_attention": "mamba", "full_attention": "self_attn", "moe": "mlp", "mlp": "mlp"}
)
"""The kinds of layers, with what the decoder calls their only part."""
_PATTERN: Final = MappingProxyType(
    {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
)
"""The same kinds in ``hybrid_override_pattern``."""
_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "attention_bias": False,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mlp_hidden_act": "relu2",
        "residual_in_fp32": False,
        "sliding_window": None,
    }
)
"""The only supported values of these keys."""
_FORMER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_limit": "time_step_limit",
        "mamba_n_groups": "n_groups",
    }
)
"""Former keys, each with the present one, over which transformers prefers it."""


def read_nemotron_h(config: ConfigReader) -> ModelSpec:
    """``NemotronHForCausalLM``: each layer is only Mamba 2, attention that does not rotate, a block
    without gates, or experts without gates. Steps are limited by ``time_step_limit``, as in
    NVIDIA's own code. (transformers limits steps of prompts by ``time_step_min`` instead, and those
    of decoding not at all.)"""
    check_supported(config, _SUPPORTED)
    former = {key: config.values[old] for old, key in _FORMER.items() if old in config.values}
    config = config.with_values(**former)
    kinds = _kinds(config)
    config = config.with_defaults(
        vocab_size=131_072,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=config.integer("attention_head_dim", 128, maximum=MOST_HEADS),
        intermediate_size=21_504,
        max_position_embeddings=4096,
    )
    eps = config.number("layer_norm_epsilon", 1e-5)
    config = config.with_values(num_hidden_layers=len(kinds), rms_norm_eps=eps)
    fields = common_fields(config)
    by_kind = {
        kind: frozenset(layer for layer, own in enumerate(kinds) if own == kind)
        for kind in _MODULES
    }
    mamba = _mamba(config, by_kind["linear_attention"])
    return ModelSpec(
        architecture="NemotronHForCausalLM",
        ropes=(None,) * len(kinds),
        gate=None,
        biases=BiasesSpec(mlp=config.flag("mlp_bias")),
        recurrent=mamba if mamba.layers else None,
        single_parts=tuple(
            "feed-forward" if _MODULES[kind] == "mlp" else "mixer" for kind in kinds
        ),
        moe=_experts(config, by_kind["moe"]) if by_kind["moe"] else None,
        names=TensorNames(
            renamed=(
                ("backbone.", "model."),
                ("model.embeddings.", "model.embed_tokens."),
                ("model.norm_f.", "model.norm."),
                *_renamed(kinds),
            ),
            merged=merged_parts(".mamba", mamba),
            left_out=("mtp.",),
        ),
        **fields,
    )


def _kinds(config: ConfigReader) -> list[str]:
    """The kind of each layer; their number is that of all layers."""
    pattern = config.word("hybrid_override_pattern", "ME*-")
    given: Any = config.values.get("layers_block_type", config.values.get("layer_types"))
    if given is None:
        key, known, given = "hybrid_override_pattern", list(_PATTERN), pattern
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
    else:
        key, known = "layers_block_type", list(_MODULES)
        kinds = read_kinds(given) if isinstance(given, list) else []
    if not 0 < len(kinds) <= MOST_LAYERS or any(kind not in _MODULES for kind in kinds):
        raise config.error(key, f"up to {MOST_LAYERS} of {', '.join(known)}", given)
    return kinds


def _renamed(kinds: list[str]) -> list[tuple[str, str]]:
    """The names of all layers, whose only part is their ``mixer``."""
    pairs = []
    for layer, kind in enumerate(kinds):
        around = f".layers.{layer}."
        pairs.append((f"{around}norm.", f"{around}input_layernorm."))
        pairs.append((f"{around}mixer.", f"{around}{_MODULES[kind]}."))
    return pairs


def _mamba(config: ConfigReader, layers: frozenset[int]) -> MambaSpec:
    return MambaSpec(
        num_heads=config.integer("mamba_num_heads", 128, maximum=MOST_HEADS),
        head_dim=config.integer("mamba_head_dim", 64, maximum=MOST_HEADS),
        state_size=config.integer("ssm_state_size", 128, maximum=MOST_HEADS),
        num_groups=config.integer("n_groups", 8, maximum=MOST_HEADS),
        conv_width=config.integer("conv_kernel", 4, minimum=2, maximum=MOST_HEADS),
        layers=layers,
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias"),
        time_steps=read_time_steps(config),
        state_dtype=read_state_dtype(config, "mamba_ssm_cache_dtype"),
    )


def _experts(config: ConfigReader, layers: frozenset[int]) -> MoeSpec:
    """Experts by DeepSeek's router, and one that all tokens take."""
    check_supported(config, {"mlp_bias": False})
    latent = None
    if "moe_latent_size" in config.values:
        latent = config.integer("moe_latent_size", maximum=MOST_WIDTH)
    num_experts = config.integer("num_local_experts", 8, maximum=MOST_EXPERTS)
    rule = RoutingRule(
        num_experts=config.integer("n_routed_experts", num_experts, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 2),
        normalize=config.flag("norm_topk_prob", True),
        sigmoid=True,
        corrected=True,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1, maximum=MOST_EXPERTS),
        top_groups=config.integer("topk_group", 1, maximum=MOST_EXPERTS),
    )
    shared = config.integer("moe_shared_expert_intermediate_size", 7688, maximum=MOST_WIDTH)
    experts = ExpertsSpec(
        routing=rule,
        intermediate_size=config.integer("moe_intermediate_size", 7688, maximum=MOST_WIDTH),
        shared=SharedExpert(name="shared_experts", intermediate_size=shared),
        gate=None,
        latent_size=latent,
    )
    return MoeSpec(experts=experts, layers=layers)
