"""GPT-2 and what was built like it: GPTBigCode (StarCoder), GPT-J, GPT-NeoX (Pythia)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.models.bounds import MOST_HEADS
from minisgl_backend.models.common_fields import common_fields
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.fields import (
    check_supported,
    layer_norms,
    outputs_of_qkv,
    positions_by_table,
    read_activation,
    rotated_share,
    with_wide_blocks,
)
from minisgl_backend.models.spec import BiasesSpec, ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

_KEYS: Final = MappingProxyType(
    {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
)
"""Keys of config.json, each with the one that other architectures have."""
_SUPPORTED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "add_cross_attention": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    }
)
"""The only supported values of these keys."""
_RENAMED: Final = (
    ("transformer.", ""),
    ("wte.", "model.embed_tokens."),
    ("wpe.", "model.embed_positions."),
    ("ln_f.", "model.norm."),
    ("h.", "model.layers."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".attn.", ".self_attn."),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.fc_in.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
    (".mlp.fc_out.", ".mlp.down_proj."),
)
"""Names of GPT-2 and GPT-J, with or without ``transformer.``, each with the decoder's."""
_MASKS: Final = (".self_attn.bias", ".self_attn.masked_bias")
"""Masks of attention, which older files hold."""
_PROJECTIONS: Final = (".self_attn.c_attn", ".self_attn.o_proj", ".mlp.up_proj", ".mlp.down_proj")


def read_gpt2(config: ConfigReader) -> ModelSpec:
    """``GPT2LMHeadModel``: learned positions, LayerNorms, GELU in place of gates, and weights with
    inputs before outputs."""
    fields = _gpt_fields(config.with_defaults(n_positions=1024, tie_word_embeddings=True))
    merged = {".self_attn.c_attn": outputs_of_qkv(fields["heads"])}
    return ModelSpec(
        architecture="GPT2LMHeadModel",
        biases=BiasesSpec(qkv=True, output=True, mlp=True),
        names=TensorNames(renamed=_RENAMED, merged=merged, transposed=_PROJECTIONS, buffers=_MASKS),
        **positions_by_table(fields),
    )


def read_gpt_bigcode(config: ConfigReader) -> ModelSpec:
    """``GPTBigCodeForCausalLM``, StarCoder and SantaCoder: GPT-2 whose query heads may share one
    head of keys and values. If they do not, the projection is ordered by heads."""
    is_shared = config.flag("multi_query", True)
    config = config.with_defaults(
        n_positions=1024, tie_word_embeddings=True, activation_function="gelu_pytorch_tanh"
    )
    fields = _gpt_fields(config)
    heads: LayerHeads = fields["heads"]
    end, by_head = ".self_attn.c_attn", {}
    if is_shared:
        heads = fields["heads"] = replace(heads, num_kv_heads=1)
    else:
        by_head = {end: heads.num_heads}
    names = TensorNames(
        renamed=_RENAMED, merged={end: outputs_of_qkv(heads)}, by_head=by_head, buffers=_MASKS
    )
    return ModelSpec(
        architecture="GPTBigCodeForCausalLM",
        biases=BiasesSpec(qkv=True, output=True, mlp=True),
        names=names,
        **positions_by_table(fields),
    )


def read_gptj(config: ConfigReader) -> ModelSpec:
    """``GPTJForCausalLM``: a rotation of ``rotary_dim`` dimensions instead of learned positions,
    attention and feed-forward side by side, and a head with biases."""
    # a head with biases is none that the embedding could be
    check_supported(config, {"tie_word_embeddings": False})
    config = config.with_defaults(n_positions=2048, n_embd=4096, n_layer=28, n_head=16)
    fields = _gpt_fields(config.with_defaults(vocab_size=50_400))
    if "rotary_dim" in config.nulls:
        raise config.error("rotary_dim", "a number", None)
    rotated = rotated_share(config.with_defaults(rotary_dim=64), fields["heads"].head_dim)
    fields["rope"] = replace(fields["rope"], interleaved=True, rotated=rotated)
    return ModelSpec(
        architecture="GPTJForCausalLM",
        biases=BiasesSpec(mlp=True, head=True),
        parallel="parts",
        names=TensorNames(renamed=_RENAMED, buffers=_MASKS),
        **fields,
    )


def read_gpt_neox(config: ConfigReader) -> ModelSpec:
    """``GPTNeoXForCausalLM``, Pythia among others: attention and feed-forward side by side, each
    behind a norm of its own, or one after the other, and heads that rotate in part."""
    config = config.respelled(
        {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    ).with_defaults(
        vocab_size=50_432,
        hidden_size=6144,
        num_hidden_layers=44,
        num_attention_heads=64,
        intermediate_size=24_576,
        max_position_embeddings=2048,
        partial_rotary_factor=0.25,
    )
    function = read_activation(config, "hidden_act", "gelu")
    fields = common_fields(config.with_values(hidden_act="silu"), partial=True)
    heads: LayerHeads = fields["heads"]
    end, bias = ".self_attn.query_key_value", config.flag("attention_bias", True)
    names = TensorNames(
        renamed=(
            ("gpt_neox.embed_in.", "model.embed_tokens."),
            ("gpt_neox.final_layer_norm.", "model.norm."),
            ("gpt_neox.", "model."),
            ("embed_out.", "lm_head."),
            (".attention.dense.", ".self_attn.o_proj."),
            (".attention.", ".self_attn."),
            (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
            (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
        ),
        merged={end: outputs_of_qkv(heads)},
        by_head={end: heads.num_heads},
        buffers=_MASKS,
    )
    fields["norms"] = layer_norms(config, "layer_norm_eps")
    return ModelSpec(
        architecture="GPTNeoXForCausalLM",
        biases=BiasesSpec(qkv=bias, output=bias, mlp=True),
        parallel="normed parts" if config.flag("use_parallel_residual", True) else None,
        gate=None,
        activation=function,
        names=names,
        **fields,
    )


def _gpt_fields(config: ConfigReader) -> dict[str, Any]:
    """The fields that are spelled alike in GPT-2, GPTBigCode and GPT-J."""
    check_supported(config, _SUPPORTED)
    function = read_activation(config, "activation_function", "gelu_new")
    config = config.with_defaults(vocab_size=50_257, n_embd=768, n_layer=12, n_head=12)
    # transformers also writes num_key_value_heads, which follows from multi_query
    num_heads = config.integer("n_head", maximum=MOST_HEADS)
    config = with_wide_blocks(config, "n_inner", "n_embd")
    config = config.with_values(num_key_value_heads=num_heads)
    fields = common_fields(config.respelled(_KEYS))
    more = {"gate": None, "activation": function}
    return fields | more | {"norms": layer_norms(config, "layer_norm_epsilon")}
