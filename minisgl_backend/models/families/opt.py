"""OPT: learned positions, LayerNorms, and ReLU in place of gates."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl_backend.models.bounds import MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    check_supported,
    layer_norms,
    positions_by_table,
    read_activation,
)
from minisgl_backend.models.spec import BiasesSpec, ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "_remove_final_layer_norm": False,
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
    }
)
"""The only supported values of these keys; OPT-350m has others."""
_OFFSET: Final = 2
"""The first rows of the table of positions are for padding."""
_NAMES: Final = TensorNames(
    renamed=(
        ("model.decoder.", "model."),
        ("decoder.", "model."),
        ("model.final_layer_norm.", "model.norm."),
        (".self_attn_layer_norm.", ".input_layernorm."),
        (".final_layer_norm.", ".post_attention_layernorm."),
        (".self_attn.out_proj.", ".self_attn.o_proj."),
        (".fc1.", ".mlp.up_proj."),
        (".fc2.", ".mlp.down_proj."),
    )
)


def read_opt(config: ConfigReader) -> ModelSpec:
    """``OPTForCausalLM``: all sizes but 350m, which normalizes outputs and has narrower
    embeddings."""
    check_supported(config, _SUPPORTED)
    config = config.respelled({"ffn_dim": "intermediate_size"}).with_defaults(
        vocab_size=50_272,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    hidden_size = config.integer("hidden_size", maximum=MOST_WIDTH)
    check_supported(config, {"word_embed_proj_dim": hidden_size})
    fields = common_fields(config)
    fields["norms"] = layer_norms(config)
    bias = config.flag("enable_bias", True)
    return ModelSpec(
        architecture="OPTForCausalLM",
        biases=BiasesSpec(qkv=bias, output=bias, mlp=bias),
        gate=None,
        activation=read_activation(config, "activation_function", "relu"),
        names=_NAMES,
        **positions_by_table(fields, offset=_OFFSET),
    )
