"""HyperCLOVA X: Granite's multipliers, and norms of the outputs of a layer's parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from minisgl_backend.models.attention_spec import ScoresSpec
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.granite import granite_fields
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_NORMS: Final = (
    (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
    (".post_norm1.", ".post_attention_layernorm."),
    (".post_norm2.", ".post_feedforward_layernorm."),
)
"""Names of norms in layers that also normalize the outputs of their parts."""


def read_hyperclovax(config: ConfigReader) -> ModelSpec:
    """``HyperCLOVAXForCausalLM``, HyperCLOVA X SEED Think 14B. In contrast to Granite,
    ``logits_scaling`` multiplies the logits, and scores are scaled as usual by default."""
    fields = granite_fields(config, mlp_bias=config.flag("mlp_bias"))
    logit_scale = config.number("logits_scaling", 1.0)
    fields["scales"] = replace(fields["scales"], logits=logit_scale)
    if "attention_multiplier" not in config.values:
        fields["scores"] = ScoresSpec(scale=fields["heads"].head_dim ** -0.5)
    if config.flag("use_post_norm", True):
        fields["norms"] = replace(fields["norms"], place="around")
        fields["names"] = TensorNames(renamed=_NORMS)
    return ModelSpec(architecture="HyperCLOVAXForCausalLM", **fields)
