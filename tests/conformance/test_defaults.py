"""A key missing from config.json means what it means to transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import pytest
import transformers

from minisgl_backend.models.catalog import ARCHITECTURES
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.multimodal import _DECODERS, _SIZES
from minisgl_backend.models.spec import ModelSpec

_ALWAYS_GIVEN: Final = frozenset(
    {"num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"}
)
_NO_DEFAULT: Final = frozenset(
    {("Ministral3ForCausalLM", "rope_parameters"), ("Glm4MoeForCausalLM", "head_dim")}
    | {("HYV3ForCausalLM", "dtype"), ("DeepseekV2ForCausalLM", "num_experts_per_tok")}
)
"""Without the first and the last, a checkpoint is refused; transformers' defaults for the others
fit none."""
_ALONE: Final = [
    name
    for name in ARCHITECTURES
    if name.endswith(("ForCausalLM", "LMHeadModel"))
    and name != "HCXVisionV2ForCausalLM"  # which sees
]
_AROUND: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MuseGlimmer": "muse_glimmer_text",
        "Step3p7": "step3p5",
        "MiniCPMV4_6": "qwen3_5_text",
        "MiniCPMV4_7": "qwen3_5_text",
        "Lfm3Vl": "lfm3",
        "HyperCLOVAXVisionV2": "hyperclovax",
        "Ovis2": "qwen2",
        "Granite4Vision": "granite4_vision_text",
        "Qwen2Audio": "qwen2",
        "Voxtral": "llama",
    }
)
"""Models around a decoder, each with the ``model_type`` of that."""


@pytest.mark.parametrize("name", _ALONE)
def test_keys_that_are_left_out(name: str) -> None:
    config_class = _config_class(name)
    own: dict[str, Any] = {} if name == "FalconForCausalLM" else {"head_dim": 128}
    if name == "DeepseekV2ForCausalLM":
        own["num_experts_per_tok"] = 6
    given: dict[str, Any] = config_class(**own).to_dict()
    del given["model_type"], given["transformers_version"]
    for key in given.keys() - _ALWAYS_GIVEN:
        if (name, key) in _NO_DEFAULT:
            continue
        rest = {other: value for other, value in given.items() if other != key}
        filled = config_class(**copy.deepcopy(rest)).to_dict()
        assert _read(name, rest) == _read(name, filled), key


@pytest.mark.parametrize("kind", _DECODERS)
def test_keys_that_a_text_part_leaves_out(kind: str) -> None:
    """Its config has only what differs from the defaults of its class, sizes included."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config_class: Any = transformers.CONFIG_MAPPING[kind]
    plain = config_class()
    assert _SIZES[kind] == {key: getattr(plain, key) for key in _SIZES[kind]}
    some: list[dict[str, Any]] = [{}, {"num_attention_heads": 64}, {"num_hidden_layers": 8}]
    for given in some:
        filled = config_class(**given).to_dict()
        assert _read_text(kind, given) == _read_text(kind, filled), given


@pytest.mark.parametrize("name", _AROUND)
def test_a_text_part_that_says_nothing(name: str) -> None:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    text = {"model_type": _AROUND[name], "dtype": "bfloat16"}
    filled = getattr(transformers, f"{name}Config")(text_config=dict(text)).to_dict()
    architecture = f"{name}ForConditionalGeneration"
    assert _read(architecture, {"text_config": text}) == _read(architecture, filled)


def _read_text(kind: str, text: dict[str, Any]) -> ModelSpec:
    """The text part of a model that sees."""
    same = {"dtype": "bfloat16", "tie_word_embeddings": True}
    seeing = {"text_config": {**text, **same, "model_type": kind}, **same}
    return _read("LlavaForConditionalGeneration", seeing)


def _config_class(name: str) -> Any:
    """Also of publishers' names that transformers has no class for."""
    spelled = name.replace("MoE", "Moe").replace("BailingMoeV3", "BailingHybrid")
    spelled = spelled.replace("Step3p5", "Step3p7Text")
    if found := getattr(transformers, name, getattr(transformers, spelled, None)):
        return found.config_class
    if found := getattr(transformers, spelled.replace("ForCausalLM", "Config"), None):
        return found
    pytest.skip(f"transformers {transformers.__version__} has no {name}")


def _read(name: str, values: dict[str, Any]) -> ModelSpec:
    """Without the end-of-sequence ids, which generation_config.json has, too."""
    return replace(ARCHITECTURES[name](ConfigReader(values)), eos_token_ids=frozenset())
