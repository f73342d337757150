"""EXAONE 4."""

from __future__ import annotations

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import ATTENTION_KINDS, windows_by_kind
from minisgl_backend.models.spec import ModelSpec


def read_exaone4(config: ConfigReader) -> ModelSpec:
    """``Exaone4ForCausalLM``: the outputs of attention and feed-forward are normalized, not their
    inputs; queries and keys are normalized by head. If some layers have windows, only these rotate.
    """
    config = config.with_defaults(rms_norm_eps=1e-5, num_key_value_heads=32)
    fields = common_fields(config)
    kinds, window = _kinds(config, fields["num_layers"])
    fields["windows"] = windows_by_kind(kinds, window)
    if window is not None:
        rope = fields["rope"]
        fields["ropes"] = tuple(rope if kind == "sliding_attention" else None for kind in kinds)
    return ModelSpec(architecture="Exaone4ForCausalLM", norms="after", qk_norm="head", **fields)


def _kinds(config: ConfigReader, num_layers: int) -> tuple[list[str], int | None]:
    """The kind of each layer, and the window of those that slide."""
    window = config.integer_or_null("sliding_window", 4096)
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers)
    if kinds is None and window is not None:
        every = config.with_defaults(sliding_window_pattern=4).integer("sliding_window_pattern")
        kinds = [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
            for layer in range(num_layers)
        ]
    kinds = kinds or ["full_attention"] * num_layers
    if "sliding_attention" in kinds and window is None:
        raise config.error("sliding_window", "an integer, since layer_types has windows", window)
    return kinds, window
