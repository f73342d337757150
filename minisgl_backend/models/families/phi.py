"""Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import read_window
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import TensorNames


def read_phi3(config: ConfigReader) -> ModelSpec:
    """``Phi3ForCausalLM``, Phi-3 and Phi-4: merged projections in the file, and in Phi-4-mini heads
    that rotate only in part."""
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096)
    fields = common_fields(_longrope(config), partial=True)
    heads: LayerHeads = fields["heads"]
    queries, keys = (n * heads.head_dim for n in (heads.num_heads, heads.num_kv_heads))
    inner = fields["intermediate_size"]
    merged = {
        ".self_attn.qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        ".mlp.gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    fields["windows"] = (read_window(config),) * fields["num_layers"]
    return ModelSpec(architecture="Phi3ForCausalLM", names=TensorNames(merged=merged), **fields)


def _longrope(config: ConfigReader) -> ConfigReader:
    """The same with a single name for what Phi-3's config.json calls ``su``, ``yarn`` or
    ``longrope``."""
    tables: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        table = dict(config.table(key))
        for name in ("type", "rope_type"):
            if table.get(name) in ("su", "yarn"):
                table[name] = "longrope"
        if table:
            tables[key] = table
    return config.with_defaults(original_max_position_embeddings=4096).with_values(**tables)
