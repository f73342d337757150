"""Models that see or hear around a decoder that is another architecture here: Aya and Command A
Vision, Granite Vision 4, HyperCLOVA X Think 32B, InternVL, LFM2-VL and LFM3-VL, LLaVA, MiniCPM-V,
Ovis 2, Qwen2-Audio, SmolVLM, Voxtral, the thinkers of Qwen's Omni models. Read is the text part.

A decoder is found by ``model_type`` of the text part's config. Must not know how it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeAlias

from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.families.cohere import read_cohere, read_cohere2, read_cohere2_moe
from minisgl_backend.models.families.fields import text_of_vl, text_part
from minisgl_backend.models.families.gpt_oss import read_gpt_oss
from minisgl_backend.models.families.granite import read_granite
from minisgl_backend.models.families.hyperclova import read_hyperclovax
from minisgl_backend.models.families.lfm import read_lfm2, read_lfm2_moe, read_lfm3
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
from minisgl_backend.models.families.qwen_hybrid import read_qwen3_5
from minisgl_backend.models.spec import ModelSpec

_Read: TypeAlias = Callable[[ConfigReader], ModelSpec]

_DECODERS: Final[Mapping[str, _Read]] = MappingProxyType(
    {
        "cohere": read_cohere,
        "cohere2": read_cohere2,
        "cohere2_moe": read_cohere2_moe,
        "gpt_oss": read_gpt_oss,
        "granite": read_granite,
        "hyperclovax": read_hyperclovax,
        "lfm2": read_lfm2,
        "lfm2_moe": read_lfm2_moe,
        "lfm3": read_lfm3,
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
        "qwen3_5_text": read_qwen3_5,
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
            "granite": (4096, 11_008, 32, 32, 32_000),
            "hyperclovax": (4096, 11_008, 32, 32, 32_000),
            "lfm2": (2560, 12_288, 32, 32, 65_536),
            "lfm2_moe": (2048, 7168, 32, 32, 65_536),
            "lfm3": (2048, 7680, 24, 16, 128_000),
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
            "qwen3_5_text": (4096, 12_288, 32, 16, 248_320),
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
_OF_HYPERCLOVA: Final = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
)
"""Names of tensors of text parts, each with the decoder's."""
_HYPERCLOVA: Final = ("HCXVisionV2ForCausalLM", "HyperCLOVAXVisionV2ForConditionalGeneration")
_QWEN_2_5_OMNI: Final = ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration")
"""How the architectures are spelled: by their publishers, and by transformers."""
_SPEECH: Final = ("talker.", "token2wav.", "code2wav.")
"""How names of tensors begin that speak."""
_VOXTRAL: Final[Mapping[str, object]] = MappingProxyType(
    {
        "vocab_size": 2**17,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 2**17,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
    }
)
"""What the config of Voxtral's text part leaves out."""


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


def read_lfm3_vl(config: ConfigReader) -> ModelSpec:
    """``Lfm3VlForConditionalGeneration``: LFM3-VL."""
    return _text_of(config, "Lfm3VlForConditionalGeneration", "lfm3", tied=True)


def read_minicpmv4_6(config: ConfigReader) -> ModelSpec:
    """``MiniCPMV4_6ForConditionalGeneration``: MiniCPM-V 4.6, around Qwen3.5."""
    return _text_of(config, "MiniCPMV4_6ForConditionalGeneration", "qwen3_5_text")


def read_minicpmv4_7(config: ConfigReader) -> ModelSpec:
    """``MiniCPMV4_7ForConditionalGeneration``: the same, which places images otherwise."""
    return _text_of(config, "MiniCPMV4_7ForConditionalGeneration", "qwen3_5_text")


def read_hyperclovax_vision(config: ConfigReader) -> ModelSpec:
    """``HCXVisionV2ForCausalLM``, in transformers ``HyperCLOVAXVisionV2ForConditionalGeneration``:
    HyperCLOVA X SEED Think 32B."""
    spec = _text_of(config, _spelled(config, _HYPERCLOVA), "hyperclovax", tied=True)
    return _renamed(spec, _OF_HYPERCLOVA)


def read_ovis2(config: ConfigReader) -> ModelSpec:
    """``Ovis2ForConditionalGeneration``: Ovis 2 in the format of transformers."""
    return _text_of(config, "Ovis2ForConditionalGeneration", "qwen2", tied=True)


def read_granite4_vision(config: ConfigReader) -> ModelSpec:
    """``Granite4VisionForConditionalGeneration``: Granite Vision 4. Its layers are those of dense
    Granites, under a name of their own."""
    text = ConfigReader(config.table("text_config"), f"{config.where}: text_config")
    if text.word("model_type", "granite") == "granite4_vision_text":
        respelled = {**config.table("text_config"), "model_type": "granite"}
        config = config.with_values(text_config=respelled)
    return _text_of(config, "Granite4VisionForConditionalGeneration", "granite")


def read_qwen2_audio(config: ConfigReader) -> ModelSpec:
    """``Qwen2AudioForConditionalGeneration``: Qwen2-Audio."""
    return _text_of(config, "Qwen2AudioForConditionalGeneration", "qwen2")


def read_voxtral(config: ConfigReader) -> ModelSpec:
    """``VoxtralForConditionalGeneration``: Voxtral Mini and Small, around Llama."""
    text = config.part("text_config").with_defaults(**_VOXTRAL)
    config = config.with_values(text_config={**dict.fromkeys(text.nulls), **text.values})
    return _text_of(config, "VoxtralForConditionalGeneration", "llama")


def read_qwen2_5_omni(config: ConfigReader) -> ModelSpec:
    """``Qwen2_5OmniModel``, in transformers ``Qwen2_5OmniForConditionalGeneration``: Qwen2, whose
    text another part would speak."""
    return _of_qwen2_5_thinker(_thinker(config), _spelled(config, _QWEN_2_5_OMNI))


def read_qwen2_5_omni_thinker(config: ConfigReader) -> ModelSpec:
    """``Qwen2_5OmniThinkerForConditionalGeneration``: the same without that part."""
    return _of_qwen2_5_thinker(config, "Qwen2_5OmniThinkerForConditionalGeneration")


def read_qwen3_omni(config: ConfigReader) -> ModelSpec:
    """``Qwen3OmniMoeForConditionalGeneration``: the same around Qwen3 with experts, without
    windows."""
    return _of_qwen3_thinker(_thinker(config), "Qwen3OmniMoeForConditionalGeneration")


def read_qwen3_omni_thinker(config: ConfigReader) -> ModelSpec:
    """``Qwen3OmniMoeThinkerForConditionalGeneration``: the same without what would speak."""
    return _of_qwen3_thinker(config, "Qwen3OmniMoeThinkerForConditionalGeneration")


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


def _of_qwen2_5_thinker(config: ConfigReader, architecture: str) -> ModelSpec:
    text = text_of_vl(config, flat=False).with_defaults(rope_theta=1e6, num_key_value_heads=4)
    return _of_thinker(read_qwen2(text), architecture)


def _of_qwen3_thinker(config: ConfigReader, architecture: str) -> ModelSpec:
    text = text_of_vl(config, flat=False).with_defaults(norm_topk_prob=True)
    return _of_thinker(read_qwen3_moe(text.with_values(use_sliding_window=False)), architecture)


def _spelled(config: ConfigReader, names: Sequence[str]) -> str:
    """The one of ``names`` that the checkpoint has for its architecture."""
    given = config.values.get("architectures", ())
    return next((name for name in names if name in given), names[0])


def _of_thinker(spec: ModelSpec, architecture: str) -> ModelSpec:
    spec = _renamed(text_part(spec, architecture), _OF_THINKER)
    return replace(spec, names=replace(spec.names, left_out=_SPEECH))


def _renamed(spec: ModelSpec, renamed: tuple[tuple[str, str], ...]) -> ModelSpec:
    """The same with tensors that are named so in the checkpoint."""
    return replace(spec, names=replace(spec.names, renamed=(*renamed, *spec.names.renamed)))
