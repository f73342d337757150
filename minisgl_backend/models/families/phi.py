"""Phi 1.5 and 2, Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any, Final

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    check_supported,
    layer_norms,
    outputs_of_qkv,
    read_activation,
    read_window,
)
from minisgl_backend.models.spec import BiasesSpec, ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_NAMES_OF_PHI2: Final = TensorNames(
    renamed=(
        ("model.final_layernorm.", "model.norm."),
        (".self_attn.dense.", ".self_attn.o_proj."),
        (".mlp.fc1.", ".mlp.up_proj."),
        (".mlp.fc2.", ".mlp.down_proj."),
    )
)


def read_phi(config: ConfigReader) -> ModelSpec:
    """``PhiForCausalLM``, Phi 1.5 and 2: attention and feed-forward on the same LayerNorm, side by
    side, heads that rotate in part, and biases everywhere, also of the head."""
    # a head with biases is none that the embedding could be
    check_supported(config, {"qk_layernorm": False, "tie_word_embeddings": False})
    config = config.with_defaults(
        vocab_size=51_200,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        max_position_embeddings=2048,
        partial_rotary_factor=0.5,
    )
    function = read_activation(config, "hidden_act", "gelu_new")
    fields = common_fields(config.with_values(hidden_act="silu"), partial=True)
    fields["norms"] = layer_norms(config, "layer_norm_eps")
    return ModelSpec(
        architecture="PhiForCausalLM",
        biases=BiasesSpec(qkv=True, output=True, mlp=True, head=True),
        parallel="parts",
        gate=None,
        activation=function,
        names=_NAMES_OF_PHI2,
        **fields,
    )


def read_phi3(config: ConfigReader) -> ModelSpec:
    """``Phi3ForCausalLM``, Phi-3 and Phi-4: merged projections in the file, and in Phi-4-mini heads
    that rotate only in part."""
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096)
    fields = common_fields(_longrope(config), partial=True)
    inner = fields["intermediate_size"]
    merged = {
        ".self_attn.qkv_proj": outputs_of_qkv(fields["heads"]),
        ".mlp.gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    fields["windows"] = (read_window(config),) * fields["num_layers"]
    return ModelSpec(architecture="Phi3ForCausalLM", names=TensorNames(merged=merged), **fields)


def _longrope(config: ConfigReader) -> ConfigReader:
    """The same with a single name for what Phi-3's config.json calls ``su``, ``yarn`` or
    ``longrope``."""
    tables: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        table = dict(config.table(key))
        for name in ("type", "rope_type"):
            if table.get(name) in ("su", "yarn"):
                table[name] = "longrope"
        if table:
            tables[key] = table
    return config.with_defaults(original_max_position_embeddings=4096).with_values(**tables)
