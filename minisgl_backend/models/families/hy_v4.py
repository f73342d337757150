"""Hy4: latent attention with sinks and gates over positions that an indexer chooses, experts, and
several residual streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from minisgl_backend.gates import LimitedGate
from minisgl_backend.models.attention_spec import AttentionGates
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.deepseek_experts import deepseek_experts
from minisgl_backend.models.families.fields import check_supported, layers_with_experts
from minisgl_backend.models.families.latents import latent_fields, layers_that_choose, read_indexer
from minisgl_backend.models.spec import ModelSpec, StreamsSpec
from minisgl_backend.models.tensor_names import TensorNames

_MOST_STREAMS: Final = 16
_NAMES: Final = (
    (".hc_pre.hc_", ".hc_"),
    (".hc_attn_layer.hc_", ".attn_hc."),
    (".hc_mlp_layer.hc_", ".ffn_hc."),
    (".hc_head.hc_head_", ".hc_head."),
    (".hc_head.hc_", ".hc_head."),
    (".learnable_sink_param", ".sinks"),
    (".linear_gate.", ".gate_proj."),
    (".self_attn.gate_proj.", ".self_attn.g_proj."),
)
"""The publisher's names, or those of transformers, each with the decoder's."""


def read_hy_v4(config: ConfigReader) -> ModelSpec:
    """``HYV4ForCausalLM``: Hy4. By default every fourth layer chooses positions, from the second
    on, and so does the first; all layers but the first have experts."""
    # transformers does not read this key
    config = config.with_values(rope_interleave=False).with_defaults(
        index_n_heads=16,
        max_position_embeddings=2**18,
        moe_intermediate_size=768,
        n_routed_experts=config.values.get("num_local_experts", 256),
        q_lora_rank=1536,
        qk_nope_head_dim=192,
        rms_norm_eps=1e-5,
        routed_scaling_factor=2.827,
        v_head_dim=256,
    )
    fields = latent_fields(config)
    num_layers = fields["num_layers"]
    config.layer_kinds(("indexed_attention",), num_layers)
    latent = fields["latent"]
    choosing = layers_that_choose(config, "indexer_types", num_layers)
    if choosing is None:
        choosing = [layer for layer in range(num_layers) if layer == 0 or layer % 4 == 1]
    indexer = replace(
        read_indexer(config, latent, set(choosing), interleaved=False),
        rotates_last=True,
        norm_eps=fields["norms"].eps,
    )
    with_experts = layers_with_experts(config, num_layers, dense=1)
    if "mlp_layer_types" not in config.values:  # transformers does not read the other key
        check_supported(config, {"first_k_dense_replace": 1})
    moe = deepseek_experts(config, with_experts)
    gate = LimitedGate(config.number("swiglu_limit", 10.0), on_input=True)
    return ModelSpec(
        architecture="HYV4ForCausalLM",
        attention_gates=AttentionGates(apart=True),
        moe=replace(moe, experts=replace(moe.experts, gate=gate)) if with_experts else None,
        names=TensorNames(renamed=_NAMES, left_out=("model.mtp_layers.",)),
        streams=StreamsSpec(
            count=config.integer("hc_mult", 4, maximum=_MOST_STREAMS),
            magnitude=config.number("hc_magnitude", 2.0),
            eps=config.number("hc_eps", 1e-6, or_zero=True),
        ),
        **{
            **fields,
            "latent": replace(latent, indexer=indexer),
            "scores": replace(fields["scores"], sinks=True),
        },
    )
