"""Cohere's Command and Aya: attention and feed-forward read the same LayerNorm, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    attention_biases,
    check_supported,
    kinds_by_pattern,
    windows_by_kind,
)
from minisgl_backend.models.spec import MOST_POSITIONS, ModelSpec

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
    fields["ropes"] = tuple(None if window is None else rope for window in windows)
    return ModelSpec(architecture="Cohere2ForCausalLM", **fields)


def _command_fields(config: ConfigReader) -> dict[str, Any]:
    """The fields that both have in common. The first Command R has its context in
    ``model_max_length``, which then is the larger number."""
    check_supported(config, _SUPPORTED)
    positions = config.integer("max_position_embeddings", 8192, maximum=MOST_POSITIONS)
    config = config.with_values(
        max_position_embeddings=max(
            positions, config.integer("model_max_length", positions, maximum=MOST_POSITIONS)
        )
    ).with_defaults(
        rms_norm_eps=config.number("layer_norm_eps", 1e-5),
        tie_word_embeddings=True,
    )
    fields = common_fields(config)
    more = {
        "rope": replace(fields["rope"], interleaved=True),
        "centered_norms": True,
        "parallel_parts": True,
        "logit_scale": config.number("logit_scale", 0.0625),
        **attention_biases(config),
    }
    return fields | more
