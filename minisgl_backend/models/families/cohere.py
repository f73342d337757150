"""Cohere's Command and Aya: attention and feed-forward read the same norm, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.experts_spec import ExpertsSpec, SharedExpert
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_POSITIONS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    attention_biases,
    check_supported,
    kinds_by_pattern,
    layers_with_experts,
    read_routing,
    ropes_by_window,
    windows_by_kind,
)
from minisgl_backend.models.spec import ModelSpec, MoeSpec, ScalesSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_qk_norm": False,
    }
)
"""The only supported values of these keys."""


def read_cohere(config: ConfigReader) -> ModelSpec:
    """``CohereForCausalLM``: Command R and Aya, without norms of queries and keys, which the first
    Command R+ has."""
    fields = _command_fields(config.with_defaults(rope_theta=5e5))
    return ModelSpec(architecture="CohereForCausalLM", **fields)


def read_cohere2(config: ConfigReader) -> ModelSpec:
    """``Cohere2ForCausalLM``: Command R7B and Command A. Three of four layers have windows; the
    others do not rotate."""
    fields = _command_fields(config)
    rope, num_layers = fields["rope"], fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers)
    kinds = kinds or kinds_by_pattern(num_layers, config.integer("sliding_window_pattern", 4))
    windows = windows_by_kind(kinds, config.integer_or_null("sliding_window", 4096))
    fields["windows"] = windows
    fields["ropes"] = ropes_by_window(windows, rope)
    return ModelSpec(architecture="Cohere2ForCausalLM", **fields)


def read_cohere2_moe(config: ConfigReader) -> ModelSpec:
    """``Cohere2MoeForCausalLM``: Command A+, whose layers have experts, perhaps but for the first
    ones. Norms are RMSNorms if config.json has ``rms_norm_eps``."""
    fields = _command_fields(config.with_defaults(head_dim=128))
    rope, num_layers = fields["rope"], fields["num_layers"]
    num_dense = config.integer("first_k_dense_replace", 0, minimum=0, maximum=num_layers)
    sparse = layers_with_experts(config, num_layers, dense=num_dense)
    of_dense = config.integer("prefix_dense_sliding_window_pattern", 1)
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or [
        *kinds_by_pattern(num_dense, of_dense),
        *kinds_by_pattern(num_layers - num_dense, config.integer("sliding_window_pattern", 4)),
    ]
    windows = windows_by_kind(kinds, config.integer_or_null("sliding_window", 4096))
    fields["windows"] = windows
    fields["ropes"] = tuple(
        rope if window is not None or (of_dense == 1 and layer not in sparse) else None
        for layer, window in enumerate(windows)
    )
    fields["norms"] = replace(fields["norms"], centered="rms_norm_eps" not in config.values)
    inner = fields["intermediate_size"]  # of an expert
    key = "prefix_dense_intermediate_size"
    fields["intermediate_size"] = config.integer(key, inner, maximum=MOST_WIDTH)
    experts, names = _command_experts(config, inner)
    moe = MoeSpec(experts=experts, layers=sparse) if sparse else None
    return ModelSpec(architecture="Cohere2MoeForCausalLM", moe=moe, names=names, **fields)


def _command_experts(config: ConfigReader, inner: int) -> tuple[ExpertsSpec, TensorNames]:
    """The experts, of width ``inner``, and the factor of the last weight of those that all tokens
    take: the layer adds the sum of both kinds or, by default, their average."""
    select = _one_of(config, "expert_selection_fn", ("softmax", "sigmoid"))
    combine = _one_of(config, "shared_expert_combination_strategy", ("average", "sum"))
    normalize = select == "softmax" or config.flag("norm_topk_prob", True)
    rule = read_routing(config, num_experts=8, top_k=2, normalize=normalize)
    rule = replace(rule, sigmoid=select == "sigmoid")
    num_shared = config.integer("num_shared_experts", 0, minimum=0, maximum=MOST_EXPERTS)
    if not num_shared:
        return ExpertsSpec(routing=rule, intermediate_size=inner), TensorNames()
    shared = SharedExpert(name="shared_experts", intermediate_size=num_shared * inner)
    scaled = {}
    if combine == "average":
        rule, scaled = replace(rule, scale=0.5), {".shared_experts.down_proj": 0.5}
    experts = ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)
    return experts, TensorNames(scaled=scaled)


def _one_of(config: ConfigReader, key: str, known: tuple[str, ...]) -> str:
    """The word under ``key``, by default the first of those that are ``known``."""
    value = config.word(key, known[0])
    if value not in known:
        raise config.error(key, "one of " + ", ".join(known), value)
    return value


def _command_fields(config: ConfigReader) -> dict[str, Any]:
    """The fields that all have in common. The first Command R has its context in
    ``model_max_length``, which then is the larger number."""
    check_supported(config, _SUPPORTED)
    positions = config.integer("max_position_embeddings", 8192, maximum=MOST_POSITIONS)
    config = config.with_values(
        max_position_embeddings=max(
            positions, config.integer("model_max_length", positions, maximum=MOST_POSITIONS)
        ),
        rms_norm_eps=config.number("rms_norm_eps", config.number("layer_norm_eps", 1e-5)),
    ).with_defaults(tie_word_embeddings=True)
    fields = common_fields(config)
    more = {
        "rope": replace(fields["rope"], interleaved=True),
        "norms": replace(fields["norms"], centered=True),
        "parallel": "parts",
        "scales": ScalesSpec(logits=config.number("logit_scale", 0.0625)),
        "biases": attention_biases(config),
    }
    return fields | more
