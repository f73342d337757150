"""How published checkpoints say which of their modules are stored in which format.

Their files are shortened to a few layers; no key is added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.quantization import read_quantization
from minisgl_backend.weight_format import Encoding, Layout, Rule, WeightFormat, WeightFormats

_NVFP4: Final = WeightFormat(layout=Layout.NV_MODELOPT, encoding=Encoding.E2M1, block=(1, 16))
_NVFP4_PACKED: Final = WeightFormat(layout=Layout.NV_PACKED, encoding=Encoding.E2M1, block=(1, 16))
_FP8: Final = WeightFormat(
    layout=Layout.FP8, encoding=Encoding.E4M3, block=(None, None), static_inputs=True
)
_LLM_COMPRESSOR: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "actorder": None,
        "block_structure": None,
        "group_size": 16,
        "num_bits": 4,
        "observer_kwargs": {},
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
)
_MODELOPT_GROUP: Final = MappingProxyType(
    {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
)
_W4A16: Final = MappingProxyType({"quant_algo": "W4A16_NVFP4", "group_size": 16})
_FP8_IN_BLOCKS: Final = WeightFormat(layout=Layout.FP8, encoding=Encoding.E4M3, block=(128, 128))
_MXFP8: Final = WeightFormat(layout=Layout.MXFP8, encoding=Encoding.E4M3, block=(1, 32))
_INT8: Final = WeightFormat(layout=Layout.INT8, encoding=Encoding.INT8, block=(1, None))
_INT4: Final = WeightFormat(layout=Layout.GPTQ, encoding=Encoding.INT4, block=(1, 128))
_AUTO_ROUND: Final = MappingProxyType(
    {
        "autoround_version": "0.10.2",
        "bits": 4,
        "data_type": "int",
        "group_size": 128,
        "iters": 0,
        "packing_format": "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": True,
    }
)
_LEFT_PLAIN: Final = MappingProxyType({"bits": 16, "data_type": "fp"})


def _read(
    quantization: dict[str, Any] | None, modelopt: dict[str, Any] | None = None
) -> WeightFormats:
    config = {} if quantization is None else {"quantization_config": quantization}
    found = read_quantization(ConfigReader(config), modelopt)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "listed",
    [
        None,
        ["lm_head", "model.embed_tokens"]
        + [f"model.layers.{layer}.self_attn.indexers_proj" for layer in range(5)]
        + [f"model.layers.{layer}.mlp.gate" for layer in (3, 4)],
    ],
)
def test_weights_of_index_queries_are_plain_whatever_is_listed(listed: list[str] | None) -> None:
    """deepseek-ai/DeepSeek-V3.2, which lists nothing, and zai-org/GLM-5-FP8, which has another name
    for them than its tensors."""
    formats = _read(
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": listed,
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    )
    attention = "model.layers.0.self_attn"
    assert formats.of(f"{attention}.indexer.weights_proj") is None
    for name in ("indexer.wk", "indexer.wq_b", "q_b_proj", "o_proj"):
        assert formats.of(f"{attention}.{name}") == _FP8_IN_BLOCKS


def test_modelopt_in_a_file_of_its_own() -> None:
    """nvidia/Qwen3-30B-A3B-NVFP4"""
    formats = _read(
        None,
        {
            "producer": {"name": "modelopt", "version": "0.33.0"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "exclude_modules": [*(f"model.layers.{at}.mlp.gate" for at in range(2)), "lm_head"],
            },
        },
    )
    for name in ("mlp.experts.7.gate_proj", "mlp.experts.127.down_proj", "self_attn.q_proj"):
        assert formats.of(f"model.layers.1.{name}") == _NVFP4
    for name in ("model.layers.1.mlp.gate", "lm_head", "model.embed_tokens"):
        assert formats.of(name) is None
    assert str(formats) == "fp4 in groups of 16 (modelopt)"


def test_modelopt_in_config_json() -> None:
    """nvidia/Qwen3-32B-NVFP4"""
    formats = _read(
        {
            "config_groups": {
                "group_0": {
                    "input_activations": dict(_MODELOPT_GROUP),
                    "weights": dict(_MODELOPT_GROUP),
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head"],
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.35.0"},
            "quant_method": "modelopt",
        }
    )
    assert formats.of("model.layers.63.mlp.down_proj") == _NVFP4
    assert formats.of("lm_head") is None


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("given", [None, {"quant_method": "modelopt"}])
def test_the_file_counts_if_config_json_says_no_more_than_the_tool(
    given: dict[str, Any] | None, wraps: bool
) -> None:
    """The keys may also be at the top of the file."""
    in_file = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    formats = _read(given, {"quantization": in_file} if wraps else in_file)
    assert formats.of("model.layers.0.mlp.down_proj") == _NVFP4
    assert formats.of("lm_head") is None


def test_config_json_counts_before_the_file_if_it_says_more() -> None:
    in_file = {"quantization": {"quant_algo": "NVFP4"}}
    in_config = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    assert _read(in_config, in_file).of("model.layers.0.mlp.down_proj") == _MXFP8
    of_another_tool = _read({"quant_method": "fp8"}, in_file)
    assert of_another_tool.of("model.layers.0.mlp.down_proj") == replace(_FP8, static_inputs=False)


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"])
def test_modelopt_has_several_names(method: str) -> None:
    formats = _read({"quant_method": method, "quant_algo": "NVFP4"})
    assert formats.of("model.layers.0.mlp.down_proj") == _NVFP4


def test_all_but_attention_and_dense_layers_is_in_nvfp4() -> None:
    """nvidia/DeepSeek-V3-0324-NVFP4 also excludes norms, and the layer that predicts more."""
    excluded = ["model.layers.3.mlp.gate", "model.layers.3.input_layernorm", "model.norm"]
    excluded += ["model.layers.3.self_attn*", "model.layers.61*", "lm_head", "model.embed_tokens"]
    formats = _read(
        None,
        {
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": excluded,
            }
        },
    )
    for name in ("mlp.experts.255.up_proj", "mlp.shared_experts.down_proj"):
        assert formats.of(f"model.layers.3.{name}") == _NVFP4
        assert formats.of(f"model.layers.61.{name}") is None
    assert formats.of("model.layers.3.self_attn.kv_b_proj") is None
    assert formats.of("model.layers.3.mlp.gate") is None


def test_layers_may_be_listed_with_their_formats() -> None:
    """nvidia/Qwen3.6-35B-A3B-NVFP4, which lists all experts of a layer as one module."""
    formats = _read(
        None,
        {
            "producer": {"name": "modelopt", "version": "0.44.0"},
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["mtp*", "mtp.layers.0*"],
                "quantized_layers": {
                    "model.language_model.layers.0.mlp.experts": dict(_W4A16),
                    "model.language_model.layers.0.mlp.shared_expert.gate_proj": dict(_W4A16),
                    "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
                    "model.language_model.layers.0.linear_attn.out_proj": {"quant_algo": "FP8"},
                    "lm_head": dict(_W4A16),
                },
            },
        },
    )

    def of(name: str) -> WeightFormat | None:
        """By the decoder's name and the checkpoint's."""
        return formats.of(f"model.{name}", f"model.language_model.{name}")

    assert of("layers.0.mlp.experts.200.up_proj") == _NVFP4
    assert of("layers.0.mlp.shared_expert.gate_proj") == _NVFP4
    assert formats.of("lm_head") == _NVFP4
    assert of("layers.3.self_attn.q_proj") == of("layers.0.linear_attn.out_proj") == _FP8
    for name in ("1.mlp.experts.0.up_proj", "0.mlp.gate", "0.mlp.shared_expert.up_proj"):
        assert of(f"layers.{name}") is None
    assert formats.of("model.layers.40.mlp.experts.0.up_proj", "mtp.layers.0.mlp.experts.0") is None
    assert str(formats) == "fp4 in groups of 16, fp8 per tensor (modelopt)"


def test_what_is_excluded_stays_plain_even_if_it_is_listed() -> None:
    formats = _read(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "ignore": ["mtp*"],
            "quantized_layers": {
                "model.layers.0.mlp.experts": dict(_W4A16),
                "mtp.layers.0.mlp.experts": dict(_W4A16),
            },
        }
    )
    assert formats.of("model.layers.0.mlp.experts.3.up_proj") == _NVFP4
    of_mtp = "model.layers.40.mlp.experts.3.up_proj", "mtp.layers.0.mlp.experts.3.up_proj"
    assert formats.of(*of_mtp) is None


def test_each_expert_may_be_listed() -> None:
    """nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4"""
    experts = [f"backbone.layers.1.mixer.experts.{expert}.up_proj" for expert in range(128)]
    layers = {
        "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        **{name: {"quant_algo": "NVFP4", "group_size": 16} for name in experts},
    }
    formats = _read(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "quantized_layers": layers,
        }
    )
    assert all(formats.of("model.unlike", name) == _NVFP4 for name in experts)
    assert formats.of("model.unlike", "backbone.layers.0.mixer.in_proj") == _FP8
    assert formats.of("model.unlike", "backbone.layers.1.mixer.experts.1.down_proj") is None
    assert len(formats.rules) == 3


@pytest.mark.parametrize("inputs", [None, {**_LLM_COMPRESSOR, "dynamic": "local"}])
def test_llm_compressor(inputs: dict[str, Any] | None) -> None:
    """RedHatAI/Qwen3-32B-NVFP4 and, without activations, -NVFP4A16"""
    formats = _read(
        {
            "config_groups": {
                "group_0": {
                    "input_activations": inputs,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {**_LLM_COMPRESSOR, "dynamic": False, "observer": "minmax"},
                }
            },
            "format": "nvfp4-pack-quantized",
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
    )
    assert formats.of("model.layers.0.self_attn.q_proj") == _NVFP4_PACKED
    assert formats.of("lm_head") is None


def test_modelopt_may_leave_the_former_format_in_a_text_config() -> None:
    """nvidia/Kimi-K2.5-NVFP4 was made from weights in int4, as its ``text_config`` still says."""
    former = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            }
        },
    }
    config = ConfigReader({"text_config": {"quantization_config": former}})
    modelopt = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    formats = read_quantization(config, modelopt)
    assert formats is not None
    assert formats.of("model.layers.1.mlp.experts.0.up_proj") == _NVFP4
    alone = read_quantization(config, None)
    assert str(alone) == "int4 in groups of 32 (compressed-tensors)"


def test_blocks_may_be_beside_nvfp4() -> None:
    """NVIDIA's Qwen3.8-Flash-Next has experts in NVFP4, but for those of the MTP layer."""
    formats = _read(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "ignore": ["lm_head"],
            "quantized_layers": {
                "model.language_model.layers.0.mlp.experts": {
                    "quant_algo": "NVFP4",
                    "group_size": 16,
                },
                "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128},
            },
        }
    )
    of_mtp = formats.of("model.layers.48.mlp.experts.3.up_proj", "mtp.layers.0.mlp.experts.3.up")
    assert of_mtp == _FP8_IN_BLOCKS
    assert formats.of("", "model.language_model.layers.0.mlp.experts.3.up_proj") == _NVFP4


def test_mxfp8_of_modelopt() -> None:
    """As its documents have the file and the same in config.json; tencent/Hy4-preview-FP8 has the
    file's content in config.json."""
    in_file = {"quant_algo": "MXFP8", "kv_cache_quant_algo": "FP8", "group_size": 32}
    in_file = {**in_file, "exclude_modules": ["lm_head"]}
    in_config = {
        "ignore": ["lm_head"],
        "quant_algo": "MXFP8",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.41.0"},
        "quant_method": "modelopt",
    }
    for formats in (
        _read(None, {"quantization": in_file}),
        _read(in_config),
        _read({"quant_method": "modelopt", "quantization": in_file}),
    ):
        assert formats.of("model.layers.0.mlp.up_proj") == _MXFP8
        assert formats.of("lm_head") is None
        assert str(formats) == "fp8 in groups of 32 (modelopt)"


def test_llm_compressor_in_int8() -> None:
    """As it writes W8A8, with its scales of tokens."""
    inputs: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": True,
        "group_size": None,
        "num_bits": 8,
        "observer": None,
        "observer_kwargs": {},
        "strategy": "token",
        "symmetric": True,
        "type": "int",
    }
    weights = {**inputs, "dynamic": False, "observer": "mse", "strategy": "channel"}
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    formats = _read(
        {
            "config_groups": {"group_0": {**group, "weights": weights}},
            "format": "int-quantized",
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
    )
    assert formats.of("model.layers.0.self_attn.q_proj") == _INT8
    assert formats.of("lm_head") is None


def test_mtp_layers_in_int8_have_names_of_their_own() -> None:
    """A checkpoint of Qwen3.8-27B in INT8 calls the projection of the MTP layer's inputs
    ``mtp.fc``, and quantizes it. Linear attention stays plain."""
    formats = _read(
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "INT8": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                }
            },
            "ignore": [
                *("re:.*(vision|visual).*", "lm_head", "re:.*embed_tokens.*", "re:.*norm.*"),
                *("re:.*conv1d.*", "re:.*linear_attn.*"),
            ],
        }
    )
    assert formats.of("model.layers.3.mlp.up_proj") == _INT8
    assert formats.of("model.layers.64.eh_proj", "mtp.fc") == _INT8
    assert formats.of("model.layers.0.linear_attn.in_proj_qkv") is None


def test_llm_compressor_in_mxfp8_beside_mxfp4() -> None:
    exponents = {"type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    formats = _read(
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {
                    "targets": [r"re:.*mlp\.experts\..*_proj$"],
                    "format": "mxfp4-pack-quantized",
                    "weights": {"num_bits": 4, **exponents},
                },
                "group_1": {
                    "targets": [r"re:.*self_attn\..*_proj$"],
                    "format": "mxfp8-quantized",
                    "weights": {"num_bits": 8, "scale_dtype": "torch.uint8", **exponents},
                },
            },
        }
    )
    experts = formats.of("model.layers.1.mlp.experts.0.up_proj")
    assert experts is not None and experts.layout is Layout.MX_PACKED
    assert formats.of("model.layers.1.self_attn.q_proj") == _MXFP8
    assert formats.of("model.layers.1.mlp.gate") is None


def test_auto_round_lists_blocks_and_what_is_left_plain() -> None:
    """Lorbus/Qwen3.6-27B-int4-AutoRound"""
    extra = {
        f"model.language_model.layers.0.linear_attn.in_proj_{rate}": dict(_LEFT_PLAIN)
        for rate in "ab"
    }
    formats = _read(
        {
            **_AUTO_ROUND,
            "block_name_to_quantize": "model.language_model.layers",
            "extra_config": extra,
        }
    )

    def of(name: str) -> WeightFormat | None:
        return formats.of(f"model.{name}", f"model.language_model.{name}")

    assert of("layers.0.linear_attn.in_proj_qkv") == of("layers.3.mlp.up_proj") == _INT4
    assert of("layers.0.linear_attn.in_proj_a") is None
    assert formats.of("lm_head") is None
    assert formats.of("model.layers.64.mlp.up_proj", "mtp.layers.0.mlp.up_proj") is None
    assert str(formats) == "int4 in groups of 128 (auto-round)"


@pytest.mark.parametrize("method", ["auto-round", "auto_round", "intel/auto-round"])
def test_auto_round_quantizes_all_but_the_head_by_default(method: str) -> None:
    formats = _read({**_AUTO_ROUND, "quant_method": method})
    assert formats.of("model.layers.0.mlp.down_proj") == _INT4
    assert formats.of("model.layers.64.mlp.up_proj", "mtp.layers.0.mlp.up_proj") == _INT4
    assert formats.of("lm_head") is None


@pytest.mark.parametrize(
    "blocks",
    [
        {"to_quant_block_names": "model.layers,model.mtp"},
        {"to_quant_block_names": " model.mtp, model.layers"},
        {"block_name_to_quantize": [" model.layers "]},
        {"to_quant_block_names": [["model.layers.0", "model.layers.1"], ["model.mtp"]]},
        {"block_name_to_quantize": ["model.layers"], "to_quant_block_names": None},
    ],
)
def test_auto_round_lists_blocks_in_several_ways(blocks: dict[str, Any]) -> None:
    formats = _read({**_AUTO_ROUND, **blocks})
    assert formats.of("model.layers.1.mlp.down_proj") == _INT4
    assert formats.of("audio.layers.1.mlp.down_proj") is None


def test_names_count_before_expressions_in_auto_round() -> None:
    """Of expressions the first counts; they are found anywhere in a name."""
    formats = _read(
        {
            **_AUTO_ROUND,
            "modules_to_not_convert": ["model.layers.2"],
            "extra_config": {
                r".*shared_expert.*": dict(_LEFT_PLAIN),
                r"mlp\.(shared|up)": {"bits": 8},
                "model.layers.1.mlp.up_proj": {"group_size": 32, "sym": False},
                "lm_head": {"bits": 8, "group_size": -1},
            },
        }
    )
    assert formats.of("model.layers.1.mlp.shared_expert.up_proj") is None
    assert formats.of("model.layers.2.mlp.up_proj") is None
    up_proj, other = (formats.of(f"model.layers.{at}.mlp.up_proj") for at in range(2))
    head = formats.of("lm_head")
    assert up_proj is not None and (up_proj.encoding, up_proj.block) == (Encoding.INT8, (1, 128))
    assert other is not None and (other.encoding, other.block) == (Encoding.INT4, (1, 32))
    assert up_proj.symmetric and not other.symmetric
    assert head is not None and (head.encoding, head.block) == (Encoding.INT8, (1, None))


@pytest.mark.parametrize(
    ("packing", "layout"),
    [
        ({}, Layout.GPTQ),
        ({"backend": "auto"}, Layout.GPTQ),
        ({"backend": "auto_round:gptq:exllamav2"}, Layout.GPTQ),
        ({"packing_format": "auto_round:auto_awq", "backend": "auto"}, Layout.AWQ),
    ],
)
def test_auto_round_packs_as_others_do(packing: dict[str, str], layout: Layout) -> None:
    formats = _read({"quant_method": "auto-round", "bits": 4, "group_size": 128, **packing})
    form = formats.of("model.layers.0.mlp.up_proj")
    assert form is not None and form.layout is layout


def test_a_layer_with_another_group_size_is_refused() -> None:
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 32}}
    message = (
        "quantized_layers: model.layers.0.mlp.up_proj: group_size 32 is not supported, only 16"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        _read(
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": layers,
            }
        )


@pytest.mark.parametrize(
    ("name", "is_held"),
    [
        ("model.layers.1.mlp.experts", True),
        ("model.layers.1.mlp.experts.3.up_proj", True),
        ("model.language_model.layers.1.mlp.experts.3.up_proj", False),
        ("language_model.model.layers.1.mlp.experts.3.up_proj", True),
        ("model.layers.11.mlp.experts.3.up_proj", False),
        ("model.layers.1.mlp.experts_of_others", False),
        ("model.layers.1.mlp", False),
        ("lm_head", True),
        ("language_model.lm_head", True),
        ("model.lm_heads", False),
    ],
)
def test_a_listed_module_holds_all_below_it(name: str, is_held: bool) -> None:
    rule = Rule(frozenset({"model.layers.1.mlp.experts", "lm_head"}), _NVFP4)
    assert rule.is_for(name) == is_held
