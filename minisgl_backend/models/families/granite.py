"""Granite 3, Granite 4 and Granite SWASH, dense and with experts: Llama with multipliers, and
perhaps with Mamba 2 in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from minisgl_backend.experts_spec import ExpertsSpec, SharedExpert
from minisgl_backend.models.attention_spec import ScoresSpec
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    HYBRID_KINDS,
    attention_biases,
    read_routing,
    windows_by_kind,
)
from minisgl_backend.models.families.mamba import merged_parts, read_kinds, read_mamba
from minisgl_backend.models.spec import ModelSpec, MoeSpec, ScalesSpec
from minisgl_backend.models.tensor_names import TensorNames

_RENAMED: Final = (
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.router."),
    (".block_sparse_moe.", ".mlp."),
    (".shared_mlp.input_linear.", ".mlp.shared_mlp.input_linear."),
    (".shared_mlp.output_linear.", ".mlp.shared_mlp.down_proj."),
)
_OF_DENSE: Final = (
    (".shared_mlp.input_linear.", ".mlp.input_linear."),
    (".shared_mlp.output_linear.", ".mlp.down_proj."),
)
"""Names in checkpoints without experts."""


def read_granite(config: ConfigReader) -> ModelSpec:
    """``GraniteForCausalLM``, Granite 3."""
    return ModelSpec(
        architecture="GraniteForCausalLM",
        **granite_fields(config, mlp_bias=config.flag("mlp_bias")),
    )


def read_granite_moe(config: ConfigReader) -> ModelSpec:
    """``GraniteMoeForCausalLM``, Granite 3 with experts in every layer."""
    return _with_experts(config, "GraniteMoeForCausalLM", granite_fields(config))


def read_granite_moe_shared(config: ConfigReader) -> ModelSpec:
    """``GraniteMoeSharedForCausalLM``: the same, perhaps with an expert that all tokens take."""
    return _with_experts(config, "GraniteMoeSharedForCausalLM", granite_fields(config), shared=True)


def read_granite_swa(config: ConfigReader) -> ModelSpec:
    """``GraniteSWAForCausalLM``, Granite SWASH: attention with sinks, and layers with windows. Each
    layer may have its own base of the rotation; one of 0 means that it does not rotate."""
    config = config.with_defaults(
        rms_norm_eps=1e-5,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return ModelSpec(
        architecture="GraniteSWAForCausalLM",
        **_swa_fields(config, mlp_bias=config.flag("mlp_bias")),
    )


def read_granite_moe_swa(config: ConfigReader) -> ModelSpec:
    """``GraniteMoeSWAForCausalLM``: the same with the experts of ``GraniteMoeShared``."""
    fields = _swa_fields(config)
    return _with_experts(config, "GraniteMoeSWAForCausalLM", fields, shared=True)


def read_granite_moe_hybrid(config: ConfigReader) -> ModelSpec:
    """``GraniteMoeHybridForCausalLM``, Granite 4: Mamba 2 in most layers or in none, and experts
    beside one that all tokens take, or that one alone as a dense block. Heads of attention may
    rotate."""
    config = config.with_defaults(shared_intermediate_size=1024)
    width = config.integer("shared_intermediate_size", maximum=MOST_WIDTH)
    has_experts = config.integer("num_local_experts", 8, minimum=0, maximum=MOST_EXPERTS) > 0
    if not has_experts:
        config = config.with_values(intermediate_size=width)
    fields = granite_fields(config)
    num_layers = fields["num_layers"]
    kinds = _hybrid_kinds(config, num_layers)
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    mamba = read_mamba(config, fields["hidden_size"], layers)
    fields["recurrent"] = mamba if mamba.layers else None
    rotation = config.word("position_embedding_type", "nope")
    if rotation not in ("nope", "rope"):
        raise config.error("position_embedding_type", "nope or rope", rotation)
    if rotation == "nope":
        fields["ropes"] = (None,) * num_layers
    architecture, parts = "GraniteMoeHybridForCausalLM", merged_parts(".mamba", mamba)
    if has_experts:
        spec = _with_experts(config, architecture, fields, shared=True)
        return replace(spec, names=replace(spec.names, merged={**spec.names.merged, **parts}))
    parts[".mlp.input_linear"] = {"gate_proj": width, "up_proj": width}
    names = TensorNames(renamed=_OF_DENSE, merged=parts)
    return ModelSpec(architecture=architecture, names=names, **fields)


def _hybrid_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """The kind of each layer, by default Mamba 2 for all."""
    given = config.values.get("layer_types", config.values.get("layers_block_type"))
    kinds = ["linear_attention"] * num_layers
    if given is not None:
        kinds = read_kinds(given) if isinstance(given, list) else []
    if len(kinds) != num_layers or any(kind not in HYBRID_KINDS for kind in kinds):
        raise config.error("layer_types", f"{num_layers} of {', '.join(HYBRID_KINDS)}", given)
    return kinds


def granite_fields(config: ConfigReader, *, mlp_bias: bool = False) -> dict[str, Any]:
    """The common fields with Granite's multipliers, and perhaps biases of attention."""
    return {
        "scores": ScoresSpec(scale=config.number("attention_multiplier", 1.0)),
        "scales": ScalesSpec(
            embedding=config.number("embedding_multiplier", 1.0),
            branch=config.number("residual_multiplier", 1.0),
            logits=1 / config.number("logits_scaling", 1.0),
        ),
        "biases": attention_biases(config, mlp=mlp_bias),
        **common_fields(config),
    }


def _swa_fields(config: ConfigReader, *, mlp_bias: bool = False) -> dict[str, Any]:
    fields = granite_fields(config, mlp_bias=mlp_bias)
    fields["scores"] = replace(fields["scores"], sinks=True)
    num_layers, rope = fields["num_layers"], fields["rope"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or [
        "sliding_attention" if layer % 4 else "full_attention" for layer in range(num_layers)
    ]
    fields["windows"] = windows_by_kind(kinds, config.integer("sliding_window", 128))
    bases = config.numbers("layer_rope_theta", or_zero=True) or (rope.theta,) * num_layers
    if len(bases) != num_layers or any(0 < base <= 1 for base in bases):
        raise config.error("layer_rope_theta", f"{num_layers} numbers above 1, or 0", list(bases))
    ropes = tuple(replace(rope, theta=base) if base else None for base in bases)
    if set(ropes) != {rope}:
        fields["ropes"] = ropes
    return fields


def _with_experts(
    config: ConfigReader, architecture: str, fields: dict[str, Any], *, shared: bool = False
) -> ModelSpec:
    """Experts in every layer: a softmax over the logits of a token's experts, which is that over
    all logits if the weights sum to 1. ``shared``: the architecture may have an expert that all
    tokens take, whose gates and ups are one tensor."""
    width = config.integer("shared_intermediate_size", 0, minimum=0, maximum=MOST_WIDTH)
    width = width if shared else 0
    experts = ExpertsSpec(
        routing=read_routing(config, 8, 2, normalize=True),
        intermediate_size=fields["intermediate_size"],
        shared=SharedExpert(name="shared_mlp", intermediate_size=width) if width else None,
        router="router",
    )
    merged = {".mlp.shared_mlp.input_linear": {"gate_proj": width, "up_proj": width}}
    return ModelSpec(
        architecture=architecture,
        moe=MoeSpec(experts=experts, layers=frozenset(range(fields["num_layers"]))),
        names=TensorNames(renamed=_RENAMED, merged=merged if width else {}),
        **fields,
    )
