"""StableLM 2 and 3B: Llama with LayerNorms, and heads that rotate in part."""

from __future__ import annotations

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import check_supported, layer_norms
from minisgl_backend.models.spec import BiasesSpec, ModelSpec


def read_stablelm(config: ConfigReader) -> ModelSpec:
    """``StableLmForCausalLM``: attention and feed-forward one after the other, or side by side on
    the same norm. Without norms of queries and keys, which the 12B model has."""
    check_supported(config, {"qk_layernorm": False})
    config = config.with_defaults(max_position_embeddings=4096, partial_rotary_factor=0.25)
    fields = common_fields(config, partial=True)
    fields["norms"] = layer_norms(config, "layer_norm_eps")
    return ModelSpec(
        architecture="StableLmForCausalLM",
        biases=BiasesSpec(qkv=config.flag("use_qkv_bias")),
        parallel="parts" if config.flag("use_parallel_residual") else None,
        **fields,
    )
