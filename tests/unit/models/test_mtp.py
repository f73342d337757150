"""Which published models have an MTP layer that is supported, and what it adds to a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.catalog import parse_spec
from minisgl_backend.models.checkpoint import WeightHeader, check_weights
from minisgl_backend.models.tensor_names import StoredAs
from tests.unit.models.config_jsons import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM_4_5_AIR,
    GLM_4_5V,
    GLM_4_7_FLASH,
    HY3,
    KIMI_LINEAR_48B_A3B,
    LING_3_FLASH,
    QWEN_3_0_6B,
    QWEN_3_5_MOE,
)

QWEN_MULTIMODAL = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        **{key: value for key, value in QWEN_3_5_MOE.items() if key != "architectures"},
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    },
}
QWEN_NEXT = {**QWEN_3_5_MOE, "architectures": ["Qwen3NextForCausalLM"]}
OF_QWEN = {
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.fc.weight_scale_inv": "eh_proj.weight_scale_inv",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "shared_head.norm.weight",
    "mtp.layers.0.self_attn.q_proj.weight": "self_attn.q_proj.weight",
    "mtp.layers.0.mlp.experts.7.up_proj.weight": "mlp.experts.7.up_proj.weight",
    "mtp.layers.0.mlp.shared_expert_gate.weight": "mlp.shared_expert_gate.weight",
}
OF_GLM = {
    "model.layers.46.eh_proj.weight": "eh_proj.weight",
    "model.layers.46.enorm.weight": "enorm.weight",
    "model.layers.46.shared_head.norm.weight": "shared_head.norm.weight",
    "model.layers.46.mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "model.layers.46.shared_head.head.weight": None,
    "model.layers.46.embed_tokens.weight": None,
}
NAMES: dict[str, tuple[dict[str, Any], dict[str, str | None]]] = {
    "qwen3.5": (QWEN_3_5_MOE, {**OF_QWEN}),
    "qwen3.5 multimodal": (QWEN_MULTIMODAL, {**OF_QWEN}),
    "qwen3-next": (QWEN_NEXT, {**OF_QWEN}),
    "glm-4.5-air": (GLM_4_5_AIR, OF_GLM),
    "glm-4.5v": (
        GLM_4_5V,
        {
            name.replace("model.", "model.language_model.", 1): weight
            for name, weight in OF_GLM.items()
        },
    ),
    "glm-4.7-flash": (
        GLM_4_7_FLASH,
        {"model.layers.47.self_attn.kv_b_proj.weight": "self_attn.kv_b_proj.weight"},
    ),
    "deepseek-v3": (DEEPSEEK_V3, {"model.layers.61.hnorm.weight": "hnorm.weight"}),
    "hy3": (
        HY3,
        {
            "model.layers.80.final_layernorm.weight": "shared_head.norm.weight",
            "model.layers.80.mlp.router.gate.weight": "mlp.gate.weight",
        },
    ),
    "ling-3.0-flash": (
        LING_3_FLASH,
        {
            "model.layers.42.final_layernorm.weight": "shared_head.norm.weight",
            "model.layers.42.attention.g_proj.weight": "self_attn.g_proj.weight",
            "model.layers.42.mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
        },
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_of_its_tensors(case: str) -> None:
    config, names = NAMES[case]
    plain = parse_spec(config)
    spec = plain.with_mtp()
    layer = f"model.layers.{spec.num_layers}."
    for name, weight in names.items():
        assert not list(plain.names.weights(name, (8, 8)))
        found = [own for own, _ in spec.names.weights(name, (8, 8))]
        assert found == ([] if weight is None else [layer + weight])
        if weight is not None and "scale" not in weight:
            prefix = "model.language_model." if spec.names.multimodal else "model."
            assert spec.names.in_checkpoint(layer + weight, prefix) == name


@pytest.mark.parametrize("case", NAMES)
def test_the_layer_counts_wherever_layers_do(case: str) -> None:
    plain = parse_spec(NAMES[case][0])
    spec, last = plain.with_mtp(), plain.num_layers
    assert (plain.has_mtp_layer, spec.has_mtp_layer) == (False, True)
    assert spec.num_layers == last and spec.all_layers == range(last + 1)
    assert spec.attention_layers == (*plain.attention_layers, last)
    assert spec.attends(last) and spec.windows[last] is None and spec.rope_of(last) == spec.rope
    assert spec.moe is not None and last in spec.moe.layers
    shape, of_plain = spec.attention_shape(), plain.attention_shape()
    assert shape.num_layers == of_plain.num_layers + 1 and not shape.by_layer
    inputs = 2 * spec.hidden_size**2
    more = spec.num_active_parameters - plain.num_active_parameters
    assert inputs < more < inputs + plain.num_active_parameters / plain.num_layers * 2
    all_experts = spec.moe.experts.num_weights(spec.hidden_size)
    of_token = spec.moe.experts.num_active_weights(spec.hidden_size)
    assert spec.num_parameters - plain.num_parameters == more + all_experts - of_token


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN_3_0_6B, "Qwen3ForCausalLM has no MTP layer that is supported"),
        (DEEPSEEK_V2, "DeepseekV2ForCausalLM has no MTP layer that is supported"),
        (KIMI_LINEAR_48B_A3B, "KimiLinearForCausalLM has no MTP layer that is supported"),
        ({**QWEN_NEXT, "mtp_num_hidden_layers": 0}, r"has no MTP layers \(mtp_num_hidden_layers\)"),
        ({**QWEN_3_5_MOE, "mtp_num_hidden_layers": 2}, r"2 MTP layers .*, and one alone is"),
        (
            {**QWEN_3_5_MOE, "mtp_use_dedicated_embeddings": True},
            "embeddings of its own, which are not supported",
        ),
        ({**GLM_4_5_AIR, "num_nextn_predict_layers": 0}, r"no MTP layers \(num_nextn_predict_lay"),
        ({**DEEPSEEK_V3, "num_nextn_predict_layers": 3}, r"has 3 MTP layers \(num_nextn_predict_l"),
    ],
)
def test_what_is_not_offered(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{message}.* \(speculative_mtp_tokens\)"):
        parse_spec(config).with_mtp()


def test_the_number_of_layers_includes_it() -> None:
    spec = parse_spec(GLM_4_5_AIR).with_mtp()

    def weights(*layers: int) -> dict[Path, dict[str, WeightHeader]]:
        names = [f"model.layers.{layer}.input_layernorm.weight" for layer in layers]
        header = {name: WeightHeader("BF16", (8,), StoredAs(name, (8,))) for name in names}
        return {Path("a.safetensors"): header}

    check_weights(spec, weights(0, 45, 46))
    with pytest.raises(ConfigError, match=r"lacks, such as model\.layers\.46\.eh_proj\.weight"):
        check_weights(spec, weights(0, 45))
    with pytest.raises(ConfigError, match="num_hidden_layers is 46, but the weights have 45"):
        check_weights(spec, weights(0, 44, 46))
    with pytest.raises(ConfigError, match="num_hidden_layers is 46, but the weights have 48"):
        check_weights(spec, weights(0, 46, 47))
