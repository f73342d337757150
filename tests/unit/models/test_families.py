"""What model families say in their config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from minisgl_backend.attention.base import IndexShape, LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.gates import ClampedGate, LimitedGate
from minisgl_backend.models.attention_spec import AttentionGates
from minisgl_backend.models.catalog import ARCHITECTURES, parse_spec
from minisgl_backend.models.latent_spec import IndexerSpec, LatentSpec
from minisgl_backend.models.norms_spec import NormsSpec
from minisgl_backend.models.recurrent_spec import ConvSpec, DeltaSpec, KimiDeltaSpec, MambaSpec
from minisgl_backend.models.rope_spec import LearnedPositions, QueryGrowth
from minisgl_backend.models.spec import (
    BiasesSpec,
    LayerInputs,
    ModelSpec,
    MoeSpec,
    StreamsSpec,
)
from minisgl_bench.dummy_model import SHAPES
from tests.unit.models.config_jsons import (
    AFM_4_5B,
    APERTUS_8B,
    AX_K1,
    AYA_VISION_32B,
    BAMBA_9B,
    COMMAND_A_PLUS,
    COMMAND_R7B,
    COMMAND_R_08_2024,
    COMMAND_R_V01,
    CWM,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DOTS_LLM1,
    ERNIE_4_5_0_3B,
    ERNIE_4_5_21B_A3B,
    EXAONE_4_5_33B,
    EXAONE_4_32B,
    FALCON_7B,
    FALCON_40B,
    FALCON_H1_0_5B,
    FLEX_OLMO_7X7B,
    FLINT,
    GEMMA_2_9B,
    GEMMA_3_1B,
    GEMMA_3_4B,
    GEMMA_4_31B,
    GEMMA_4_E2B,
    GEMMA_7B,
    GLM_4_1V_9B,
    GLM_4_5_AIR,
    GLM_4_5V,
    GLM_4_7_FLASH,
    GLM_4_9B_0414,
    GLM_5,
    GPT_2,
    GPT_J_6B,
    GPT_OSS_20B,
    GRANITE_3_1_3B_A800M,
    GRANITE_3_3_8B,
    GRANITE_4_H_TINY,
    GRANITE_SWASH_2B,
    GRANITE_SWASH_3B_A600M,
    HELIUM_1_2B,
    HUNYUAN_7B,
    HUNYUAN_A13B,
    HY3,
    HY4,
    HYPERCLOVA_X_SEED_THINK_14B,
    HYPERCLOVA_X_SEED_THINK_32B,
    INTERNLM3_8B,
    INTERNVL_3_5_8B,
    IQUEST_CODER_40B,
    JAIS_2_8B,
    K_EXAONE,
    KIMI_LINEAR_48B_A3B,
    KOLIBRI_1,
    LAGUNA_XS_2,
    LFM2_1_2B,
    LFM2_8B_A1B,
    LFM3_1_7B,
    LING_3_FLASH,
    LING_3_TINY,
    LLAMA_3_1_8B,
    LLAMA_4_SCOUT,
    LLAVA_1_5_7B,
    LLAVA_1_6_MISTRAL_7B,
    MELLUM_2,
    MINICPM3_4B,
    MINIMAX_M2,
    MINISTRAL_3_8B,
    MINISTRAL_8B,
    MINITRON_4B,
    MISTRAL_7B,
    MISTRAL_SMALL_3_1,
    MISTRAL_SMALL_4,
    MIXTRAL_8X7B,
    MUSE_GLIMMER_30B,
    NANOCHAT_D32,
    NEMOTRON_3_NANO_30B_A3B,
    NEMOTRON_NANO_9B_V2,
    OLMO_1_7B,
    OLMO_2_7B,
    OLMO_3_7B,
    OLMO_HYBRID_7B,
    OLMOE_1B_7B,
    OPT_1_3B,
    PHI_2,
    PHI_4_MINI,
    PIXTRAL_12B,
    PYTHIA_1_4B,
    QWEN_1_5_MOE,
    QWEN_2_5_7B,
    QWEN_2_5_OMNI_7B,
    QWEN_2_5_VL_7B,
    QWEN_2_AUDIO_7B,
    QWEN_3_0_6B,
    QWEN_3_5_MOE,
    QWEN_3_30B_A3B,
    QWEN_3_OMNI_30B_A3B,
    QWEN_3_VL_4B,
    QWEN_3_VL_30B_A3B,
    SEED_OSS_36B,
    SMOLLM_3B,
    SOLAR_OPEN_100B,
    STABLELM_2_1_6B,
    STARCODER,
    STARCODER2_7B,
    STEP_3_5_FLASH,
    STEP_3_7_FLASH,
    TRINITY_NANO,
    VAULTGEMMA_1B,
    VOXTRAL_MINI_3B,
    YOUTU_LLM_2B,
)


def test_llama_3_1() -> None:
    spec = parse_spec(LLAMA_3_1_8B)
    assert (spec.num_layers, spec.heads) == (32, LayerHeads(32, 8, 128))
    assert spec.eos_token_ids == {128001, 128008, 128009}
    assert (spec.rope.scaling, spec.rope.theta, spec.rope.factor) == ("llama3", 500000.0, 8.0)
    assert spec.rope.original_max_positions == 8192
    assert spec.rope.max_positions == 131072
    assert not (spec.tie_embeddings or spec.biases.qkv or spec.biases.output or spec.biases.mlp)
    assert spec.windows == (None,) * 32
    assert spec.dtype == "bfloat16"


def test_llama_biases_are_on_all_projections() -> None:
    spec = parse_spec({**LLAMA_3_1_8B, "attention_bias": True, "mlp_bias": True})
    assert spec.biases.qkv and spec.biases.output and spec.biases.mlp


@pytest.mark.parametrize(("window", "expected"), [(4096, 4096), (None, None), ("absent", 4096)])
def test_mistral_window(window: Any, expected: int | None) -> None:
    values = {**MISTRAL_7B, "sliding_window": window}
    if window == "absent":
        del values["sliding_window"]
    assert parse_spec(values).windows == (expected,) * 32


def test_qwen2_has_biases_on_its_inputs_only() -> None:
    spec = parse_spec(QWEN_2_5_7B)
    assert spec.biases.qkv and not spec.biases.output and not spec.qk_norm
    assert spec.windows == (None,) * 28


def test_qwen2_windows_by_layer() -> None:
    on = {**QWEN_2_5_7B, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 64}
    assert parse_spec({**on, "max_window_layers": 3}).windows == (None, None, None, 64)
    assert parse_spec({**on, "max_window_layers": 0}).windows == (64,) * 4
    assert parse_spec({**on, "sliding_window": None, "max_window_layers": 0}).windows == (None,) * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert parse_spec({**on, "layer_types": types}).windows == (64, None, 64, None)
    unknown: list[Any] = [types[:3], ["chunked_attention"] * 4, "full_attention", [[]] * 4]
    for wrong in unknown:
        with pytest.raises(ConfigError, match="layer_types"):
            parse_spec({**on, "layer_types": wrong})


@pytest.mark.parametrize("usual", [{"original_max_position_embeddings": 512}, {"chunk_size": 512}])
def test_dual_chunks_of_qwen_are_not_needed_within_the_usual_context(usual: Any) -> None:
    """Qwen2.5-1M: beyond it, plain attention as elsewhere would make text without sense."""
    chunks = {"chunk_size": 600, "local_size": 64, **usual}
    for values in (QWEN_3_0_6B, {**QWEN_3_0_6B, "architectures": ["Qwen2ForCausalLM"]}):
        spec = parse_spec({**values, "dual_chunk_attention_config": chunks})
        assert spec.context == 512 and not any(spec.windows)
    with pytest.raises(ConfigError, match="dual_chunk_attention_config: chunk_size is missing"):
        parse_spec({**QWEN_3_0_6B, "dual_chunk_attention_config": {"chunk": 1}})


def test_qwen3() -> None:
    spec = parse_spec(QWEN_3_0_6B)
    assert spec.qk_norm and not spec.biases.qkv and spec.tie_embeddings
    assert spec.heads.head_dim == 128 != spec.hidden_size // spec.heads.num_heads
    del (values := dict(QWEN_3_0_6B))["head_dim"]
    assert parse_spec(values).heads.head_dim == 128


def test_qwen3_moe() -> None:
    spec = parse_spec(QWEN_3_30B_A3B)
    assert spec.moe is not None
    rule = RoutingRule(num_experts=128, top_k=8, normalize=True)
    assert spec.moe.experts == ExpertsSpec(routing=rule, intermediate_size=768)
    assert spec.moe.layers == frozenset(range(48))
    sparse = {**QWEN_3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": None}
    spec = parse_spec({**sparse, "num_hidden_layers": 6})
    assert spec.moe is not None and spec.moe.layers == {1, 5}
    assert spec.heads.head_dim == 64
    renamed = {**QWEN_3_30B_A3B, "num_experts": None, "num_local_experts": 16}
    found = parse_spec(renamed).moe
    assert found is not None and found.experts.num_experts == 16
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        parse_spec({**renamed, "num_experts_per_tok": 17})


def test_qwen3_moe_window_is_on_all_layers() -> None:
    values = {**QWEN_3_30B_A3B, "use_sliding_window": True, "sliding_window": 512}
    assert parse_spec(values).windows == (512,) * 48


def test_gemma_3_leaves_most_of_its_config_out() -> None:
    spec = parse_spec(GEMMA_3_4B)
    assert (spec.num_layers, spec.heads) == (34, LayerHeads(8, 4, 256))
    assert (spec.vocab_size, spec.context, spec.dtype) == (262208, 2**17, "bfloat16")
    assert spec.eos_token_ids == {1, 106} and spec.tie_embeddings and spec.names.multimodal
    assert (spec.norms.place, spec.norms.offset, spec.gate, spec.qk_norm) == (
        "around",
        1.0,
        "gelu",
        "head",
    )
    assert spec.attention_shape().scale == 256**-0.5 and spec.scales.embedding == 2560**0.5
    assert spec.windows[:6] == (1024,) * 5 + (None,)
    local, far = spec.ropes[0], spec.ropes[5]
    assert local is not None and far is not None
    assert (local.theta, local.scaling, far.theta, far.scaling) == (1e4, "default", 1e6, "linear")


def test_gemma_4_has_wider_heads_in_layers_without_a_window() -> None:
    spec = parse_spec(GEMMA_4_31B)
    assert spec.windows[:6] == (1024,) * 5 + (None,)
    assert spec.heads_by_layer[:6] == (LayerHeads(32, 16, 256),) * 5 + (LayerHeads(32, 4, 512),)
    assert spec.kv.keys_are_values == set(range(5, 60, 6)) and spec.kv.value_norm
    local, wide = spec.ropes[0], spec.ropes[5]
    assert local is not None and (local.theta, local.scaling) == (1e4, "default")
    assert wide is not None and (wide.theta, wide.rotated, wide.dims(512)) == (1e6, 0.25, 512)
    assert spec.attention_shape().scale == 1.0 and spec.scales.logit_cap == 30.0
    assert spec.layer_inputs is None and spec.kv.sources == tuple(range(60))
    assert 30e9 < spec.num_parameters < 32e9
    embeddings = spec.vocab_size * spec.hidden_size
    assert spec.num_active_parameters == spec.num_parameters - embeddings
    kinds = spec.attention_shape(2).kinds
    assert [(kind.num_kv_heads, kind.head_dim, len(own)) for kind, own in kinds] == [
        (8, 256, 50),
        (2, 512, 10),
    ]


def test_small_gemma_4_reads_keys_of_other_layers_and_inputs_of_each_layer() -> None:
    spec = parse_spec(GEMMA_4_E2B)
    assert spec.attention_layers == tuple(range(15))
    assert {spec.kv_source(layer) for layer in range(15, 35)} == {13, 14}
    assert spec.kv_source(19) == 14 and spec.kv_source(20) == 13
    assert spec.intermediate_sizes == (6144,) * 15 + (12288,) * 20
    assert spec.layer_inputs == LayerInputs(size=256, vocab_size=262_144)
    tables = spec.vocab_size * spec.hidden_size + 262_144 * 256 * 35
    assert spec.num_active_parameters == spec.num_parameters - tables
    assert "model.layers.15.self_attn.k_proj." in spec.names.left_out
    refused: dict[str, Any] = {
        "num_kv_shared_layers": 33,
        "vocab_size_per_layer_input": 100,
        "use_bidirectional_attention": "all",
    }
    for key, value in refused.items():
        with pytest.raises(ConfigError, match=key):
            parse_spec({**GEMMA_4_E2B, key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_layer_config": {"35": {"head_dim": 64}}}, "by layers, from 0 to 34, got '35'"),
        ({"per_layer_config": {"-1": {"head_dim": 64}}}, "by layers, from 0 to 34, got '-1'"),
        ({"per_layer_config": {"last": {"head_dim": 64}}}, "by layers, from 0 to 34, got 'last'"),
        ({"per_layer_config": {"4": {"num_key_value_heads": 3}}}, "8 attention heads cannot share"),
        (
            {"per_layer_config": {"4": {"head_dim": 64, "rms_norm_eps": 0.5}}},
            "per_layer_config: 4: rms_norm_eps is not supported for single layers",
        ),
        ({"global_head_dim": 65}, "even head_dim, got 65"),
    ],
)
def test_heads_of_single_layers_that_no_model_has(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec({**GEMMA_4_E2B, **changes})


@pytest.mark.parametrize("layer", ["34", "034"])
def test_gemma_4_takes_the_heads_of_single_layers(layer: str) -> None:
    own = {"per_layer_config": {layer: {"head_dim": 64, "num_key_value_heads": 2}}}
    heads = parse_spec({**GEMMA_4_E2B, **own}).heads_by_layer
    assert heads[34] == LayerHeads(8, 2, 64) and set(heads[:34]) == {LayerHeads(8, 1, 256)}


def test_gemma_4_that_sees_without_an_encoder_has_no_inputs_of_each_layer() -> None:
    """As published, config.json does not mention them."""
    defaults = ("hidden_size_per_layer_input", "max_position_embeddings", "sliding_window")
    of_31b = GEMMA_4_31B["text_config"]
    text = {key: value for key, value in of_31b.items() if key not in defaults}
    config = {**GEMMA_4_31B, "text_config": text}
    spec = parse_spec({**config, "architectures": ["Gemma4UnifiedForConditionalGeneration"]})
    assert spec.layer_inputs is None and spec.names.multimodal
    assert spec.windows[:6] == (1024,) * 5 + (None,) and spec.context == 2**18


def test_the_last_layer_of_gemma_4_has_no_window() -> None:
    spec = parse_spec({**GEMMA_4_E2B, "num_kv_shared_layers": 0, "layer_types": None})
    assert spec.windows[28:] == (512, None, *[512] * 4, None)  # 35 layers, every sixth
    assert spec.heads_by_layer[-1] == LayerHeads(8, 1, 512)


def test_gemma_4_has_experts_beside_each_block() -> None:
    text = SHAPES["gemma-4-26b-a4b"]
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    spec = parse_spec(config)
    rule = RoutingRule(num_experts=128, top_k=8, normalize=True, scaled=True)
    assert spec.moe == MoeSpec(
        experts=ExpertsSpec(routing=rule, intermediate_size=704, gate="gelu", router="router.proj"),
        layers=frozenset(range(30)),
        beside=True,
    )
    assert 25e9 < spec.num_parameters < 26e9
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        missing = {**text, key: None}
        with pytest.raises(ConfigError, match=key):
            parse_spec({**config, "text_config": missing})


def test_the_smallest_gemma_3_has_text_only() -> None:
    spec = parse_spec(GEMMA_3_1B)
    assert not spec.names.multimodal
    assert {rope.theta for rope in spec.ropes if rope} == {1e4, 1e6}
    assert spec.context == 32768
    refused: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    refused |= {"use_bidirectional_attention": True, "hidden_activation": "gelu"}
    for key, value in refused.items():
        with pytest.raises(ConfigError, match=key):
            parse_spec({**GEMMA_3_1B, key: value})


def test_what_a_text_config_has_as_null_is_read_beside_it() -> None:
    text = {**MISTRAL_SMALL_3_1["text_config"], "torch_dtype": None, "eos_token_id": None}
    beside = {"torch_dtype": "bfloat16", "eos_token_id": 2}
    spec = parse_spec({**MISTRAL_SMALL_3_1, **beside, "text_config": text})
    assert spec.dtype == "bfloat16" and spec.eos_token_ids == {2}


def test_mistral_small_is_read_from_its_text_config() -> None:
    spec = parse_spec(MISTRAL_SMALL_3_1)
    assert (spec.num_layers, spec.heads.head_dim, spec.hidden_size) == (40, 128, 5120)
    assert (spec.dtype, spec.rope.theta, spec.windows) == ("bfloat16", 1e9, (None,) * 40)
    assert spec.names.multimodal and spec.tie_embeddings  # the weights will tell
    with pytest.raises(ConfigError, match="text_config is missing"):
        parse_spec({**MISTRAL_SMALL_3_1, "text_config": None})
    other = {**MISTRAL_SMALL_3_1["text_config"], "model_type": "llama"}
    with pytest.raises(ConfigError, match="text_config: model_type must be one of mistral, min"):
        parse_spec({**MISTRAL_SMALL_3_1, "text_config": other})


def test_queries_of_ministral_3_grow() -> None:
    rope = {"rope_type": "yarn", "factor": 16.0, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 16384
    text = {**MISTRAL_SMALL_3_1["text_config"], "model_type": "ministral3"}
    values = {**MISTRAL_SMALL_3_1, "text_config": {**text, "rope_parameters": rope}}
    spec = parse_spec(values)
    assert spec.query_growth == QueryGrowth(factor=0.1, period=16384)
    assert spec.context == 262144
    none = {**text, "rope_parameters": {**rope, "llama_4_scaling_beta": 0.0}}
    assert parse_spec({**values, "text_config": none}).query_growth == QueryGrowth(
        factor=0, period=16384
    )
    for wrong in (-0.1, None, float("nan")):
        rope_parameters = {**rope, "llama_4_scaling_beta": wrong}
        with pytest.raises(ConfigError, match="llama_4_scaling_beta"):
            parse_spec({**values, "text_config": {**text, "rope_parameters": rope_parameters}})
    with pytest.raises(ConfigError, match="rope_parameters is missing"):
        parse_spec({**values, "text_config": text})


def test_phi_4_mini_is_served_within_its_original_context() -> None:
    spec = parse_spec(PHI_4_MINI)
    assert spec.rope.dims(spec.heads.head_dim) == 96
    assert (spec.rope.scaling, len(spec.rope.short_factors)) == ("longrope", 48)
    assert spec.context == 4096
    assert spec.rope.attention_factor == pytest.approx(1.19023807)
    for name in ("su", "yarn"):
        renamed = {**PHI_4_MINI["rope_scaling"], "type": name}
        assert parse_spec({**PHI_4_MINI, "rope_scaling": renamed}) == spec
    few = {**PHI_4_MINI["rope_scaling"], "short_factor": [1.0] * 47}
    with pytest.raises(ConfigError, match="needs 48 short factors"):
        parse_spec({**PHI_4_MINI, "rope_scaling": few})
    with pytest.raises(ConfigError, match="short_factor is missing"):
        parse_spec({**PHI_4_MINI, "rope_scaling": {"type": "longrope"}})
    with pytest.raises(ConfigError, match=r"short_factor\[47\] must be positive"):
        wrong = {**PHI_4_MINI["rope_scaling"], "short_factor": [1.0] * 47 + [-1]}
        parse_spec({**PHI_4_MINI, "rope_scaling": wrong})
    with pytest.raises(ConfigError, match="33 rotary dimensions"):
        parse_spec({**PHI_4_MINI, "rope_scaling": None, "partial_rotary_factor": 0.26})


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (PHI_4_MINI, {"partial_rotary_factor": 1e308}, "partial_rotary_factor must be at most 1"),
        (PHI_4_MINI, {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        (GEMMA_3_4B, {"rope_scaling": {"rope_type": "linear", "factor": 1e-320}}, "rope_scaling"),
        (GEMMA_3_4B, {"rope_scaling": {"rope_type": "linear", "factor": 2e5}}, "rope_scaling"),
        (OLMO_3_7B, {"rope_parameters": {"full_attention": 1}}, "full_attention must be an object"),
    ],
)
def test_numbers_of_rotary_embeddings_that_no_model_has(
    published: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    if "text_config" in published:
        changes = {"text_config": {**published["text_config"], **changes}}
    with pytest.raises(ConfigError, match=message):
        parse_spec({**published, **changes})


def test_only_some_architectures_rotate_a_part_of_a_head() -> None:
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.5 is not supported"):
        parse_spec({**LLAMA_3_1_8B, "partial_rotary_factor": 0.5})


def test_windows_of_olmo_3_rotate_without_stretching() -> None:
    spec = parse_spec(OLMO_3_7B)
    assert spec.windows == ((4096,) * 3 + (None,)) * 8
    assert [rope.scaling for rope in spec.ropes[:4] if rope] == ["default"] * 3 + ["yarn"]
    assert {rope.theta for rope in spec.ropes if rope} == {500000.0}
    nested = {
        "full_attention": {**OLMO_3_7B["rope_scaling"], "rope_theta": 500000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
    }
    values = {**OLMO_3_7B, "rope_scaling": None, "rope_parameters": nested}
    assert parse_spec(values) == spec
    with pytest.raises(ConfigError, match="layer_types must be 32 of"):
        parse_spec({**OLMO_3_7B, "layer_types": ["full_attention"]})


def test_layers_of_olmo_hybrid() -> None:
    spec = parse_spec(OLMO_HYBRID_7B)
    delta = spec.recurrent
    assert isinstance(delta, DeltaSpec) and len(delta.layers) == 24
    assert delta.matrices == (30, 96, 192) and (delta.rate_scale, delta.norm_eps) == (2.0, 1e-5)
    assert [spec.norms_of(layer) for layer in range(4)] == [*["before"] * 3, "after"]
    assert (spec.norms.eps, spec.qk_norm, spec.context) == (1e-6, "token", 65536)
    assert spec.ropes == (None,) * 32 and 7.3 < spec.num_parameters / 1e9 < 7.5
    left_out = {key for key in OLMO_HYBRID_7B if key.startswith("linear_")}
    left_out |= {"layer_types", "num_key_value_heads", "max_position_embeddings"}
    assert parse_spec({k: v for k, v in OLMO_HYBRID_7B.items() if k not in left_out}) == spec
    assert parse_spec({**OLMO_HYBRID_7B, "rope_parameters": {}, "rope_theta": None}) == spec

    rotating = parse_spec({**OLMO_HYBRID_7B, "rope_parameters": None, "rope_theta": 5e5})
    assert not rotating.ropes and rotating.rope.theta == 5e5
    gentle = parse_spec({**OLMO_HYBRID_7B, "linear_allow_neg_eigval": False})
    assert isinstance(gentle.recurrent, DeltaSpec) and gentle.recurrent.rate_scale == 1.0
    with pytest.raises(ConfigError, match="layer_types must be linear_attention for some layers"):
        parse_spec({**OLMO_HYBRID_7B, "layer_types": ["full_attention"] * 32})
    with pytest.raises(ConfigError, match="linear_num_value_heads must be a multiple of"):
        parse_spec({**OLMO_HYBRID_7B, "linear_num_value_heads": 20})


def test_layers_of_kimi_linear() -> None:
    spec = parse_spec(KIMI_LINEAR_48B_A3B)
    delta = spec.recurrent
    assert isinstance(delta, KimiDeltaSpec) and len(delta.layers) == 20
    assert (delta.matrices, delta.conv_width, delta.updates) == (
        (32, 128, 128),
        4,
        (32, 32, 128, 128),
    )
    assert spec.attention_layers == (3, 7, 11, 15, 19, 23, 26) and spec.ropes == (None,) * 27
    assert spec.latent == LatentSpec(latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128)
    assert spec.scores.scale == 192**-0.5 and spec.context == 2**20 and spec.norms.eps == 1e-5
    assert spec.moe is not None and spec.moe.layers == frozenset(range(1, 27))
    routing = spec.moe.experts.routing
    assert (routing.num_experts, routing.top_k, routing.scale) == (256, 8, 2.446)
    assert routing.sigmoid and routing.corrected and routing.normalize
    assert 48 < spec.num_parameters / 1e9 < 49.2
    assert delta.of_rank(4).matrices == (8, 128, 128)

    kinds = [
        "full_attention" if n in spec.attention_layers else "linear_attention" for n in range(27)
    ]
    left_out = {"linear_attn_config", "first_k_dense_replace", "model_max_length", "num_experts"}
    left_out |= {"kv_lora_rank", "num_experts_per_token", "q_lora_rank", "routed_scaling_factor"}
    short = {k: v for k, v in KIMI_LINEAR_48B_A3B.items() if k not in left_out}
    assert parse_spec({**short, "layer_types": kinds}) == spec
    by_default = parse_spec(short)
    assert by_default.attention_layers == (4, 8, 12, 16, 20, 24)
    dense = parse_spec({**KIMI_LINEAR_48B_A3B, "mlp_layer_types": ["dense"] * 27})
    assert dense.moe is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False is not supported, only True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax' is not"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling {'type': 'yarn'} is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"num_hidden_layers": 28}, "kda_layers must be the layers from 1 to 28 that are not in"),
        ({"linear_attn_config": {"num_heads": 0}}, "linear_attn_config: num_heads must be"),
        ({"num_experts": 0}, "num_experts must be an integer >= 1, got 0"),
        ({"num_shared_experts": -1}, "config.json: num_shared_experts must be"),
    ],
)
def test_what_kimi_linear_must_not_say(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_spec({**KIMI_LINEAR_48B_A3B, **given})


def test_layers_of_ling_3() -> None:
    spec = parse_spec(LING_3_FLASH)
    delta = spec.recurrent
    assert isinstance(delta, KimiDeltaSpec) and len(delta.layers) == 35
    assert delta.matrices == (32, 128, 128) and delta.conv_width == 4
    assert delta.direct and delta.least_decay == -5.0
    assert spec.attention_layers == (5, 11, 17, 23, 29, 35, 41)
    assert spec.latent == LatentSpec(latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128)
    assert (spec.rope.theta, spec.rope.rotated, spec.rope.interleaved) == (6e6, 1.0, True)
    assert spec.scores.scale == 192**-0.5 and spec.context == 2**18
    assert spec.attention_gates == AttentionGates(apart=True, one_per_head=True)
    assert spec.num_gates(5) == 32
    assert spec.moe is not None and spec.moe.layers == frozenset(range(2, 42))
    routing = spec.moe.experts.routing
    assert (routing.num_experts, routing.top_k, routing.scale) == (512, 8, 2.5)
    assert (routing.num_groups, routing.top_groups) == (8, 4)
    assert 123.5 < spec.num_parameters / 1e9 < 124.5  # with the embedding and the output head
    # published are 124 and 5.1, with one of them
    active = spec.num_active_parameters + spec.vocab_size * spec.hidden_size
    assert 5.0 < active / 1e9 < 5.2
    guessing = spec.with_mtp()
    assert guessing.attention_layers == (*spec.attention_layers, 42)
    assert guessing.moe is not None and guessing.moe.of_layer(42) == spec.moe.experts

    tiny = parse_spec(LING_3_TINY)
    assert tiny.latent is not None and tiny.latent.query_rank == 256
    assert tiny.attention_layers == (3, 7, 11, 15, 19, 23)
    assert tiny.moe is not None and not tiny.moe.limits
    assert 7.8 < tiny.num_parameters / 1e9 < 8.0
    softly = parse_spec({**LING_3_TINY, "kda_safe_gate": False})
    assert isinstance(softly.recurrent, KimiDeltaSpec) and softly.recurrent.least_decay is None
    dense = parse_spec({**LING_3_TINY, "mlp_layer_types": ["dense"] * 24})
    assert dense.moe is None


def test_limits_of_ling_3() -> None:
    moe = parse_spec(LING_3_FLASH).moe
    assert moe is not None and min(moe.limits) == 34
    plain, shared = moe.of_layer(33), moe.of_layer(34)
    assert plain == moe.experts and plain.gate_of_shared == "silu"
    assert shared.gate == "silu" and shared.gate_of_shared == LimitedGate(5.0)
    both = moe.of_layer(41)
    assert both.gate == LimitedGate(4.0) and both.gate_of_shared == LimitedGate(7.0)
    given = {"expert_swiglu_limit_list": [None] * 41 + [4], "share_expert_swiglu_limit_list": None}
    alone = parse_spec({**LING_3_FLASH, **given}).moe
    assert alone is not None and alone.of_layer(41).gate_of_shared == "silu"
    assert [alone.of_layer(layer).gate for layer in (40, 41)] == ["silu", LimitedGate(4.0)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_bias": True}, "attention_bias True is not supported"),
        (
            {"gated_attention_proj_granularity_type": "element_wise"},
            "gated_attention_proj_granularity_type 'element_wise' is not supported",
        ),
        ({"expert_swiglu_limit_list": [4]}, "expert_swiglu_limit_list must be 42 numbers or more"),
        ({"share_expert_swiglu_limit_list": ["a"] * 42}, "limit_list[0] must be a number"),
        ({"kda_lower_bound": 5.0}, "kda_lower_bound must be a number below 0 and above -1000"),
        ({"layer_group_size": 5}, "layer_group_size must be a divisor of num_hidden_layers (42)"),
        ({"moe_shared_expert_intermediate_size": 512}, "512 is not supported, only 768"),
        ({"mtp_use_kda": True}, "mtp_use_kda True is not supported"),
        ({"no_kda_lora": False}, "no_kda_lora False is not supported"),
        ({"num_experts": 0}, "num_experts must be an integer >= 1, got 0"),
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        ({"use_mla_nope": True}, "use_mla_nope True is not supported"),
        ({"value_norm": True}, "value_norm True is not supported"),
    ],
)
def test_what_ling_3_must_not_say(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_spec({**LING_3_FLASH, **given})


def test_layers_of_step_3_5() -> None:
    spec = parse_spec(STEP_3_5_FLASH)
    few, many = LayerHeads(64, 8, 128), LayerHeads(96, 8, 128)
    assert spec.heads_by_layer == (few, *[many, many, many, few] * 11)
    assert spec.windows == (None, *[512, 512, 512, None] * 11)
    gates = AttentionGates(apart=True, one_per_head=True)
    assert (spec.attention_gates, spec.qk_norm, spec.norms.offset) == (gates, "head", 1.0)
    assert (spec.num_gates(0), spec.num_gates(1)) == (64, 96)
    assert spec.scores.scale == 128**-0.5 and spec.norms.eps == 1e-5
    assert [(rope.scaling, rope.theta, rope.rotated) for rope in spec.ropes[:2] if rope] == [
        ("llama3", 5e6, 0.5),
        ("default", 1e4, 1.0),
    ]
    assert spec.rope.original_max_positions == 2**17 and spec.context == 2**18
    assert spec.moe is not None and spec.moe.layers == frozenset(range(3, 45))
    rule = spec.moe.experts.routing
    assert (rule.num_experts, rule.top_k, rule.scale, rule.corrected) == (288, 8, 3.0, True)
    assert spec.moe.of_layer(42) == spec.moe.experts and set(spec.moe.limits) == {43, 44}
    limited = spec.moe.of_layer(44)
    assert (limited.gate, limited.gate_of_shared) == (LimitedGate(7.0), LimitedGate(16.0))
    # published are 196 and 11
    assert 196 < spec.num_parameters / 1e9 < 197
    assert 10.8 < spec.num_active_parameters / 1e9 < 11.2
    assert spec.names.left_out == tuple(f"model.layers.{layer}." for layer in (45, 46, 47))
    with pytest.raises(ConfigError, match="has MTP layers of a kind that is not supported"):
        spec.with_mtp()

    seeing = parse_spec(STEP_3_7_FLASH)
    assert seeing.architecture == "Step3p7ForConditionalGeneration" and seeing.names.multimodal
    assert replace(seeing, architecture=spec.architecture, names=spec.names) == spec
    alike = parse_spec({**STEP_3_5_FLASH, "attention_other_setting": None})
    assert alike.heads_by_layer == ()
    listed = {**STEP_3_5_FLASH, "moe_layers_enum": list(range(3, 48))}
    assert parse_spec(listed).moe == spec.moe
    plain = {"moe_layers_enum": "", "swiglu_limits": None, "swiglu_limits_shared": None}
    assert parse_spec({**STEP_3_5_FLASH, **plain}).moe is None
    one = {"rope_theta": 1e4, "partial_rotary_factors": None, "rope_scaling": None}
    everywhere = parse_spec({**STEP_3_5_FLASH, **one}).ropes
    assert {(rope.scaling, rope.theta, rope.rotated) for rope in everywhere if rope} == {
        ("default", 1e4, 1.0)
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"attention_other_setting": {"head_dim": 64}}, "head_dim 64 is not supported, only 128"),
        ({"attention_other_setting": {"num_attention_heads": 60}}, "60 attention heads cannot"),
        ({"layer_types": ["full_attention"] * 46}, "layer_types must be 45 of sliding_attention"),
        ({"moe_layers_enum": "3,four"}, "must be numbers with commas between them, got '3,four'"),
        ({"moe_layers_enum": [-1]}, "moe_layers_enum must be an integer >= 0 or a list of them"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation 'softmax' is not supported"),
        ({"norm_expert_weight": False}, "norm_expert_weight False is not supported"),
        ({"num_sliding_attention_heads": 60}, "60 attention heads cannot share 8 key-value heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported, only 1.0"),
        ({"partial_rotary_factors": [0.5] * 44}, "partial_rotary_factors must be 45 numbers, the"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "must be 96 num_attention_heads of layers"),
        ({"per_layer_config": {"1": {"num_attention_heads": 96}}}, "and nothing else"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "must be an object with a table for full_att"),
        ({"rope_theta": [5e6, *[1e4] * 44]}, "rope_theta must be 45 numbers, the same for all"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"swiglu_limits": [7.0]}, "swiglu_limits must be 45 numbers or more"),
        ({"swiglu_limits_shared": [16.0] * 45}, "must be 0 for layer 0, which has no experts"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate False is not supported"),
        ({"use_rope_layers": [0] * 45}, "is not supported, only []"),
        ({"yarn_only_types": []}, "yarn_only_types [] is not supported, only ['full_attention']"),
        ({"zero_centered": False}, "zero_centered False is not supported"),
    ],
)
def test_what_step_3_5_must_not_say(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_spec({**STEP_3_5_FLASH, **given})


def test_layers_of_smollm_3_without_rotation() -> None:
    spec = parse_spec(SMOLLM_3B)
    assert [rope is None for rope in spec.ropes] == [False, False, False, True] * 9
    assert spec.tie_embeddings and spec.rope_of(0) == spec.rope
    assert parse_spec({**SMOLLM_3B, "no_rope_layers": None}) == spec
    for wrong in ([1, 1], [2] * 36):
        with pytest.raises(ConfigError, match="no_rope_layers must be 36 of 0 and 1"):
            parse_spec({**SMOLLM_3B, "no_rope_layers": wrong})


def test_windows_of_smollm_3() -> None:
    """A size that no layer uses may be any; ``layer_types`` count before ``use_sliding_window``."""
    plain = parse_spec(SMOLLM_3B)
    assert set(plain.windows) == {None}
    for unused in ({}, {"layer_types": ["full_attention"] * 36}):
        given = {**SMOLLM_3B, "use_sliding_window": False, "sliding_window": 0, **unused}
        assert parse_spec(given) == plain
    kinds = ["sliding_attention", "full_attention"] * 18
    spec = parse_spec({**SMOLLM_3B, "layer_types": kinds, "sliding_window": 64})
    assert spec.windows == (64, None) * 18
    assert parse_spec({**SMOLLM_3B, "layer_types": kinds, "sliding_window": None}) == plain


def test_mixtral() -> None:
    spec = parse_spec(MIXTRAL_8X7B)
    assert spec.moe is not None
    rule = RoutingRule(num_experts=8, top_k=2, normalize=True)
    assert spec.moe.experts == ExpertsSpec(routing=rule, intermediate_size=14336)
    assert spec.moe.layers == frozenset(range(32)) and spec.windows == (None,) * 32
    assert 46e9 < spec.num_parameters < 47e9
    assert 12e9 < spec.num_active_parameters < 13e9  # 12.9e9 with the vocabulary, as published


def test_windows_of_ministral() -> None:
    assert parse_spec(MINISTRAL_8B).windows == (32768,) * 36
    kinds = ["full_attention", *["sliding_attention"] * 35]
    windows = parse_spec({**MINISTRAL_8B, "layer_types": kinds}).windows
    assert windows == (None, *[32768] * 35)


def test_multipliers_of_granite() -> None:
    spec = parse_spec(GRANITE_3_3_8B)
    assert spec.attention_shape().scale == 0.0078125
    assert (spec.scales.embedding, spec.scales.branch, spec.scales.logits) == (12.0, 0.22, 1 / 16)
    assert spec.stream_eps == pytest.approx(1e-5 / 0.22**2)
    assert parse_spec(LLAMA_3_1_8B).stream_eps == 1e-5


def test_shared_expert_of_qwen2_moe() -> None:
    spec = parse_spec(QWEN_1_5_MOE)
    rule = RoutingRule(num_experts=60, top_k=4, normalize=False)
    shared = SharedExpert(name="shared_expert", intermediate_size=5632, gated=True)
    experts = ExpertsSpec(routing=rule, intermediate_size=1408, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(24)))
    assert spec.biases.qkv and not parse_spec({**QWEN_1_5_MOE, "qkv_bias": False}).biases.qkv
    assert round(spec.num_parameters / 1e9, 1) == 14.3
    with pytest.raises(ConfigError, match="use_sliding_window"):
        parse_spec({**QWEN_1_5_MOE, "use_sliding_window": True})


def test_experts_of_qwen3_5() -> None:
    """Its config.json gives no width for a feed-forward block without experts."""
    spec = parse_spec(QWEN_3_5_MOE)
    rule = RoutingRule(num_experts=256, top_k=8, normalize=True)
    shared = SharedExpert(name="shared_expert", intermediate_size=512, gated=True)
    experts = ExpertsSpec(routing=rule, intermediate_size=512, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(40)))
    assert spec.recurrent is not None and 3 not in spec.recurrent.layers
    assert 34 < spec.num_parameters / 1e9 < 36
    dense = {**QWEN_3_5_MOE, "architectures": ["Qwen3_5ForCausalLM"], "intermediate_size": 6144}
    assert parse_spec(dense).moe is None
    for text in (QWEN_3_5_MOE, dense):
        (name,) = text["architectures"]
        outer = name.replace("CausalLM", "ConditionalGeneration")
        found = parse_spec({"architectures": [outer], "text_config": text})
        assert found.architecture == outer and found.moe == parse_spec(text).moe


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "float32"),
        ({"mamba_ssm_dtype": "float32"}, "float32"),
        ({"mamba_ssm_dtype": "float16"}, "float16"),
        ({"mamba_ssm_dtype": "bfloat16"}, "bfloat16"),
        ({"mamba_ssm_dtype": "float64"}, "float32"),
        ({"mamba_ssm_dtype": [1]}, "float32"),
    ],
)
def test_a_checkpoint_may_name_the_type_of_states(given: dict[str, Any], expected: str) -> None:
    plain = {**QWEN_3_5_MOE, **given}
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    for config in (
        plain,
        {**outer, "text_config": plain},
        {**outer, **given, "text_config": QWEN_3_5_MOE},
    ):
        delta = parse_spec(config).recurrent
        assert delta is not None and delta.state_dtype == expected


def test_layers_of_nemotron_nano() -> None:
    spec = parse_spec(NEMOTRON_NANO_9B_V2)
    assert spec.num_layers == 56 and set(spec.ropes) == {None} and spec.gate is None
    assert spec.attention_layers == (14, 21, 30, 39) and spec.moe is None
    assert spec.single_parts.count("feed-forward") == 25
    mamba = spec.recurrent
    assert isinstance(mamba, MambaSpec) and len(mamba.layers) == 27
    assert mamba.matrices == (128, 80, 128) and mamba.num_channels == 12_288
    assert mamba.time_steps == (0.0, math.inf) and mamba.conv_bias and not mamba.bias
    assert mamba.of_rank(8).matrices == (16, 80, 128)
    with pytest.raises(ConfigError, match="128 heads of Mamba in 8 groups cannot be split evenly"):
        mamba.of_rank(3)
    assert 8.8 < spec.num_parameters / 1e9 < 8.9
    kinds = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    pattern = NEMOTRON_NANO_9B_V2["hybrid_override_pattern"]
    without = {k: v for k, v in NEMOTRON_NANO_9B_V2.items() if k != "hybrid_override_pattern"}
    spelled = {**without, "layers_block_type": [kinds[letter] for letter in pattern]}
    infinite = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert parse_spec({**spelled, **infinite, "num_hidden_layers": 7}) == spec
    former = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_dt_limit": [0.1, 0.5]}
    changed = parse_spec({**NEMOTRON_NANO_9B_V2, **former, "mamba_conv_bias": False}).recurrent
    assert changed == replace(
        mamba, num_groups=4, conv_width=3, time_steps=(0.1, 0.5), conv_bias=False
    )


def test_experts_of_nemotron_3_nano() -> None:
    spec = parse_spec(NEMOTRON_3_NANO_30B_A3B)
    rule = RoutingRule(
        num_experts=128, top_k=6, normalize=True, sigmoid=True, corrected=True, scale=2.5
    )
    shared = SharedExpert(name="shared_experts", intermediate_size=3712)
    experts = ExpertsSpec(routing=rule, intermediate_size=1856, shared=shared, gate=None)
    assert spec.moe is not None and spec.moe.experts == experts and len(spec.moe.layers) == 23
    assert 31 < spec.num_parameters / 1e9 < 32
    assert 2.8 < spec.num_active_parameters / 1e9 < 2.9
    latent = parse_spec({**NEMOTRON_3_NANO_30B_A3B, "moe_latent_size": 1344})
    assert latent.moe == MoeSpec(experts=replace(experts, latent_size=1344), layers=spec.moe.layers)
    fewer = 23 * (128 * 1856 * 2 * 1344 - 2 * 1344 * 2688)
    assert spec.num_parameters - latent.num_parameters == fewer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern must be up to 1024 of M"),
        ({"hybrid_override_pattern": ""}, "hybrid_override_pattern must be up to 1024 of M"),
        (
            {"layers_block_type": ["mamba", "rwkv"]},
            "layers_block_type must be up to 1024 of",
        ),
        ({"time_step_limit": [0.1, 0.1]}, "time_step_limit must be two numbers >= 0 in ascending"),
        ({"time_step_limit": 0.1}, "time_step_limit must be two numbers"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported, only 'relu2'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"sliding_window": 512}, "sliding_window 512 is not supported"),
        ({"moe_latent_size": 0}, "moe_latent_size must be an integer >= 1"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"n_groups": 6}, "64 heads of Mamba cannot share 6 groups"),
    ],
)
def test_what_nemotron_must_not_say(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_spec({**NEMOTRON_3_NANO_30B_A3B, **given})


def test_experts_and_projections_of_qwen3_next() -> None:
    """Those of the 80B-A3B, whose config.json has its class's defaults except for the context."""
    text = {"architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1}
    sizes = {"vocab_size": 151936, "num_hidden_layers": 48, "num_attention_heads": 16}
    spec = parse_spec({**text, **sizes, "rope_theta": 10000000})
    rule = RoutingRule(num_experts=512, top_k=10, normalize=True)
    shared = SharedExpert(name="shared_expert", intermediate_size=512, gated=True)
    experts = ExpertsSpec(routing=rule, intermediate_size=512, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(48)))
    assert isinstance(spec.recurrent, DeltaSpec)
    assert set(spec.names.by_head.values()) == {spec.recurrent.num_key_heads} == {16}
    assert spec.recurrent.layers == frozenset(range(48)) - frozenset(range(3, 48, 4))
    assert (spec.heads.head_dim, spec.heads.num_kv_heads, spec.rope.rotated) == (256, 2, 0.25)
    assert 79 < spec.num_parameters / 1e9 < 80.5
    some = parse_spec({**text, **sizes, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert some.moe is not None and some.moe.layers == frozenset(range(3, 48, 2))


def test_router_and_first_layer_of_glm() -> None:
    spec = parse_spec(GLM_4_5_AIR)
    rule = RoutingRule(num_experts=128, top_k=8, normalize=True, sigmoid=True, corrected=True)
    shared = SharedExpert(name="shared_experts", intermediate_size=1408)
    experts = ExpertsSpec(routing=rule, intermediate_size=1408, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(1, 46)))
    assert (spec.biases.qkv, spec.biases.output, spec.qk_norm) == (True, False, None)
    assert spec.rope.rotated == 0.5 and spec.names.left_out == ("model.layers.46.",)
    assert 104 < spec.num_parameters / 1e9 < 108
    assert parse_spec({**GLM_4_5_AIR, "use_qk_norm": True}).qk_norm == "head"


def test_latents_of_glm() -> None:
    spec = parse_spec(GLM_4_7_FLASH)
    assert spec.latent == LatentSpec(
        latent_dim=512, rope_dim=64, nope_dim=192, value_dim=256, query_rank=768
    )
    assert (spec.heads.num_kv_heads, spec.heads.head_dim, spec.rotary_head_dim(0)) == (1, 576, 64)
    assert spec.scores.scale == 256**-0.5 and spec.rope.interleaved
    assert 29.5 < spec.num_parameters / 1e9 < 30.5
    assert spec.names.left_out == ("model.layers.47.",)
    assert spec.moe is not None and spec.moe.layers == frozenset(range(1, 47))
    assert spec.moe.experts.shared == SharedExpert(name="shared_experts", intermediate_size=1536)
    shape = spec.attention_shape(4)
    assert (shape.num_heads, shape.num_kv_heads, shape.latent_dim) == (5, 1, 512)
    # all layers of one position, on every rank
    assert shape.numbers_per_position(window_pages=False) == 47 * 576
    with pytest.raises(ConfigError, match="20 attention heads and 1 key-value heads cannot be spl"):
        spec.attention_shape(8)


def test_router_and_latents_of_deepseek() -> None:
    spec = parse_spec(DEEPSEEK_V3)
    rule = RoutingRule(
        num_experts=256,
        top_k=8,
        normalize=True,
        sigmoid=True,
        corrected=True,
        scale=2.5,
        num_groups=8,
        top_groups=4,
    )
    assert spec.moe is not None and spec.moe.experts.routing == rule
    assert spec.moe.layers == frozenset(range(3, 61))
    assert 670 < spec.num_parameters / 1e9 < 672
    stretched = 0.1 * math.log(40) + 1
    assert spec.scores.scale == pytest.approx(192**-0.5 * stretched**2)
    assert (spec.rope.attention_factor, spec.context) == (1.0, 163_840)
    whole = parse_spec({**DEEPSEEK_V3, "q_lora_rank": None, "rope_interleave": False})
    assert whole.latent is not None and whole.latent.query_rank is None
    assert not whole.rope.interleaved
    assert parse_spec({**DEEPSEEK_V3, "first_k_dense_replace": 61}).moe is None
    for wrong, message in (
        ({"attention_bias": True}, "attention_bias True is not supported, only False"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported, only 128"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1"),
        ({"qk_rope_head_dim": 63}, "rotary embedding needs an even qk_rope_head_dim, got 63"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**DEEPSEEK_V3, **wrong})


def test_the_indexer_of_deepseek_v32() -> None:
    spec = parse_spec(DEEPSEEK_V32)
    assert spec.latent is not None
    assert spec.latent.indexer == IndexerSpec(
        num_heads=64, key_dim=128, top_k=2048, layers=frozenset(range(62))
    )
    of_layer = 64 * 128 * 1536 + (128 + 64) * 7168
    assert spec.num_parameters == parse_spec(DEEPSEEK_V3).num_parameters + 61 * of_layer
    shape = spec.attention_shape(8)
    assert shape.index == IndexShape(top_k=2048, key_dim=128, layers=tuple(range(61)))
    assert shape.numbers_per_position(window_pages=False) == 61 * (576 + 128)
    with_mtp = spec.with_mtp().attention_shape()
    assert with_mtp.index is not None and with_mtp.index.layers == tuple(range(62))
    shared = ["full", *["shared"] * 60]
    for ignored in (
        {"indexer_types": shared},
        {"index_topk_pattern": shared},
        {"index_topk_freq": 4},
    ):
        assert parse_spec({**DEEPSEEK_V32, **ignored}) == spec  # as in transformers
    # all positions are chosen, so there is no choice
    assert shape.for_context(2048).index is None and shape.for_context(2049).index == shape.index
    for wrong, message in (
        ({"q_lora_rank": None}, "q_lora_rank must be an integer, since the indexer reads latents"),
        ({"index_head_dim": 32}, "index_head_dim must be at least 64, which is qk_rope_head_dim"),
        ({"index_topk": 0}, "index_topk must be an integer >= 1, got 0"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave True is not supported"),
        ({"rope_interleave": False}, "rope_interleave False is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**DEEPSEEK_V32, **wrong})


@pytest.mark.parametrize(
    ("keys", "own"),
    [
        ({}, range(78)),
        ({"indexer_types": ["full", "shared"] * 39}, range(0, 78, 2)),
        ({"index_topk_pattern": "FSS" * 26}, range(0, 78, 3)),
        ({"index_topk_pattern": ["full", "shared"] * 39}, range(0, 78, 2)),
        ({"index_topk_freq": 4}, (0, *range(1, 78, 4))),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, *range(2, 78, 4))),
        ({"index_skip_topk_offset": 0}, range(78)),
    ],
)
def test_layers_of_glm_5_that_choose_positions(keys: dict[str, Any], own: Iterable[int]) -> None:
    spec = parse_spec({**GLM_5, **keys})
    assert spec.latent is not None and spec.latent.indexer is not None
    indexer = spec.latent.indexer
    assert (indexer.num_heads, indexer.interleaved) == (32, True)
    assert indexer.layers == {*own, 78}  # 78 is the MTP layer
    assert spec.moe is not None and spec.moe.layers == frozenset(range(3, 78))
    assert 735 < spec.num_parameters / 1e9 < 750


def test_indexers_that_layers_do_not_use_are_left_out() -> None:
    """GLM-5 has one in each layer, also if config.json is told to share."""
    spec = parse_spec({**GLM_5, "index_topk_freq": 4})
    for names in (spec.names, spec.with_mtp().names):
        for layer, is_read in ((1, True), (2, False), (5, True)):
            name = f"model.layers.{layer}.self_attn.indexer.wk.weight"
            assert bool(list(names.weights(name, (2, 2)))) == is_read


def test_wrong_layers_of_glm_5() -> None:
    for wrong, message in (
        ({"indexer_types": ["shared"] * 78}, "indexer_types must be full for the first layer"),
        ({"index_topk_pattern": "FX" * 39}, "index_topk_pattern must be F or S for 78 layers"),
        ({"index_topk_pattern": "FS"}, "index_topk_pattern must be F or S for 78 layers"),
        ({"index_topk_pattern": 5}, "index_topk_pattern must be 78 of full, shared, got 5"),
        ({"index_topk_pattern": "S" * 78}, "index_topk_pattern must be full for the first layer"),
        (
            {"index_topk_freq": 4, "index_skip_topk_offset": 0},
            "index_skip_topk_offset must be an integer >= 1, got 0",
        ),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave False is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**GLM_5, **wrong})


def kimi_k25(spelled: str) -> dict[str, Any]:
    """A config.json of Kimi K2.5, whose architecture is ``spelled`` so."""
    left_out = ("architectures", "quantization_config", "num_nextn_predict_layers")
    text = {key: value for key, value in DEEPSEEK_V3.items() if key not in left_out}
    return {
        "architectures": [f"{spelled}ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**text, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
    }


@pytest.mark.parametrize("spelled", ["KimiK25", "Kimi_K25"])
def test_the_text_part_of_kimi(spelled: str) -> None:
    spec = parse_spec(kimi_k25(spelled))
    assert spec.architecture == f"{spelled}ForConditionalGeneration" and spec.names.multimodal
    assert spec.latent is not None and spec.moe is not None
    held = dict(spec.names.weights("language_model.model.layers.0.mlp.up_proj.weight", (2, 2)))
    assert list(held) == ["model.layers.0.mlp.up_proj.weight"]
    assert not list(spec.names.weights("mm_projector.proj.0.weight", (2, 2)))
    other = kimi_k25(spelled)
    other["text_config"]["model_type"] = "kimi_linear"
    with pytest.raises(ConfigError, match="model_type must be one of deepseek_v3, kimi_k2, got 'k"):
        parse_spec(other)


def test_streams_sinks_and_gates_of_hy4() -> None:
    spec = parse_spec(HY4)
    assert spec.streams == StreamsSpec(count=4, magnitude=2.0, eps=1e-6)
    assert spec.attention_gates == AttentionGates(apart=True) and spec.num_gates(0) == 32 * 256
    assert spec.scores.sinks and spec.scores.scale == 256**-0.5 and not spec.rope.interleaved
    assert spec.latent is not None
    choosing = frozenset({0, *range(1, 34, 4)})
    assert spec.latent.indexer == IndexerSpec(
        num_heads=16, key_dim=128, top_k=2048, layers=choosing, rotates_last=True, norm_eps=1e-5
    )
    assert spec.moe is not None and spec.moe.layers == frozenset(range(1, 34))
    experts = spec.moe.experts
    assert experts.gate == LimitedGate(10.0, on_input=True) and experts.gate_of_shared == "silu"
    assert 58 < spec.num_parameters / 1e9 < 59
    assert not list(spec.names.weights("model.mtp_layers.0.norm.weight", (2816,)))
    with pytest.raises(ConfigError, match="has no MTP layer that is supported"):
        spec.with_mtp()
    dense = parse_spec({**HY4, "mlp_layer_types": ["dense"] * 34})
    assert dense.moe is None
    types = {"indexer_types": ["full", "shared"] * 17}
    halves = parse_spec({**HY4, **types}).latent
    assert halves is not None and halves.indexer is not None
    assert halves.indexer.layers == frozenset(range(0, 34, 2))
    for key, value, message in (
        ("hc_mult", 0, "hc_mult must be an integer >= 1"),
        ("hc_mult", 17, "hc_mult must be at most 16"),
        ("swiglu_limit", 0, "swiglu_limit must be positive"),
        ("attention_bias", True, "attention_bias True is not supported"),
        ("q_lora_rank", None, "q_lora_rank must be an integer"),
        ("first_k_dense_replace", 3, "first_k_dense_replace 3 is not supported"),
        ("layer_types", ["full_attention"] * 34, "layer_types must be 34 of indexed_attention"),
        ("indexer_types", ["shared"] * 34, "indexer_types must be full for the first layer"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**HY4, key: value})


def test_experts_of_ax_k1() -> None:
    spec = parse_spec(AX_K1)
    assert spec.moe is not None and spec.moe.normed
    assert spec.moe.layers == frozenset(range(1, 61))
    rule = spec.moe.experts.routing
    assert rule.sigmoid and not rule.corrected and rule.normalize
    assert (rule.num_experts, rule.top_k, rule.scale) == (192, 8, 2.5)
    assert (rule.num_groups, rule.top_groups, rule.best_of_group) == (8, 4, 2)
    assert 518.5 < spec.num_parameters / 1e9 < 519.5  # published are 519
    norm = "model.layers.0.post_mlp_layernorm.weight"
    assert not list(spec.names.weights(norm, (7168,)))
    with pytest.raises(ConfigError, match="has no MTP layer that is supported"):
        spec.with_mtp()
    dense = parse_spec({**AX_K1, "mlp_layer_types": ["dense"] * 61})
    assert dense.moe is None
    for key, value in (("scoring_func", "softmax"), ("moe_layer_freq", 2), ("q_lora_rank", None)):
        with pytest.raises(ConfigError, match=key):
            parse_spec({**AX_K1, key: value})


def test_latents_of_mistral_small_4() -> None:
    spec = parse_spec(MISTRAL_SMALL_4)
    assert spec.latent is not None and spec.latent.key_dim == 256 + 64
    assert (spec.rope.rotated, spec.rotary_head_dim(0)) == (1.0, 64)
    assert spec.query_growth == QueryGrowth(factor=0.1, period=8192)
    rule = RoutingRule(num_experts=128, top_k=4, normalize=True)
    assert spec.moe is not None and spec.moe.experts.routing == rule and not rule.wide
    assert 118 < spec.num_parameters / 1e9 < 120
    assert spec == parse_spec({**MISTRAL_SMALL_4, "rope_parameters": None})
    rope = {**MISTRAL_SMALL_4["rope_parameters"], "partial_rotary_factor": 0.25}
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.25 is not supported, only 0"):
        parse_spec({**MISTRAL_SMALL_4, "rope_parameters": rope})


def test_latents_of_youtu() -> None:
    spec = parse_spec(YOUTU_LLM_2B)
    assert spec.latent is not None and spec.latent.query_rank == 1536
    assert spec.moe is None and spec.tie_embeddings
    assert 1.9 < spec.num_parameters / 1e9 < 2.1


def test_router_of_deepseek_v2() -> None:
    spec = parse_spec(DEEPSEEK_V2)
    rule = RoutingRule(
        num_experts=160,
        top_k=6,
        normalize=False,
        scale=16.0,
        num_groups=8,
        top_groups=3,
        best_of_group=1,
        in_float32=True,
    )
    shared = SharedExpert(name="shared_experts", intermediate_size=3072)
    experts = ExpertsSpec(routing=rule, intermediate_size=1536, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(1, 60)))
    assert 235 < spec.num_parameters / 1e9 < 237
    greedy = parse_spec({**DEEPSEEK_V2, "topk_method": "greedy"}).moe
    assert greedy is not None
    assert greedy.experts.routing == replace(rule, num_groups=1, top_groups=1)
    for wrong, message in (
        ({"topk_method": "noaux_tc"}, "topk_method must be one of greedy, group_limited_greedy"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported, only False"),
        ({"n_group": None}, "n_group is missing"),
        ({"rope_interleave": False}, "rope_interleave False is not supported, only True"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**DEEPSEEK_V2, **wrong})


def test_router_and_windows_of_dots() -> None:
    spec = parse_spec(DOTS_LLM1)
    assert spec.moe is not None and spec.moe.layers == frozenset(range(1, 62))
    rule = spec.moe.experts.routing
    assert (rule.top_k, rule.scale, rule.limits_groups) == (6, 2.5, False)
    assert spec.moe.experts.shared == SharedExpert(name="shared_experts", intermediate_size=2816)
    assert spec.qk_norm == "head" and spec.windows == (None,) * 62
    some = parse_spec({**DOTS_LLM1, "sliding_window": 4096, "max_window_layers": 60})
    assert some.windows == (*[None] * 60, 4096, 4096)
    with pytest.raises(ConfigError, match="2 of 3 groups of 128 experts"):
        parse_spec({**DOTS_LLM1, "n_group": 3, "topk_group": 2})


def test_router_and_rotation_of_minimax() -> None:
    spec = parse_spec(MINIMAX_M2)
    assert (spec.qk_norm, spec.rope.rotated, spec.rope.theta) == ("token", 0.5, 5e6)
    rule = RoutingRule(num_experts=256, top_k=8, normalize=True, sigmoid=True, corrected=True)
    experts = ExpertsSpec(routing=rule, intermediate_size=1536)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(62)))
    assert spec.names.left_out == tuple(f"model.layers.{layer}." for layer in (62, 63, 64))
    partly = parse_spec({**MINIMAX_M2, "head_dim": 176, "rotary_dim": 30})
    assert partly.rope.dims(176) == 30  # 30 / 176 * 176 is less
    assert 228 < spec.num_parameters / 1e9 < 230 and 9 < spec.num_active_parameters / 1e9 < 10
    assert spec.weights is not None
    layer = "model.layers.5"
    gate = spec.weights.of(f"{layer}.mlp.gate", f"{layer}.block_sparse_moe.gate")
    expert = f"{layer}.mlp.experts.3.gate_proj", f"{layer}.block_sparse_moe.experts.3.w1"
    assert gate is None and str(spec.weights.of(*expert)) == "fp8 in blocks of 128 x 128"
    for key, value, message in (
        ("rotary_dim", 129, "rotary_dim must be"),
        ("scoring_func", "softmax", "scoring_func 'softmax' is not supported, only 'sigmoid'"),
        ("shared_intermediate_size", 1536, "shared_intermediate_size 1536 is not supported"),
        ("use_qk_norm", False, "use_qk_norm False is not supported"),
        ("attn_type_list", [1, 0], "attn_type_list must be 1 for each layer"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**MINIMAX_M2, key: value})


def test_biases_of_seed_oss() -> None:
    spec = parse_spec(SEED_OSS_36B)
    biases = spec.biases.qkv, spec.biases.output, spec.biases.mlp
    assert biases == (True, False, False) and spec.heads.head_dim == 128
    assert 35.5 < spec.num_parameters / 1e9 < 36.5
    changed = parse_spec({**SEED_OSS_36B, "attention_bias": False, "attention_out_bias": True})
    assert (changed.biases.qkv, changed.biases.output) == (False, True)


def test_text_parts_of_glms_that_see() -> None:
    spec = parse_spec(GLM_4_1V_9B)
    assert spec.norms.place == "around" and spec.biases.qkv and spec.names.multimodal
    assert (spec.rope.rotated, spec.rope.interleaved, spec.norms.eps) == (0.5, True, 1e-5)
    assert 9.3 < spec.num_parameters / 1e9 < 9.5
    text = GLM_4_1V_9B["text_config"]
    with pytest.raises(ConfigError, match="attention_bias False is not supported, only True"):
        parse_spec({**GLM_4_1V_9B, "text_config": {**text, "attention_bias": False}})
    whole = {key: value for key, value in text.items() if key != "partial_rotary_factor"}
    assert parse_spec({**GLM_4_1V_9B, "text_config": whole}).rope.rotated == 1.0

    moe = parse_spec(GLM_4_5V)
    assert moe.moe == parse_spec(GLM_4_5_AIR).moe and not moe.rope.interleaved and moe.biases.qkv
    text = {**GLM_4_5V["text_config"], "use_qk_norm": True}
    with pytest.raises(ConfigError, match="use_qk_norm True is not supported, only False"):
        parse_spec({**GLM_4_5V, "text_config": text})

    for config, known in ((GLM_4_1V_9B, spec), (GLM_4_5V, moe)):
        newer = {**config, "architectures": ["Glm46VForConditionalGeneration"]}
        assert parse_spec(newer) == replace(known, architecture="Glm46VForConditionalGeneration")
    newer["text_config"] = {**text, "model_type": "glm5v_text"}
    with pytest.raises(ConfigError, match="model_type must be glm4v_text or glm4v_moe_text"):
        parse_spec(newer)


def test_text_parts_of_qwens_that_see() -> None:
    spec = parse_spec(QWEN_2_5_VL_7B)
    assert spec.biases.qkv and not spec.tie_embeddings and spec.eos_token_ids == {151645}
    assert (spec.rope.scaling, spec.rope.theta, spec.windows) == ("default", 1e6, (None,) * 28)
    assert 7.5 < spec.num_parameters / 1e9 < 7.7
    nested = {key: QWEN_2_5_VL_7B[key] for key in ("architectures", "vision_config")}
    text = {key: QWEN_2_5_VL_7B[key] for key in QWEN_2_5_VL_7B.keys() - nested.keys()}
    assert parse_spec({**nested, "text_config": text}) == spec
    stretched = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    both = {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e6}}
    assert parse_spec({**QWEN_2_5_VL_7B, **both}).rope == spec.rope
    rope = parse_spec({**QWEN_2_5_VL_7B, "rope_scaling": stretched}).rope
    assert (rope.scaling, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 32768)

    spec = parse_spec(QWEN_3_VL_4B)
    assert spec.qk_norm == "head" and spec.tie_embeddings and spec.rope.theta == 5e6
    for outer in ({"tie_word_embeddings": False}, {}):
        some = {key: value for key, value in QWEN_3_VL_4B.items() if key != "tie_word_embeddings"}
        assert parse_spec(some | outer).tie_embeddings  # as in transformers
    assert 3.9 < spec.num_parameters / 1e9 < 4.1

    spec = parse_spec(QWEN_3_VL_30B_A3B)
    rule = RoutingRule(num_experts=128, top_k=8, normalize=True)
    experts = ExpertsSpec(routing=rule, intermediate_size=768)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(48)))
    assert (
        not spec.tie_embeddings
        and spec.names.multimodal
        and spec.names.order_by_hidden_size == 2048
    )
    assert 30 < spec.num_parameters / 1e9 < 31


def test_windows_and_rotation_of_exaone_4() -> None:
    spec = parse_spec(EXAONE_4_32B)
    assert (spec.norms.place, spec.qk_norm, spec.norms.eps) == ("after", "head", 1e-5)
    assert spec.windows == (4096, 4096, 4096, None) * 16 and spec.context == 131072
    assert spec.ropes == (spec.rope, spec.rope, spec.rope, None) * 16
    assert (spec.rope.scaling, spec.rope.factor, spec.rope.theta) == ("llama3", 16.0, 1e6)
    assert 31.5 < spec.num_parameters / 1e9 < 32.5
    unlisted = {**EXAONE_4_32B, "layer_types": None, "sliding_window_pattern": 4}
    assert parse_spec(unlisted) == spec
    del unlisted["sliding_window_pattern"], unlisted["sliding_window"]
    assert parse_spec(unlisted) == spec
    whole = parse_spec({**unlisted, "sliding_window": None})
    assert whole.windows == (None,) * 64 and not whole.ropes  # then all layers rotate
    for wrong, message in (
        ({"layer_types": None}, "sliding_window_pattern must be an integer >= 1, got 'LLLG'"),
        (
            unlisted | {"sliding_window_pattern": None},
            "sliding_window_pattern must be an integer, since",
        ),
        ({"sliding_window": None}, "sliding_window must be an integer, since layer_types has"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**EXAONE_4_32B, **wrong})


def test_norms_and_rotation_of_glm_4() -> None:
    spec = parse_spec(GLM_4_9B_0414)
    assert (spec.norms.place, spec.norms.eps) == ("around", 1e-5)
    assert (spec.biases.qkv, spec.biases.output) == (True, False)
    assert spec.rope.interleaved and spec.rope.rotated == 0.5 and spec.heads.head_dim == 128
    assert 9 < spec.num_parameters / 1e9 < 10
    former = parse_spec({**GLM_4_9B_0414, "architectures": ["GlmForCausalLM"]})
    assert former.norms.place == "before" and former.num_parameters == spec.num_parameters
    assert former.rope == spec.rope and not former.names.renamed
    left_out = ("partial_rotary_factor", "head_dim", "attention_bias", "num_key_value_heads")
    assert parse_spec({k: v for k, v in GLM_4_9B_0414.items() if k not in left_out}) == spec
    del (without := dict(GLM_4_9B_0414))["rms_norm_eps"]
    assert parse_spec(without).norms.eps == 1.5625e-7
    assert not parse_spec({**GLM_4_9B_0414, "attention_bias": False}).biases.qkv


def test_biases_and_rotation_of_ernie() -> None:
    spec = parse_spec(ERNIE_4_5_0_3B)
    assert not (spec.biases.qkv or spec.biases.output or spec.biases.mlp) and spec.tie_embeddings
    assert (spec.rope.interleaved, spec.rope.theta, spec.heads.head_dim) == (True, 5e5, 128)
    assert 0.35 < spec.num_parameters / 1e9 < 0.37
    left_out = ("rope_theta", "head_dim", "tie_word_embeddings", "num_key_value_heads")
    assert parse_spec({k: v for k, v in ERNIE_4_5_0_3B.items() if k not in left_out}) == spec
    assert parse_spec({**ERNIE_4_5_0_3B, "head_dim": None}).heads.head_dim == 64
    biased = parse_spec({**ERNIE_4_5_0_3B, "use_bias": True})
    assert biased.biases.qkv and biased.biases.output and biased.biases.mlp


def test_experts_of_ernie() -> None:
    spec = parse_spec(ERNIE_4_5_21B_A3B)
    rule = RoutingRule(num_experts=64, top_k=6, normalize=True, corrected=True)
    shared = SharedExpert(name="shared_experts", intermediate_size=3072)
    experts = ExpertsSpec(routing=rule, intermediate_size=1536, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(1, 28))) and rule.wide
    assert 21 < spec.num_parameters / 1e9 < 22.5 and spec.rope.interleaved
    assert spec.names.left_out == ("model.mtp_",) and spec.heads.head_dim == 128
    some = {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 6}
    found = parse_spec({**ERNIE_4_5_21B_A3B, **some, "moe_num_shared_experts": 0}).moe
    assert found == MoeSpec(experts=replace(experts, shared=None), layers=frozenset({1, 3, 5}))
    other = {"moe_num_experts": None, "num_experts": 32, "moe_k": None, "num_experts_per_tok": 2}
    found = parse_spec({**ERNIE_4_5_21B_A3B, **other}).moe
    assert found is not None
    assert found.experts.routing == replace(rule, num_experts=32, top_k=2)
    for wrong, message in (
        ({"use_bias": True}, "use_bias True is not supported, only False"),
        ({"moe_norm_min": 1e-6}, "moe_norm_min 1e-06 is not supported, only 1e-12"),
        ({"moe_norm_min": 0.0}, "moe_norm_min 0.0 is not supported"),
        ({"moe_k": 65}, "a token cannot take 65 of 64 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**ERNIE_4_5_21B_A3B, **wrong})


def test_experts_of_olmoe() -> None:
    spec = parse_spec(OLMOE_1B_7B)
    rule = RoutingRule(num_experts=64, top_k=8, normalize=False)
    experts = ExpertsSpec(routing=rule, intermediate_size=1024)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(16)))
    assert (spec.norms.place, spec.qk_norm, spec.norms.eps) == ("before", "token", 1e-5)
    assert 6.8 < spec.num_parameters / 1e9 < 7 and 1 < spec.num_active_parameters / 1e9 < 1.3
    left_out = ("num_experts", "num_experts_per_tok", "max_position_embeddings", "rms_norm_eps")
    assert parse_spec({k: v for k, v in OLMOE_1B_7B.items() if k not in left_out}) == spec
    with pytest.raises(ConfigError, match="clip_qkv is not supported"):
        parse_spec({**OLMOE_1B_7B, "clip_qkv": 8.0})


def test_multipliers_and_experts_of_granite() -> None:
    spec = parse_spec(GRANITE_3_1_3B_A800M)
    rule = RoutingRule(num_experts=40, top_k=8, normalize=True)
    experts = ExpertsSpec(routing=rule, intermediate_size=512, router="router")
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(32)))
    scales = spec.scores.scale, spec.scales.embedding, spec.scales.branch, spec.scales.logits
    assert scales == (0.015625, 12.0, 0.22, 1 / 6.0) and spec.tie_embeddings
    assert 3.2 < spec.num_parameters / 1e9 < 3.5


def test_shared_experts_of_granite() -> None:
    changes = {"architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": 1024}
    spec = parse_spec({**GRANITE_3_1_3B_A800M, **changes})
    former = parse_spec(GRANITE_3_1_3B_A800M)
    assert spec.moe is not None and former.moe is not None
    shared = SharedExpert(name="shared_mlp", intermediate_size=1024)
    assert spec.moe.experts == replace(former.moe.experts, shared=shared)
    without = parse_spec({**GRANITE_3_1_3B_A800M, **changes, "shared_intermediate_size": 0})
    assert without == replace(former, architecture="GraniteMoeSharedForCausalLM")


def test_layers_and_experts_of_granite_4() -> None:
    spec = parse_spec(GRANITE_4_H_TINY)
    assert spec.attention_layers == (5, 15, 25, 35) and set(spec.ropes) == {None}
    mamba = spec.recurrent
    assert isinstance(mamba, MambaSpec) and mamba.matrices == (48, 64, 128)
    assert (mamba.num_groups, mamba.num_channels) == (1, 3328) and not spec.single_parts
    rule = RoutingRule(num_experts=64, top_k=6, normalize=True)
    shared = SharedExpert(name="shared_mlp", intermediate_size=1024)
    experts = ExpertsSpec(routing=rule, intermediate_size=512, shared=shared, router="router")
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(40)))
    assert 6.8 < spec.num_parameters / 1e9 < 7
    assert (mamba.of_rank(4).num_groups, mamba.of_rank(4).matrices) == (1, (12, 64, 128))
    with pytest.raises(ConfigError, match="48 heads of Mamba in 1 groups cannot be split evenly"):
        mamba.of_rank(5)
    assert parse_spec({**GRANITE_4_H_TINY, "mamba_d_head": "auto"}) == spec
    dense = parse_spec({**GRANITE_4_H_TINY, "num_local_experts": 0})
    assert dense.moe is None and dense.intermediate_size == 1024
    changes = {"layer_types": ["attention"] * 40, "position_embedding_type": "rope"}
    plain = parse_spec({**GRANITE_4_H_TINY, **changes})
    assert plain.recurrent is None and not plain.ropes
    for wrong, message in (
        ({"mamba_d_head": 32}, "mamba_n_heads must be so many that heads of 32 have 3072 values"),
        ({"layer_types": ["mamba"] * 39}, "layer_types must be 40 of linear_attention, full"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type must be nope or rope"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**GRANITE_4_H_TINY, **wrong})


def test_layers_of_bamba() -> None:
    spec = parse_spec(BAMBA_9B)
    assert spec.attention_layers == (9, 18, 27) and spec.rope.rotated == 0.5
    mamba = spec.recurrent
    assert isinstance(mamba, MambaSpec) and mamba.matrices == (128, 64, 128)
    assert 9.7 < spec.num_parameters / 1e9 < 9.9
    assert parse_spec({**BAMBA_9B, "partial_rotary_factor": 1.0}) == spec
    llama = parse_spec({**BAMBA_9B, "attn_layer_indices": list(range(32))})
    assert llama.recurrent is None
    with pytest.raises(ConfigError, match="not supported if no layer has attention"):
        parse_spec({**BAMBA_9B, "attn_layer_indices": None}).attention_shape()


def test_mixers_and_multipliers_of_falcon_h1() -> None:
    spec = parse_spec(FALCON_H1_0_5B)
    mamba = spec.recurrent
    assert isinstance(mamba, MambaSpec) and mamba.matrices == (24, 64, 128) and not mamba.normed
    assert spec.parallel == "mixers" and spec.attention_layers == tuple(sorted(mamba.layers))
    assert 0.5 < spec.num_parameters / 1e9 < 0.55
    assert (spec.scales.embedding, spec.scales.logits) == (5.656854249492381, 0.0390625)
    scaled = spec.names.scaled
    assert ".self_attn.q_proj" not in scaled and scaled[".self_attn.k_proj"] == 0.390625
    assert scaled[".mamba.in_proj_x"] == 1.25 * 0.25 and scaled[".mlp.down_proj"] == 0.5859375
    normed = parse_spec({**FALCON_H1_0_5B, "mamba_rms_norm": True}).recurrent
    assert isinstance(normed, MambaSpec) and normed.normed
    wide = {"mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 32}
    assert parse_spec({**FALCON_H1_0_5B, **wide}).recurrent != mamba
    before = {"mamba_rms_norm": True, "mamba_norm_before_gate": True}
    for wrong, message in (
        (before, "mamba_norm_before_gate True is not supported"),
        ({**before, "mamba_norm_before_gate": None}, "mamba_norm_before_gate must be false"),
        ({"projectors_bias": True}, "projectors_bias True is not supported"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be 5 numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**FALCON_H1_0_5B, **wrong})


def test_windows_sinks_and_rotations_of_granite_swash() -> None:
    spec = parse_spec(GRANITE_SWASH_2B)
    assert spec.scores.sinks and spec.windows == (None, 128, 128, 128) * 6 and not spec.ropes
    assert (spec.scores.scale, spec.heads.head_dim, spec.tie_embeddings) == (1 / 128, 128, True)
    assert 2.1 < spec.num_parameters / 1e9 < 2.2
    left_out = ("layer_types", "sliding_window", "num_key_value_heads", "tie_word_embeddings")
    assert parse_spec({k: v for k, v in GRANITE_SWASH_2B.items() if k not in left_out}) == spec
    changed = parse_spec({**GRANITE_SWASH_2B, "layer_rope_theta": [0, 1e4, 1e4, 5e5] * 6})
    assert changed.ropes == (None, spec.rope, spec.rope, replace(spec.rope, theta=5e5)) * 6
    for wrong in ([1e4] * 23, [1e4] * 25, [1.0] * 24):
        with pytest.raises(ConfigError, match="layer_rope_theta must be 24 numbers above 1, or 0"):
            parse_spec({**GRANITE_SWASH_2B, "layer_rope_theta": wrong})


def test_experts_of_granite_swash() -> None:
    spec = parse_spec(GRANITE_SWASH_3B_A600M)
    rule = RoutingRule(num_experts=48, top_k=4, normalize=True)
    shared = SharedExpert(name="shared_mlp", intermediate_size=1280)
    experts = ExpertsSpec(routing=rule, intermediate_size=512, shared=shared, router="router")
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(28))) and spec.scores.sinks
    assert spec.windows == (None, 128, 128, None, *(128, 128, 128, None) * 6)
    assert 3 < spec.num_parameters / 1e9 < 3.05


def test_norms_and_rotation_of_hunyuan() -> None:
    spec = parse_spec(HUNYUAN_7B)
    assert (spec.norms.place, spec.qk_norm, spec.norms.eps) == ("before", "rotated", 1e-5)
    assert (spec.rope.scaling, spec.context, spec.tie_embeddings) == ("default", 32768, True)
    assert spec.rope.theta == 10_000.0 * 1000.0 ** (128 / 126)
    assert 7.4 < spec.num_parameters / 1e9 < 7.6
    newer = {**HUNYUAN_7B["rope_scaling"], "rope_theta": 10000.0, "rope_type": "dynamic"}
    changed = {**HUNYUAN_7B, "rope_scaling": None, "rope_theta": None, "rope_parameters": newer}
    assert parse_spec(changed) == spec
    beside = {"rope_parameters": {"rope_theta": 10_000.0}, "norm_type": "hf_rms"}
    assert parse_spec({**HUNYUAN_7B, **beside, "attention_head_dim": 64}) == spec
    without = {key: value for key, value in HUNYUAN_7B.items() if key != "head_dim"}
    narrow = parse_spec({**without, "attention_head_dim": 64})
    assert (narrow.heads.head_dim, narrow.rope.theta) == (64, 10_000.0 * 1000.0 ** (64 / 62))
    stretched = parse_spec({**HUNYUAN_7B, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert (stretched.rope.scaling, stretched.rope.factor) == ("dynamic", 4.0)
    for wrong, message in (
        ({"use_qk_norm": False}, "use_qk_norm False is not supported, only True"),
        ({"use_cla": True}, "use_cla True is not supported"),
        ({"use_mla": True}, "use_mla True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"norm_type": "layer"}, "norm_type 'layer' is not supported"),
        ({"head_dim": 2}, "rope_scaling: alpha needs heads of 4"),
        ({"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "rope_scaling: alpha must be pos"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**HUNYUAN_7B, **wrong})


def test_experts_of_hunyuan() -> None:
    spec = parse_spec(HUNYUAN_A13B)
    rule = RoutingRule(num_experts=64, top_k=8, normalize=True, in_float32=True)
    assert rule.wide
    shared = SharedExpert(name="shared_mlp", intermediate_size=3072)
    experts = ExpertsSpec(routing=rule, intermediate_size=3072, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(32)))
    assert 79 < spec.num_parameters / 1e9 < 81 and 12 < spec.num_active_parameters / 1e9 < 14
    once = {"moe_topk": 8, "num_shared_expert": 1, "moe_intermediate_size": 3072}
    assert parse_spec({**HUNYUAN_A13B, **once}) == spec
    other = {"moe_topk": None, "num_experts_per_tok": 8, "num_experts": None}
    assert parse_spec({**HUNYUAN_A13B, **other, "num_local_experts": 64}) == spec
    for wrong, message in (
        ({"moe_topk": [8, 4] * 16}, r"moe_topk must be the same number in all layers, got \[4, 8"),
        ({"num_shared_expert": 2}, "num_shared_expert 2 is not supported, only 1"),
        ({"moe_intermediate_size": [1024] * 32}, "moe_intermediate_size 1024 is not .* only 3072"),
        ({"moe_layer_num_skipped": 1}, "moe_layer_num_skipped 1 is not supported, only 0"),
        ({"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe False is not supported"),
        ({"group_limited_greedy": True}, "group_limited_greedy True is not supported"),
        ({"num_experts": 0}, "num_experts must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**HUNYUAN_A13B, **wrong})


def test_the_text_part_of_exaone_4_5() -> None:
    spec = parse_spec(EXAONE_4_5_33B)
    whole = {**EXAONE_4_5_33B["text_config"], "tie_word_embeddings": False}
    alone = parse_spec(whole)
    assert spec.names.multimodal and spec.names.left_out == ("mtp.",)
    assert replace(spec, architecture=alone.architecture, names=alone.names) == alone
    assert spec.windows == (4096, 4096, 4096, None) * 16 and spec.eos_token_ids == {53}
    assert 31.5 < spec.num_parameters / 1e9 < 33.5


def test_experts_of_k_exaone() -> None:
    spec = parse_spec(K_EXAONE)
    rule = RoutingRule(
        num_experts=128, top_k=8, normalize=True, sigmoid=True, corrected=True, scale=2.5
    )
    shared = SharedExpert(name="shared_experts", intermediate_size=2048)
    experts = ExpertsSpec(routing=rule, intermediate_size=2048, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(1, 48)))
    assert (spec.norms.place, spec.qk_norm, spec.norms.eps) == ("before", "head", 1e-5)
    assert spec.windows == (128, 128, 128, None) * 12
    assert spec.ropes == (spec.rope, spec.rope, spec.rope, None) * 12
    assert 230 < spec.num_parameters / 1e9 < 240 and 21 < spec.num_active_parameters / 1e9 < 24
    other = {"architectures": ["ExaoneMoeForCausalLM"], "is_moe_layer": None}
    changed = parse_spec({**K_EXAONE, **other, "first_k_dense_replace": 1})
    assert changed == replace(spec, architecture="ExaoneMoeForCausalLM")
    later = {"first_k_dense_replace": 3, "is_moe_layer": [False] * 3 + [True] * 45}
    found = parse_spec({**K_EXAONE, **later}).moe
    assert found is not None and found.layers == frozenset(range(3, 48))
    for wrong, message in (
        ({"is_moe_layer": [True] * 48}, r"is_moe_layer \[True, .* is not supported, only \[False"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types must be 48 of dense, sparse"),
        ({"sliding_window": None}, "sliding_window must be an integer, since layer_types has"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**K_EXAONE, **wrong})


def test_experts_of_solar_open() -> None:
    spec = parse_spec(SOLAR_OPEN_100B)
    rule = RoutingRule(num_experts=128, top_k=8, normalize=True, sigmoid=True, corrected=True)
    shared = SharedExpert(name="shared_experts", intermediate_size=1280)
    experts = ExpertsSpec(routing=rule, intermediate_size=1280, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(48)))
    assert (spec.qk_norm, spec.norms.eps, spec.context) == (None, 1e-5, 131072)
    assert (spec.rope.scaling, spec.rope.factor, spec.rope.theta) == ("yarn", 2.0, 1e6)
    assert 100 < spec.num_parameters / 1e9 < 104 and 10 < spec.num_active_parameters / 1e9 < 13
    biased = parse_spec({**SOLAR_OPEN_100B, "attention_bias": True})
    assert (biased.biases.qkv, biased.biases.output) == (True, False)
    del (other := {**SOLAR_OPEN_100B, "num_local_experts": 128})["intermediate_size"]
    changed = parse_spec({**other, "n_routed_experts": None})
    assert replace(changed, intermediate_size=spec.intermediate_size) == spec
    for wrong, message in (
        ({"first_k_dense_replace": 1}, "first_k_dense_replace 1 is not supported, only 0"),
        ({"use_qk_norm": True}, "use_qk_norm True is not supported, only False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**SOLAR_OPEN_100B, **wrong})


def test_gates_windows_and_experts_of_trinity() -> None:
    spec = parse_spec(TRINITY_NANO)
    rule = RoutingRule(
        num_experts=128, top_k=8, normalize=True, sigmoid=True, corrected=True, scale=2.826
    )
    shared = SharedExpert(name="shared_experts", intermediate_size=256)
    experts = ExpertsSpec(routing=rule, intermediate_size=256, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(2, 56)))
    assert (spec.norms.place, spec.qk_norm, spec.norms.eps) == ("around", "head", 1e-5)
    assert spec.gates_apart and spec.scales.embedding == 32.0
    assert spec.windows == (2048, 2048, 2048, None) * 14
    assert spec.ropes == (spec.rope, spec.rope, spec.rope, None) * 14
    assert 6 < spec.num_parameters / 1e9 < 6.3
    unlisted = {**TRINITY_NANO, "layer_types": None}
    assert parse_spec(unlisted) == spec
    other = parse_spec({**unlisted, "global_attn_every_n_layers": 2, "num_dense_layers": 56})
    assert other.windows == (2048, None) * 28 and other.moe is None
    assert parse_spec({**TRINITY_NANO, "mup_enabled": False}).scales.embedding == 1.0
    for wrong, message in (
        ({"attention_bias": True}, "attention_bias True is not supported, only False"),
        ({"score_func": "softmax"}, "score_func 'softmax' is not supported, only 'sigmoid'"),
        ({"route_norm": False}, "route_norm False is not supported, only True"),
        ({"n_group": 2}, "n_group 2 is not supported, only 1"),
        ({"num_limited_groups": 2}, "num_limited_groups 2 is not supported, only 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**TRINITY_NANO, **wrong})


def test_experts_of_hy3() -> None:
    spec = parse_spec(HY3)
    rule = RoutingRule(
        num_experts=192, top_k=8, normalize=True, sigmoid=True, corrected=True, scale=2.826
    )
    shared = SharedExpert(name="shared_experts", intermediate_size=1536)
    experts = ExpertsSpec(routing=rule, intermediate_size=1536, shared=shared)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(1, 80)))
    assert (spec.qk_norm, spec.norms.eps, spec.dtype) == ("head", 1e-5, "bfloat16")
    assert spec.names.left_out == ("model.layers.80.",)
    assert 293 < spec.num_parameters / 1e9 < 300 and 19 < spec.num_active_parameters / 1e9 < 22
    assert parse_spec({**HY3, "torch_dtype": "float16"}).dtype == "float16"
    kinds = {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 78, "first_k_dense_replace": 2}
    found = parse_spec({**HY3, **kinds}).moe
    assert found is not None and found.layers == frozenset(range(2, 80))
    for wrong, message in (
        ({"first_k_dense_replace": 2}, "first_k_dense_replace 2 is not supported, only 1"),
        ({"expert_hidden_dim": 1024}, "expert_hidden_dim 1024 is not supported, only 1536"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"qk_norm": False}, "qk_norm False is not supported"),
        ({"route_norm": False}, "route_norm False is not supported"),
        ({"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid False is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**HY3, **wrong})


def test_windows_and_experts_of_mellum_2() -> None:
    spec = parse_spec(MELLUM_2)
    rule = RoutingRule(num_experts=64, top_k=8, normalize=True)
    experts = ExpertsSpec(routing=rule, intermediate_size=896)
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(28)))
    assert spec.windows == (1024, 1024, 1024, None) * 7 and spec.context == 131072
    assert (spec.rope.scaling, spec.rope.factor) == ("yarn", 16.0)
    local = spec.rope_of(0)
    assert local is not None and (local.scaling, local.theta) == ("default", 5e5)
    assert spec.ropes == (local, local, local, spec.rope) * 7
    assert 12 < spec.num_parameters / 1e9 < 12.5 and 1.9 < spec.num_active_parameters / 1e9 < 2.1
    plain = parse_spec({**MELLUM_2, "layer_types": None, "mlp_layer_types": ["dense"] * 28})
    assert plain.windows == (None,) * 28 and not plain.ropes and plain.moe is None
    for wrong, message in (
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is not supported, only rope_param"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters lacks a table for sliding_attention",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "lacks a table for full_attention, sliding_attention",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**MELLUM_2, **wrong})


def test_multipliers_and_norms_of_hyperclova() -> None:
    spec = parse_spec(HYPERCLOVA_X_SEED_THINK_14B)
    scales = spec.scores.scale, spec.scales.embedding, spec.scales.branch, spec.scales.logits
    assert scales == (0.0078125, 10.0, 1.0, 0.125) and spec.norms.place == "around"
    assert 14.7 < spec.num_parameters / 1e9 < 14.8
    scaled = {**HYPERCLOVA_X_SEED_THINK_14B, "residual_multiplier": 0.5}
    spec = parse_spec(scaled)
    assert (spec.scales.branch, spec.stream_scale, spec.stream_eps) == (0.5, 1.0, 1e-5)
    spec = parse_spec({**scaled, "use_post_norm": False, "attention_multiplier": None})
    assert (spec.stream_scale, spec.stream_eps, spec.scores.scale) == (0.5, 4e-5, 128**-0.5)
    assert spec.norms.place == "before" and not spec.names.renamed


def test_biases_of_internlm3() -> None:
    spec = parse_spec(INTERNLM3_8B)
    assert (spec.rope.scaling, spec.context) == ("dynamic", 196_608)
    assert not (spec.biases.qkv or spec.biases.output or spec.biases.mlp)
    assert 8.7 < spec.num_parameters / 1e9 < 8.9
    for names in (("qkv_bias", "bias"), ("attention_bias", "mlp_bias")):
        biased = parse_spec({**INTERNLM3_8B, **dict.fromkeys(names, True)})
        assert biased.biases.qkv and biased.biases.output and biased.biases.mlp
    with pytest.raises(
        ConfigError,
        match=r"qkv_bias \(or attention_bias\) True with bias \(or mlp_bias\) False is not",
    ):
        parse_spec({**INTERNLM3_8B, "qkv_bias": True})


def test_what_iquest_coder_does_not_use() -> None:
    spec = parse_spec(IQUEST_CODER_40B)
    assert 39 < spec.num_parameters / 1e9 < 41 and spec.context == 131072
    for wrong, message in (
        ({"clip_qkv": 8.0}, "clip_qkv is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**IQUEST_CODER_40B, **wrong})


def test_sections_and_experts_of_llama_4() -> None:
    spec = parse_spec(LLAMA_4_SCOUT)
    still = frozenset(range(3, 48, 4))
    assert spec.windows == (8192, 8192, 8192, None) * 12 and spec.sections
    assert [layer for layer in range(48) if spec.rope_of(layer) is None] == sorted(still)
    assert spec.rope.interleaved and spec.context == 10485760
    assert (spec.rope.low_freq_factor, spec.rope.high_freq_factor) == (1.0, 1.0)
    assert spec.query_growth == QueryGrowth(factor=0.1, period=8192, first=1, layers=still)
    assert spec.qk_norm == "unweighted" and not spec.tie_embeddings and spec.names.multimodal
    experts = ExpertsSpec(
        routing=RoutingRule(num_experts=16, top_k=1, normalize=False, sigmoid=True),
        intermediate_size=8192,
        shared=SharedExpert(name="shared_expert", intermediate_size=8192),
        router="router",
        scales_inputs=True,
    )
    assert spec.moe == MoeSpec(experts=experts, layers=frozenset(range(48)))
    assert 107 < spec.num_parameters / 1e9 < 109


def test_llama_4_maverick() -> None:
    """Experts in every second layer, without query norms; the flag was once a number."""
    changes: dict[str, Any] = {"interleave_moe_layer_step": 2, "num_local_experts": 128}
    changes |= {"use_qk_norm": False, "rope_scaling": None, "attn_temperature_tuning": 4}
    text = {**LLAMA_4_SCOUT["text_config"], **changes}
    spec = parse_spec({**LLAMA_4_SCOUT, "text_config": text})
    assert spec.moe is not None and spec.moe.layers == frozenset(range(1, 48, 2))
    assert spec.intermediate_size == 16384 and spec.qk_norm is None
    assert spec.query_growth is not None and spec.rope.scaling == "default"
    assert 395 < spec.num_parameters / 1e9 < 402
    alone = {**text, "architectures": ["Llama4ForCausalLM"]}
    assert parse_spec({**alone, "attn_temperature_tuning": 0}).query_growth is None
    assert parse_spec({**alone, "moe_layers": [0, 47, 60]}).moe == replace(
        spec.moe, layers=frozenset({0, 47})
    )
    assert parse_spec({**alone, "moe_layers": []}).moe is None
    assert not parse_spec({**alone, "attention_chunk_size": None}).sections
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    for wrong, message in (
        ({"num_experts_per_tok": 2}, "num_experts_per_tok must be 1, got 2"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning must be true or false"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types must be 48 of chunked_att"),
        ({"use_qk_norm": True, "rope_scaling": rope}, "use_qk_norm .* multiplies it by 1.2"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_spec({**alone, **wrong})


def test_experts_windows_and_sinks_of_gpt_oss() -> None:
    spec = parse_spec(GPT_OSS_20B)
    rule = RoutingRule(num_experts=32, top_k=4, normalize=True)
    assert spec.moe is not None and spec.moe.layers == frozenset(range(24))
    assert spec.moe.experts == ExpertsSpec(
        routing=rule,
        intermediate_size=2880,
        gate=ClampedGate(alpha=1.702, limit=7.0),
        biases=True,
        router="router",
        interleaved=True,
    )
    assert spec.windows == (128, None) * 12 and spec.dtype == "bfloat16"
    assert spec.biases.qkv and spec.biases.output and spec.attention_shape(2).sinks
    assert (spec.rope.scaling, spec.rope.truncate, spec.context) == ("yarn", False, 131072)
    assert 20 < spec.num_parameters / 1e9 < 22
    left_out = ("layer_types", "rope_scaling", "swiglu_limit", "rms_norm_eps", "head_dim")
    assert parse_spec({k: v for k, v in GPT_OSS_20B.items() if k not in left_out}) == spec
    plain = {**GPT_OSS_20B, "quantization_config": None, "swiglu_limit": 5.0, "dtype": "float32"}
    changed = parse_spec(plain)
    assert changed.moe is not None and changed.moe.experts.gate == ClampedGate(1.702, 5.0)
    assert changed.weights is None and changed.dtype == "float32"


def test_parts_that_read_the_same_norm() -> None:
    spec = parse_spec(COMMAND_R_08_2024)
    assert spec.norms.centered and spec.parallel == "parts" and spec.tie_embeddings
    assert (spec.norms.eps, spec.scales.logits, spec.rope.theta) == (1e-5, 0.0625, 4e6)
    assert spec.rope.interleaved and spec.ropes == () and spec.windows == (None,) * 40
    assert 32.2 < spec.num_parameters / 1e9 < 32.4
    with pytest.raises(ConfigError, match="use_qk_norm True is not supported, only False"):
        parse_spec({**COMMAND_R_08_2024, "use_qk_norm": True})
    with pytest.raises(ConfigError, match="norms that subtract the mean are supported only of"):
        replace(spec.norms, place="after")

    spec = parse_spec(COMMAND_R_V01)
    assert (spec.context, spec.rope.scaling, spec.heads.num_kv_heads) == (131072, "default", 64)
    assert 34.9 < spec.num_parameters / 1e9 < 35.1
    assert parse_spec({**COMMAND_R_V01, "model_max_length": 4096}).context == 8192
    assert parse_spec({**COMMAND_R_V01, "model_max_length": None}).context == 8192

    spec = parse_spec(COMMAND_R7B)
    assert spec.windows == (4096, 4096, 4096, None) * 8
    assert spec.ropes == (spec.rope, spec.rope, spec.rope, None) * 8 and spec.rope.interleaved
    assert (spec.scales.logits, spec.context) == (0.25, 132096)
    assert 8.0 < spec.num_parameters / 1e9 < 8.1
    kinds = ["full_attention"] * 32
    assert parse_spec({**COMMAND_R7B, "layer_types": kinds}).ropes == (None,) * 32


def test_experts_of_command() -> None:
    spec = parse_spec(COMMAND_A_PLUS)
    assert spec.moe is not None and spec.moe.layers == frozenset(range(1, 8))
    experts, rule = spec.moe.experts, spec.moe.experts.routing
    assert (rule.num_experts, rule.top_k, rule.scale) == (128, 8, 0.5)
    assert rule.sigmoid and rule.normalize and not rule.corrected
    assert experts.shared is not None and experts.shared.intermediate_size == 2 * 1024
    assert spec.names.scaled == {".shared_experts.down_proj": 0.5}
    assert (experts.intermediate_size, spec.intermediate_size) == (1024, 8192)
    assert spec.windows == (None, 4096, 4096, 4096, None, 4096, 4096, 4096)
    assert spec.ropes == (*[spec.rope] * 4, None, *[spec.rope] * 3)  # the first is dense
    assert spec.norms.centered and spec.parallel == "parts" and spec.heads.head_dim == 128

    spec = parse_spec({**COMMAND_A_PLUS, "shared_expert_combination_strategy": "sum"})
    assert spec.moe is not None and spec.moe.experts.routing.scale == 1.0 and not spec.names.scaled
    changed = {"prefix_dense_sliding_window_pattern": 2, "rms_norm_eps": 1e-6}
    spec = parse_spec({**COMMAND_A_PLUS, **changed, "first_k_dense_replace": 3})
    assert spec.windows == (4096, None, 4096, 4096, 4096, 4096, None, 4096)
    assert [rope is None for rope in spec.ropes] == [window is None for window in spec.windows]
    assert (spec.norms.eps, spec.norms.centered) == (1e-6, False)
    softmax = parse_spec(
        {**COMMAND_A_PLUS, "expert_selection_fn": "softmax", "norm_topk_prob": False}
    )
    assert softmax.moe is not None and softmax.moe.experts.routing.normalize
    assert parse_spec({**COMMAND_A_PLUS, "first_k_dense_replace": 8}).moe is None
    for key, value in (("expert_selection_fn", "relu"), ("first_k_dense_replace", 9)):
        with pytest.raises(ConfigError, match=key):
            parse_spec({**COMMAND_A_PLUS, key: value})


def test_the_square_of_relu_and_gates_of_gelu() -> None:
    spec = parse_spec(AFM_4_5B)
    assert spec.gate is None and (spec.rope.scaling, spec.context) == ("yarn", 81920)
    assert 4.5 < spec.num_parameters / 1e9 < 4.7
    with pytest.raises(ConfigError, match="hidden_act 'silu' is not supported, only 'relu2'"):
        parse_spec({**AFM_4_5B, "hidden_act": "silu"})

    spec = parse_spec(GEMMA_7B)
    assert (spec.gate, spec.norms.offset, spec.norms.place) == ("gelu", 1.0, "before")
    assert spec.tie_embeddings and spec.scales.embedding == 3072**0.5
    assert 8.5 < spec.num_parameters / 1e9 < 8.6
    assert parse_spec({**GEMMA_7B, "hidden_activation": "gelu_pytorch_tanh"}) == spec
    with pytest.raises(ConfigError, match="hidden_activation must be 'gelu' or"):
        parse_spec({**GEMMA_7B, "hidden_activation": "relu"})


def test_windows_of_cwm() -> None:
    spec = parse_spec(CWM)
    assert spec.windows == (None, 8192, 8192, 8192) * 16 and spec.ropes == ()
    assert (spec.rope.scaling, spec.rope.factor, spec.heads.head_dim) == ("llama3", 16.0, 128)
    assert spec.eos_token_ids == {128001, 128008, 128009} and not spec.biases.qkv
    assert 32.0 < spec.num_parameters / 1e9 < 33.0
    bare = {key: value for key, value in CWM.items() if "rope" not in key}
    assert parse_spec({**bare, "eos_token_id": None}) == spec
    with pytest.raises(ConfigError, match="attention_bias True is not supported"):
        parse_spec({**CWM, "attention_bias": True})


def test_layer_norms_that_are_stored_less_one() -> None:
    spec = parse_spec(MINITRON_4B)
    assert spec.norms.centered and spec.norms.biased and spec.norms.offset == 1.0
    assert spec.gate is None and not (spec.biases.qkv or spec.biases.mlp)
    assert (spec.rope.rotated, spec.norms.eps, spec.heads.head_dim) == (0.5, 1e-5, 128)
    assert 4.1 < spec.num_parameters / 1e9 < 4.3
    bare = {key: value for key, value in MINITRON_4B.items() if key != "partial_rotary_factor"}
    assert parse_spec(bare) == spec
    with pytest.raises(ConfigError, match="hidden_act 'silu' is not supported, only 'relu2'"):
        parse_spec({**MINITRON_4B, "hidden_act": "silu"})


def test_heads_of_laguna() -> None:
    spec = parse_spec(LAGUNA_XS_2)
    few, many = LayerHeads(48, 8, 128), LayerHeads(64, 8, 128)
    assert spec.heads_by_layer == (few, many, many, many) * 10
    assert spec.windows == (None, 512, 512, 512) * 10
    gates = AttentionGates(apart=True, one_per_head=True, function="softplus")
    assert (spec.attention_gates, spec.qk_norm) == (gates, "head")
    assert [(rope.scaling, rope.theta, rope.rotated) for rope in spec.ropes[:2] if rope] == [
        ("yarn", 5e5, 0.5),
        ("default", 1e4, 1.0),
    ]
    assert spec.moe is not None and spec.moe.layers == frozenset(range(1, 40))
    rule = spec.moe.experts.routing
    assert (rule.num_experts, rule.top_k, rule.scale, rule.corrected) == (256, 8, 2.5, True)
    assert (spec.num_gates(0), spec.num_gates(1)) == (48, 64)
    assert 33 < spec.num_parameters / 1e9 < 34
    shape = spec.attention_shape(2)
    assert shape.by_layer[:2] == (LayerHeads(24, 4, 128), LayerHeads(32, 4, 128))
    assert [(kind.num_heads, len(own)) for kind, own in shape.kinds] == [(24, 10), (32, 30)]
    with pytest.raises(ConfigError, match="48 attention heads and 8 key-value heads cannot be spl"):
        spec.attention_shape(32)

    bare = {key: value for key, value in LAGUNA_XS_2.items() if key != "rope_parameters"}
    assert [rope.rotated for rope in parse_spec(bare).ropes[:2] if rope] == [0.5, 1.0]
    assert parse_spec({**LAGUNA_XS_2, "num_attention_heads_per_layer": None}).heads_by_layer == ()
    by_element = replace(gates, one_per_head=False)
    assert parse_spec({**LAGUNA_XS_2, "gating": "per-element"}).attention_gates == by_element
    for key, value in (
        ("gating", False),
        ("partial_rotary_factor", 0.5),
        ("swa_attention_sink_enabled", True),
        ("moe_router_logit_softcapping", 30.0),
        ("num_attention_heads_per_layer", [48] * 39),
        ("num_attention_heads_per_layer", [0] * 40),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("attention_bias", True),
    ):
        with pytest.raises(ConfigError, match=f"{key} "):
            parse_spec({**LAGUNA_XS_2, key: value})
    uneven = [48, *[60] * 39]
    with pytest.raises(ConfigError, match="_per_layer must be 40 numbers of heads that share 8 KV"):
        parse_spec({**LAGUNA_XS_2, "num_attention_heads_per_layer": uneven})
    alike = parse_spec({**LAGUNA_XS_2, "num_attention_heads_per_layer": [48] * 40})
    assert alike.heads_by_layer == ()
    ropes = {**LAGUNA_XS_2["rope_parameters"], "sliding_attention": {"rope_type": "foo"}}
    with pytest.raises(ConfigError, match=r"rope_parameters: sliding_attention: .*foo"):
        parse_spec({**LAGUNA_XS_2, "rope_parameters": ropes})


def test_routers_that_correct_logits() -> None:
    spec = parse_spec(KOLIBRI_1)
    assert spec.moe is not None and spec.moe.layers == frozenset(range(50))
    experts, rule = spec.moe.experts, spec.moe.experts.routing
    assert (rule.num_experts, rule.top_k, rule.normalize, rule.wide) == (384, 6, False, True)
    assert rule.sigmoid and rule.corrected and rule.corrects_logits
    assert experts.shared is not None and experts.shared.intermediate_size == 512
    assert (spec.norms.place, spec.qk_norm) == ("around", "head")
    assert spec.windows == (513, 513, 513, 513, None) * 10
    assert [rope is None for rope in spec.ropes] == [window is None for window in spec.windows]
    assert 77 < spec.num_parameters / 1e9 < 79
    renamed = {
        ours
        for theirs in (
            "model.layers.0.post_attn_norm.weight",
            "model.layers.0.post_self_attn_layernorm.weight",
        )
        for ours, _ in spec.names.weights(theirs, (2560,))
    }
    assert renamed == {"model.layers.0.post_attention_layernorm.weight"}
    with pytest.raises(ConfigError, match="sliding_window must be an integer"):
        parse_spec({**KOLIBRI_1, "sliding_window": None})


def test_experts_of_flex_olmo() -> None:
    spec = parse_spec(FLEX_OLMO_7X7B)
    assert (spec.norms.place, spec.qk_norm, spec.norms.eps, spec.rope.theta) == (
        "after",
        "token",
        1e-6,
        5e5,
    )
    assert spec.moe is not None and spec.moe.layers == frozenset(range(32))
    experts, rule = spec.moe.experts, spec.moe.experts.routing
    assert (rule.num_experts, rule.top_k, rule.normalize, rule.sigmoid) == (7, 5, False, False)
    assert (experts.intermediate_size, experts.shared) == (11008, None)
    assert 33.0 < spec.num_parameters / 1e9 < 33.5


def test_layer_norms_with_biases() -> None:
    spec = parse_spec(STARCODER2_7B)
    assert spec.norms.centered and spec.norms.biased and spec.parallel is None
    assert spec.biases.qkv and spec.biases.output and spec.biases.mlp
    assert spec.gate is None and spec.activation == "gelu" and spec.tie_embeddings
    assert spec.windows == (4096,) * 32 and (spec.norms.eps, spec.context) == (1e-5, 16384)
    assert 7.1 < spec.num_parameters / 1e9 < 7.2
    assert not parse_spec({**STARCODER2_7B, "use_bias": False}).biases.mlp
    with pytest.raises(ConfigError, match="norm_type 'rms_norm' is not supported"):
        parse_spec({**STARCODER2_7B, "norm_type": "rms_norm"})
    with pytest.raises(ConfigError, match="norms with biases are supported only if"):
        replace(spec.norms, centered=False)

    spec = parse_spec(JAIS_2_8B)
    assert spec.norms.centered and spec.norms.biased and spec.biases.qkv and spec.biases.mlp
    assert spec.gate is None and (spec.activation, spec.rope.theta) == ("relu2", 5e5)
    assert 8.0 < spec.num_parameters / 1e9 < 8.2
    with pytest.raises(ConfigError, match="hidden_act 'gelu' is not supported, only 'relu2'"):
        parse_spec({**JAIS_2_8B, "hidden_act": "gelu"})


def test_positions_by_a_table() -> None:
    spec = parse_spec(OPT_1_3B)
    assert spec.positions == LearnedPositions(offset=2) and spec.ropes == (None,) * 24
    assert spec.norms == NormsSpec(eps=1e-5, centered=True, biased=True)
    assert (spec.gate, spec.activation, spec.context) == (None, "relu", 2048)
    assert spec.biases == BiasesSpec(qkv=True, output=True, mlp=True) and spec.tie_embeddings
    assert 1.31 < spec.num_parameters / 1e9 < 1.32
    for changes in ({"do_layer_norm_before": False}, {"word_embed_proj_dim": 512}):
        with pytest.raises(ConfigError, match=f"{next(iter(changes))} .* is not supported"):
            parse_spec({**OPT_1_3B, **changes})
    with pytest.raises(ConfigError, match=r"activation_function must be one of gelu, .*relu"):
        parse_spec({**OPT_1_3B, "activation_function": "quick_gelu"})

    spec = parse_spec(GPT_2)
    assert spec.positions == LearnedPositions() and spec.activation == "gelu"
    assert (spec.intermediate_size, spec.context, spec.tie_embeddings) == (3072, 1024, True)
    assert 0.124 < spec.num_parameters / 1e9 < 0.125
    with pytest.raises(ConfigError, match="scale_attn_by_inverse_layer_idx True is not supported"):
        parse_spec({**GPT_2, "scale_attn_by_inverse_layer_idx": True})

    spec = parse_spec(STARCODER)
    assert spec.heads == LayerHeads(48, 1, 128) and spec.activation == "exact gelu"
    assert 15.5 < spec.num_parameters / 1e9 < 15.6
    assert parse_spec({**STARCODER, "multi_query": False}).heads == LayerHeads(48, 48, 128)


def test_parts_side_by_side_of_older_models() -> None:
    spec = parse_spec(GPT_J_6B)
    assert spec.parallel == "parts" and spec.rope.interleaved and spec.rope.rotated == 0.25
    assert spec.biases == BiasesSpec(mlp=True, head=True)
    assert 6.0 < spec.num_parameters / 1e9 < 6.1
    with pytest.raises(ConfigError, match="rotary_dim must be a number"):
        parse_spec({**GPT_J_6B, "rotary_dim": None})
    with pytest.raises(ConfigError, match="tie_word_embeddings True is not supported"):
        parse_spec({**GPT_J_6B, "tie_word_embeddings": True})

    spec = parse_spec(PYTHIA_1_4B)
    assert spec.parallel == "normed parts" and spec.rope.rotated == 0.25
    assert spec.activation == "exact gelu" and not spec.biases.head
    assert 1.41 < spec.num_parameters / 1e9 < 1.42
    assert parse_spec({**PYTHIA_1_4B, "use_parallel_residual": False}).parallel is None

    spec = parse_spec(PHI_2)
    assert spec.parallel == "parts" and spec.rope.rotated == 0.4 and spec.biases.head
    assert 2.7 < spec.num_parameters / 1e9 < 2.8
    with pytest.raises(ConfigError, match="qk_layernorm True is not supported"):
        parse_spec({**PHI_2, "qk_layernorm": True})
    with pytest.raises(ConfigError, match="tie_word_embeddings True is not supported"):
        parse_spec({**PHI_2, "tie_word_embeddings": True})

    spec = parse_spec(STABLELM_2_1_6B)
    assert spec.gate == "silu" and spec.biases == BiasesSpec(qkv=True) and spec.parallel is None
    assert spec.norms.biased and 1.6 < spec.num_parameters / 1e9 < 1.7

    spec = parse_spec(FALCON_7B)
    assert spec.parallel == "parts" and spec.heads == LayerHeads(71, 1, 64)
    assert 6.9 < spec.num_parameters / 1e9 < 7.0
    with pytest.raises(ConfigError, match="alibi True is not supported"):
        parse_spec({**FALCON_7B, "alibi": True})
    spec = parse_spec(FALCON_40B)
    assert spec.parallel == "normed parts" and spec.heads == LayerHeads(128, 8, 64)
    assert 41 < spec.num_parameters / 1e9 < 42
    assert parse_spec({**FALCON_40B, "num_ln_in_parallel_attn": 1}).parallel == "parts"


def test_norms_without_weights_that_subtract_the_mean() -> None:
    spec = parse_spec(OLMO_1_7B)
    assert spec.norms == NormsSpec(eps=1e-5, centered=True, weighted=False)
    assert 6.8 < spec.num_parameters / 1e9 < 6.9
    with pytest.raises(ConfigError, match="clip_qkv must be null"):
        parse_spec({**OLMO_1_7B, "clip_qkv": 8.0})


def test_learned_activations() -> None:
    spec = parse_spec(APERTUS_8B)
    assert spec.gate is None and (spec.activation, spec.qk_norm) == ("xielu", "head")
    assert (spec.rope.scaling, spec.rope.theta, spec.context) == ("llama3", 12e6, 65536)
    assert 8.0 < spec.num_parameters / 1e9 < 8.1
    bare = {key: value for key, value in APERTUS_8B.items() if "rope" not in key}
    assert parse_spec(bare).rope == spec.rope
    with pytest.raises(ConfigError, match="post_norm True is not supported, only False"):
        parse_spec({**APERTUS_8B, "post_norm": True})


def test_bounded_scores() -> None:
    spec = parse_spec(GEMMA_2_9B)
    assert (spec.scores.cap, spec.scales.logit_cap, spec.scores.scale) == (50.0, 30.0, 1 / 16)
    assert spec.windows == (4096, None) * 21 and spec.attention_shape().cap == 50.0
    assert (spec.norms.place, spec.norms.offset, spec.gate) == ("around", 1.0, "gelu")
    assert 9.2 < spec.num_parameters / 1e9 < 9.3
    assert parse_spec({k: v for k, v in GEMMA_2_9B.items() if "softcapping" not in k}) == spec
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    free = parse_spec({**GEMMA_2_9B, **nulls})
    assert free.scores.cap == free.scales.logit_cap == 0.0


def test_short_convolutions() -> None:
    spec = parse_spec(LFM2_1_2B)
    conv = spec.recurrent
    assert isinstance(conv, ConvSpec) and len(conv.layers) == 10
    assert (conv.num_channels, conv.conv_width, conv.matrices) == (2048, 3, (0, 0, 0))
    assert (spec.intermediate_size, spec.qk_norm, spec.norms.eps) == (8192, "head", 1e-5)
    assert spec.tie_embeddings and 1.16 < spec.num_parameters / 1e9 < 1.18
    assert conv.of_rank(4).num_channels == 512
    with pytest.raises(ConfigError, match="2048 channels of short convolutions cannot be split"):
        conv.of_rank(3)
    wider = parse_spec({**LFM2_1_2B, "block_ffn_dim_multiplier": 1.01})
    assert wider.intermediate_size == 8448
    unrounded = parse_spec({**LFM2_1_2B, "block_ff_dim": 12300, "block_ffn_dim_multiplier": None})
    assert unrounded.intermediate_size == 8200
    whole = parse_spec({**LFM2_1_2B, "block_auto_adjust_ff_dim": False, "tie_embedding": False})
    assert whole.intermediate_size == 12288 and not whole.tie_embeddings

    spec = parse_spec(LFM2_8B_A1B)
    assert spec.moe is not None and spec.moe.layers == frozenset(range(2, 24))
    assert spec.moe.experts.routing.corrected and spec.moe.experts.routing.sigmoid
    assert 8.3 < spec.num_parameters / 1e9 < 8.4

    spec = parse_spec(LFM3_1_7B)
    conv = spec.recurrent
    assert isinstance(conv, ConvSpec) and len(conv.layers) == 13 and conv.conv_width == 7
    assert spec.windows[:5] == (None, None, None, None, 256)
    assert parse_spec({**LFM3_1_7B, "sliding_window": None}).windows == (None,) * 24
    assert spec.norms.place == "around"
    assert spec.attention_gates == AttentionGates(apart=True, one_per_head=True)
    local, rope = spec.rope_of(4), spec.rope
    assert local is not None and (local.scaling, local.theta) == ("default", 1e4)
    assert (rope.scaling, rope.theta, rope.rotated) == ("proportional", 1e6, 0.5)
    assert not spec.attention_shape().for_context(4096).window_pages, "states have snapshots"
    assert 1.7 < spec.num_parameters / 1e9 < 1.9
    with pytest.raises(ConfigError, match="use_sandwich_norm False is not supported, only True"):
        parse_spec({**LFM3_1_7B, "use_sandwich_norm": False})
    for table, complaint in (
        ({"rope_theta": 0.5}, "rope_theta must be above 1, got 0.5"),
        ({"rope_type": "spiral"}, "rope type 'spiral' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ):
        ropes = {"sliding_attention": table, "full_attention": {"rope_theta": 1e6}}
        with pytest.raises(ConfigError, match=f"rope_parameters: sliding_attention: {complaint}"):
            parse_spec({**LFM3_1_7B, "rope_parameters": ropes})
    with pytest.raises(ConfigError, match="layer_types must be 24 of conv, full_attention"):
        parse_spec({**LFM2_8B_A1B, "layer_types": ["conv"]})


def test_flint() -> None:
    spec = parse_spec(FLINT)
    assert spec.windows[:6] == (None, None, 513, 513, 513, None) and spec.windows[-1] is None
    assert spec.windows.count(None) == 14
    assert [rope is None for rope in spec.ropes] == [window is None for window in spec.windows]
    assert spec.moe is not None and spec.moe.layers == frozenset(range(2, 49))
    experts, rule = spec.moe.experts, spec.moe.experts.routing
    assert (rule.num_experts, rule.top_k, rule.normalize, rule.wide) == (256, 6, True, True)
    assert rule.sigmoid and not rule.corrected
    assert experts.shared == SharedExpert(name="shared_expert", intermediate_size=1024)
    assert spec.scores.sinks and spec.qk_norm == "head"
    assert 39 < spec.num_parameters / 1e9 < 41
    ours = dict(spec.names.weights("model.layers.0.self_attn.softmax_offset", (32,)))
    assert list(ours) == ["model.layers.0.self_attn.sinks"]
    everywhere = parse_spec({**FLINT, "mlp_only_layers": []}).moe
    assert everywhere is not None and everywhere.layers == frozenset(range(49))
    for key, complaint in (("sliding_window", "an integer"), ("layer_types", "49 of ")):
        with pytest.raises(ConfigError, match=f"{key} must be {complaint}"):
            parse_spec({**FLINT, key: ["full_attention"]})


def test_muse_glimmer() -> None:
    spec = parse_spec(MUSE_GLIMMER_30B)
    assert spec.windows == (2048, 2048, 2048, None) * 13
    assert [rope is None for rope in spec.ropes] == [False, False, False, True] * 13
    assert spec.qk_norm == "unweighted everywhere"
    norms = NormsSpec(eps=1e-5, place="around", output_eps=1e-8, offset=1.0, final_offset=0.0)
    assert spec.norms == replace(norms, of_embedding=True)
    assert spec.scores.scale == pytest.approx(3.87 / math.sqrt(128))
    assert spec.scales.logits == pytest.approx(26**-0.5) and spec.scales.logit_cap == 20.0
    assert spec.attention_gates == AttentionGates(apart=True)
    assert 27.5 < spec.num_parameters / 1e9 < 28
    text = MUSE_GLIMMER_30B["text_config"]
    short = {"rope_parameters": text["rope_parameters"], "model_type": "muse_glimmer_text"}
    by_default = parse_spec({**MUSE_GLIMMER_30B, "text_config": short})
    assert by_default == spec
    refused: list[tuple[str, Any, str]] = [
        ("layer_rope_theta", [500000, 10000.0, 500000, 0] * 13, "must be 52 of 0 and 500000"),
        ("layer_rope_theta", [500000, 0], "must be 52 of 0 and 500000"),
        ("layer_types", ["full_attention"], "must be 52 of sliding_attention"),
        ("attention_bias", True, "True is not supported, only False"),
        ("hidden_activation", "gelu", "'gelu' is not supported, only 'silu'"),
    ]
    for key, value, complaint in refused:
        with pytest.raises(ConfigError, match=f"text_config: {key} {complaint}"):
            parse_spec({**MUSE_GLIMMER_30B, "text_config": {**text, key: value}})


def test_vaultgemma() -> None:
    spec = parse_spec(VAULTGEMMA_1B)
    assert (spec.norms.place, spec.norms.offset, spec.gate) == ("before", 1.0, "gelu")
    assert (spec.scores.cap, spec.scales.logit_cap, spec.windows) == (0.0, 0.0, (512, None) * 13)
    assert 1.0 < spec.num_parameters / 1e9 < 1.1 and spec.tie_embeddings
    bounded = dict(VAULTGEMMA_1B)
    del bounded["attn_logit_softcapping"], bounded["final_logit_softcapping"]
    assert (parse_spec(bounded).scores.cap, parse_spec(bounded).scales.logit_cap) == (50.0, 30.0)
    norm = "model.layers.0.pre_feedforward_layernorm.weight"
    ours = [name for name, _ in spec.names.weights(norm, (1152,))]
    assert ours == ["model.layers.0.post_attention_layernorm.weight"]


def test_helium() -> None:
    spec = parse_spec(HELIUM_1_2B)
    assert spec.rope.interleaved and (spec.rope.theta, spec.norms.eps) == (1e5, 1e-8)
    assert 2.0 < spec.num_parameters / 1e9 < 2.3
    biased = parse_spec({**HELIUM_1_2B, "attention_bias": True})
    assert biased.biases.qkv and not biased.biases.output
    with pytest.raises(ConfigError, match="head_dim must be hidden_size / 20 heads, got 64"):
        parse_spec({**HELIUM_1_2B, "head_dim": 64})


def test_minicpm3() -> None:
    spec = parse_spec(MINICPM3_4B)
    latent = LatentSpec(latent_dim=256, rope_dim=32, nope_dim=64, value_dim=64, query_rank=768)
    assert spec.latent == latent and not spec.rope.interleaved
    assert (spec.rope.scaling, spec.context, spec.tie_embeddings) == ("longrope", 32768, True)
    assert (spec.scales.embedding, spec.scales.logits) == (12.0, 0.1)
    assert spec.scales.branch == pytest.approx(1.4 / math.sqrt(62))
    assert 4.0 < spec.num_parameters / 1e9 < 4.3
    plain = parse_spec({**MINICPM3_4B, "scale_depth": None, "dim_model_base": None})
    assert plain.scales.branch == plain.scales.logits == 1.0
    with pytest.raises(ConfigError, match="attention_bias True is not supported"):
        parse_spec({**MINICPM3_4B, "attention_bias": True})


def test_nanochat() -> None:
    spec = parse_spec(NANOCHAT_D32)
    assert not spec.norms.weighted and spec.norms.of_embedding and spec.qk_norm == "unweighted"
    assert spec.rope.reversed and spec.gate is None and spec.activation == "relu2"
    assert spec.scales.logit_cap == 15.0
    assert parse_spec({**NANOCHAT_D32, "final_logit_softcapping": None}).scales.logit_cap == 0.0
    assert 1.8 < spec.num_parameters / 1e9 < 1.95
    yarn: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}
    yarn["original_max_position_embeddings"] = 2048
    with pytest.raises(ConfigError, match=r"multiplies by 1\.13863 is not supported"):
        parse_spec({**NANOCHAT_D32, "rope_parameters": yarn})
    with pytest.raises(ConfigError, match="hidden_act 'silu' is not supported, only 'relu2'"):
        parse_spec({**NANOCHAT_D32, "hidden_act": "silu"})


def test_text_parts_around_other_decoders() -> None:
    spec = parse_spec(LLAVA_1_5_7B)
    assert (spec.architecture, spec.dtype) == ("LlavaForConditionalGeneration", "float16")
    assert (spec.num_layers, spec.heads.num_kv_heads, spec.intermediate_size) == (32, 32, 11008)
    assert 6.7 < spec.num_parameters / 1e9 < 6.8 and not spec.tie_embeddings

    spec = parse_spec(LLAVA_1_6_MISTRAL_7B)
    assert (spec.dtype, spec.rope.theta, spec.windows) == ("bfloat16", 1e6, (None,) * 32)
    assert 7.2 < spec.num_parameters / 1e9 < 7.3

    spec = parse_spec(PIXTRAL_12B)
    assert (spec.heads.num_heads, spec.heads.head_dim, spec.windows) == (32, 128, (None,) * 40)
    assert 12.2 < spec.num_parameters / 1e9 < 12.3

    spec = parse_spec(AYA_VISION_32B)
    assert spec.norms.centered and spec.tie_embeddings and spec.rope.theta == 4e6
    assert (spec.hidden_size, spec.num_layers, spec.heads.num_heads) == (8192, 40, 64)
    assert 32.2 < spec.num_parameters / 1e9 < 32.4

    spec = parse_spec(INTERNVL_3_5_8B)
    assert (spec.hidden_size, spec.heads.num_heads, spec.heads.head_dim) == (4096, 32, 128)
    assert (spec.vocab_size, spec.context, spec.qk_norm) == (151936, 40960, "head")
    assert 8.1 < spec.num_parameters / 1e9 < 8.3 and not spec.tie_embeddings

    text = {**QWEN_3_0_6B, "model_type": "qwen3", "tie_word_embeddings": True}
    seeing = {"architectures": ["InternVLForConditionalGeneration"], "text_config": text}
    spec = parse_spec(seeing)
    assert spec.qk_norm == "head" and spec.tie_embeddings
    with pytest.raises(ConfigError, match="text_config: model_type must be one of "):
        parse_spec({**seeing, "text_config": {**text, "model_type": "bloom"}})


def test_thinkers_of_models_that_speak() -> None:
    spec = parse_spec(QWEN_2_5_OMNI_7B)
    theirs = {"architectures": ["Qwen2_5OmniForConditionalGeneration"]}
    assert spec.architecture == "Qwen2_5OmniModel"
    assert parse_spec({**QWEN_2_5_OMNI_7B, **theirs}).architecture == theirs["architectures"][0]
    assert spec.biases.qkv and (spec.rope.scaling, spec.rope.theta) == ("default", 1e6)
    assert (spec.dtype, spec.context) == ("bfloat16", 32768)
    assert 7.5 < spec.num_parameters / 1e9 < 7.7

    spec = parse_spec(QWEN_3_OMNI_30B_A3B)
    assert spec.moe is not None and spec.moe.experts.routing.normalize
    assert 30 < spec.num_parameters / 1e9 < 31
    names = {
        name: [weight for weight, _ in spec.names.weights(name, (2, 2))]
        for name in (
            "thinker.model.layers.0.mlp.gate.weight",
            "thinker.lm_head.weight",
            "thinker.audio_tower.conv_out.weight",
            "talker.model.layers.0.mlp.gate.weight",
            "code2wav.code_embedding.weight",
        )
    }
    kept = [["model.layers.0.mlp.gate.weight"], ["lm_head.weight"]]
    assert list(names.values()) == [*kept, [], [], []]
    with pytest.raises(ConfigError, match="thinker_config is missing"):
        parse_spec({"architectures": QWEN_3_OMNI_30B_A3B["architectures"]})


def thinker_of(config: dict[str, Any], name: str) -> tuple[dict[str, Any], ModelSpec]:
    """The part of an Omni model that thinks, alone, and what it is inside of the whole."""
    whole, thinks = parse_spec(config), f"{name}ThinkerForConditionalGeneration"
    alone = {**config["thinker_config"], "architectures": [thinks], "dtype": "bfloat16"}
    return alone, replace(whole, architecture=thinks)


@pytest.mark.parametrize(
    ("config", "name"),
    [(QWEN_2_5_OMNI_7B, "Qwen2_5Omni"), (QWEN_3_OMNI_30B_A3B, "Qwen3OmniMoe")],
)
def test_a_thinker_alone_is_the_same(config: dict[str, Any], name: str) -> None:
    alone, expected = thinker_of(config, name)
    assert parse_spec(alone) == expected


def granite_vision_4(**text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Granite4VisionForConditionalGeneration"],
        "text_config": {**GRANITE_3_3_8B, "model_type": "granite4_vision_text", **text},
    }


def test_text_parts_of_models_that_see_or_hear() -> None:
    spec = parse_spec(HYPERCLOVA_X_SEED_THINK_32B)
    assert (spec.norms.place, spec.scores.scale) == ("before", 0.08838834764831845)
    assert 32 < spec.num_parameters / 1e9 < 33
    names = {
        name: [weight for weight, _ in spec.names.weights(name, (2, 2))]
        for name in (
            "model.language_model.model.layers.0.mlp.up_proj.weight",
            "model.language_model.lm_head.weight",
            "model.vision_model.blocks.0.attn.qkv.weight",
            "model.vision_projector.weight",
        )
    }
    kept = [["model.layers.0.mlp.up_proj.weight"], ["lm_head.weight"]]
    assert list(names.values()) == [*kept, [], []]
    prefix = "model.language_model.model."
    spelled = (spec.names.in_checkpoint(weight, prefix) for (weight,) in kept)
    assert list(spelled) == list(names)[:2]

    spec = parse_spec(QWEN_2_AUDIO_7B)
    assert (spec.heads.num_kv_heads, spec.windows, spec.biases.qkv) == (32, (None,) * 32, True)
    assert 7.5 < spec.num_parameters / 1e9 < 8.5

    spec = parse_spec(VOXTRAL_MINI_3B)
    assert (spec.rope.theta, spec.heads.head_dim, spec.context) == (1e8, 128, 131072)
    assert 3.9 < spec.num_parameters / 1e9 < 4.1
    short = {**VOXTRAL_MINI_3B, "text_config": {"model_type": "llama"}}
    assert parse_spec(short) == spec

    spec = parse_spec(granite_vision_4())
    assert spec.scales.logits == 1 / 16 and spec.scales.embedding == 12.0
    assert parse_spec(granite_vision_4(model_type="granite")) == spec
    with pytest.raises(ConfigError, match="text_config: model_type must be one of "):
        parse_spec(granite_vision_4(model_type="granitemoehybrid"))


def test_every_architecture_is_tested() -> None:
    configs = (
        *(LLAMA_3_1_8B, MISTRAL_7B, QWEN_2_5_7B, QWEN_3_0_6B, QWEN_3_30B_A3B, MISTRAL_SMALL_3_1),
        *(MIXTRAL_8X7B, MINISTRAL_8B, MINISTRAL_3_8B, PHI_4_MINI, OLMO_2_7B, OLMO_3_7B),
        *(
            GEMMA_3_1B,
            GEMMA_3_4B,
            GEMMA_4_31B,
            GEMMA_4_E2B,
            {**GEMMA_4_31B, "architectures": ["Gemma4UnifiedForConditionalGeneration"]},
            {**GEMMA_4_E2B, "architectures": ["Gemma4UnifiedForCausalLM"]},
            GRANITE_3_3_8B,
            SMOLLM_3B,
            QWEN_1_5_MOE,
            GLM_4_5_AIR,
            DOTS_LLM1,
            MINIMAX_M2,
            SEED_OSS_36B,
            {**QWEN_2_5_VL_7B, "architectures": ["Qwen2VLForConditionalGeneration"]},
            QWEN_2_5_VL_7B,
            QWEN_3_VL_4B,
            QWEN_3_VL_30B_A3B,
            GPT_OSS_20B,
            LLAMA_4_SCOUT,
            {**LLAMA_4_SCOUT["text_config"], "architectures": ["Llama4ForCausalLM"]},
        ),
        *(EXAONE_4_32B, GLM_4_9B_0414, {**GLM_4_9B_0414, "architectures": ["GlmForCausalLM"]}),
        *(ERNIE_4_5_0_3B, ERNIE_4_5_21B_A3B, OLMOE_1B_7B, GRANITE_3_1_3B_A800M),
        *(HUNYUAN_7B, HUNYUAN_A13B, EXAONE_4_5_33B, SOLAR_OPEN_100B, HY3, MELLUM_2),
        *(GRANITE_SWASH_2B, GRANITE_SWASH_3B_A600M, TRINITY_NANO),
        {**GRANITE_3_1_3B_A800M, "architectures": ["GraniteMoeSharedForCausalLM"]},
        *(K_EXAONE, {**K_EXAONE, "architectures": ["ExaoneMoeForCausalLM"]}),
        *(HYPERCLOVA_X_SEED_THINK_14B, INTERNLM3_8B, IQUEST_CODER_40B, NEMOTRON_NANO_9B_V2),
        *(GRANITE_4_H_TINY, BAMBA_9B, FALCON_H1_0_5B),
        *(DEEPSEEK_V2, DEEPSEEK_V3, GLM_4_7_FLASH, YOUTU_LLM_2B, MISTRAL_SMALL_4),
        *(DEEPSEEK_V32, GLM_5, AX_K1, HY4),
        *(kimi_k25("KimiK25"), kimi_k25("Kimi_K25"), GLM_4_1V_9B, GLM_4_5V),
        {**GLM_4_5V, "architectures": ["Glm46VForConditionalGeneration"]},
        *(LLAVA_1_5_7B, LLAVA_1_6_MISTRAL_7B, QWEN_2_5_OMNI_7B, QWEN_3_OMNI_30B_A3B),
        *(thinker_of(QWEN_2_5_OMNI_7B, "Qwen2_5Omni")[0], granite_vision_4()),
        thinker_of(QWEN_3_OMNI_30B_A3B, "Qwen3OmniMoe")[0],
        {
            **HYPERCLOVA_X_SEED_THINK_32B,
            "architectures": ["HyperCLOVAXVisionV2ForConditionalGeneration"],
            "auto_map": None,
        },
        *(
            {**LLAVA_1_5_7B, "architectures": [f"{name}ForConditionalGeneration"]}
            for name in ("Ovis2", "Lfm3Vl", "MiniCPMV4_6", "MiniCPMV4_7")
        ),
        {**QWEN_2_5_OMNI_7B, "architectures": ["Qwen2_5OmniForConditionalGeneration"]},
        *(
            {**LLAVA_1_5_7B, "architectures": [f"{name}ForConditionalGeneration"]}
            for name in ("LlavaOnevision", "InternVL", "Idefics3", "SmolVLM", "Lfm2Vl", "AyaVision")
        ),
        {**LLAVA_1_5_7B, "architectures": ["Cohere2VisionForConditionalGeneration"]},
        *(
            LFM2_1_2B,
            LFM2_8B_A1B,
            LFM3_1_7B,
            AFM_4_5B,
            APERTUS_8B,
            COMMAND_A_PLUS,
            COMMAND_R_08_2024,
            COMMAND_R7B,
            STARCODER2_7B,
            OPT_1_3B,
            GPT_2,
            STARCODER,
            GPT_J_6B,
            PYTHIA_1_4B,
            PHI_2,
            STABLELM_2_1_6B,
            OLMO_1_7B,
            FALCON_7B,
            FALCON_40B,
            JAIS_2_8B,
            CWM,
            KOLIBRI_1,
            LAGUNA_XS_2,
            MINITRON_4B,
            FLEX_OLMO_7X7B,
            GEMMA_7B,
            GEMMA_2_9B,
            OLMO_HYBRID_7B,
            KIMI_LINEAR_48B_A3B,
            LING_3_FLASH,
            {**LING_3_FLASH, "architectures": ["BailingHybridForCausalLM"], "auto_map": None},
            NANOCHAT_D32,
            STEP_3_5_FLASH,
            STEP_3_7_FLASH,
            MINICPM3_4B,
            HELIUM_1_2B,
            VAULTGEMMA_1B,
            VOXTRAL_MINI_3B,
            QWEN_2_AUDIO_7B,
            HYPERCLOVA_X_SEED_THINK_32B,
            MUSE_GLIMMER_30B,
            FLINT,
        ),
    )
    found = {parse_spec(config).architecture for config in configs}
    hybrid = {name for name in ARCHITECTURES if name.startswith(("Qwen3_5", "Qwen3Next"))}
    assert found | hybrid == set(ARCHITECTURES)  # see ``test_experts_of_qwen3_5`` and the next


@pytest.mark.parametrize(
    ("architecture", "outer", "where"),
    [
        ("LlavaForConditionalGeneration", {}, ""),
        ("Lfm2VlForConditionalGeneration", {"model_type": "lfm2_vl"}, ""),
        ("Qwen3OmniMoeForConditionalGeneration", {"thinker_config": {"a": 1}}, "thinker_config: "),
    ],
)
def test_a_text_part_is_not_looked_for_elsewhere(
    architecture: str, outer: dict[str, object], where: str
) -> None:
    with pytest.raises(ConfigError, match=f"{where}text_config is missing"):
        parse_spec({"architectures": [architecture], **outer})
