"""Recursive's Flint: attention with sinks, windows in most layers, and experts by sigmoids."""

from __future__ import annotations

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.models.attention_spec import ScoresSpec
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_WIDTH
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    ATTENTION_KINDS,
    qk_normed_fields,
    ropes_by_window,
    sparse_layers,
    windows_by_kind,
)
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.tensor_names import TensorNames


def read_flint(config: ConfigReader) -> ModelSpec:
    """``FlintForCausalLM``: only the layers with windows rotate, and the first two have no experts.
    Transformers keeps routers and sinks in float32."""
    if "mlp_only_layers" not in config.values:
        config = config.with_values(mlp_only_layers=[0, 1])
    config = config.with_defaults(num_key_value_heads=4, max_position_embeddings=2**18)
    fields = qk_normed_fields(config, head_dim=128)
    num_layers = fields["num_layers"]
    kinds = config.layer_kinds(ATTENTION_KINDS, num_layers) or [
        "full_attention" if layer in (0, num_layers - 1) or layer % 4 == 1 else "sliding_attention"
        for layer in range(num_layers)
    ]
    windows = windows_by_kind(kinds, config.integer("sliding_window", 513))
    fields |= {"windows": windows, "ropes": ropes_by_window(windows, fields["rope"])}
    layers = sparse_layers(config, num_layers)
    return ModelSpec(
        architecture="FlintForCausalLM",
        scores=ScoresSpec(sinks=True),
        moe=MoeSpec(experts=_experts(config), layers=layers) if layers else None,
        names=TensorNames(renamed=((".softmax_offset", ".sinks"),)),
        **fields,
    )


def _experts(config: ConfigReader) -> ExpertsSpec:
    rule = RoutingRule(
        num_experts=config.integer("num_experts", 256, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 6),
        normalize=config.flag("norm_topk_prob", True),
        sigmoid=True,
    )
    shared = config.integer("shared_expert_intermediate_size", 1024, maximum=MOST_WIDTH)
    return ExpertsSpec(
        routing=rule,
        intermediate_size=config.integer("moe_intermediate_size", 512, maximum=MOST_WIDTH),
        shared=SharedExpert(name="shared_expert", intermediate_size=shared),
    )
