"""EXAONE 4.0, the text part of EXAONE 4.5, and K-EXAONE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from minisgl_backend.models.bounds import MOST_EXPERTS
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.deepseek_experts import deepseek_experts
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    check_supported,
    kinds_by_pattern,
    layers_with_experts,
    text_config,
    text_part,
    windows_by_kind,
)
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_CORRECTION: Final = "e_score_correction_bias"


def read_exaone4(config: ConfigReader) -> ModelSpec:
    """``Exaone4ForCausalLM``: the outputs of attention and feed-forward are normalized, not their
    inputs; queries and keys are normalized by head. If some layers have windows, only these rotate.
    """
    fields = _exaone_fields(config)
    fields["norms"] = replace(fields["norms"], place="after")
    return ModelSpec(architecture="Exaone4ForCausalLM", **fields)


def read_exaone4_5(config: ConfigReader) -> ModelSpec:
    """``Exaone4_5_ForConditionalGeneration``, the text part: EXAONE 4.0."""
    spec = read_exaone4(text_config(config, tied=False))
    spec = replace(spec, names=replace(spec.names, left_out=("mtp.",)))
    return text_part(spec, "Exaone4_5_ForConditionalGeneration")


def read_exaone_moe(config: ConfigReader) -> ModelSpec:
    """``ExaoneMoeForCausalLM``, K-EXAONE, also spelled ``ExaoneMoEForCausalLM``: inputs are
    normalized as usual, and all layers but the first have experts by DeepSeek's router."""
    check_supported(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    fields = _exaone_fields(config)
    num_layers = fields["num_layers"]
    dense = config.integer("first_k_dense_replace", 1, minimum=0)
    layers = layers_with_experts(config, num_layers, dense=dense)
    # the publisher's own list, which transformers does not read
    check_supported(config, {"is_moe_layer": [layer in layers for layer in range(num_layers)]})
    spelled = config.with_defaults(
        moe_intermediate_size=1024, routed_scaling_factor=2.5
    ).with_values(
        n_routed_experts=config.integer("num_experts", 64, maximum=MOST_EXPERTS),
        n_shared_experts=config.integer("num_shared_experts", 1, maximum=MOST_EXPERTS),
    )
    moe = deepseek_experts(spelled, layers)
    names = TensorNames(
        renamed=((f".mlp.{_CORRECTION}", f".mlp.gate.{_CORRECTION}"),), left_out=("mtp.",)
    )
    names_there = config.values.get("architectures", ())
    spelling = "MoE" if "ExaoneMoEForCausalLM" in names_there else "Moe"
    return ModelSpec(
        architecture=f"Exaone{spelling}ForCausalLM",
        moe=moe if layers else None,
        names=names,
        **fields,
    )


def _exaone_fields(config: ConfigReader) -> dict[str, Any]:
    config = config.with_defaults(rms_norm_eps=1e-5, num_key_value_heads=32)
    fields = {**common_fields(config), "qk_norm": "head"}
    kinds, window = _kinds(config, fields["num_layers"])
    fields["windows"] = windows_by_kind(kinds, window)
    if window is not None:
        rope = fields["rope"]
        fields["ropes"] = tuple(rope if kind == "sliding_attention" else None for kind in kinds)
    return fields


def _kinds(config: ConfigReader, num_layers: int) -> tuple[list[str], int | None]:
    """The kind of each layer, and the window of those that slide."""
    window = config.integer_or_null("sliding_window", 4096)
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers)
    if kinds is None and window is not None:
        every = config.integer_or_null("sliding_window_pattern", 4)
        if every is None:
            wanted = "an integer, since there is a sliding_window"
            raise config.error("sliding_window_pattern", wanted, every)
        kinds = kinds_by_pattern(num_layers, every)
    kinds = kinds or ["full_attention"] * num_layers
    if "sliding_attention" in kinds and window is None:
        raise config.error("sliding_window", "an integer, since layer_types has windows", window)
    return kinds, window
