"""Falcon-H1: attention and Mamba 2 side by side in each layer, with multipliers."""

from __future__ import annotations

from typing import Final

from minisgl_backend.models.bounds import MOST_WIDTH
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import check_supported
from minisgl_backend.models.families.mamba import RENAMED, merged_parts, read_mamba
from minisgl_backend.models.spec import ModelSpec, ScalesSpec
from minisgl_backend.models.tensor_names import TensorNames

_NO_BIASES: Final = ("attention_bias", "mamba_proj_bias", "mlp_bias", "projectors_bias")
"""Some would take other multipliers than the weights."""


def read_falcon_h1(config: ConfigReader) -> ModelSpec:
    """``FalconH1ForCausalLM``: each layer adds attention and Mamba 2 of the same input. Multipliers
    of inputs and outputs of projections are multiplied into their weights."""
    check_supported(config, dict.fromkeys(_NO_BIASES, False))
    config = config.with_defaults(
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        vocab_size=128_000,
    )
    fields = common_fields(config)
    has_norm = config.flag("mamba_rms_norm")
    if has_norm:
        check_supported(config, {"mamba_norm_before_gate": False})
        if "mamba_norm_before_gate" not in config.values:  # true by default
            raise config.error("mamba_norm_before_gate", "false, as mamba_rms_norm is true", None)
    inner = None
    if "mamba_d_ssm" not in config.nulls:
        inner = config.integer("mamba_d_ssm", 1024, maximum=MOST_WIDTH)
    layers = frozenset(range(fields["num_layers"]))
    mamba = read_mamba(config, fields["hidden_size"], layers, inner=inner, normed=has_norm)
    return ModelSpec(
        architecture="FalconH1ForCausalLM",
        scales=ScalesSpec(
            embedding=config.number("embedding_multiplier", 1.0),
            logits=config.number("lm_head_multiplier", 1.0),
        ),
        recurrent=mamba,
        parallel="mixers",
        names=TensorNames(
            renamed=RENAMED, merged=merged_parts(".mamba", mamba), scaled=_multipliers(config)
        ),
        **fields,
    )


def _multipliers(config: ConfigReader) -> dict[str, float]:
    """The factors of projections, by the ends of their names."""

    def several(key: str, count: int) -> tuple[float, ...]:
        found = config.numbers(key) or (1.0,) * count
        if len(found) != count:
            raise config.error(key, f"{count} numbers", list(found))
        return found

    into_attention = config.number("attention_in_multiplier", 1.0)
    of_gates, of_blocks = several("mlp_multipliers", 2)
    into_mamba = config.number("ssm_in_multiplier", 1.0)
    of_parts = zip(("z", "x", "b", "c", "dt"), several("ssm_multipliers", 5), strict=True)
    factors = {
        ".self_attn.q_proj": into_attention,
        ".self_attn.k_proj": into_attention * config.number("key_multiplier", 1.0),
        ".self_attn.v_proj": into_attention,
        ".self_attn.o_proj": config.number("attention_out_multiplier", 1.0),
        **{f".mamba.in_proj_{part}": into_mamba * factor for part, factor in of_parts},
        ".mamba.out_proj": config.number("ssm_out_multiplier", 1.0),
        ".mlp.gate_proj": of_gates,
        ".mlp.down_proj": of_blocks,
    }
    return {name: factor for name, factor in factors.items() if factor != 1.0}
