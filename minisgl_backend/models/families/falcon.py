"""Falcon 7B to 180B, and Falcon 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Literal

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.models.bounds import MOST_HEADS
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    check_supported,
    layer_norms,
    outputs_of_qkv,
    read_activation,
    with_wide_blocks,
)
from minisgl_backend.models.spec import BiasesSpec, ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType({"alibi": False})
"""The only supported values of these keys."""
_RENAMED: Final = (
    ("transformer.word_embeddings.", "model.embed_tokens."),
    ("transformer.ln_f.", "model.norm."),
    ("transformer.h.", "model.layers."),
    (".ln_attn.", ".input_layernorm."),
    (".ln_mlp.", ".post_attention_layernorm."),
    (".self_attention.dense.", ".self_attn.o_proj."),
    (".self_attention.", ".self_attn."),
    (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)


def read_falcon(config: ConfigReader) -> ModelSpec:
    """``FalconForCausalLM``: attention and feed-forward side by side, mostly, on one norm or, if
    heads share keys and values in groups, perhaps each behind a norm of its own. The merged
    projection is ordered by these groups, or by heads, unless all heads share one."""
    check_supported(config, _SUPPORTED)
    config = config.respelled(
        {"ffn_hidden_size": "intermediate_size", "n_embed": "hidden_size"}
    ).with_defaults(
        vocab_size=65_024,
        hidden_size=4544,
        num_hidden_layers=32,
        num_attention_heads=71,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    fields = common_fields(with_wide_blocks(config, "intermediate_size", "hidden_size"))
    heads: LayerHeads = fields["heads"]
    in_groups, is_shared = config.flag("new_decoder_architecture"), config.flag("multi_query", True)
    num_kv_heads = heads.num_heads
    if in_groups:
        num_kv_heads = config.integer("num_kv_heads", heads.num_heads, maximum=MOST_HEADS)
    elif is_shared:
        num_kv_heads = 1
    fields["heads"] = heads = replace(heads, num_kv_heads=num_kv_heads)
    fields["norms"] = layer_norms(config, "layer_norm_epsilon")
    end, bias = ".self_attn.query_key_value", config.flag("bias")
    num_norms = config.integer("num_ln_in_parallel_attn", 2, maximum=2) if in_groups else 1
    is_parallel = in_groups or config.flag("parallel_attn", True)
    of_parallel: Literal["parts", "normed parts"] = "parts" if num_norms == 1 else "normed parts"
    return ModelSpec(
        architecture="FalconForCausalLM",
        biases=BiasesSpec(qkv=bias, output=bias, mlp=bias),
        parallel=of_parallel if is_parallel else None,
        gate=None,
        activation=read_activation(config, "activation", "gelu"),
        names=TensorNames(
            renamed=_RENAMED,
            merged={end: outputs_of_qkv(heads)},
            by_head={end: num_kv_heads} if num_kv_heads > 1 else {},
        ),
        **fields,
    )
