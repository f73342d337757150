"""DeepSeek-V2, V3 and V3.2 and models made like them, with multi-head latent attention: Kimi K2 and
K2.5, Moonlight, GLM-4.7-Flash, GLM-5, A.X K1 and Youtu-LLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule
from minisgl_backend.models.bounds import MOST_EXPERTS, MOST_LAYERS, MOST_WIDTH
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.deepseek_experts import deepseek_experts
from minisgl_backend.models.families.fields import (
    check_supported,
    layers_with_experts,
    shared_experts,
    text_config,
    text_part,
)
from minisgl_backend.models.families.latents import (
    latent_fields,
    layers_that_choose,
    read_indexer,
)
from minisgl_backend.models.families.mtp_layers import left_out_mtp, mtp_behind
from minisgl_backend.models.spec import ModelSpec, MoeSpec, MTPSpec
from minisgl_backend.models.tensor_names import TensorNames

_OF_V3: Final[Mapping[str, object]] = MappingProxyType(
    {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
)
"""The only supported values of these keys."""
_OF_V2: Final[Mapping[str, object]] = MappingProxyType(
    {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "mlp_bias": False}
    | {"rope_interleave": True}
)
"""The same for DeepSeek-V2."""
_SIZES_OF_V3: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
    }
)
"""Defaults of DeepSeek-V3 and V3.2."""
_OF_KIMI: Final = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
"""How the architecture is spelled: by its publisher, and by transformers."""
_BLOCKS_OF_KIMI: Final = (
    ("language_model.model.blocks.", "model.layers."),
    ("model.language_model.blocks.", "model.layers."),
)
"""Names of layers as transformers saves them, each with the decoder's."""


def read_deepseek_v3(config: ConfigReader) -> ModelSpec:
    """``DeepseekV3ForCausalLM``: DeepSeek-V3, V3.1 and R1, Kimi-K2, Moonlight. All but the first
    layers have experts by a router of corrected sigmoids, in groups."""
    check_supported(config, _OF_V3)
    config = config.with_defaults(**_SIZES_OF_V3, max_position_embeddings=4096)
    fields = latent_fields(config)
    num_layers = fields["num_layers"]
    dense = config.integer("first_k_dense_replace", 3, minimum=0)
    moe = deepseek_experts(config, range(dense, num_layers))
    return ModelSpec(
        architecture="DeepseekV3ForCausalLM",
        moe=moe if moe.layers else None,
        names=TensorNames(left_out=left_out_mtp(config, num_layers)),
        mtp=mtp_behind(config, num_layers),
        **fields,
    )


def read_axk1(config: ConfigReader) -> ModelSpec:
    """``AXK1ForCausalLM``, A.X K1: DeepSeek-V3 with norms of the outputs of experts, and a router
    without corrections."""
    check_supported(config, {"scoring_func": "sigmoid", "moe_layer_freq": 1})
    sizes = {**_SIZES_OF_V3, "n_routed_experts": 192, "max_position_embeddings": 2**15}
    config = config.with_defaults(**sizes)
    config.integer("q_lora_rank")
    fields = latent_fields(config)
    num_layers = fields["num_layers"]
    dense = config.integer("first_k_dense_replace", 1, minimum=0)
    layers = layers_with_experts(config, num_layers, dense=dense)
    moe = deepseek_experts(config, layers)
    rule = replace(moe.experts.routing, corrected=False)
    moe = replace(moe, normed=True, experts=replace(moe.experts, routing=rule))
    # dense layers have such a norm, too, which is not used
    unused = (
        f"model.layers.{layer}.post_feedforward_layernorm."
        for layer in range(num_layers)
        if layer not in layers
    )
    names = TensorNames(
        renamed=(
            (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
            # transformers saves corrections; as biases they are taken as long as they are 0
            (".mlp.gate.e_score_correction_bias", ".mlp.gate.bias"),
        ),
        left_out=(*left_out_mtp(config, num_layers), *unused),
    )
    return ModelSpec(
        architecture="AXK1ForCausalLM", moe=moe if layers else None, names=names, **fields
    )


def read_deepseek_v32(config: ConfigReader) -> ModelSpec:
    """``DeepseekV32ForCausalLM``: DeepSeek-V3.2, which is DeepSeek-V3 with an indexer in each
    layer. The keys by which layers of GLM-5 share positions do not count here, as in transformers.
    """
    check_supported(config, {"indexer_rope_interleave": False})
    config = config.with_defaults(**_SIZES_OF_V3, index_n_heads=64, max_position_embeddings=163_840)
    num_layers = config.integer("num_hidden_layers")
    return _with_indexer("DeepseekV32ForCausalLM", config, range(num_layers), interleaved=False)


def read_glm_moe_dsa(config: ConfigReader) -> ModelSpec:
    """``GlmMoeDsaForCausalLM``: GLM-5, DeepSeek-V3.2 with other sizes, an indexer that rotates
    neighbours, and perhaps layers that share the positions which one of them chose."""
    check_supported(config, {"indexer_rope_interleave": True})
    config = config.with_defaults(
        index_n_heads=32,
        max_position_embeddings=202_752,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        rms_norm_eps=1e-5,
        routed_scaling_factor=2.5,
        v_head_dim=256,
    )
    num_layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    layers = _layers_that_choose(config, num_layers)
    return _with_indexer("GlmMoeDsaForCausalLM", config, layers, interleaved=True)


def _with_indexer(
    architecture: str, config: ConfigReader, layers: Iterable[int], *, interleaved: bool
) -> ModelSpec:
    """A model like DeepSeek-V3.2, in which ``layers`` have an indexer, and so has the MTP layer."""
    check_supported(config, {**_OF_V3, "rope_interleave": True})
    fields = latent_fields(config)
    num_layers, latent = fields["num_layers"], fields["latent"]
    indexer = read_indexer(config, latent, {*layers, num_layers}, interleaved=interleaved)
    # checkpoints may have an indexer in layers that do not use it
    unused = tuple(
        f"model.layers.{layer}.self_attn.indexer."
        for layer in range(num_layers)
        if layer not in indexer.layers
    )
    mtp = mtp_behind(config, num_layers)
    if isinstance(mtp, MTPSpec):
        mtp = replace(mtp, left_out=(*mtp.left_out, *unused))
    dense = config.integer("first_k_dense_replace", 3, minimum=0)
    with_experts = layers_with_experts(config, num_layers, dense=dense)
    moe = deepseek_experts(config, with_experts)
    return ModelSpec(
        architecture=architecture,
        moe=moe if with_experts else None,
        names=TensorNames(left_out=(*left_out_mtp(config, num_layers), *unused)),
        mtp=mtp,
        **{**fields, "latent": replace(latent, indexer=indexer)},
    )


def _layers_that_choose(config: ConfigReader, num_layers: int) -> list[int]:
    """The layers with an indexer, by ``indexer_types``; or by ``index_topk_pattern``, which may be
    a letter for each layer; or every ``index_topk_freq``-th."""
    keys = [key for key in ("indexer_types", "index_topk_pattern") if key in config.values]
    if not keys:
        every = config.integer("index_topk_freq", 1, minimum=0) or 1
        # the first layer has none to take positions from
        offset = config.integer("index_skip_topk_offset", 2, minimum=0 if every == 1 else 1)
        return [layer for layer in range(num_layers) if max(layer + 1 - offset, 0) % every == 0]
    key, given = keys[0], config.values[keys[0]]
    if key == "index_topk_pattern" and isinstance(given, str):
        if len(given) != num_layers or not set(given) <= set("FS"):
            raise config.error(key, f"F or S for {num_layers} layers", given)
        kinds = ["full" if letter == "F" else "shared" for letter in given]
        config = config.with_values(index_topk_pattern=kinds)
    return layers_that_choose(config, key, num_layers) or []


def read_kimi_k25(config: ConfigReader) -> ModelSpec:
    """``KimiK25ForConditionalGeneration``, in transformers ``Kimi_K25ForConditionalGeneration``:
    the text part of Kimi K2.5 and K2.6, which is Kimi-K2. transformers calls its layers blocks when
    it saves them."""
    text = text_config(config, tied=True)
    kind, kinds = text.word("model_type", "deepseek_v3"), ("deepseek_v3", "kimi_k2")
    if kind not in kinds:
        raise text.error("model_type", "one of " + ", ".join(kinds), kind)
    spelled = set(config.values.get("architectures", ())) & set(_OF_KIMI)
    spec = text_part(read_deepseek_v3(text), next(iter(spelled), _OF_KIMI[0]))
    names = replace(spec.names, renamed=(*_BLOCKS_OF_KIMI, *spec.names.renamed))
    return replace(spec, names=names)


def read_glm4_moe_lite(config: ConfigReader) -> ModelSpec:
    """``Glm4MoeLiteForCausalLM``, GLM-4.7-Flash: DeepSeek-V3 with experts in all layers but the
    first."""
    check_supported(config, _OF_V3)
    config = config.with_defaults(
        max_position_embeddings=202_752,
        moe_intermediate_size=1536,
        n_routed_experts=64,
        num_experts_per_tok=4,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        rms_norm_eps=1e-5,
        routed_scaling_factor=1.8,
        v_head_dim=256,
    )
    fields = latent_fields(config)
    num_layers = fields["num_layers"]
    layers = layers_with_experts(config, num_layers, dense=1)
    if "mlp_layer_types" not in config.values:  # transformers does not read the other key
        check_supported(config, {"first_k_dense_replace": 1})
    moe = deepseek_experts(config, layers)
    return ModelSpec(
        architecture="Glm4MoeLiteForCausalLM",
        moe=moe if layers else None,
        names=TensorNames(left_out=left_out_mtp(config, num_layers)),
        mtp=mtp_behind(config, num_layers),
        **fields,
    )


def read_deepseek_v2(config: ConfigReader) -> ModelSpec:
    """``DeepseekV2ForCausalLM``: DeepSeek-V2, V2-Lite, Coder-V2. Experts are picked by a softmax,
    perhaps only from the groups with the best experts."""
    check_supported(config, _OF_V2)
    config = config.with_defaults(
        max_position_embeddings=2048, q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128
    )
    fields = latent_fields(config)
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    layers = frozenset(range(first, fields["num_layers"]))
    moe = MoeSpec(experts=_experts_of_v2(config), layers=layers) if layers else None
    return ModelSpec(architecture="DeepseekV2ForCausalLM", moe=moe, **fields)


def _experts_of_v2(config: ConfigReader) -> ExpertsSpec:
    inner = config.integer("moe_intermediate_size", 1407, maximum=MOST_WIDTH)
    methods = ("greedy", "group_limited_greedy")
    method = config.word("topk_method", methods[0])
    if method not in methods:
        raise config.error("topk_method", "one of " + ", ".join(methods), method)
    groups = (1, 1)
    if method == methods[1]:
        groups = (
            config.integer("n_group", maximum=MOST_EXPERTS),
            config.integer("topk_group", maximum=MOST_EXPERTS),
        )
    rule = RoutingRule(
        num_experts=config.integer("n_routed_experts", 64, maximum=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        normalize=False,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=groups[0],
        top_groups=groups[1],
        best_of_group=1,
        in_float32=True,
    )
    shared = shared_experts(config, inner, default=2)
    return ExpertsSpec(routing=rule, intermediate_size=inner, shared=shared)


def read_youtu(config: ConfigReader) -> ModelSpec:
    """``YoutuForCausalLM``, Youtu-LLM: DeepSeek's attention, and no experts."""
    config = config.with_defaults(
        max_position_embeddings=2**17,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        tie_word_embeddings=True,
        v_head_dim=128,
    )
    return ModelSpec(architecture="YoutuForCausalLM", **latent_fields(config))
