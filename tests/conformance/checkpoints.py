"""Tiny random checkpoints of every architecture and RoPE variant, written by transformers itself.

Weights are drawn wide enough for logits to differ clearly: ``test_tokens_equal_transformers``
checks that no two candidates nearly tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Exaone4Config,
    Exaone4ForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB_SIZE: Final = 256
CONTEXT: Final = 256
"""Positions that the engine serves; ``dynamic`` checkpoints say 64 and are stretched beyond."""

_SHAPE: Final = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
)
_LLAMA3: Final = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
)
_OF_STABLELM: Final = MappingProxyType(
    {"intermediate_size": 96, "num_key_value_heads": 2, "rope_theta": 500.0}
)
_YARN: Final = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
)


_MINISTRAL_ROPE: Final = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": CONTEXT,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    }
)


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **changes}))


def _llama4_text(**changes: Any) -> dict[str, Any]:
    """Prompts have two or three sections, and queries grow in each."""
    experts = {"intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 4}
    values: dict[str, Any] = {**_SHAPE, "head_dim": 16, **experts, "num_hidden_layers": 4}
    values |= {"no_rope_layer_interval": 2, "attention_chunk_size": 48}
    values |= {"floor_scale": 10, "attn_scale": 0.4, "rope_parameters": dict(_LLAMA3)}
    return {**values, **changes}


def _llama4(**changes: Any) -> PreTrainedModel:
    return Llama4ForCausalLM(Llama4TextConfig(**_llama4_text(**changes)))


def _llama4_multimodal() -> PreTrainedModel:
    """Like Maverick: experts in every second layer, and no norms of queries and keys."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    text = _llama4_text(interleave_moe_layer_step=2, use_qk_norm=False, num_local_experts=8)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    config = Llama4Config(text_config=text, vision_config=vision)
    return Llama4ForConditionalGeneration(config)


def _mistral(**changes: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**_SHAPE, **changes}))


def _qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, **changes}))


def _qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, "head_dim": 32, **changes}))


def _qwen3_moe(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
    values = {**_SHAPE, "head_dim": 32, "norm_topk_prob": True, **experts, **changes}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))


def _qwen2_moe(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    values = {**_SHAPE, **experts, "shared_expert_intermediate_size": 80, **changes}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**values))


def _sigmoid_experts(**changes: Any) -> dict[str, Any]:
    """Experts with the router of DeepSeek-V3, from the second layer on."""
    experts = {"moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 3}
    experts |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True}
    return {**_SHAPE, **experts, "num_hidden_layers": 3, "routed_scaling_factor": 2.5, **changes}


def _glm4_moe(**changes: Any) -> PreTrainedModel:
    return _corrected(Glm4MoeForCausalLM(Glm4MoeConfig(**_sigmoid_experts(**changes))))


def _dots1(**changes: Any) -> PreTrainedModel:
    return _corrected(Dots1ForCausalLM(Dots1Config(**_sigmoid_experts(**changes))))


_LATENTS: Final = MappingProxyType(
    {
        "kv_lora_rank": 40,
        "q_lora_rank": 36,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "num_key_value_heads": 4,
    }
)
"""Of multi-head latent attention."""
_LATENT_YARN: Final = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    }
)


def _deepseek_v3(**changes: Any) -> PreTrainedModel:
    values = _sigmoid_experts(**{**_LATENTS, **changes})
    return _corrected(DeepseekV3ForCausalLM(DeepseekV3Config(**values)))


def _with_indexer(architecture: str, **changes: Any) -> PreTrainedModel:
    """Of few positions, among 24 heads of scores, so that no two scores are equal at 0."""
    sizes = {"index_n_heads": 24, "index_head_dim": 24, "index_topk": 10}
    values = _sigmoid_experts(**{**_LATENTS, **sizes, "first_k_dense_replace": 1, **changes})
    config = _newer(f"{architecture}Config")(**values)
    return _corrected(_newer(f"{architecture}ForCausalLM")(config))


def _hy_v4(**changes: Any) -> PreTrainedModel:
    limit = {"swiglu_limit": 0.5, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    values = {"index_n_heads": 24, "index_head_dim": 24, "index_topk": 10, **limit, **changes}
    config = _newer("HYV4Config")(**_sigmoid_experts(**{**_LATENTS, **values}))
    return _corrected(_newer("HYV4ForCausalLM")(config))


def _axk1(**changes: Any) -> PreTrainedModel:
    values = _sigmoid_experts(**{**_LATENTS, "first_k_dense_replace": 1, **changes})
    return cast(PreTrainedModel, _newer("AXK1ForCausalLM")(_newer("AXK1Config")(**values)))


def _deepseek_v2(**changes: Any) -> PreTrainedModel:
    values = _sigmoid_experts(**{**_LATENTS, "norm_topk_prob": False, **changes})
    return DeepseekV2ForCausalLM(DeepseekV2Config(**values))


def _glm4_moe_lite(**changes: Any) -> PreTrainedModel:
    values = _sigmoid_experts(**{**_LATENTS, **changes})
    return _corrected(_newer("Glm4MoeLiteForCausalLM")(_newer("Glm4MoeLiteConfig")(**values)))


def _mistral4_text(**changes: Any) -> dict[str, Any]:
    """Queries grow every 32 positions."""
    _newer("Mistral4Config")
    rope = {**_MINISTRAL_ROPE, "partial_rotary_factor": 0.4, "mscale_all_dim": 0.8}
    values = {**_LATENTS, "first_k_dense_replace": 0, "rope_parameters": rope}
    return _sigmoid_experts(**{**values, "num_hidden_layers": 2, **changes})


def _mistral4(**changes: Any) -> PreTrainedModel:
    config = _newer("Mistral4Config")(**_mistral4_text(**changes))
    return cast(PreTrainedModel, _newer("Mistral4ForCausalLM")(config))


def _kimi_k25(spelled: str = "Kimi_K25") -> PreTrainedModel:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
    text = _sigmoid_experts(**_LATENTS, n_group=1, topk_group=1, model_type="deepseek_v3")
    config = _newer("Kimi_K25Config")(
        text_config={**text, "rope_parameters": dict(_LATENT_YARN)},
        vision_config=vision,
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )
    return _corrected(class_of(f"{spelled}ForConditionalGeneration")(config))


def _youtu(**changes: Any) -> PreTrainedModel:
    config = _newer("YoutuConfig")(**{**_SHAPE, **_LATENTS, **changes})
    return cast(PreTrainedModel, _newer("YoutuForCausalLM")(config))


def _corrected(model: PreTrainedModel) -> PreTrainedModel:
    """The model with corrections in its routers that change which experts are chosen."""
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)))
    return model


def _ministral(**changes: Any) -> PreTrainedModel:
    return MinistralForCausalLM(MinistralConfig(**{**_SHAPE, "head_dim": 32, **changes}))


def _ministral3(**changes: Any) -> PreTrainedModel:
    values = {**_SHAPE, "head_dim": 32, "rope_parameters": dict(_MINISTRAL_ROPE), **changes}
    return Ministral3ForCausalLM(Ministral3Config(**values))


def _mistral3(text: dict[str, Any], **changes: Any) -> PreTrainedModel:
    """A vision model whose text part is one of the others."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 16}
    values = {
        "vision_config": {"model_type": "pixtral", **vision},
        "text_config": {**_SHAPE, "head_dim": 32, **text},
        **changes,
    }
    return Mistral3ForConditionalGeneration(Mistral3Config(**values))


def _mixtral(**changes: Any) -> PreTrainedModel:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**{**_SHAPE, **experts, **changes}))


def _phi3(**changes: Any) -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**{**_SHAPE, **changes}))


def _olmo2(**changes: Any) -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**{**_SHAPE, **changes}))


def _olmo3(**changes: Any) -> PreTrainedModel:
    values = {**_SHAPE, "num_hidden_layers": 4, "sliding_window": 20, **changes}
    return Olmo3ForCausalLM(Olmo3Config(**values))


def _granite(**changes: Any) -> PreTrainedModel:
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    multipliers |= {"attention_multiplier": 0.2, "logits_scaling": 6.0}
    odd = {"vocab_size": VOCAB_SIZE + 3}  # as published: the output head's kernels want an even one
    return GraniteForCausalLM(GraniteConfig(**{**_SHAPE, **odd, **multipliers, **changes}))


def _smollm3(**changes: Any) -> PreTrainedModel:
    values = {**_SHAPE, "num_hidden_layers": 4, "no_rope_layer_interval": 2, **changes}
    return SmolLM3ForCausalLM(SmolLM3Config(**values))


_GEMMA: Final = MappingProxyType(
    {
        "num_hidden_layers": 3,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
)


def _gemma3(**changes: Any) -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**_SHAPE, **_GEMMA, **changes}))


def _gemma3_seeing() -> PreTrainedModel:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = {**_SHAPE, **_GEMMA, "attention_bias": True}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


_GPT_OSS_ROPE: Final = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    }
)


def _gpt_oss(**changes: Any) -> PreTrainedModel:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3}
    values = {
        **_SHAPE,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 20,
        "rope_parameters": dict(_GPT_OSS_ROPE),
        **experts,
        **changes,
    }
    return GptOssForCausalLM(GptOssConfig(**values))


_GEMMA_4: Final = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 5.0,
        "hidden_size_per_layer_input": 0,
    }
)
_PER_LAYER: Final = MappingProxyType(
    {
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": _SHAPE["vocab_size"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }
)


def _gemma4(**changes: Any) -> PreTrainedModel:
    model = Gemma4ForCausalLM(Gemma4TextConfig(**{**_SHAPE, **_GEMMA_4, **changes}))
    _draw_scalars(model)
    return model


def _gemma4_experts() -> PreTrainedModel:
    experts = {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48}
    return _gemma4(enable_moe_block=True, attention_k_eq_v=True, **experts)


def _gemma4_multimodal() -> PreTrainedModel:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    text = {**_SHAPE, **_GEMMA_4, **_PER_LAYER, "pad_token_id": 0}
    config = Gemma4Config(text_config=text, vision_config=vision)
    model = Gemma4ForConditionalGeneration(config)
    _draw_scalars(model)
    return model


def _gemma4_unified_text(**changes: Any) -> dict[str, Any]:
    text = {key: value for key, value in _GEMMA_4.items() if "per_layer" not in key}
    return {**_SHAPE, **text, "pad_token_id": 0, **changes}


def _gemma4_unified() -> PreTrainedModel:
    config = Gemma4UnifiedTextConfig(**_gemma4_unified_text())
    model = Gemma4UnifiedForCausalLM(config)
    _draw_scalars(model)
    return model


def _gemma4_unified_multimodal() -> PreTrainedModel:
    text = _gemma4_unified_text(attention_k_eq_v=True, num_global_key_value_heads=1)
    vision = {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 16, "patch_size": 4}
    config = Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16}
    )
    model = Gemma4UnifiedForConditionalGeneration(config)
    _draw_scalars(model)
    return model


def _draw_scalars(model: PreTrainedModel) -> None:
    """Set the layer scalars, which are ones in a new model."""
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5 + 0.1 * len(name))


def _longrope(num_frequencies: int) -> dict[str, Any]:
    """Sequences stay within the original context, as they do in the engine."""
    short = [1.0 + 0.3 * index for index in range(num_frequencies)]
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short}
    rope["long_factor"] = [4 * factor for factor in short]
    return {
        "rope_parameters": rope,
        "max_position_embeddings": 4 * CONTEXT,
        "original_max_position_embeddings": CONTEXT,
    }


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "rope_theta": 10_000.0, "factor": factor}


def _dynamic() -> dict[str, Any]:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    return {"max_position_embeddings": 64, "rope_parameters": rope}


_DELTA: Final = MappingProxyType(
    {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    }
)


_WIDE_DELTA: Final = MappingProxyType(
    {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_hidden_layers": 4}
)
"""Sizes for which the parts of merged projections end where blocks of 64 do, also on two ranks."""


def _qwen3_5(**changes: Any) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**_SHAPE, **_DELTA, **changes}))


_SIGHT: Final = MappingProxyType(
    {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": _SHAPE["hidden_size"],
        "num_position_embeddings": 16,
    }
)


def _qwen3_5_multimodal(**changes: Any) -> PreTrainedModel:
    text, vision = {**_SHAPE, **_DELTA}, dict(_SIGHT)
    config = Qwen3_5Config(text_config=text, vision_config=vision, **changes)
    return Qwen3_5ForConditionalGeneration(config)


def _qwen3_5_moe_text() -> dict[str, Any]:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    shape = {key: value for key, value in _SHAPE.items() if key != "intermediate_size"}
    return {**shape, **_DELTA, **experts, "shared_expert_intermediate_size": 80}


def _qwen3_5_moe(**changes: Any) -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**_qwen3_5_moe_text(), **changes}))


def _qwen3_5_moe_multimodal() -> PreTrainedModel:
    config = Qwen3_5MoeConfig(text_config=_qwen3_5_moe_text(), vision_config=dict(_SIGHT))
    return Qwen3_5MoeForConditionalGeneration(config)


def _qwen3_next(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    values = {**_SHAPE, **_DELTA, **experts, "shared_expert_intermediate_size": 80, **changes}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**values))


def _seed_oss(**changes: Any) -> PreTrainedModel:
    return SeedOssForCausalLM(SeedOssConfig(**{**_SHAPE, "head_dim": 32, **changes}))


def _minimax_m2(**changes: Any) -> PreTrainedModel:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3}
    # some versions of transformers rotate by the last key alone
    heads = {"head_dim": 32, "rotary_dim": 16, "partial_rotary_factor": 0.5}
    config = MiniMaxM2Config(**{**_SHAPE, **experts, **heads, **changes})
    return _corrected(MiniMaxM2ForCausalLM(config))


def _qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": _SHAPE["hidden_size"], "num_heads": 2}
    config = Qwen2VLConfig(text_config=_text_of_vl(), vision_config=vision)
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl() -> PreTrainedModel:
    text = {**_text_of_vl(), "use_sliding_window": True, "sliding_window": 24}
    text["max_window_layers"] = 1
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=dict(_SIGHT), tie_word_embeddings=True
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> PreTrainedModel:
    text = {**_text_of_vl(mrope_interleaved=True), "attention_bias": True, "head_dim": 16}
    vision = _SIGHT | {"deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))


def _qwen3_vl_moe() -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    text = {**_text_of_vl(mrope_interleaved=True), **experts, "mlp_only_layers": [1]}
    vision = _SIGHT | {"deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return Qwen3VLMoeForConditionalGeneration(config)


def _text_of_vl(**rope: Any) -> dict[str, Any]:
    """A text part whose heads of 16 elements rotate by time, row and column."""
    usual = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    return {**_SHAPE, "rope_parameters": usual | rope}


def _exaone4(**changes: Any) -> PreTrainedModel:
    sizes = {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 20}
    values = {**_SHAPE, **sizes, "rope_parameters": dict(_LLAMA3), **changes}
    return Exaone4ForCausalLM(Exaone4Config(**values))


def _glm4(**changes: Any) -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**{**_SHAPE, "head_dim": 32, **changes}))


def _glm4v() -> PreTrainedModel:
    text = _text_of_vl(partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
    config = Glm4vConfig(text_config=text, vision_config=dict(_SIGHT))
    return Glm4vForConditionalGeneration(config)


def _glm4v_moe() -> PreTrainedModel:
    rope = _text_of_vl(partial_rotary_factor=0.5, mrope_section=[2, 1, 1])["rope_parameters"]
    text = _sigmoid_experts(rope_parameters=rope)
    config = Glm4vMoeConfig(text_config=text, vision_config=dict(_SIGHT))
    return _corrected(Glm4vMoeForConditionalGeneration(config))


def _glm46v() -> PreTrainedModel:
    text = {"model_type": "glm4v_text", **_text_of_vl(mrope_section=[4, 2, 2])}
    config = Glm46VConfig(text_config=text, vision_config=dict(_SIGHT), tie_word_embeddings=True)
    return Glm46VForConditionalGeneration(config)


def _glm(**changes: Any) -> PreTrainedModel:
    return GlmForCausalLM(GlmConfig(**{**_SHAPE, "head_dim": 32, **changes}))


def _ernie(**changes: Any) -> PreTrainedModel:
    return Ernie4_5ForCausalLM(Ernie4_5Config(**{**_SHAPE, "head_dim": 32, **changes}))


def _ernie_moe(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "moe_num_experts": 8, "moe_k": 3}
    values = {**_SHAPE, **experts, "num_hidden_layers": 3, **changes}
    return Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**values))


def _olmoe(**changes: Any) -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
    return OlmoeForCausalLM(OlmoeConfig(**{**_SHAPE, **experts, **changes}))


def _granite_hybrid(**changes: Any) -> PreTrainedModel:
    """Mamba 2 with heads that are all in one group, and attention that does not rotate."""
    hybrid = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 80,
        **changes,
    }
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**_granite_experts(**hybrid)))


def _bamba(**changes: Any) -> PreTrainedModel:
    values = {
        **_SHAPE,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        **changes,
    }
    return BambaForCausalLM(BambaConfig(**values))


def _falcon_h1(**changes: Any) -> PreTrainedModel:
    """Attention and Mamba 2 side by side, with multipliers that are no powers of two."""
    values = {
        **_SHAPE,
        "mamba_n_heads": 6,
        "mamba_d_ssm": 96,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.7,
        "key_multiplier": 0.6,
        "mlp_multipliers": [0.8, 0.55],
        "ssm_in_multiplier": 1.3,
        "ssm_multipliers": [0.7, 0.9, 0.6, 1.2, 0.8],
        "ssm_out_multiplier": 0.45,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.4,
        **changes,
    }
    return FalconH1ForCausalLM(FalconH1Config(**values))


def _nemotron_h(**changes: Any) -> PreTrainedModel:
    """Attention after the first Mamba 2 layers, with heads of a size that is no power of two."""
    values = {
        **{key: value for key, value in _SHAPE.items() if key != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 4,
        "ssm_state_size": 16,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 80,
        "time_step_min": 1e-9,  # by which transformers limits steps of prompts, but not others
        **changes,
    }
    return NemotronHForCausalLM(NemotronHConfig(**values))


def _granite_experts(**changes: Any) -> dict[str, Any]:
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    multipliers |= {"attention_multiplier": 0.2, "logits_scaling": 6.0}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
    return {**_SHAPE, **multipliers, **experts, **changes}


def _granite_moe() -> PreTrainedModel:
    return GraniteMoeForCausalLM(GraniteMoeConfig(**_granite_experts()))


def _granite_moe_shared(**changes: Any) -> PreTrainedModel:
    values = _granite_experts(shared_intermediate_size=80, **changes)
    return GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**values))


_SWA: Final = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "sliding_window": 20,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    }
)


def _granite_swa(**changes: Any) -> PreTrainedModel:
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    multipliers |= {"attention_multiplier": 0.2, "logits_scaling": 6.0}
    values = {**_SHAPE, **_SWA, **multipliers, **changes}
    return GraniteSWAForCausalLM(GraniteSWAConfig(**values))


def _granite_moe_swa(**changes: Any) -> PreTrainedModel:
    values = _granite_experts(**_SWA, **changes)
    return GraniteMoeSWAForCausalLM(GraniteMoeSWAConfig(**values))


_ALPHA: Final = MappingProxyType(
    {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
)


def _hunyuan(**changes: Any) -> PreTrainedModel:
    values = {**_SHAPE, "head_dim": 32, "rope_parameters": dict(_ALPHA), **changes}
    return HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**values))


def _hunyuan_moe(**changes: Any) -> PreTrainedModel:
    experts = {"num_experts": 8, "moe_topk": [3, 3], "intermediate_size": 48}
    values = {**_SHAPE, "head_dim": 32, "rope_parameters": dict(_ALPHA), **experts, **changes}
    return HunYuanMoEV1ForCausalLM(HunYuanMoEV1Config(**values))


_AS_LLAMA: Final = MappingProxyType(
    {"InternLM3ForCausalLM": "InternLM3Config", "IQuestCoderForCausalLM": "IQuestCoderConfig"}
)
"""Architectures that transformers computes as Llama, with their configs."""


def class_of(architecture: str) -> Any:
    """The class of transformers for a name in ``architectures``, as publishers spell it."""
    if architecture == "ExaoneMoEForCausalLM":
        return type(architecture, (ExaoneMoeForCausalLM,), {})
    if architecture == "KimiK25ForConditionalGeneration":
        return type(architecture, (_newer("Kimi_K25ForConditionalGeneration"),), {})
    if architecture == "BailingMoeV3ForCausalLM":
        return type(architecture, (_newer("BailingHybridForCausalLM"),), {})
    if architecture == "Step3p5ForCausalLM":
        config_class = _newer("Step3p7TextConfig")
        values = {"config_class": config_class, "__init__": _around_step_text}
        return type(architecture, (LlamaForCausalLM,), values)
    if architecture == "HCXVisionV2ForCausalLM":
        return type(architecture, (_newer("HyperCLOVAXVisionV2ForConditionalGeneration"),), {})
    if "Omni" in architecture and "Thinker" not in architecture:
        whole = _newer(architecture.replace("OmniModel", "OmniForConditionalGeneration"))
        return type(architecture, (whole,), {"forward": _think, "generate": _answer})
    if config := _AS_LLAMA.get(architecture):
        return type(architecture, (LlamaForCausalLM,), {"config_class": _newer(config)})
    return _newer(architecture)


def _around_step_text(self: Any, config: Any) -> None:
    """The text part of Step 3.7 with an output head, of which transformers has no class."""
    PreTrainedModel.__init__(self, config)
    self.model = _newer("Step3p7TextModel")(config)
    self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    self.post_init()


def _think(self: Any, *args: Any, **options: Any) -> Any:
    return self.thinker(*args, **options)


def _answer(self: Any, *args: Any, **options: Any) -> Any:
    return self.thinker.generate(*args, **options)


def _newer(name: str) -> Any:
    """A class that the transformers of a GPU machine may not have yet."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def _exaone_moe(**changes: Any) -> dict[str, Any]:
    sizes = {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 20}
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    return {**_SHAPE, **sizes, **experts, **changes}


def _exaone4_5() -> PreTrainedModel:
    text: dict[str, Any] = {**_SHAPE, "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 20}
    text |= {"model_type": "exaone4", "rope_parameters": dict(_LLAMA3)}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 48}
    vision |= {"num_heads": 2, "num_key_value_heads": 1, "out_hidden_size": 64}
    vision |= {"fullatt_block_indexes": [0]}
    config = Exaone4_5_Config(text_config=text, vision_config=vision)
    return Exaone4_5_ForConditionalGeneration(config)


def _solar_open(**changes: Any) -> PreTrainedModel:
    values = {**_sigmoid_experts(), "head_dim": 32, "attention_bias": True, **changes}
    del values["intermediate_size"], values["first_k_dense_replace"]
    config = _newer("SolarOpenConfig")(**values)
    return _corrected(_newer("SolarOpenForCausalLM")(config))


def _hy_v3(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    values = {**_SHAPE, "head_dim": 32, "num_hidden_layers": 3, **experts, **changes}
    return _corrected(HYV3ForCausalLM(HYV3Config(**values)))


def _mellum(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    values: dict[str, Any] = {**_SHAPE, "head_dim": 32, "sliding_window": 20, **experts}
    values["layer_types"] = ["sliding_attention", "full_attention"]
    values["rope_parameters"] = {
        "full_attention": {**_YARN, "attention_factor": 1.2},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    config = _newer("MellumConfig")(**{**values, **changes})
    return cast(PreTrainedModel, _newer("MellumForCausalLM")(config))


def _hyperclova(**changes: Any) -> PreTrainedModel:
    multipliers = {"embedding_multiplier": 10.0, "residual_multiplier": 0.7}
    multipliers |= {"attention_multiplier": 0.2, "logits_scaling": 0.125}
    return HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**{**_SHAPE, **multipliers, **changes}))


def _internlm3(**changes: Any) -> Any:
    model = class_of("InternLM3ForCausalLM")
    return model(model.config_class(**{**_SHAPE, "head_dim": 32, **changes}))


def _iquest_coder(**changes: Any) -> Any:
    model = class_of("IQuestCoderForCausalLM")
    return model(model.config_class(**{**_SHAPE, "head_dim": 32, **changes}))


def _afmoe(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    sizes = {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 20}
    return AfmoeForCausalLM(AfmoeConfig(**{**_SHAPE, **experts, **sizes, **changes}))


def _cohere(**changes: Any) -> PreTrainedModel:
    config = _newer("CohereConfig")(**{**_SHAPE, "logit_scale": 1.5, **changes})
    return cast(PreTrainedModel, _newer("CohereForCausalLM")(config))


def _cohere2(**changes: Any) -> PreTrainedModel:
    sizes = {"num_hidden_layers": 4, "sliding_window": 20, "logit_scale": 1.5}
    config = _newer("Cohere2Config")(**{**_SHAPE, **sizes, **changes})
    return cast(PreTrainedModel, _newer("Cohere2ForCausalLM")(config))


def _cohere2_moe(**changes: Any) -> PreTrainedModel:
    """By default the first layer is dense, and neither it nor the last one has a window."""
    sizes = {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 20, "logit_scale": 1.5}
    experts = {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    dense = {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 96}
    pattern = {"sliding_window_pattern": 3}
    config = _newer("Cohere2MoeConfig")(
        **{**_SHAPE, **sizes, **experts, **dense, **pattern, **changes}
    )
    return cast(PreTrainedModel, _newer("Cohere2MoeForCausalLM")(config))


def _starcoder2(**changes: Any) -> PreTrainedModel:
    config = _newer("Starcoder2Config")(**{**_SHAPE, "sliding_window": 20, **changes})
    return cast(PreTrainedModel, _newer("Starcoder2ForCausalLM")(config))


def _older(config: str, model: str, **changes: Any) -> PreTrainedModel:
    """A model of a kind that has neither gates nor fewer KV heads in its config.json."""
    needless = ("intermediate_size", "num_key_value_heads")
    shape = {key: value for key, value in _SHAPE.items() if key not in needless}
    made = _newer(f"{config}Config")(**{**shape, **changes})
    return cast(PreTrainedModel, _newer(model)(made))


def _jais2(**changes: Any) -> PreTrainedModel:
    config = _newer("Jais2Config")(**{**_SHAPE, **changes})
    return cast(PreTrainedModel, _newer("Jais2ForCausalLM")(config))


def _flex_olmo(**changes: Any) -> PreTrainedModel:
    experts = {"intermediate_size": 48, "num_experts": 7, "num_experts_per_tok": 5}
    config = _newer("FlexOlmoConfig")(**{**_SHAPE, **experts, **changes})
    return cast(PreTrainedModel, _newer("FlexOlmoForCausalLM")(config))


def _cwm(**changes: Any) -> PreTrainedModel:
    """Answers end only by their length."""
    sizes = {"head_dim": 32, "num_hidden_layers": 5, "sliding_window": 20}
    ends = {"bos_token_id": 0, "eos_token_id": []}
    values = {**_SHAPE, **sizes, **ends, "rope_parameters": dict(_LLAMA3), **changes}
    return cast(PreTrainedModel, _newer("CwmForCausalLM")(_newer("CwmConfig")(**values)))


def _kolibri1(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    experts |= {"shared_expert_intermediate_size": 80}
    sizes = {"head_dim": 32, "num_hidden_layers": 5, "sliding_window": 20}
    shape = {key: value for key, value in _SHAPE.items() if key != "intermediate_size"}
    config = _newer("Kolibri1Config")(**{**shape, **experts, **sizes, **changes})
    return _corrected(_newer("Kolibri1ForCausalLM")(config))


_LAGUNA_ROPES: Final = MappingProxyType(
    {
        "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
)


def _laguna(**changes: Any) -> PreTrainedModel:
    """Layers with windows have more heads than the others."""
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    experts |= {"shared_expert_intermediate_size": 80}
    sizes = {"head_dim": 32, "num_hidden_layers": 3, "sliding_window": 20}
    layers = {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [4, 8, 4],
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {kind: dict(rope) for kind, rope in _LAGUNA_ROPES.items()},
    }
    config = _newer("LagunaConfig")(**{**_SHAPE, **experts, **sizes, **layers, **changes})
    return cast(PreTrainedModel, _newer("LagunaForCausalLM")(config))


def _step(*, seeing: bool = True, **changes: Any) -> PreTrainedModel:
    """Layers with windows have more heads than the others, and the last two gates with limits."""
    experts = {"moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 3}
    sizes = {"share_expert_dim": 80, "head_dim": 32, "num_hidden_layers": 3, "sliding_window": 20}
    text: dict[str, Any] = {
        **_SHAPE,
        **experts,
        **sizes,
        "moe_router_scaling_factor": 2.5,
        "pad_token_id": 0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_sliding_attention_heads": 8,
        "rope_parameters": {
            "full_attention": {**_LLAMA3, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        "swiglu_limits": [0.0, None, 0.5],
        "swiglu_limits_shared": [0.0, 0.7, 0.25],
        **changes,
    }
    if not seeing:
        config = _newer("Step3p7TextConfig")(**text)
        return _corrected(class_of("Step3p5ForCausalLM")(config))
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = _newer("Step3p7Config")(text_config=text, vision_config=vision)
    return _corrected(_newer("Step3p7ForConditionalGeneration")(config))


def _nemotron(**changes: Any) -> PreTrainedModel:
    config = _newer("NemotronConfig")(**{**_SHAPE, "head_dim": 32, **changes})
    return cast(PreTrainedModel, _newer("NemotronForCausalLM")(config))


def _arcee(**changes: Any) -> PreTrainedModel:
    config = _newer("ArceeConfig")(**{**_SHAPE, "head_dim": 32, **changes})
    return cast(PreTrainedModel, _newer("ArceeForCausalLM")(config))


def _gemma(**changes: Any) -> PreTrainedModel:
    config = _newer("GemmaConfig")(**{**_SHAPE, "head_dim": 32, **changes})
    return cast(PreTrainedModel, _newer("GemmaForCausalLM")(config))


def _gemma2(name: str = "Gemma2", **changes: Any) -> PreTrainedModel:
    """Scores are well beyond their bound."""
    sizes = {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 20}
    bounds = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0}
    values = {**_SHAPE, **sizes, **bounds, "query_pre_attn_scalar": 24, **changes}
    config = _newer(f"{name}Config")(**values, attn_implementation="eager")
    return cast(PreTrainedModel, _newer(f"{name}ForCausalLM")(config))


def _apertus(**changes: Any) -> PreTrainedModel:
    """Not even the numbers that training leaves alone are the same in all layers."""
    values = {**_SHAPE, "rope_parameters": dict(_LLAMA3), **changes}
    model: Any = _newer("ApertusForCausalLM")(_newer("ApertusConfig")(**values))
    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn.beta.fill_(0.5 - 0.2 * index)
        layer.mlp.act_fn.eps.fill_(-1e-6 - 0.1 * index)
    return cast(PreTrainedModel, model)


_SHORT_CONVS: Final = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 32,
    }
)


def _lfm2(**changes: Any) -> PreTrainedModel:
    config = _newer("Lfm2Config")(**{**_SHAPE, **_SHORT_CONVS, **changes})
    return cast(PreTrainedModel, _newer("Lfm2ForCausalLM")(config))


def _lfm2_moe(**changes: Any) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
    values = {**_SHAPE, **_SHORT_CONVS, **experts, "num_dense_layers": 1, **changes}
    return _corrected(_newer("Lfm2MoeForCausalLM")(_newer("Lfm2MoeConfig")(**values)))


def _lfm3_values() -> dict[str, Any]:
    kinds = ["conv", "sliding_attention", "full_attention", "conv"]
    sizes = {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 20, "layer_types": kinds}
    return {**_SHAPE, **sizes}


def _lfm3(**changes: Any) -> PreTrainedModel:
    config = _newer("Lfm3Config")(**{**_lfm3_values(), **changes})
    return cast(PreTrainedModel, _newer("Lfm3ForCausalLM")(config))


def _olmo_hybrid(**changes: Any) -> PreTrainedModel:
    """Its attention does not rotate, and its rates are up to 2. Keys and values have the same size,
    since transformers cuts the convolution into thirds when it saves it."""
    sizes = {"num_hidden_layers": 5, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    sizes |= {"linear_key_head_dim": 12, "linear_value_head_dim": 6}
    still = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    config = _newer("OlmoHybridConfig")(**{**_SHAPE, **sizes, **still, **changes})
    return cast(PreTrainedModel, _newer("OlmoHybridForCausalLM")(config))


def _kimi_linear(**changes: Any) -> PreTrainedModel:
    """Kimi Delta Attention in three of four layers, and latents that do not rotate."""
    experts = {"moe_intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3}
    kinds = [*["linear_attention"] * 3, "full_attention"]
    sizes = {"linear_num_heads": 4, "linear_head_dim": 16, "num_hidden_layers": 4}
    values = {**_SHAPE, **_LATENTS, **experts, **sizes, "layer_types": kinds}
    values |= {"q_lora_rank": None, **changes}
    return _corrected(_newer("KimiLinearForCausalLM")(_newer("KimiLinearConfig")(**values)))


def _bailing(spelled: str = "BailingHybrid", **changes: Any) -> PreTrainedModel:
    """Ling 3.0: Kimi Delta Attention in two of three layers, and gated latents that rotate."""
    experts = {"moe_intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3}
    experts |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    values = {**_SHAPE, **_LATENTS, **experts, "num_hidden_layers": 3, "layer_group_size": 3}
    values |= {"q_lora_rank": None, "head_dim": 24, **changes}
    model = class_of(f"{spelled}ForCausalLM")(_newer("BailingHybridConfig")(**values))
    limits = (changes.get(f"{of}expert_swiglu_limit_list", ()) for of in ("", "share_"))
    for layer, of_experts, of_shared in zip(model.model.layers, *limits, strict=False):
        if of_experts or of_shared:
            limit_gates(layer.mlp, of_experts, of_shared)
    return _corrected(model)


def limit_gates(block: Any, of_experts: float | None, of_shared: float | None) -> None:
    """Give a mixture of experts of transformers the limits of Ling 3.0, which it does not read."""
    if of_experts:
        block.experts.forward = partial(_limited_experts, block.experts, of_experts)
    if of_shared:
        block.shared_experts.forward = partial(_limited_mlp, block.shared_experts, of_shared)


def _limited_mlp(mlp: Any, limit: float, x: Tensor) -> Tensor:
    """What a block with a limit computes."""
    output: Tensor = mlp.down_proj(_limited(mlp.gate_proj(x), mlp.up_proj(x), limit))
    return output


def _limited_experts(
    experts: Any, limit: float, x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The same of experts, each of which computes all tokens [num_tokens, hidden_size]."""
    gates, ups = torch.einsum("nh,eih->eni", x, experts.gate_up_proj).chunk(2, dim=-1)
    each = torch.einsum("eni,ehi->neh", _limited(gates, ups, limit), experts.down_proj)
    picked = each.take_along_dim(chosen[..., None], dim=1)
    return (picked * weights[..., None]).sum(1)


def _limited(gates: Tensor, ups: Tensor, limit: float) -> Tensor:
    return torch.nn.functional.silu(gates).clamp(max=limit) * ups.clamp(-limit, limit)


_EYE: Final = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
)
"""Of a vision part."""


def _seeing(name: str, kind: str, **text: Any) -> PreTrainedModel:
    """A model that sees, around a decoder of ``kind``."""
    config = _newer(f"{name}Config")(
        text_config={**_SHAPE, "model_type": kind, **text},
        vision_config=dict(_EYE),
        tie_word_embeddings=False,
    )
    return cast(PreTrainedModel, _newer(f"{name}ForConditionalGeneration")(config))


def _minicpm_v(version: str, **text: Any) -> PreTrainedModel:
    vision = {**_EYE, "num_hidden_layers": 2, "insert_layer_id": 0}
    config = _newer(f"MiniCPMV{version}Config")(
        text_config={**_SHAPE, **_DELTA, "model_type": "qwen3_5_text", **text},
        vision_config=vision,
        insert_layer_id=0,
    )
    return cast(PreTrainedModel, _newer(f"MiniCPMV{version}ForConditionalGeneration")(config))


def _lfm3_vl() -> PreTrainedModel:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = _newer("Lfm3VlConfig")(
        text_config={**_lfm3_values(), "model_type": "lfm3"},
        vision_config=vision,
        projector_hidden_size=32,
    )
    return cast(PreTrainedModel, _newer("Lfm3VlForConditionalGeneration")(config))


def _hyperclova_seeing(architecture: str, **text: Any) -> PreTrainedModel:
    config = _newer("HyperCLOVAXVisionV2Config")(
        text_config={**_SHAPE, "model_type": "hyperclovax", **text},
        vision_config={**_SIGHT, "model_type": "qwen2_5_vl_vision", "fullatt_block_indexes": [0]},
        tie_word_embeddings=False,
    )
    return cast(PreTrainedModel, class_of(architecture)(config))


def _ovis2() -> PreTrainedModel:
    config = _newer("Ovis2Config")(
        text_config={**_SHAPE, "model_type": "qwen2"},
        vision_config={**_EYE, "vocab_size": 32},
        vocab_size=VOCAB_SIZE,
        hidden_size=_SHAPE["hidden_size"],
        image_token_id=VOCAB_SIZE,
        visual_indicator_token_ids=[VOCAB_SIZE + index for index in range(1, 6)],
    )
    return cast(PreTrainedModel, _newer("Ovis2ForConditionalGeneration")(config))


def _granite4_vision() -> PreTrainedModel:
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    multipliers |= {"attention_multiplier": 0.2, "logits_scaling": 6.0}
    config = _newer("Granite4VisionConfig")(
        text_config={**_SHAPE, **multipliers},
        vision_config={**_EYE, "hidden_size": 64, "model_type": "siglip_vision_model"},
        downsample_rate="1/2",
        deepstack_layer_map=[[-1, 0]],
        image_token_index=VOCAB_SIZE,
    )
    return cast(PreTrainedModel, _newer("Granite4VisionForConditionalGeneration")(config))


def _hearing(name: str, kind: str, **text: Any) -> PreTrainedModel:
    """A model that hears, around a decoder of ``kind``."""
    audio = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    config = _newer(f"{name}Config")(
        text_config={**_SHAPE, "model_type": kind, **text},
        audio_config={**audio, "d_model": 32},
    )
    return cast(PreTrainedModel, _newer(f"{name}ForConditionalGeneration")(config))


def _omni(name: str, spelled: str = "ForConditionalGeneration", **text: Any) -> Any:
    """A model that sees and hears, without what would speak."""
    model, thinker = class_of(f"{name}{spelled}"), _thinker(**text)
    return model(model.config_class(thinker_config=thinker, enable_audio_output=False))


def _thinking(name: str, **text: Any) -> PreTrainedModel:
    """The part alone that sees, hears and writes."""
    config = _newer(f"{name}ThinkerConfig")(**_thinker(**text))
    return cast(PreTrainedModel, _newer(f"{name}ThinkerForConditionalGeneration")(config))


def _thinker(**text: Any) -> dict[str, Any]:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2}
    return {
        "text_config": {**_text_of_vl(), **text},
        "vision_config": {**vision, "out_hidden_size": 64},
        "audio_config": {**audio, "encoder_ffn_dim": 48, "output_dim": 64},
        "vision_start_token_id": VOCAB_SIZE,  # in no prompt
    }


def _flint(**changes: Any) -> PreTrainedModel:
    values: dict[str, Any] = {**_SHAPE, "head_dim": 32, "num_hidden_layers": 4}
    values |= {"sliding_window": 20, "mlp_only_layers": [0]}
    values |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    values["shared_expert_intermediate_size"] = 80
    config = _newer("FlintConfig")(**{**values, **changes})
    return cast(PreTrainedModel, _newer("FlintForCausalLM")(config))


def _muse_glimmer(**changes: Any) -> PreTrainedModel:
    """The eps are large enough to matter."""
    text: dict[str, Any] = {**_SHAPE, "head_dim": 32, "num_hidden_layers": 5}
    text |= {"sliding_window": 20, "rms_norm_eps": 0.01, "post_norm_eps": 0.3}
    text |= {"final_logit_softcapping": 5.0, **changes}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
    config = _newer("MuseGlimmerConfig")(
        text_config=text,
        vision_config=vision,
        out_hidden_size=128,
        projector_hidden_size=32,
        tie_word_embeddings=False,
    )
    return cast(PreTrainedModel, _newer("MuseGlimmerForConditionalGeneration")(config))


def _helium(**changes: Any) -> PreTrainedModel:
    config = _newer("HeliumConfig")(**{**_SHAPE, "head_dim": 16, **changes})
    return cast(PreTrainedModel, _newer("HeliumForCausalLM")(config))


def _minicpm3(**changes: Any) -> PreTrainedModel:
    config = _newer("MiniCPM3Config")(**{**_SHAPE, **_LATENTS, **changes})
    return cast(PreTrainedModel, _newer("MiniCPM3ForCausalLM")(config))


def _nanochat(**changes: Any) -> PreTrainedModel:
    """The eps is large enough to matter."""
    values: dict[str, Any] = {**_SHAPE, "rms_norm_eps": 0.01, "final_logit_softcapping": 5.0}
    config = _newer("NanoChatConfig")(**{**values, **changes})
    return cast(PreTrainedModel, _newer("NanoChatForCausalLM")(config))


CASES: Final[Mapping[str, Callable[[], PreTrainedModel]]] = MappingProxyType(
    {
        "llama": _llama,
        "llama-tied": lambda: _llama(tie_word_embeddings=True, num_key_value_heads=1),
        "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
        "llama-linear": lambda: _llama(rope_parameters=_linear(4.0)),
        "llama-dynamic": lambda: _llama(**_dynamic()),
        "llama3": lambda: _llama(rope_parameters=dict(_LLAMA3), head_dim=32),
        "llama-yarn": lambda: _llama(rope_parameters=dict(_YARN)),
        "mistral": lambda: _mistral(sliding_window=None),
        "mistral-window": lambda: _mistral(sliding_window=24),
        "qwen2": _qwen2,
        "qwen2-window": lambda: _qwen2(
            use_sliding_window=True, sliding_window=20, max_window_layers=1
        ),
        "qwen2-yarn": lambda: _qwen2(rope_parameters=dict(_YARN), tie_word_embeddings=True),
        "qwen3": lambda: _qwen3(tie_word_embeddings=True),
        "qwen3-yarn": lambda: _qwen3(
            rope_parameters={**_YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
        ),
        "qwen3-dynamic": lambda: _qwen3(**_dynamic()),
        "qwen3-window": lambda: _qwen3(
            use_sliding_window=True,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "qwen3-moe": _qwen3_moe,
        "qwen3-moe-sparse": lambda: _qwen3_moe(
            num_hidden_layers=4,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=False,
            use_sliding_window=True,
            sliding_window=32,
        ),
        "mixtral": _mixtral,
        "mixtral-window": lambda: _mixtral(sliding_window=24, tie_word_embeddings=True),
        "ministral": lambda: _ministral(
            sliding_window=24, layer_types=["sliding_attention", "full_attention"]
        ),
        "ministral3": _ministral3,
        "mistral3": lambda: _mistral3(
            {"model_type": "mistral", "sliding_window": None}, tie_word_embeddings=False
        ),
        "mistral3-tied": lambda: _mistral3(
            {"model_type": "ministral3", "rope_parameters": dict(_MINISTRAL_ROPE)}
        ),
        "phi3": lambda: _phi3(sliding_window=24, hidden_size=96),
        "phi3-partial": lambda: _phi3(partial_rotary_factor=0.75, tie_word_embeddings=True),
        "phi3-longrope": lambda: _phi3(partial_rotary_factor=0.75, **_longrope(6)),
        "olmo2": lambda: _olmo2(num_key_value_heads=4),
        "olmo2-biases": lambda: _olmo2(attention_bias=True, tie_word_embeddings=True),
        "olmo3": _olmo3,
        "olmo3-yarn": lambda: _olmo3(
            rope_parameters={
                "full_attention": {**_YARN, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "gemma3": _gemma3,
        "gemma3-stretched": lambda: _gemma3(
            rope_parameters={
                "full_attention": _linear(8.0),
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            tie_word_embeddings=False,
        ),
        "gemma3-seeing": _gemma3_seeing,
        "gemma4": _gemma4,
        "gemma4-merged": lambda: _gemma4(
            attention_k_eq_v=True, num_global_key_value_heads=1, tie_word_embeddings=False
        ),
        "gemma4-per-layer": lambda: _gemma4(**_PER_LAYER),
        "gemma4-experts": _gemma4_experts,
        "gemma4-multimodal": _gemma4_multimodal,
        "granite": _granite,
        "granite-tied": lambda: _granite(
            tie_word_embeddings=True, attention_bias=True, mlp_bias=True, logits_scaling=8.0
        ),
        "smollm3": _smollm3,
        "qwen3.5": _qwen3_5,
        "qwen3.5-tied": lambda: _qwen3_5(
            tie_word_embeddings=True,
            attention_bias=True,
            linear_conv_kernel_dim=2,
            linear_num_key_heads=4,
            layer_types=["full_attention", *["linear_attention"] * 3],
        ),
        "qwen3.5-multimodal": _qwen3_5_multimodal,
        "smollm3-listed": lambda: _smollm3(
            no_rope_layers=[0, 1, 1, 0],
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
            use_sliding_window=True,
            sliding_window=20,
        ),
        "qwen3.5-experts": _qwen3_5_moe,
        "qwen3.5-experts-multimodal": _qwen3_5_moe_multimodal,
        "qwen2-moe": _qwen2_moe,
        "qwen2-moe-normalized": lambda: _qwen2_moe(
            norm_topk_prob=True, decoder_sparse_step=2, num_hidden_layers=4, qkv_bias=False
        ),
        "glm4-moe": _glm4_moe,
        "glm4-moe-groups": lambda: _glm4_moe(
            n_group=4,
            topk_group=2,
            use_qk_norm=True,
            attention_bias=True,
            norm_topk_prob=False,
            n_shared_experts=1,
        ),
        "dots1": _dots1,
        "dots1-window": lambda: _dots1(
            sliding_window=20, max_window_layers=1, n_group=2, topk_group=1, attention_bias=True
        ),
        "gpt-oss": _gpt_oss,
        "gpt-oss-listed": lambda: _gpt_oss(
            num_hidden_layers=3,
            layer_types=["full_attention", *["sliding_attention"] * 2],
            num_key_value_heads=1,
            attention_bias=False,
            tie_word_embeddings=True,
            swiglu_limit=0.8,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        "qwen3-next": _qwen3_next,
        "qwen3-next-sparse": lambda: _qwen3_next(
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=False,
            tie_word_embeddings=True,
            linear_num_key_heads=4,
        ),
        "gemma4-unified": _gemma4_unified,
        "gemma4-unified-multimodal": _gemma4_unified_multimodal,
        "llama4": _llama4,
        "llama4-listed": lambda: _llama4(
            no_rope_layers=[1, 1, 0, 1],
            moe_layers=[0, 3],
            layer_types=["chunked_attention", "full_attention", *["chunked_attention"] * 2],
            attention_bias=True,
            attn_temperature_tuning=False,
            tie_word_embeddings=True,
        ),
        "llama4-multimodal": _llama4_multimodal,
        "gemma4-full": lambda: _gemma4(layer_types=["full_attention"] * 4, num_key_value_heads=1),
        "smollm3-window": lambda: _smollm3(
            sliding_window=20, layer_types=["sliding_attention", *["full_attention"] * 3]
        ),
        "seed-oss": _seed_oss,
        "seed-oss-biases": lambda: _seed_oss(
            attention_bias=False, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        "minimax-m2": _minimax_m2,
        "qwen2-vl": _qwen2_vl,
        "qwen2.5-vl": _qwen2_5_vl,
        "qwen3-vl": _qwen3_vl,
        "qwen3-vl-experts": _qwen3_vl_moe,
        "exaone4": _exaone4,
        "exaone4-full": lambda: _exaone4(
            sliding_window=None, layer_types=["full_attention"] * 4, tie_word_embeddings=True
        ),
        "glm": _glm,
        "glm4": _glm4,
        "glm4-whole": lambda: _glm4(
            partial_rotary_factor=1.0, attention_bias=False, tie_word_embeddings=True
        ),
        "ernie": lambda: _ernie(tie_word_embeddings=False),
        "ernie-biases": lambda: _ernie(use_bias=True, rope_parameters=dict(_YARN)),
        "ernie-moe": _ernie_moe,
        "ernie-moe-sparse": lambda: _ernie_moe(
            num_hidden_layers=4,
            moe_layer_interval=2,
            moe_layer_start_index=0,
            moe_layer_end_index=2,
            moe_num_shared_experts=0,
            tie_word_embeddings=False,
        ),
        "olmoe": _olmoe,
        "olmoe-normalized": lambda: _olmoe(
            norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True
        ),
        "granite-moe": _granite_moe,
        "hunyuan": _hunyuan,
        "hunyuan-yarn": lambda: _hunyuan(
            rope_parameters={**_YARN, "attention_factor": 1.3},
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        "hunyuan-moe": _hunyuan_moe,
        "exaone-moe": lambda: _corrected(ExaoneMoeForCausalLM(ExaoneMoeConfig(**_exaone_moe()))),
        "exaone-moe-groups": lambda: _corrected(
            class_of("ExaoneMoEForCausalLM")(
                ExaoneMoeConfig(
                    **_exaone_moe(
                        n_group=4,
                        topk_group=2,
                        norm_topk_prob=False,
                        num_shared_experts=2,
                        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
                    )
                )
            )
        ),
        "exaone4.5": _exaone4_5,
        "solar-open": _solar_open,
        "hy-v3": _hy_v3,
        "hy-v3-biases": lambda: _hy_v3(
            attention_bias=True,
            num_shared_experts=2,
            mlp_layer_types=["sparse", "dense", "sparse"],
        ),
        "mellum": _mellum,
        "mellum-sparse": lambda: _mellum(
            mlp_layer_types=["dense", "sparse"],
            layer_types=["full_attention"] * 2,
            attention_bias=True,
            norm_topk_prob=False,
        ),
        "hyperclova": _hyperclova,
        "hyperclova-biases": lambda: _hyperclova(
            attention_bias=True, mlp_bias=True, attention_multiplier=None, tie_word_embeddings=True
        ),
        "internlm3-dynamic": lambda: _internlm3(**_dynamic()),
        "internlm3-biases": lambda: _internlm3(attention_bias=True, mlp_bias=True),
        "iquest-coder": lambda: _iquest_coder(tie_word_embeddings=True),
        "granite-shared": _granite_moe_shared,
        "granite-swa": lambda: _granite_swa(
            layer_rope_theta=[0, 10_000.0, 500.0, 10_000.0], tie_word_embeddings=False
        ),
        "granite-swa-biases": lambda: _granite_swa(
            attention_bias=True, mlp_bias=True, rope_parameters=dict(_LLAMA3)
        ),
        "granite-moe-swa": _granite_moe_swa,
        "granite-moe-swa-shared": lambda: _granite_moe_swa(
            shared_intermediate_size=80, layer_rope_theta=[0, 500.0, 500.0, 0]
        ),
        "afmoe": lambda: _afmoe(mup_enabled=True, num_shared_experts=1, route_scale=2.8),
        "afmoe-dense": lambda: _afmoe(
            num_dense_layers=2, global_attn_every_n_layers=2, rope_parameters=dict(_YARN)
        ),
        "nemotron-h": _nemotron_h,
        "nemotron-h-biases": lambda: _nemotron_h(
            layers_block_type=["full_attention", *["mlp", "linear_attention"] * 2],
            use_bias=True,
            mlp_bias=True,
            use_conv_bias=False,
            conv_kernel=2,
            n_groups=1,
            tie_word_embeddings=True,
        ),
        "nemotron-h-experts": lambda: _corrected(
            _nemotron_h(
                layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
                n_routed_experts=8,
                num_experts_per_tok=3,
                n_group=4,
                topk_group=2,
                norm_topk_prob=False,
                routed_scaling_factor=2.5,
            )
        ),
        "granite-hybrid": _granite_hybrid,
        "granite-hybrid-dense": lambda: _granite_hybrid(
            num_local_experts=0,
            mamba_n_groups=4,
            mamba_proj_bias=True,
            attention_bias=True,
            tie_word_embeddings=True,
            embedding_multiplier=0.5,
            logits_scaling=0.5,
        ),
        "granite-hybrid-rope": lambda: _granite_hybrid(
            layer_types=["full_attention"] * 2,
            num_hidden_layers=2,
            position_embedding_type="rope",
            num_local_experts=0,
        ),
        "bamba": _bamba,
        "bamba-biases": lambda: _bamba(
            attn_layer_indices=[0, 2],
            attention_bias=True,
            mlp_bias=True,
            mamba_conv_bias=False,
            mamba_n_groups=2,
            tie_word_embeddings=True,
        ),
        "nemotron-h-latent": lambda: _corrected(
            _nemotron_h(
                layers_block_type=["moe", "linear_attention", "full_attention", "moe"],
                moe_latent_size=40,
                n_routed_experts=8,
                num_experts_per_tok=3,
            )
        ),
        "falcon-h1": _falcon_h1,
        "falcon-h1-norm": lambda: _falcon_h1(
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_d_ssm=None,
            mamba_n_heads=8,
            mamba_n_groups=4,
            key_multiplier=1.0,
            tie_word_embeddings=True,
        ),
        "deepseek-v3": lambda: _deepseek_v3(
            n_group=4, topk_group=2, rope_parameters=dict(_LATENT_YARN)
        ),
        "deepseek-v3-queries": lambda: _deepseek_v3(
            n_group=1, topk_group=1, q_lora_rank=None, rope_interleave=False
        ),
        "deepseek-v2": lambda: _deepseek_v2(
            n_group=4, topk_group=2, topk_method="group_limited_greedy"
        ),
        "deepseek-v2-lite": lambda: _deepseek_v2(
            q_lora_rank=None, rope_parameters=dict(_LATENT_YARN)
        ),
        "glm4-moe-lite": _glm4_moe_lite,
        "glm4-moe-lite-sparse": lambda: _glm4_moe_lite(
            mlp_layer_types=["sparse", "dense", "sparse"], tie_word_embeddings=True
        ),
        "youtu": _youtu,
        "mistral4": _mistral4,
        "mistral4-groups": lambda: _mistral4(
            n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=None
        ),
        "kimi-k25": _kimi_k25,
        "kimi-k25-published": lambda: _kimi_k25("KimiK25"),
        "mistral3-latents": lambda: _mistral3(_mistral4_text(model_type="mistral4", head_dim=40)),
        "glm4v": _glm4v,
        "glm4v-moe": _glm4v_moe,
        "glm46v": _glm46v,
        "internvl": lambda: _seeing("InternVL", "qwen3", head_dim=32),
        "llava": lambda: _seeing("Llava", "llama"),
        "llava-next": lambda: _seeing("LlavaNext", "mistral", sliding_window=None),
        "llava-onevision": lambda: _seeing("LlavaOnevision", "qwen2", tie_word_embeddings=True),
        "idefics3": lambda: _seeing("Idefics3", "llama"),
        "smolvlm": lambda: _seeing("SmolVLM", "llama", rope_parameters=dict(_LLAMA3)),
        "qwen2.5-omni": lambda: _omni("Qwen2_5Omni"),
        "qwen2.5-omni-published": lambda: _omni("Qwen2_5Omni", "Model"),
        "qwen3-omni": lambda: _omni(
            "Qwen3OmniMoe", moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3
        ),
        "lfm2": _lfm2,
        "lfm2-biases": lambda: _lfm2(
            conv_bias=True,
            conv_L_cache=2,
            block_auto_adjust_ff_dim=False,
            layer_types=["full_attention", *["conv"] * 3],
            tie_word_embeddings=False,
        ),
        "lfm2-moe": _lfm2_moe,
        "lfm2-moe-uncorrected": lambda: _lfm2_moe(
            use_expert_bias=False,
            norm_topk_prob=False,
            routed_scaling_factor=2.5,
            conv_bias=True,
            tie_word_embeddings=False,
        ),
        "lfm2-vl": lambda: _seeing("Lfm2Vl", "lfm2", **_SHORT_CONVS),
        "cohere": _cohere,
        "cohere-biases": lambda: _cohere(
            attention_bias=True, logit_scale=0.25, tie_word_embeddings=False
        ),
        "cohere2": _cohere2,
        "cohere2-listed": lambda: _cohere2(
            layer_types=["full_attention", *["sliding_attention"] * 3],
            attention_bias=True,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
        "aya-vision": lambda: _seeing("AyaVision", "cohere", logit_scale=0.2),
        "cohere2-vision": lambda: _seeing("Cohere2Vision", "cohere2", sliding_window=20),
        "arcee": lambda: _arcee(rope_parameters=dict(_YARN)),
        "arcee-biases": lambda: _arcee(
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        "gemma": _gemma,
        "gemma-biases": lambda: _gemma(
            attention_bias=True, num_key_value_heads=1, tie_word_embeddings=False
        ),
        "gemma2": _gemma2,
        "gemma2-listed": lambda: _gemma2(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
        "lfm3": _lfm3,
        "lfm3-biases": lambda: _lfm3(
            use_attention_gate=False,
            attention_bias=True,
            conv_bias=True,
            conv_L_cache=3,
            tie_word_embeddings=False,
        ),
        "olmo-hybrid": _olmo_hybrid,
        "olmo-hybrid-rotating": lambda: _olmo_hybrid(
            rope_parameters=dict(_YARN),
            layer_types=["full_attention", *["linear_attention"] * 2, "full_attention"],
            num_hidden_layers=4,
            linear_allow_neg_eigval=False,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=3,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        "kimi-linear": _kimi_linear,
        "kimi-linear-queries": lambda: _kimi_linear(
            q_lora_rank=36,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            norm_topk_prob=False,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            num_hidden_layers=3,
            linear_num_heads=2,
            linear_head_dim=24,
            linear_conv_kernel_dim=2,
        ),
        "apertus": _apertus,
        "apertus-biases": lambda: _apertus(
            attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True
        ),
        "cohere2-moe": lambda: _cohere2_moe(
            expert_selection_fn="sigmoid", num_shared_experts=2, norm_topk_prob=True
        ),
        "cohere2-moe-sums": lambda: _cohere2_moe(
            expert_selection_fn="sigmoid",
            norm_topk_prob=False,
            num_shared_experts=1,
            shared_expert_combination_strategy="sum",
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        ),
        "cohere2-moe-softmax": lambda: _cohere2_moe(
            attention_bias=True,
            first_k_dense_replace=2,
            prefix_dense_sliding_window_pattern=2,
            num_key_value_heads=4,
        ),
        "cohere2-moe-listed": lambda: _cohere2_moe(
            layer_types=["full_attention", *["sliding_attention"] * 3],
            mlp_layer_types=["sparse", "dense", "sparse", "dense"],
            prefix_dense_intermediate_size=None,
            first_k_dense_replace=0,
        ),
        "cohere2-vision-moe": lambda: _seeing(
            "Cohere2Vision",
            "cohere2_moe",
            head_dim=32,
            sliding_window=20,
            num_experts=8,
            num_shared_experts=1,
        ),
        "starcoder2": _starcoder2,
        "starcoder2-without-biases": lambda: _starcoder2(
            use_bias=False,
            sliding_window=None,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
        "jais2": _jais2,
        "jais2-without-biases": lambda: _jais2(
            attention_bias=False,
            mlp_bias=False,
            head_dim=32,
            num_key_value_heads=None,
            rope_parameters=dict(_LLAMA3),
            tie_word_embeddings=True,
        ),
        "flex-olmo": _flex_olmo,
        "flex-olmo-biases": lambda: _flex_olmo(
            attention_bias=True, norm_topk_prob=True, num_key_value_heads=4
        ),
        "cwm": _cwm,
        "cwm-listed": lambda: _cwm(
            layer_types=["sliding_attention", "full_attention"] * 2,
            mlp_bias=True,
            num_hidden_layers=4,
            tie_word_embeddings=True,
        ),
        "kolibri1": _kolibri1,
        "kolibri1-listed": lambda: _kolibri1(
            layer_types=["full_attention", "sliding_attention"],
            norm_topk_prob=True,
            num_hidden_layers=2,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        ),
        "laguna": _laguna,
        "laguna-alike": lambda: _laguna(
            gating="per-element",
            layer_types=None,
            mlp_layer_types=["sparse", "dense", "sparse"],
            num_attention_heads_per_layer=None,
            rope_parameters=None,
            tie_word_embeddings=True,
        ),
        "laguna-by-layer": lambda: _laguna(
            gating="per-element", num_attention_heads_per_layer=[4, 8, 12]
        ),
        "nemotron": _nemotron,
        "nemotron-biases": lambda: _nemotron(
            attention_bias=True,
            mlp_bias=True,
            num_key_value_heads=4,
            partial_rotary_factor=0.25,
            tie_word_embeddings=True,
        ),
        "deepseek-v32": lambda: _with_indexer(
            "DeepseekV32", n_group=4, topk_group=2, rope_parameters=dict(_LATENT_YARN)
        ),
        "deepseek-v32-sparse": lambda: _with_indexer(
            "DeepseekV32", n_group=1, topk_group=1, mlp_layer_types=["sparse", "dense", "sparse"]
        ),
        "glm-moe-dsa": lambda: _with_indexer("GlmMoeDsa", tie_word_embeddings=True),
        "glm-moe-dsa-shared": lambda: _with_indexer(
            "GlmMoeDsa", num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"]
        ),
        "flint": _flint,
        "flint-listed": lambda: _flint(
            layer_types=["sliding_attention", "full_attention"] * 2,
            attention_bias=True,
            norm_topk_prob=False,
            mlp_only_layers=[],
            decoder_sparse_step=2,
            num_key_value_heads=4,
            rope_parameters=dict(_YARN),
            tie_word_embeddings=True,
        ),
        "muse-glimmer": _muse_glimmer,
        "muse-glimmer-listed": lambda: _muse_glimmer(
            layer_types=["full_attention", "sliding_attention"],
            layer_rope_theta=[500.0, 0],
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            num_hidden_layers=2,
            num_key_value_heads=4,
            qk_scale_factor=1.5,
            output_multiplier=0.7,
        ),
        "minicpm-v4.6": lambda: _minicpm_v("4_6", attention_bias=True),
        "minicpm-v4.7": lambda: _minicpm_v("4_7"),
        "lfm3-vl": _lfm3_vl,
        "hyperclova-seeing": lambda: _hyperclova_seeing(
            "HyperCLOVAXVisionV2ForConditionalGeneration", logits_scaling=0.5
        ),
        "hyperclova-seeing-published": lambda: _hyperclova_seeing("HCXVisionV2ForCausalLM"),
        "ovis2": _ovis2,
        "granite4-vision": _granite4_vision,
        "llava-next-granite": lambda: _seeing("LlavaNext", "granite", logits_scaling=6.0),
        "qwen2-audio": lambda: _hearing("Qwen2Audio", "qwen2"),
        "voxtral": lambda: _hearing("Voxtral", "llama", head_dim=32),
        "qwen2.5-omni-thinker": lambda: _thinking("Qwen2_5Omni"),
        "qwen3-omni-thinker": lambda: _thinking(
            "Qwen3OmniMoe",
            head_dim=32,
            moe_intermediate_size=48,
            num_experts=8,
            num_experts_per_tok=3,
        ),
        "vaultgemma": lambda: _gemma2("VaultGemma"),
        "vaultgemma-listed": lambda: _gemma2(
            "VaultGemma",
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "helium": _helium,
        "helium-biases": lambda: _helium(
            attention_bias=True,
            mlp_bias=True,
            num_key_value_heads=4,
            rope_parameters=dict(_YARN),
            tie_word_embeddings=True,
        ),
        "minicpm3": lambda: _minicpm3(dim_model_base=16),
        "minicpm3-plain": lambda: _minicpm3(
            scale_emb=1,
            scale_depth=None,
            dim_model_base=None,
            q_lora_rank=None,
            v_head_dim=None,
            mlp_bias=True,
            rope_parameters=dict(_LATENT_YARN),
            tie_word_embeddings=False,
        ),
        "nanochat": _nanochat,
        "nanochat-biases": lambda: _nanochat(
            attention_bias=True,
            num_key_value_heads=4,
            rope_parameters=dict(_LLAMA3),
            final_logit_softcapping=None,
            tie_word_embeddings=True,
        ),
        "bailing-hybrid": _bailing,
        "bailing-v3": lambda: _bailing(
            "BailingMoeV3",
            kda_safe_gate=False,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            n_shared_experts=2,
            norm_topk_prob=False,
            short_conv_kernel_size=3,
            num_mtp_layers=0,
            rope_parameters=dict(_LATENT_YARN),
            expert_swiglu_limit_list=[0.5, 0.0, None],
            share_expert_swiglu_limit_list=[0.0, 0.0, 0.7],
        ),
        "step3.7": _step,
        "step3.5": lambda: _step(
            seeing=False,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "sparse", "dense"],
            num_sliding_attention_heads=6,
            query_pre_attn_scalar=20,
            rope_parameters={
                "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            swiglu_limits=[0.5, 0.0, 0.25],
            swiglu_limits_shared=None,
            tie_word_embeddings=True,
        ),
        "step3.5-alike": lambda: _step(
            seeing=False,
            layer_types=None,
            mlp_layer_types=["sparse"] * 3,
            num_sliding_attention_heads=None,
            rope_parameters=None,
            swiglu_limits_shared=None,
        ),
        "axk1": lambda: _axk1(n_group=4, topk_group=2, rope_parameters=dict(_LATENT_YARN)),
        "axk1-sparse": lambda: _axk1(
            mlp_layer_types=["sparse", "dense", "sparse"],
            n_group=1,
            norm_topk_prob=False,
            num_hidden_layers=3,
            rope_interleave=False,
            tie_word_embeddings=True,
            topk_group=1,
        ),
        "opt": lambda: _older("OPT", "OPTForCausalLM", ffn_dim=96),
        "opt-alike": lambda: _older(
            "OPT",
            "OPTForCausalLM",
            activation_function="gelu",
            enable_bias=False,
            ffn_dim=160,
            tie_word_embeddings=False,
        ),
        "gpt2": lambda: _older("GPT2", "GPT2LMHeadModel"),
        "gpt2-alike": lambda: _older(
            "GPT2",
            "GPT2LMHeadModel",
            activation_function="relu",
            layer_norm_epsilon=1e-3,
            n_inner=96,
            tie_word_embeddings=False,
        ),
        "gpt-bigcode": lambda: _older("GPTBigCode", "GPTBigCodeForCausalLM"),
        "gpt-bigcode-heads": lambda: _older(
            "GPTBigCode", "GPTBigCodeForCausalLM", multi_query=False, n_inner=96
        ),
        "gptj": lambda: _older("GPTJ", "GPTJForCausalLM", rotary_dim=8),
        "gpt-neox": lambda: _older("GPTNeoX", "GPTNeoXForCausalLM", intermediate_size=96),
        "gpt-neox-serial": lambda: _older(
            "GPTNeoX",
            "GPTNeoXForCausalLM",
            attention_bias=False,
            hidden_act="gelu_new",
            intermediate_size=96,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 1.0,
            },
            tie_word_embeddings=True,
            use_parallel_residual=False,
        ),
        "phi": lambda: _older("Phi", "PhiForCausalLM", intermediate_size=96),
        "phi-alike": lambda: _older(
            "Phi",
            "PhiForCausalLM",
            hidden_act="gelu",
            intermediate_size=96,
            num_key_value_heads=2,
            rope_parameters=dict(_LLAMA3) | {"partial_rotary_factor": 0.25},
        ),
        "stablelm": lambda: _older("StableLm", "StableLmForCausalLM", **_OF_STABLELM),
        "stablelm-parallel": lambda: _older(
            "StableLm",
            "StableLmForCausalLM",
            **_OF_STABLELM,
            tie_word_embeddings=True,
            use_parallel_residual=True,
            use_qkv_bias=True,
        ),
        "olmo": lambda: _older(
            "Olmo", "OlmoForCausalLM", intermediate_size=96, num_key_value_heads=2
        ),
        "olmo-biases": lambda: _older(
            "Olmo", "OlmoForCausalLM", attention_bias=True, intermediate_size=96
        ),
        "falcon": lambda: _older("Falcon", "FalconForCausalLM"),
        "falcon-groups": lambda: _older(
            "Falcon", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2
        ),
        "falcon-groups-one-norm": lambda: _older(
            "Falcon",
            "FalconForCausalLM",
            bias=True,
            ffn_hidden_size=96,
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            tie_word_embeddings=False,
        ),
        "falcon-serial": lambda: _older(
            "Falcon", "FalconForCausalLM", bias=True, multi_query=False, parallel_attn=False
        ),
        "hy-v4": lambda: _hy_v4(rope_parameters=dict(_LATENT_YARN)),
        "hy-v4-alike": lambda: _hy_v4(
            hc_eps=0.01,
            hc_magnitude=1.5,
            hc_mult=3,
            indexer_types=["full", "full", "shared", "shared"],
            mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
            n_group=4,
            norm_topk_prob=False,
            num_hidden_layers=4,
            tie_word_embeddings=True,
            topk_group=2,
        ),
    }
)


_SEEDS: Final = MappingProxyType(
    {"dots1": 1001, "glm4-moe-groups": 1002, "gpt-oss": 1004, "granite-moe": 1001}
    | {"minimax-m2": 1001, "deepseek-v3-queries": 1001, "glm4-moe-lite": 1001, "mistral4": 1001}
    | {"cohere2": 1005, "jais2": 1001, "qwen3-omni-thinker": 1001}
)
"""Seeds of checkpoints that nearly tie with the seed that their place in ``CASES`` gives."""


def write_checkpoint(case: str, folder: Path, *, shard_size: str = "5GB") -> Any:
    """Make the model of ``case`` from a fixed seed and save it; returns it as the reference."""
    model: Any = CASES[case]()
    draw(model, seed=_SEEDS.get(case, list(CASES).index(case)))
    return _saved(model, folder, shard_size)


def write_broad_checkpoint(folder: Path, **changes: Any) -> Any:
    """A Qwen3 whose matrices are large enough for kernels that leave small ones to a library;
    ``changes`` apply to its config."""
    model: Any = _qwen3(
        hidden_size=512,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        **changes,
    )
    draw(model, seed=99, spread=0.06)
    return _saved(model, folder)


def write_broad_gemma_checkpoint(folder: Path) -> Any:
    """The same of a Gemma 3."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 64}
    model: Any = _gemma3(**sizes, num_attention_heads=8, num_key_value_heads=4)
    draw(model, seed=96, spread=0.06)
    return _saved(model, folder)


def write_broad_experts_checkpoint(folder: Path, *, num_experts: int = 128) -> Any:
    """A Qwen3-MoE in sizes that Hopper's kernels take; its routers are sure of their choices."""
    model: Any = _qwen3_moe(
        hidden_size=512,
        moe_intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=num_experts,
        num_experts_per_tok=8,
    )
    draw(model, seed=98, spread=0.06)
    return _saved(_surer(model), folder)


def write_broad_olmoe_checkpoint(folder: Path, *, num_experts: int = 128) -> Any:
    """The same of an OLMoE, whose queries and keys are normalized over all heads."""
    sizes = {"hidden_size": 512, "intermediate_size": 256, "num_key_value_heads": 4}
    experts = {"num_experts": num_experts, "num_experts_per_tok": 8}
    model: Any = _olmoe(**sizes, **experts, num_attention_heads=8)
    draw(model, seed=98, spread=0.06)
    return _saved(_surer(model), folder)


def write_broad_afmoe_checkpoint(folder: Path) -> Any:
    """Trinity in such sizes: experts between norms of their inputs and outputs."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    model: Any = _afmoe(**sizes, head_dim=64, moe_intermediate_size=256, num_experts=16)
    draw(model, seed=97, spread=0.06)
    return _saved(model, folder)


def write_broad_latents_checkpoint(folder: Path, **changes: Any) -> Any:
    """A GLM-4.7-Flash in such sizes; ``changes`` apply to its config."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 64}
    latents = {"kv_lora_rank": 128, "q_lora_rank": 256, "qk_nope_head_dim": 64}
    latents["qk_rope_head_dim"] = 64
    sizes = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256}
    sizes["n_routed_experts"] = 16
    model: Any = _glm4_moe_lite(**{**heads, **latents, **sizes, **changes})
    draw(model, seed=97, spread=0.06)
    return _saved(model, folder)


def write_broad_indexer_checkpoint(folder: Path) -> Any:
    """A dense DeepSeek-V3.2 with the published sizes of latents and index keys, whose tokens choose
    48 positions."""
    latents = {"kv_lora_rank": 512, "q_lora_rank": 192, "qk_nope_head_dim": 128, "v_head_dim": 128}
    indexer = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 48}
    model: Any = _with_indexer(
        "DeepseekV32",
        **latents,
        **indexer,
        qk_rope_head_dim=64,
        hidden_size=512,
        mlp_layer_types=["dense"] * 3,
        n_group=1,
        topk_group=1,
    )
    draw(model, seed=97, spread=0.06)
    return _saved(model, folder)


def _surer(model: Any) -> Any:
    """The model with routers that are sure: 16 bits then change only choices of little weight."""
    for layer in model.model.layers:
        layer.mlp.gate.weight.data *= 4
    return model


def write_checkpoint_of_eight_heads(folder: Path) -> Any:
    """A Qwen3-MoE that eight ranks can share; each key-value head is on two of them."""
    model: Any = _qwen3_moe(num_attention_heads=8, num_key_value_heads=4, num_experts=16)
    draw(model, seed=97)
    return _saved(model, folder)


def write_broad_hybrid_checkpoint(
    folder: Path, *, experts: bool = False, num_experts: int = 128
) -> Any:
    """A Qwen3.5 with the head sizes of the publisher's models, or a mixture of experts with the
    same head sizes, in sizes that Hopper's kernels take."""
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    if not experts:
        model: Any = _qwen3_5(**sizes, intermediate_size=512)
        draw(model, seed=98, spread=0.06)
        return _saved(model, folder)
    of_experts = {
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "num_experts": num_experts,
        "num_experts_per_tok": 8,
    }
    model = _qwen3_5_moe(**sizes, **of_experts)
    draw(model, seed=96, spread=0.06)
    return _saved(model, folder)


def write_broad_mamba_checkpoint(folder: Path, *, granite: bool = False) -> Any:
    """A Nemotron-H with the head sizes of the publisher's 9B, or a dense Granite 4 with those of
    its publisher's, in sizes that Hopper's kernels take."""
    attention = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    if granite:
        mamba = {"mamba_n_heads": 16, "mamba_d_state": 128, "shared_intermediate_size": 512}
        model: Any = _granite_hybrid(**attention, **mamba, num_local_experts=0)
    else:
        mamba = {"mamba_num_heads": 16, "mamba_head_dim": 80, "ssm_state_size": 128}
        model = _nemotron_h(**attention, **mamba, head_dim=64, intermediate_size=512)
    draw(model, seed=95, spread=0.06)
    return _saved(model, folder)


def write_broad_conv_checkpoint(folder: Path) -> Any:
    """An LFM2 in sizes that Hopper's kernels take."""
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_key_value_heads": 4}
    model: Any = _lfm2(**sizes, num_attention_heads=8)
    draw(model, seed=94, spread=0.06)
    return _saved(model, folder)


def _saved(model: Any, folder: Path, shard_size: str = "5GB") -> Any:
    """Save the model, and return it ready to be the reference."""
    model.eval()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def write_model(name: str, folder: Path) -> None:
    """A model to be quantized, named ``quantized-`` and its kind. It is wide enough for several
    blocks and groups of 128 numbers; the last one is not full, and two ranks cut some."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "tie_word_embeddings": False}
    made = {
        "quantized-dense": lambda: _qwen3(**sizes),
        "quantized-moe": lambda: _qwen3_moe(
            **sizes, moe_intermediate_size=192, num_experts=4, decoder_sparse_step=2
        ),
        "quantized-tied": lambda: _qwen3(**{**sizes, "tie_word_embeddings": True}),
        "quantized-moe-cut-anywhere": lambda: _qwen3_moe(  # two ranks cut even groups of 16
            **{**sizes, "intermediate_size": 304},
            moe_intermediate_size=176,
            num_experts=4,
            decoder_sparse_step=2,
        ),
        "quantized-latents": lambda: _deepseek_v2(
            **{**sizes, "num_hidden_layers": 2, "kv_lora_rank": 128, "q_lora_rank": 192},
            moe_intermediate_size=192,
            n_routed_experts=4,
            num_experts_per_tok=3,
        ),
        "quantized-indexer": lambda: _with_indexer(
            "DeepseekV32",
            **{**sizes, "num_hidden_layers": 2, "kv_lora_rank": 128, "q_lora_rank": 192},
            n_group=1,
            topk_group=1,
            index_head_dim=32,
            moe_intermediate_size=192,
            n_routed_experts=4,
            num_experts_per_tok=3,
        ),
        "quantized-phi": lambda: _phi3(**sizes),
        "quantized-hybrid": lambda: _qwen3_5(**sizes, **_WIDE_DELTA),
        "quantized-hybrid-moe": lambda: _qwen3_next(
            **sizes, **_WIDE_DELTA, moe_intermediate_size=192, num_experts=4
        ),
        "quantized-mamba": lambda: _nemotron_h(
            **sizes,
            layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
            mamba_head_dim=32,
            n_groups=2,
            ssm_state_size=64,
            n_routed_experts=4,
            moe_intermediate_size=192,
            moe_shared_expert_intermediate_size=224,
        ),
        "quantized-falcon": lambda: _falcon_h1(
            **sizes, num_hidden_layers=1, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_state=64
        ),
        "quantized-kimi": lambda: _kimi_linear(
            **{**sizes, "num_hidden_layers": 2, "kv_lora_rank": 128, "linear_head_dim": 32},
            layer_types=["linear_attention", "full_attention"],
            mlp_layer_types=["dense", "dense"],
        ),
        "quantized-bailing": lambda: _bailing(
            "BailingHybrid",
            **{**sizes, "num_hidden_layers": 2, "kv_lora_rank": 128, "head_dim": 32},
            layer_types=["linear_attention", "full_attention"],
            mlp_layer_types=["dense", "dense"],
        ),
        "quantized-llama4": lambda: _llama4(
            **{**sizes, "intermediate_size": 192}, interleave_moe_layer_step=2
        ),
        "quantized-gpt-oss": lambda: _gpt_oss(
            **{**sizes, "intermediate_size": 160}, num_hidden_layers=2, num_local_experts=4
        ),
    }
    model: Any = made[name]()
    draw(model, seed=17, spread=0.12)
    model.save_pretrained(folder)


def draw(model: PreTrainedModel, seed: int, spread: float = 0.25) -> None:
    """Random values everywhere: norms of 1 and biases of 0 would hide that they are left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                std = 0.5 if name.endswith("bias") else 2.0 if name.endswith("sinks") else spread
                parameter.normal_(std=std, generator=generator)
