"""Bamba: Llama with Mamba 2 in most layers."""

from __future__ import annotations

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import attention_biases
from minisgl_backend.models.families.mamba import RENAMED, merged_parts, read_mamba
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import TensorNames


def read_bamba(config: ConfigReader) -> ModelSpec:
    """``BambaForCausalLM``: attention, whose heads rotate by half, is in the layers of
    ``attn_layer_indices``, and Mamba 2 in the others."""
    config = config.with_defaults(
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        max_position_embeddings=2**18,
        rms_norm_eps=1e-5,
        vocab_size=128_000,
    )
    config = config.with_values(partial_rotary_factor=0.5)  # as transformers, whatever it was
    fields = common_fields(config, partial=True)
    attending = config.integers("attn_layer_indices")
    layers = frozenset(range(fields["num_layers"])) - frozenset(attending)
    mamba = read_mamba(config, fields["hidden_size"], layers)
    return ModelSpec(
        architecture="BambaForCausalLM",
        biases=attention_biases(config, mlp=config.flag("mlp_bias")),
        recurrent=mamba if layers else None,
        names=TensorNames(renamed=RENAMED, merged=merged_parts(".mamba", mamba)),
        **fields,
    )
