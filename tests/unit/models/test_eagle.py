"""Which EAGLE-3 layers are supported, and what one adds to the spec of a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.errors import ConfigError
from minisgl_backend.model_check import check_invariant_spec
from minisgl_backend.models.catalog import parse_spec
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.eagle_checkpoint import EAGLE_NAMES, load_eagle
from minisgl_backend.models.families.eagle_layers import read_eagle
from minisgl_backend.models.spec import EagleSpec
from minisgl_bench.dummy_model import SHAPES
from tests.unit.models.config_jsons import (
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GLM_4_5_AIR,
    GPT_2,
    LLAMA_4_SCOUT,
)

QWEN3_14B: Final = parse_spec(SHAPES["qwen3-14b"])
PLAIN: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "draft_vocab_size": 32000,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "max_position_embeddings": 40960,
    "model_type": "llama",
    "num_attention_heads": 40,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SPECULATORS: Final[dict[str, Any]] = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3"},
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "head_dim": 128,
        "intermediate_size": 14336,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
}
"""Without what is LlamaConfig's default."""


def read(config: dict[str, Any], **changes: Any) -> EagleSpec:
    return read_eagle(ConfigReader({**config, **changes}))


def read_layer(**changes: Any) -> EagleSpec:
    """With changes to the layer within the format of speculators."""
    layer = {**SPECULATORS["transformer_layer_config"], **changes}
    return read(SPECULATORS, transformer_layer_config=layer)


def test_the_plain_form() -> None:
    eagle = read(PLAIN)
    assert (eagle.target_size, eagle.num_drafted, eagle.read_layers) == (5120, 32000, None)
    assert not (eagle.norm_before_residual or eagle.norm_before_fc or eagle.own_embedding)
    assert eagle.layer.heads_of(0) == LayerHeads(40, 8, 128)
    assert eagle.read_layers_in(40) == (2, 20, 37)
    bare = {key: value for key, value in PLAIN.items() if key != "draft_vocab_size"}
    assert read(bare).num_drafted == 151936  # all


def test_the_form_of_speculators() -> None:
    eagle = read(SPECULATORS)
    assert eagle.norm_before_residual and eagle.num_drafted == 32000
    assert (eagle.target_size, eagle.layer.vocab_size) == (4096, 128256)
    assert eagle.layer.heads_of(0) == LayerHeads(32, 8, 128)
    assert eagle.layer.rope.theta == 5e5 and eagle.layer.qk_norm is None
    normed = read_layer(model_type="qwen3")
    assert normed.layer.qk_norm == "head"


def test_norms() -> None:
    for key in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"):
        assert getattr(read(PLAIN, **{key: True}), key) and not getattr(read(PLAIN), key)
    assert read(PLAIN, eagle_config={"norm_before_fc": True}).norm_before_fc


def test_layers_are_counted_in_two_ways() -> None:
    ids = [1, 46, 90]
    of_outputs = read(PLAIN, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert of_outputs.read_layers == (2, 47, 91) == read(PLAIN).read_layers_in(94)
    before = read(SPECULATORS, eagle_aux_hidden_state_layer_ids=ids)
    assert before.read_layers == (1, 46, 90)
    assert read(PLAIN, eagle_config={"eagle_aux_hidden_state_layer_ids": []}).read_layers is None
    assert before.read_layers_in(90) == before.read_layers  # the last is the end of the stream
    for num_layers in (89, 6):
        with pytest.raises(ConfigError, match=f"1, 46, 90, .* at most {num_layers}, the number"):
            before.read_layers_in(num_layers)
    with pytest.raises(ConfigError, match="before the layers 2, 3, 3, which must be in ascending"):
        read(PLAIN).read_layers_in(6)


def test_names_of_tensors() -> None:
    names = {
        "fc.weight": "fc.weight",
        "midlayer.hidden_norm.weight": "midlayer.hidden_norm.weight",
        "layers.0.self_attn.q_proj.weight": "midlayer.self_attn.q_proj.weight",
        "norm.weight": "model.norm.weight",
        "embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "d2t": "d2t.offsets",
        "t2d": "t2d",
    }
    for name, weight in names.items():
        assert [own for own, _ in EAGLE_NAMES.weights(name, (8,))] == [weight]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported, only 1"),
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not supported for EAGLE-3 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False is not su"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state False is not supported"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm True is not supported"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm False is not suppo"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step 2 is not supported"),
        ({"quantization_config": {}}, "quantized weights of EAGLE-3 layers are not supported"),
        ({"sliding_window": 512, "use_sliding_window": None}, "sliding_window is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"draft_vocab_size": 151937}, "draft_vocab_size must be at most 151936"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "LlamaForCausalLMEagle'] is no EAGLE-3 la"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is no EAGLE-3 layer that is supported"),
        ({"architectures": ["Qwen3ForCausalLMEagle3"]}, "is no EAGLE-3 layer that is supported"),
        ({"swap_h_and_emb": True}, "swap_h_and_emb True is not supported, only False"),
        ({"eagle_config": {"swap_h_and_emb": True}}, "eagle_config: swap_h_and_emb True is not su"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "is no EAGLE-3 layer"),
        ({"architectures": None}, "architectures None is no EAGLE-3 layer"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type 'peagle' is not supported"),
        ({"speculators_config": {}}, "norm_before_residual is missing"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 5000, 5001]},
            "eagle_aux_hidden_state_layer_ids must be at most 1024 each",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(PLAIN, **changes)
    assert message in str(error.value)


def test_what_is_refused_of_speculators() -> None:
    with pytest.raises(ConfigError, match="transformer_layer_config: num_hidden_layers 32 is not"):
        layer = dict(SPECULATORS["transformer_layer_config"])
        del layer["num_hidden_layers"]
        read(SPECULATORS, transformer_layer_config=layer)
    with pytest.raises(ConfigError, match="num_hidden_layers 3 is not supported, only 1"):
        read_layer(num_hidden_layers=3)
    with pytest.raises(ConfigError, match="layer_config: swap_h_and_emb True is not supported"):
        read_layer(swap_h_and_emb=True)
    with pytest.raises(ConfigError, match="sliding_window is not supported in EAGLE-3 layers"):
        read_layer(model_type="qwen3", use_sliding_window=True, max_window_layers=0)


def test_the_layer_counts_wherever_layers_do() -> None:
    eagle = read(PLAIN)
    spec = QWEN3_14B.with_eagle(eagle)
    assert spec.num_layers == 40 and spec.all_layers == range(41) and not spec.has_mtp_layer
    assert spec.own_layers == range(40) and spec.attention_layers == tuple(range(41))
    assert spec.windows == (None,) * 41 and not spec.heads_by_layer and not spec.ropes
    shape = spec.attention_shape()
    assert shape.num_layers == 41 and not shape.by_layer
    size, heads = 5120, 128 * (40 + 2 * 8)
    layer = 2 * size * heads + size * 40 * 128 + 3 * size * 17408
    more = 3 * size * size + layer
    assert spec.num_active_parameters - QWEN3_14B.num_active_parameters == more
    assert spec.num_parameters - QWEN3_14B.num_parameters == more + 32000 * size


def test_the_layer_may_have_other_heads_and_another_rotation() -> None:
    spec = QWEN3_14B.with_eagle(
        read(PLAIN, num_attention_heads=20, num_key_value_heads=4, rope_theta=10_000)
    )
    assert spec.heads_of(39) == LayerHeads(40, 8, 128)
    assert spec.heads_of(40) == LayerHeads(20, 4, 128)
    before, own = spec.rope_of(39), spec.rope_of(40)
    assert before == QWEN3_14B.rope and own is not None and own.theta == 10_000
    shape = spec.attention_shape(2)
    assert shape.by_layer[-2:] == (LayerHeads(20, 4, 128), LayerHeads(10, 2, 128))
    with pytest.raises(ConfigError, match="cannot be split evenly over 8 tensor-parallel ranks"):
        spec.attention_shape(8)
    check_invariant_spec(QWEN3_14B.with_eagle(read(PLAIN)))
    with pytest.raises(ConfigError, match="no kernels for layers that differ in their heads"):
        check_invariant_spec(spec)


def test_windows_beside_the_layer() -> None:
    plain = parse_spec(SHAPES["gpt-oss-20b"])
    heads = {"num_attention_heads": 64, "head_dim": 64, "vocab_size": 201088}
    spec = plain.with_eagle(read(PLAIN, hidden_size=2880, **heads))
    assert spec.windows == (*plain.windows, None)
    assert spec.ropes == (*[plain.rope] * 24, spec.rope_of(24)) and not spec.heads_by_layer


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (SHAPES["qwen3-0.6b"], {}, "a hidden_size of 1024, and the layer was made for 5120"),
        (SHAPES["qwen3-14b"], {"vocab_size": 32000}, "has 151936 tokens, and the layer 32000"),
        (DEEPSEEK_V3, {"hidden_size": 7168, "vocab_size": 129280}, "has latent attention, beside"),
        (GEMMA_2_9B, {}, "has bounded attention scores"),
        (LLAMA_4_SCOUT, {}, "has sections of attention"),
        (GPT_2, {"hidden_size": 768, "vocab_size": 50257}, "has learned positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_do_not_fit(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"option speculative_mtp_model: .*{message}"):
        parse_spec(config).with_eagle(read(PLAIN, **changes))


def test_a_model_without_an_output_head() -> None:
    embeds = replace(QWEN3_14B, tie_embeddings=True, generates=False)
    with pytest.raises(
        ConfigError, match="speculative_mtp_model: Qwen3ForCausalLM has no output h"
    ):
        embeds.with_eagle(read(PLAIN))


def test_a_layer_in_place_of_the_models_own() -> None:
    spec = parse_spec(GLM_4_5_AIR)
    changes = {"hidden_size": 4096, "vocab_size": spec.vocab_size}
    found = spec.with_eagle(read(PLAIN, **changes))
    assert not found.has_mtp_layer and found.all_layers == range(47)
    own = "model.layers.46.eh_proj.weight"
    assert not list(found.names.weights(own, (8, 8)))  # stays left out


def test_another_hidden_size_needs_an_embedding(tmp_path: Path) -> None:
    config = {**PLAIN, "hidden_size": 2560, "target_hidden_size": 5120}
    (tmp_path / "config.json").write_text(json.dumps(config))
    eagle = load_eagle(tmp_path, QWEN3_14B, tmp_path, has_weights=False)
    assert eagle.own_embedding
    spec = QWEN3_14B.with_eagle(eagle)
    assert spec.num_parameters > QWEN3_14B.num_parameters + 151936 * 2560
