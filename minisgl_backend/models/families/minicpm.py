"""MiniCPM 3: multi-head latent attention, with multipliers of embeddings, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.latents import latent_fields
from minisgl_backend.models.spec import BiasesSpec, ModelSpec, ScalesSpec


def read_minicpm3(config: ConfigReader) -> ModelSpec:
    """``MiniCPM3ForCausalLM``: heads rotate by halves, not by neighbours."""
    config = config.with_defaults(
        rms_norm_eps=1e-5,
        num_key_value_heads=40,
        kv_lora_rank=256,
        max_position_embeddings=2**15,
        q_lora_rank=768,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        tie_word_embeddings=True,
    )
    if "v_head_dim" not in config.values:
        num_heads = config.integer("num_attention_heads")
        config = config.with_values(v_head_dim=config.integer("hidden_size") // num_heads)
    fields = latent_fields(config.with_values(rope_interleave=False))
    scales = ScalesSpec(embedding=config.number("scale_emb", 12))
    if "scale_depth" not in config.nulls:
        depth = config.number("scale_depth", 1.4)
        scales = replace(scales, branch=depth / fields["num_layers"] ** 0.5)
    if "dim_model_base" not in config.nulls:
        base = config.number("dim_model_base", 256)
        scales = replace(scales, logits=base / fields["hidden_size"])
    return ModelSpec(
        architecture="MiniCPM3ForCausalLM",
        biases=BiasesSpec(mlp=config.flag("mlp_bias")),
        scales=scales,
        **fields,
    )
