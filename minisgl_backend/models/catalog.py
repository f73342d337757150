"""The architectures that can be served, and the spec of a checkpoint folder.

An architecture is a function in ``families`` from its config.json to a ``ModelSpec``. Reads
config.json and generation_config.json, of the tokenizer at most its end token, and through
``quantization`` how weights are stored. Code that comes with a checkpoint is never run. Must not
import torch, since commands read a spec before anything is loaded, and must not know devices or
pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.checkpoint import head_and_embedding, is_headless
from minisgl_backend.models.config_json import ConfigReader, read_json
from minisgl_backend.models.families.afmoe import read_afmoe
from minisgl_backend.models.families.apertus import read_apertus
from minisgl_backend.models.families.bailing import read_bailing_hybrid
from minisgl_backend.models.families.bamba import read_bamba
from minisgl_backend.models.families.cohere import read_cohere, read_cohere2, read_cohere2_moe
from minisgl_backend.models.families.deepseek import (
    read_axk1,
    read_deepseek_v2,
    read_deepseek_v3,
    read_deepseek_v32,
    read_glm4_moe_lite,
    read_glm_moe_dsa,
    read_kimi_k25,
    read_youtu,
)
from minisgl_backend.models.families.deepseek_experts import (
    read_dots1,
    read_glm4_moe,
    read_hy_v3,
    read_minimax_m2,
    read_solar_open,
)
from minisgl_backend.models.families.ernie import read_ernie4_5, read_ernie4_5_moe
from minisgl_backend.models.families.exaone import read_exaone4, read_exaone4_5, read_exaone_moe
from minisgl_backend.models.families.falcon import read_falcon
from minisgl_backend.models.families.falcon_h1 import read_falcon_h1
from minisgl_backend.models.families.flint import read_flint
from minisgl_backend.models.families.gemma import (
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_gemma3_text,
    read_gemma4,
    read_gemma4_text,
    read_gemma4_unified,
    read_gemma4_unified_text,
    read_vaultgemma,
)
from minisgl_backend.models.families.glm import (
    read_glm,
    read_glm4,
    read_glm4v,
    read_glm4v_moe,
    read_glm46v,
)
from minisgl_backend.models.families.gpt import (
    read_gpt2,
    read_gpt_bigcode,
    read_gpt_neox,
    read_gptj,
)
from minisgl_backend.models.families.gpt_oss import read_gpt_oss
from minisgl_backend.models.families.granite import (
    read_granite,
    read_granite_moe,
    read_granite_moe_hybrid,
    read_granite_moe_shared,
    read_granite_moe_swa,
    read_granite_swa,
)
from minisgl_backend.models.families.hunyuan import read_hunyuan_dense, read_hunyuan_moe
from minisgl_backend.models.families.hy_v4 import read_hy_v4
from minisgl_backend.models.families.hyperclova import read_hyperclovax
from minisgl_backend.models.families.jais import read_jais2
from minisgl_backend.models.families.kimi_linear import read_kimi_linear
from minisgl_backend.models.families.kolibri import read_kolibri1
from minisgl_backend.models.families.laguna import read_laguna
from minisgl_backend.models.families.lfm import read_lfm2, read_lfm2_moe, read_lfm3
from minisgl_backend.models.families.llama import (
    read_arcee,
    read_cwm,
    read_helium,
    read_internlm3,
    read_iquest_coder,
    read_llama,
    read_seed_oss,
    read_smollm3,
)
from minisgl_backend.models.families.llama4 import read_llama4, read_llama4_text
from minisgl_backend.models.families.minicpm import read_minicpm3
from minisgl_backend.models.families.minitron import read_nemotron
from minisgl_backend.models.families.mistral import (
    read_ministral,
    read_ministral3,
    read_mistral,
    read_mistral3,
    read_mistral4,
    read_mixtral,
)
from minisgl_backend.models.families.multimodal import (
    read_aya_vision,
    read_cohere2_vision,
    read_granite4_vision,
    read_hyperclovax_vision,
    read_idefics3,
    read_internvl,
    read_lfm2_vl,
    read_lfm3_vl,
    read_llava,
    read_llava_next,
    read_llava_onevision,
    read_minicpmv4_6,
    read_minicpmv4_7,
    read_ovis2,
    read_qwen2_5_omni,
    read_qwen2_5_omni_thinker,
    read_qwen2_audio,
    read_qwen3_omni,
    read_qwen3_omni_thinker,
    read_smolvlm,
    read_voxtral,
)
from minisgl_backend.models.families.muse import read_muse_glimmer
from minisgl_backend.models.families.nanochat import read_nanochat
from minisgl_backend.models.families.nemotron import read_nemotron_h
from minisgl_backend.models.families.olmo import (
    read_flex_olmo,
    read_olmo,
    read_olmo2,
    read_olmo3,
    read_olmo_hybrid,
    read_olmoe,
)
from minisgl_backend.models.families.opt import read_opt
from minisgl_backend.models.families.phi import read_phi, read_phi3
from minisgl_backend.models.families.qwen import (
    read_mellum,
    read_qwen2,
    read_qwen2_5_vl,
    read_qwen2_moe,
    read_qwen2_vl,
    read_qwen3,
    read_qwen3_moe,
    read_qwen3_vl,
    read_qwen3_vl_moe,
)
from minisgl_backend.models.families.qwen_hybrid import (
    read_qwen3_5,
    read_qwen3_5_moe,
    read_qwen3_5_moe_multimodal,
    read_qwen3_5_multimodal,
    read_qwen3_next,
)
from minisgl_backend.models.families.stablelm import read_stablelm
from minisgl_backend.models.families.starcoder import read_starcoder2
from minisgl_backend.models.families.step import read_step3p5, read_step3p7
from minisgl_backend.models.quantization import modelopt_file, read_quantization
from minisgl_backend.models.spec import ModelSpec


def load_spec(folder: Path, tokenizer: Path | None = None) -> ModelSpec:
    """The spec of the checkpoint in ``folder``; ``ConfigError`` if it cannot be served.
    ``tokenizer`` is the folder of its tokenizer, if that is another one."""
    spec = parse_spec(read_json(folder / "config.json"), modelopt_file(folder))
    _check_pooling(folder)
    generation = folder / "generation_config.json"
    if generation.exists():
        config = ConfigReader(read_json(generation), "generation_config.json")
        eos = spec.eos_token_ids | set(config.integers("eos_token_id"))
        spec = replace(spec, eos_token_ids=eos)
    # others are never sampled, and no mask has a bit for them
    known = _within(spec.eos_token_ids, spec)
    for place in filter(None, (tokenizer, folder)):
        known = known or _within(_end_of_tokenizer(place), spec)
    spec = replace(spec, eos_token_ids=known)
    if not spec.tie_embeddings and is_headless(folder):
        spec = replace(spec, tie_embeddings=True, generates=False)
    if spec.tie_embeddings and spec.generates:
        spec = _with_head(spec, head_and_embedding(folder, spec.names))
    return spec


def _within(token_ids: frozenset[int], spec: ModelSpec) -> frozenset[int]:
    """Those of the vocabulary."""
    return frozenset(token for token in token_ids if token < spec.vocab_size)


def _end_of_tokenizer(folder: Path) -> frozenset[int]:
    """The id of the tokenizer's ``eos_token``, with which answers end if the model names no id of
    its own; none if there is no such token."""
    paths = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not all(path.exists() for path in paths):
        return frozenset()
    config, tokenizer = map(read_json, paths)
    end, added = config.get("eos_token"), tokenizer.get("added_tokens")
    name = end.get("content") if isinstance(end, dict) else end
    if not isinstance(name, str) or not isinstance(added, list):
        return frozenset()
    ids = [
        token.get("id")
        for token in added
        if isinstance(token, dict) and token.get("content") == name
    ]
    return frozenset(token_id for token_id in ids if type(token_id) is int and token_id >= 0)


def _with_head(spec: ModelSpec, head: Literal["own", "alone"] | None) -> ModelSpec:
    """The spec of a checkpoint that ties embedding and head, given what it holds."""
    if head == "own":
        # multi-modal checkpoints leave the flag out even if they have a head; others got a head of
        # their own by training, and kept the flag: as in transformers, the weights count
        return replace(spec, tie_embeddings=False)
    if head == "alone":  # of tensors that share memory, tools may keep only the first by name
        renamed = (*spec.names.renamed, ("lm_head.", "model.embed_tokens."))
        return replace(spec, names=replace(spec.names, renamed=renamed))
    return spec


def parse_spec(values: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec that a parsed config.json describes, with ModelOpt's own file if there is one;
    ``ConfigError`` if it cannot be served."""
    config = ConfigReader(values)
    weights = read_quantization(config, modelopt)
    names = config.values.get("architectures") or ["no architecture"]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise config.error("architectures", "a list of names", names)
    known = [name for name in names if name in ARCHITECTURES]
    if "auto_map" in config.values and not _WITH_NEEDLESS_CODE.intersection(known):
        raise ConfigError("the checkpoint brings its own code (auto_map), which is never run")
    if not known:
        raise ConfigError(
            f"{', '.join(names)[:80]} is not supported; supported are " + ", ".join(ARCHITECTURES)
        )
    for part in (config, ConfigReader(config.table("text_config"), f"{config.where}: text_config")):
        if not part.flag("is_causal", True):  # transformers lets tokens see later ones, too
            raise ConfigError(f"{part.where}: is_causal false is not supported")
        if part.table("per_layer_config") and known[0] not in _DIFFERS_BY_LAYER:
            raise ConfigError(f"{part.where}: per_layer_config is not supported for {known[0]}")
    return replace(ARCHITECTURES[known[0]](config), weights=weights)


def _check_pooling(folder: Path) -> None:
    """Raise ``ConfigError`` for a checkpoint of sentence-transformers whose embeddings are not made
    of the last token alone."""
    if any(folder.glob("*_Dense/config.json")):
        raise ConfigError(f"{folder}: a projection of embeddings (2_Dense) is not supported")
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return
    values = read_json(path)
    flags = (key for key, value in values.items() if value is True and key.startswith(_POOLING))
    modes = [key.removeprefix(_POOLING) for key in flags] or values.get("pooling_mode")
    if modes not in (["lasttoken"], "lasttoken"):
        raise ConfigError(
            f"{path}: embeddings are made of the last token only, not by pooling_mode {modes}"
        )


ARCHITECTURES: Final[Mapping[str, Callable[[ConfigReader], ModelSpec]]] = MappingProxyType(
    {
        "LlamaForCausalLM": read_llama,
        "Llama4ForCausalLM": read_llama4_text,
        "Llama4ForConditionalGeneration": read_llama4,
        "MistralForCausalLM": read_mistral,
        "Qwen2ForCausalLM": read_qwen2,
        "Qwen3ForCausalLM": read_qwen3,
        "Qwen2MoeForCausalLM": read_qwen2_moe,
        "Qwen3MoeForCausalLM": read_qwen3_moe,
        "Qwen2VLForConditionalGeneration": read_qwen2_vl,
        "Qwen2_5_VLForConditionalGeneration": read_qwen2_5_vl,
        "Qwen3VLForConditionalGeneration": read_qwen3_vl,
        "Qwen3VLMoeForConditionalGeneration": read_qwen3_vl_moe,
        "GlmForCausalLM": read_glm,
        "Glm4ForCausalLM": read_glm4,
        "Glm4vForConditionalGeneration": read_glm4v,
        "Glm4vMoeForConditionalGeneration": read_glm4v_moe,
        "Glm46VForConditionalGeneration": read_glm46v,
        "Glm4MoeForCausalLM": read_glm4_moe,
        "Glm4MoeLiteForCausalLM": read_glm4_moe_lite,
        "DeepseekV2ForCausalLM": read_deepseek_v2,
        "DeepseekV3ForCausalLM": read_deepseek_v3,
        "DeepseekV32ForCausalLM": read_deepseek_v32,
        "GlmMoeDsaForCausalLM": read_glm_moe_dsa,
        "HYV4ForCausalLM": read_hy_v4,
        "KimiK25ForConditionalGeneration": read_kimi_k25,
        "Kimi_K25ForConditionalGeneration": read_kimi_k25,
        "KimiLinearForCausalLM": read_kimi_linear,
        "AXK1ForCausalLM": read_axk1,
        "BailingMoeV3ForCausalLM": read_bailing_hybrid,
        "BailingHybridForCausalLM": read_bailing_hybrid,
        "YoutuForCausalLM": read_youtu,
        "MiniCPM3ForCausalLM": read_minicpm3,
        "Dots1ForCausalLM": read_dots1,
        "SolarOpenForCausalLM": read_solar_open,
        "AfmoeForCausalLM": read_afmoe,
        "MiniMaxM2ForCausalLM": read_minimax_m2,
        "Qwen3NextForCausalLM": read_qwen3_next,
        "Qwen3_5ForCausalLM": read_qwen3_5,
        "Qwen3_5ForConditionalGeneration": read_qwen3_5_multimodal,
        "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
        "Qwen3_5MoeForConditionalGeneration": read_qwen3_5_moe_multimodal,
        "MinistralForCausalLM": read_ministral,
        "Ministral3ForCausalLM": read_ministral3,
        "Mistral3ForConditionalGeneration": read_mistral3,
        "Mistral4ForCausalLM": read_mistral4,
        "MixtralForCausalLM": read_mixtral,
        "Phi3ForCausalLM": read_phi3,
        "Olmo2ForCausalLM": read_olmo2,
        "Olmo3ForCausalLM": read_olmo3,
        "OlmoeForCausalLM": read_olmoe,
        "OlmoHybridForCausalLM": read_olmo_hybrid,
        "LagunaForCausalLM": read_laguna,
        "FlintForCausalLM": read_flint,
        "MuseGlimmerForConditionalGeneration": read_muse_glimmer,
        "Kolibri1ForCausalLM": read_kolibri1,
        "FlexOlmoForCausalLM": read_flex_olmo,
        "Exaone4ForCausalLM": read_exaone4,
        "Exaone4_5_ForConditionalGeneration": read_exaone4_5,
        "ExaoneMoeForCausalLM": read_exaone_moe,
        "ExaoneMoEForCausalLM": read_exaone_moe,
        "Ernie4_5ForCausalLM": read_ernie4_5,
        "Ernie4_5_MoeForCausalLM": read_ernie4_5_moe,
        "HunYuanDenseV1ForCausalLM": read_hunyuan_dense,
        "HunYuanMoEV1ForCausalLM": read_hunyuan_moe,
        "HYV3ForCausalLM": read_hy_v3,
        "HyperCLOVAXForCausalLM": read_hyperclovax,
        "InternLM3ForCausalLM": read_internlm3,
        "IQuestCoderForCausalLM": read_iquest_coder,
        "MellumForCausalLM": read_mellum,
        "Gemma3ForCausalLM": read_gemma3_text,
        "Gemma3ForConditionalGeneration": read_gemma3,
        "Gemma4ForCausalLM": read_gemma4_text,
        "Gemma4ForConditionalGeneration": read_gemma4,
        "Gemma4UnifiedForCausalLM": read_gemma4_unified_text,
        "Gemma4UnifiedForConditionalGeneration": read_gemma4_unified,
        "GraniteForCausalLM": read_granite,
        "GraniteMoeForCausalLM": read_granite_moe,
        "GraniteMoeSharedForCausalLM": read_granite_moe_shared,
        "GraniteSWAForCausalLM": read_granite_swa,
        "GraniteMoeSWAForCausalLM": read_granite_moe_swa,
        "GraniteMoeHybridForCausalLM": read_granite_moe_hybrid,
        "SeedOssForCausalLM": read_seed_oss,
        "SmolLM3ForCausalLM": read_smollm3,
        "GptOssForCausalLM": read_gpt_oss,
        "NemotronHForCausalLM": read_nemotron_h,
        "NemotronForCausalLM": read_nemotron,
        "BambaForCausalLM": read_bamba,
        "FalconH1ForCausalLM": read_falcon_h1,
        "NanoChatForCausalLM": read_nanochat,
        "Step3p5ForCausalLM": read_step3p5,
        "Step3p7ForConditionalGeneration": read_step3p7,
        "ApertusForCausalLM": read_apertus,
        "ArceeForCausalLM": read_arcee,
        "CwmForCausalLM": read_cwm,
        "HeliumForCausalLM": read_helium,
        "Starcoder2ForCausalLM": read_starcoder2,
        "OPTForCausalLM": read_opt,
        "GPT2LMHeadModel": read_gpt2,
        "GPTBigCodeForCausalLM": read_gpt_bigcode,
        "GPTJForCausalLM": read_gptj,
        "GPTNeoXForCausalLM": read_gpt_neox,
        "PhiForCausalLM": read_phi,
        "StableLmForCausalLM": read_stablelm,
        "OlmoForCausalLM": read_olmo,
        "FalconForCausalLM": read_falcon,
        "Jais2ForCausalLM": read_jais2,
        "CohereForCausalLM": read_cohere,
        "Cohere2ForCausalLM": read_cohere2,
        "Cohere2MoeForCausalLM": read_cohere2_moe,
        "GemmaForCausalLM": read_gemma,
        "Gemma2ForCausalLM": read_gemma2,
        "VaultGemmaForCausalLM": read_vaultgemma,
        "Lfm2ForCausalLM": read_lfm2,
        "Lfm2MoeForCausalLM": read_lfm2_moe,
        "Lfm3ForCausalLM": read_lfm3,
        "InternVLForConditionalGeneration": read_internvl,
        "LlavaForConditionalGeneration": read_llava,
        "LlavaNextForConditionalGeneration": read_llava_next,
        "LlavaOnevisionForConditionalGeneration": read_llava_onevision,
        "Idefics3ForConditionalGeneration": read_idefics3,
        "SmolVLMForConditionalGeneration": read_smolvlm,
        "Lfm2VlForConditionalGeneration": read_lfm2_vl,
        "AyaVisionForConditionalGeneration": read_aya_vision,
        "Cohere2VisionForConditionalGeneration": read_cohere2_vision,
        "Qwen2_5OmniModel": read_qwen2_5_omni,
        "Qwen2_5OmniForConditionalGeneration": read_qwen2_5_omni,
        "Qwen3OmniMoeForConditionalGeneration": read_qwen3_omni,
        "Lfm3VlForConditionalGeneration": read_lfm3_vl,
        "MiniCPMV4_6ForConditionalGeneration": read_minicpmv4_6,
        "MiniCPMV4_7ForConditionalGeneration": read_minicpmv4_7,
        "HCXVisionV2ForCausalLM": read_hyperclovax_vision,
        "HyperCLOVAXVisionV2ForConditionalGeneration": read_hyperclovax_vision,
        "Ovis2ForConditionalGeneration": read_ovis2,
        "Granite4VisionForConditionalGeneration": read_granite4_vision,
        "Qwen2AudioForConditionalGeneration": read_qwen2_audio,
        "VoxtralForConditionalGeneration": read_voxtral,
        "Qwen2_5OmniThinkerForConditionalGeneration": read_qwen2_5_omni_thinker,
        "Qwen3OmniMoeThinkerForConditionalGeneration": read_qwen3_omni_thinker,
    }
)
"""Keyed by the names in config.json."""

_DIFFERS_BY_LAYER: Final = frozenset(
    {"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"}
    | {"Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"}
    | {"Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"}
)
"""Architectures that read ``per_layer_config``, which transformers knows for all."""
_POOLING: Final = "pooling_mode_"
_WITH_NEEDLESS_CODE: Final = frozenset(
    {"Phi3ForCausalLM", "MiniMaxM2ForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"}
    | {"HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "HyperCLOVAXForCausalLM"}
    | {"InternLM3ForCausalLM", "IQuestCoderForCausalLM", "SolarOpenForCausalLM"}
    | {"AfmoeForCausalLM", "NemotronHForCausalLM", "FalconForCausalLM", "PhiForCausalLM"}
    | {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"}
    | {"YoutuForCausalLM", "MiniCPM3ForCausalLM", "HCXVisionV2ForCausalLM"}
    | {"KimiK25ForConditionalGeneration", "KimiLinearForCausalLM", "LagunaForCausalLM"}
    | {
        "AXK1ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    }
)
"""Architectures whose checkpoints come with code that transformers has included since."""
