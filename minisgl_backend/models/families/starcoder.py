"""StarCoder 2: LayerNorms with biases, and GELU in place of gates."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import check_supported, layer_norms, read_window
from minisgl_backend.models.spec import BiasesSpec, ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "hidden_act": "gelu_pytorch_tanh",
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attn_weights": True,
    }
)
"""The only supported values of these keys."""


def read_starcoder2(config: ConfigReader) -> ModelSpec:
    """``Starcoder2ForCausalLM``: all layers may have a window, and all projections biases."""
    check_supported(config, _SUPPORTED)
    config = config.with_values(hidden_act="silu").with_defaults(
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True
    )
    fields = common_fields(config)
    fields["windows"] = (read_window(config),) * fields["num_layers"]
    fields["norms"] = layer_norms(config, "norm_epsilon")
    bias = config.flag("use_bias", True)
    return ModelSpec(
        architecture="Starcoder2ForCausalLM",
        biases=BiasesSpec(qkv=bias, output=bias, mlp=bias),
        gate=None,
        activation="gelu",
        names=TensorNames(
            renamed=((".mlp.c_fc.", ".mlp.up_proj."), (".mlp.c_proj.", ".mlp.down_proj."))
        ),
        **fields,
    )
