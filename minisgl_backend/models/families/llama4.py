"""Llama 4, text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, SharedExpert
from minisgl_backend.models.bounds import MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    attention_biases,
    read_rotating,
    read_routing,
    text_config,
    text_part,
)
from minisgl_backend.models.rope_spec import QueryGrowth
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames

_KINDS: Final = ("chunked_attention", "full_attention")


def read_llama4_text(config: ConfigReader) -> ModelSpec:
    """``Llama4ForCausalLM``, also the text part of Llama 4, Scout and Maverick: sections in three
    of four layers, which rotate; queries that grow in the others; and in all layers, or in every
    second, experts, of which a token takes one in addition to a shared one."""
    config = config.with_defaults(
        intermediate_size=8192,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2**17,
    )
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    is_normed, rope = config.flag("use_qk_norm", True), replace(fields["rope"], interleaved=True)
    if is_normed and rope.attention_factor != 1.0:
        raise ConfigError(
            f"{config.where}: use_qk_norm normalizes what is rotated, and does not go with a "
            f"rotation that multiplies it by {rope.attention_factor:g}"
        )
    rotates = read_rotating(config, num_layers)
    kinds = config.layer_kinds(_KINDS, num_layers) or [
        "chunked_attention" if one else "full_attention" for one in rotates
    ]
    section = config.integer_or_null("attention_chunk_size", 8192)
    fields["windows"] = tuple(section if kind == "chunked_attention" else None for kind in kinds)
    fields["rope"], fields["ropes"] = rope, tuple(rope if one else None for one in rotates)
    moe = _experts(config, num_layers, fields["intermediate_size"])
    fields["intermediate_size"] = config.integer("intermediate_size_mlp", 16384, maximum=MOST_WIDTH)
    return ModelSpec(
        architecture="Llama4ForCausalLM",
        qk_norm="unweighted" if is_normed else None,
        query_growth=_growth(config, rotates),
        sections=any(fields["windows"]),
        moe=moe,
        names=TensorNames(renamed=((".feed_forward.", ".mlp."),), transposed_stacks=True),
        biases=attention_biases(config),
        **fields,
    )


def read_llama4(config: ConfigReader) -> ModelSpec:
    """``Llama4ForConditionalGeneration``, the text part."""
    spec = read_llama4_text(text_config(config, tied=False))
    return text_part(spec, "Llama4ForConditionalGeneration")


def _growth(config: ConfigReader, rotates: list[bool]) -> QueryGrowth | None:
    """How queries grow in layers that do not rotate. Older files have a number in place of the
    flag."""
    given: Any = config.values.get("attn_temperature_tuning", True)
    if not isinstance(given, int):
        raise config.error("attn_temperature_tuning", "true or false", given)
    if not given:
        return None
    return QueryGrowth(
        factor=config.number("attn_scale", 0.1, or_zero=True),
        period=config.integer("floor_scale", 8192),
        first=1,
        layers=frozenset(layer for layer, one in enumerate(rotates) if not one),
    )


def _experts(config: ConfigReader, num_layers: int, width: int) -> MoeSpec | None:
    step = config.integer("interleave_moe_layer_step", 1)
    layers = frozenset(range(step - 1, num_layers, step))
    if "moe_layers" in config.values:
        layers = frozenset(config.integers("moe_layers")) & frozenset(range(num_layers))
    experts = ExpertsSpec(
        routing=replace(read_routing(config, 16, 1, normalize=False), sigmoid=True),
        intermediate_size=width,
        shared=SharedExpert(name="shared_expert", intermediate_size=width),
        router="router",
        scales_inputs=True,
    )
    return MoeSpec(experts=experts, layers=layers) if layers else None
