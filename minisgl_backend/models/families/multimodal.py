"""Models that see or hear around a decoder that is another architecture here: Aya and Command A
Vision, InternVL, LFM2-VL, LLaVA, SmolVLM, the thinkers of Qwen's Omni models. Read is the text
part.

A decoder is found by ``model_type`` of the text part's config. Must not know how it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeAlias

from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.cohere import read_cohere, read_cohere2, read_cohere2_moe
from minisgl_backend.models.families.fields import text_of_vl, text_part
from minisgl_backend.models.families.gpt_oss import read_gpt_oss
from minisgl_backend.models.families.lfm import read_lfm2, read_lfm2_moe
from minisgl_backend.models.families.llama import read_llama, read_smollm3
from minisgl_backend.models.families.mistral import read_mistral, read_mixtral
from minisgl_backend.models.families.olmo import read_olmo2, read_olmo3
from minisgl_backend.models.families.phi import read_phi3
from minisgl_backend.models.families.qwen import (
    read_qwen2,
    read_qwen2_moe,
    read_qwen3,
    read_qwen3_moe,
)
from minisgl_backend.models.spec import ModelSpec

_Read: TypeAlias = Callable[[ConfigReader], ModelSpec]

_DECODERS: Final[Mapping[str, _Read]] = MappingProxyType(
    {
        "cohere": read_cohere,
        "cohere2": read_cohere2,
        "cohere2_moe": read_cohere2_moe,
        "gpt_oss": read_gpt_oss,
        "lfm2": read_lfm2,
        "lfm2_moe": read_lfm2_moe,
        "llama": read_llama,
        "mistral": read_mistral,
        "mixtral": read_mixtral,
        "olmo2": read_olmo2,
        "olmo3": read_olmo3,
        "phi3": read_phi3,
        "qwen2": read_qwen2,
        "qwen2_moe": read_qwen2_moe,
        "qwen3": read_qwen3,
        "qwen3_moe": read_qwen3_moe,
        "smollm3": read_smollm3,
    }
)
"""By ``model_type``."""
_SIZE_KEYS: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
_SIZES: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        kind: dict(zip(_SIZE_KEYS, sizes, strict=True))
        for kind, sizes in {
            "cohere": (8192, 22_528, 40, 64, 256_000),
            "cohere2": (8192, 22_528, 40, 64, 256_000),
            "cohere2_moe": (8192, 22_528, 40, 64, 256_000),
            "gpt_oss": (2880, 2880, 36, 64, 201_088),
            "lfm2": (2560, 12_288, 32, 32, 65_536),
            "lfm2_moe": (2048, 7168, 32, 32, 65_536),
            "llama": (4096, 11_008, 32, 32, 32_000),
            "mistral": (4096, 14_336, 32, 32, 32_000),
            "mixtral": (4096, 14_336, 32, 32, 32_000),
            "olmo2": (4096, 11_008, 32, 32, 50_304),
            "olmo3": (4096, 11_008, 32, 32, 50_304),
            "phi3": (3072, 8192, 32, 32, 32_064),
            "qwen2": (4096, 22_016, 32, 32, 151_936),
            "qwen2_moe": (2048, 5632, 24, 16, 151_936),
            "qwen3": (4096, 22_016, 32, 32, 151_936),
            "qwen3_moe": (2048, 6144, 24, 32, 151_936),
            "smollm3": (2048, 11_008, 36, 16, 128_256),
        }.items()
    }
)
"""Sizes of decoders by default: the config of a text part leaves them out."""
_KEY_VALUE_HEADS: Final = MappingProxyType({"qwen2": 32, "qwen2_moe": 16, "qwen3": 32})
"""The same of heads of keys and values. Others have as many as heads of queries, or what their
reader says."""
_OF_IDEFICS: Final = (("model.text_model.", "model."),)
_OF_THINKER: Final = (("thinker.model.", "model."), ("thinker.lm_head.", "lm_head."))
"""Names of tensors of text parts, each with the decoder's."""
_QWEN_2_5_OMNI: Final = ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration")
"""How the architecture is spelled: by its publisher, and by transformers."""
_SPEECH: Final = ("talker.", "token2wav.", "code2wav.")
"""How names of tensors begin that speak."""


def read_aya_vision(config: ConfigReader) -> ModelSpec:
    """``AyaVisionForConditionalGeneration``: Aya Vision, around Command."""
    return _text_of(config, "AyaVisionForConditionalGeneration", "cohere2", tied=True)


def read_cohere2_vision(config: ConfigReader) -> ModelSpec:
    """``Cohere2VisionForConditionalGeneration``: Command A Vision."""
    return _text_of(config, "Cohere2VisionForConditionalGeneration", "cohere2", tied=True)


def read_internvl(config: ConfigReader) -> ModelSpec:
    """``InternVLForConditionalGeneration``: InternVL 3 and 3.5 in the format of transformers."""
    return _text_of(config, "InternVLForConditionalGeneration", "qwen2", tied=True)


def read_llava(config: ConfigReader) -> ModelSpec:
    """``LlavaForConditionalGeneration``: LLaVA 1.5, and Pixtral 12B in the format of
    transformers."""
    return _text_of(config, "LlavaForConditionalGeneration", "llama")


def read_llava_next(config: ConfigReader) -> ModelSpec:
    """``LlavaNextForConditionalGeneration``: LLaVA 1.6."""
    return _text_of(config, "LlavaNextForConditionalGeneration", "llama")


def read_llava_onevision(config: ConfigReader) -> ModelSpec:
    """``LlavaOnevisionForConditionalGeneration``."""
    return _text_of(config, "LlavaOnevisionForConditionalGeneration", "qwen2")


def read_idefics3(config: ConfigReader) -> ModelSpec:
    """``Idefics3ForConditionalGeneration``: Idefics 3, the first SmolVLM."""
    return _text_of_idefics(config, "Idefics3ForConditionalGeneration")


def read_smolvlm(config: ConfigReader) -> ModelSpec:
    """``SmolVLMForConditionalGeneration``: SmolVLM 2."""
    return _text_of_idefics(config, "SmolVLMForConditionalGeneration")


def read_lfm2_vl(config: ConfigReader) -> ModelSpec:
    """``Lfm2VlForConditionalGeneration``: LFM2-VL."""
    return _text_of(config, "Lfm2VlForConditionalGeneration", "lfm2", tied=True)


def read_qwen2_5_omni(config: ConfigReader) -> ModelSpec:
    """``Qwen2_5OmniModel``, in transformers ``Qwen2_5OmniForConditionalGeneration``: Qwen2, whose
    text another part would speak."""
    text = text_of_vl(_thinker(config), flat=False).with_defaults(
        rope_theta=1e6, num_key_value_heads=4
    )
    spelled = set(config.values.get("architectures", ())) & set(_QWEN_2_5_OMNI)
    return _of_thinker(read_qwen2(text), next(iter(spelled), _QWEN_2_5_OMNI[0]))


def read_qwen3_omni(config: ConfigReader) -> ModelSpec:
    """``Qwen3OmniMoeForConditionalGeneration``: the same around Qwen3 with experts, without
    windows."""
    text = text_of_vl(_thinker(config), flat=False).with_defaults(norm_topk_prob=True)
    spec = read_qwen3_moe(text.with_values(use_sliding_window=False))
    return _of_thinker(spec, "Qwen3OmniMoeForConditionalGeneration")


def _text_of(
    config: ConfigReader, architecture: str, kind: str, *, tied: bool = False
) -> ModelSpec:
    """The text part, by default of ``kind``; ``tied`` is the default for tie_word_embeddings.
    Raises ``ConfigError`` if it is of a kind that is not known."""
    text = text_of_vl(config.with_defaults(tie_word_embeddings=tied), flat=False)
    kind = text.word("model_type", kind)
    if kind not in _DECODERS:
        raise text.error("model_type", "one of " + ", ".join(_DECODERS), kind)
    text = text.with_defaults(**_SIZES[kind])
    if kind in _KEY_VALUE_HEADS:
        text = text.with_defaults(num_key_value_heads=_KEY_VALUE_HEADS[kind])
    return text_part(_DECODERS[kind](text), architecture)


def _text_of_idefics(config: ConfigReader, architecture: str) -> ModelSpec:
    return _renamed(_text_of(config, architecture, "llama"), _OF_IDEFICS)


def _thinker(config: ConfigReader) -> ConfigReader:
    """The part that understands and writes, with what is said outside of it."""
    outer = ("dtype", "torch_dtype", "eos_token_id")
    return config.part("thinker_config").with_defaults(
        **{key: config.values[key] for key in outer if key in config.values}
    )


def _of_thinker(spec: ModelSpec, architecture: str) -> ModelSpec:
    spec = _renamed(text_part(spec, architecture), _OF_THINKER)
    return replace(spec, names=replace(spec.names, left_out=_SPEECH))


def _renamed(spec: ModelSpec, renamed: tuple[tuple[str, str], ...]) -> ModelSpec:
    """The same with tensors that are named so in the checkpoint."""
    return replace(spec, names=replace(spec.names, renamed=(*renamed, *spec.names.renamed)))
