"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from minisgl_backend.models.config_json import ConfigReader, common_fields
from minisgl_backend.models.spec import ModelSpec


def read_mistral(config: ConfigReader) -> ModelSpec:
    """``MistralForCausalLM``; ``sliding_window`` null means none, as versions since 0.2 have it."""
    fields = common_fields(config)
    window = config.integer_or_null("sliding_window", 4096)
    fields["windows"] = (window,) * fields["num_layers"]
    return ModelSpec(architecture="MistralForCausalLM", **fields)
