"""Qwen3-Next and Qwen3.5 and later: Gated DeltaNet in three of four layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minisgl_backend.experts_spec import ExpertsSpec, SharedExpert
from minisgl_backend.models.attention_spec import AttentionGates
from minisgl_backend.models.bounds import MOST_HEADS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    attention_biases,
    hybrid_kinds,
    read_routing,
    read_state_dtype,
    sparse_layers,
    text_config,
    text_part,
)
from minisgl_backend.models.families.mtp_layers import mtp_beside
from minisgl_backend.models.recurrent_spec import DeltaSpec
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import MULTIMODAL, TensorNames


def read_qwen3_next(config: ConfigReader) -> ModelSpec:
    """``Qwen3NextForCausalLM``: like Qwen3.5, with experts in every ``decoder_sparse_step``-th
    layer and projections that are ordered by key heads."""
    config = config.with_defaults(num_key_value_heads=2, hidden_size=2048, intermediate_size=5632)
    fields, delta = _hybrid_fields(config)
    moe = MoeSpec(
        experts=_experts_beside_one(config, 512, 10, normalize=config.flag("norm_topk_prob", True)),
        layers=sparse_layers(config, fields["num_layers"]),
    )
    of_inputs, of_rates = ".linear_attn.in_proj_qkvz", ".linear_attn.in_proj_ba"
    merged = {
        of_inputs: _by_channels("in_proj", delta) | {"in_proj_z": delta.value_size},
        of_rates: {"in_proj_b": delta.num_heads, "in_proj_a": delta.num_heads},
        ".linear_attn.conv1d": _by_channels("conv", delta),
    }
    by_head = dict.fromkeys((of_inputs, of_rates), delta.num_key_heads)
    names = TensorNames(merged=merged, by_head=by_head, left_out=("mtp.",))
    return ModelSpec(architecture="Qwen3NextForCausalLM", moe=moe, names=names, **fields)


def read_qwen3_5(config: ConfigReader) -> ModelSpec:
    """``Qwen3_5ForCausalLM``: three of four layers are Gated DeltaNet, the others attention with a
    gated output and with heads that rotate by a quarter. Where transformers has saved the text part
    of a larger model alone, tensors keep the names that they had there."""
    config = config.with_defaults(num_key_value_heads=4, hidden_size=4096)
    fields, delta = _hybrid_fields(config)
    merged = {
        ".linear_attn.in_proj_qkv": _by_channels("in_proj", delta),
        ".linear_attn.conv1d": _by_channels("conv", delta),
    }
    names = TensorNames(renamed=MULTIMODAL.renamed, merged=merged, left_out=("mtp.",))
    return ModelSpec(architecture="Qwen3_5ForCausalLM", names=names, **fields)


def read_qwen3_5_multimodal(config: ConfigReader) -> ModelSpec:
    """``Qwen3_5ForConditionalGeneration``, the text part: Qwen3.5 and later as they are shipped."""
    spec = read_qwen3_5(text_config(config, tied=False))
    return text_part(spec, "Qwen3_5ForConditionalGeneration")


def read_qwen3_5_moe(config: ConfigReader) -> ModelSpec:
    """``Qwen3_5MoeForCausalLM``: the same with experts in every layer, and a shared one, which is
    gated."""
    experts = _experts_beside_one(config, 256, 8, normalize=True)
    # no layer has a block of that width, so config.json does not name one
    defaults = {
        "intermediate_size": experts.intermediate_size,
        "hidden_size": 2048,
        "num_key_value_heads": 2,
    }
    spec = read_qwen3_5(config.with_defaults(**defaults))
    moe = MoeSpec(experts=experts, layers=frozenset(range(spec.num_layers)))
    return replace(spec, architecture="Qwen3_5MoeForCausalLM", moe=moe)


def read_qwen3_5_moe_multimodal(config: ConfigReader) -> ModelSpec:
    """``Qwen3_5MoeForConditionalGeneration``, the text part."""
    spec = read_qwen3_5_moe(text_config(config, tied=False))
    return text_part(spec, "Qwen3_5MoeForConditionalGeneration")


def _hybrid_fields(config: ConfigReader) -> tuple[dict[str, Any], DeltaSpec]:
    """Fields for Gated DeltaNet with the defaults of Qwen3-Next and later, and gated attention in
    between; and the shape of the DeltaNet layers, even if there are none."""
    config = config.with_defaults(
        head_dim=256, partial_rotary_factor=0.25, max_position_embeddings=2**15
    )
    fields = common_fields(config, partial=True)
    num_layers = fields["num_layers"]
    every = config.integer("full_attention_interval", 4)
    kinds = hybrid_kinds(config, num_layers, every)
    linear = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    delta = DeltaSpec(
        num_key_heads=config.integer("linear_num_key_heads", 16, maximum=MOST_HEADS),
        num_heads=config.integer("linear_num_value_heads", 32, maximum=MOST_HEADS),
        key_dim=config.integer("linear_key_head_dim", 128, maximum=MOST_HEADS),
        value_dim=config.integer("linear_value_head_dim", 128, maximum=MOST_HEADS),
        conv_width=config.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MOST_HEADS),
        layers=linear,
        state_dtype=read_state_dtype(config, "mamba_ssm_dtype"),
    )
    if delta.num_heads % delta.num_key_heads:
        raise config.error(
            "linear_num_value_heads",
            f"a multiple of linear_num_key_heads ({delta.num_key_heads})",
            delta.num_heads,
        )
    more = {
        "mtp": mtp_beside(config, num_layers),
        "qk_norm": "head",
        "biases": attention_biases(config),
        "attention_gates": AttentionGates(),
        "norms": replace(fields["norms"], offset=1.0),
        "recurrent": delta if linear else None,
    }
    return fields | more, delta


def _by_channels(module: str, delta: DeltaSpec) -> dict[str, int]:
    """The modules for queries, keys and values, with their numbers of outputs, that a checkpoint
    has as one."""
    sizes = {"q": delta.key_size, "k": delta.key_size, "v": delta.value_size}
    return {f"{module}_{name}": size for name, size in sizes.items()}


def _experts_beside_one(
    config: ConfigReader, num_experts: int, top_k: int, *, normalize: bool
) -> ExpertsSpec:
    """The experts of Qwen3-Next and later, with a shared one, which is gated."""
    shared = config.integer("shared_expert_intermediate_size", 512, maximum=MOST_WIDTH)
    return ExpertsSpec(
        routing=read_routing(config, num_experts, top_k, normalize=normalize),
        intermediate_size=config.integer("moe_intermediate_size", 512, maximum=MOST_WIDTH),
        shared=SharedExpert(name="shared_expert", intermediate_size=shared, gated=True),
    )
