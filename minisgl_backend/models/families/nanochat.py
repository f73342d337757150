"""Karpathy's nanochat: norms without weights, also of the embeddings, and the square of ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import attention_biases, check_supported
from minisgl_backend.models.rope_spec import RopeSpec
from minisgl_backend.models.spec import ModelSpec, ScalesSpec
from minisgl_backend.models.tensor_names import TensorNames

_RENAMED: Final = ((".mlp.fc1.", ".mlp.up_proj."), (".mlp.fc2.", ".mlp.down_proj."))
"""Names in checkpoints, each with the decoder's."""


def read_nanochat(config: ConfigReader) -> ModelSpec:
    """``NanoChatForCausalLM``: heads are normalized after they rotate, which is the same as before
    unless the rotation also multiplies them."""
    check_supported(config, {"hidden_act": "relu2"})
    fields = common_fields(config.with_values(hidden_act="silu"))  # blocks have no gate
    rope: RopeSpec = fields["rope"]
    if rope.attention_factor != 1.0:
        raise ConfigError(
            f"{config.where}: a rotation that multiplies by {rope.attention_factor:g} is not "
            "supported, since what is rotated is then normalized"
        )
    fields["rope"] = replace(rope, reversed=True)
    fields["norms"] = replace(fields["norms"], of_embedding=True, weighted=False)
    is_capped = "final_logit_softcapping" not in config.nulls
    cap = config.number("final_logit_softcapping", 15.0) if is_capped else 0.0
    return ModelSpec(
        architecture="NanoChatForCausalLM",
        qk_norm="unweighted",
        gate=None,
        scales=ScalesSpec(logit_cap=cap),
        names=TensorNames(renamed=_RENAMED),
        biases=attention_biases(config),
        **fields,
    )
