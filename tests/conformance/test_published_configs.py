"""Tokens equal those of transformers if config.json is spelled as publishers spelled it.

``checkpoints`` has what transformers writes today: ``rope_parameters``, every default spelled out.
Publishers' files are older or shorter: these are theirs, with small sizes and no keys added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, draw
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes
from tests.conformance.test_tokens_equal_transformers import GREEDY, Answers

_SIZES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
    }
)
_NO_EOS: Final = MappingProxyType(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
_HYBRID: Final = MappingProxyType(
    {
        "full_attention_interval": 4,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 24,
    }
)
_VISION: Final = MappingProxyType(
    {
        "head_dim": 16,
        "hidden_size": 32,
        "image_size": 28,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 14,
    }
)
_SIGHT: Final = MappingProxyType(
    {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
)
"""Of Qwen's models."""
_LLAMA_4_VISION: Final = MappingProxyType(
    {
        "hidden_size": 32,
        "image_size": 28,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    }
)
_EXPERTS: Final = MappingProxyType({"moe_intermediate_size": 48, "num_experts_per_tok": 3})

CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama-3.1": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            "rope_theta": 500.0,
            **_SIZES,
        },
        "llama-4-scout": {
            "architectures": ["Llama4ForConditionalGeneration"],
            "boi_token_index": 240,
            "eoi_token_index": 241,
            "image_token_index": 242,
            "model_type": "llama4",
            "text_config": {
                "attention_bias": False,
                "attention_chunk_size": 64,
                "for_llm_compressor": False,
                "head_dim": 32,
                "hidden_act": "silu",
                "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": 160,
                "max_position_embeddings": CONTEXT,
                "model_type": "llama4_text",
                "no_rope_layers": [],
                "num_experts_per_tok": 1,
                "num_local_experts": 4,
                "rms_norm_eps": 1e-05,
                "rope_scaling": {
                    "factor": 16.0,
                    "high_freq_factor": 1.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 32,
                    "rope_type": "llama3",
                },
                "rope_theta": 500000.0,
                "use_qk_norm": True,
                **_SIZES,
                **_NO_EOS,
            },
            "vision_config": {"model_type": "llama4_vision_model", **_LLAMA_4_VISION},
        },
        "llama-4-maverick": {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": {
                "attention_bias": False,
                "attention_chunk_size": 64,
                "attn_scale": 0.1,
                "attn_temperature_tuning": True,
                "floor_scale": 16,
                "head_dim": 32,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 160,
                "max_position_embeddings": CONTEXT,
                "model_type": "llama4_text",
                "moe_layers": [1, 3],
                "no_rope_layers": [1, 1, 1, 0],
                "num_experts_per_tok": 1,
                "num_local_experts": 8,
                "rms_norm_eps": 1e-05,
                "rope_scaling": None,
                "rope_theta": 500000.0,
                "use_qk_norm": False,
                **_SIZES,
                **_NO_EOS,
            },
            "vision_config": {"model_type": "llama4_vision_model", **_LLAMA_4_VISION},
        },
        "qwen3-yarn": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "head_dim": 32,
            "max_position_embeddings": 64,
            "max_window_layers": 28,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            **_SIZES,
        },
        "qwen3-next": {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "max_position_embeddings": CONTEXT,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "num_experts": 8,
            "partial_rotary_factor": 0.25,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": False,
            **_SIZES,
            **_HYBRID,
            **_EXPERTS,
        },
        "qwen3.5": {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "image_token_id": 250,
            "video_token_id": 251,
            "vision_start_token_id": 252,
            "vision_end_token_id": 253,
            "text_config": {
                "model_type": "qwen3_5_text",
                "attn_output_gate": True,
                "layer_types": [*["linear_attention"] * 3, "full_attention"],
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": CONTEXT,
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [2, 1, 1],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000,
                    "rope_type": "default",
                },
                "tie_word_embeddings": True,
                **_SIZES,
                **_HYBRID,
                **_NO_EOS,
            },
            "tie_word_embeddings": True,
            "vision_config": {"depth": 1, **_SIGHT, "num_position_embeddings": 16},
        },
        "qwen2.5-vl": {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            "image_token_id": 250,
            "max_position_embeddings": CONTEXT,
            "max_window_layers": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_section": [4, 2, 2], "type": "mrope"},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "video_token_id": 251,
            "vision_config": {"depth": 1, **_SIGHT, "model_type": "qwen2_5_vl"},
            "vision_end_token_id": 253,
            "vision_start_token_id": 252,
            "vision_token_id": 254,
            **_SIZES,
        },
        "qwen3-vl-8b": {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": 250,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "attention_bias": False,
                "head_dim": 16,
                "max_position_embeddings": CONTEXT,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [4, 2, 2],
                    "rope_type": "default",
                },
                "rope_theta": 5000000,
                **_SIZES,
                **_NO_EOS,
            },
            "tie_word_embeddings": True,
            "video_token_id": 251,
            "vision_config": {"depth": 1, **_SIGHT, "deepstack_visual_indexes": [0]},
            "vision_end_token_id": 253,
            "vision_start_token_id": 252,
        },
        "qwen3-vl-moe": {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "model_type": "qwen3_vl_moe",
            "image_token_id": 250,
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                "attention_bias": False,
                "decoder_sparse_step": 1,
                "head_dim": 16,
                "max_position_embeddings": CONTEXT,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
                "num_experts": 8,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [4, 2, 2],
                    "rope_type": "default",
                },
                "rope_theta": 5000000,
                **_SIZES,
                **_EXPERTS,
                **_NO_EOS,
            },
            "tie_word_embeddings": False,
            "video_token_id": 251,
            "vision_config": {"depth": 1, **_SIGHT, "deepstack_visual_indexes": [0]},
            "vision_end_token_id": 253,
            "vision_start_token_id": 252,
        },
        "seed-oss": {
            "architectures": ["SeedOssForCausalLM"],
            "model_type": "seed_oss",
            "attention_bias": True,
            "attention_dropout": 0.1,
            "attention_out_bias": False,
            "head_dim": 32,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0,
            "tie_word_embeddings": False,
            **_SIZES,
        },
        "minimax-m2": {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "attn_type_list": [1, 1, 1, 1],
            "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
            "head_dim": 32,
            "max_position_embeddings": CONTEXT,
            "mtp_transformer_layers": 1,
            "num_experts_per_tok": 3,
            "num_local_experts": 8,
            "num_mtp_modules": 3,
            "qk_norm_type": "per_layer",
            "rope_theta": 5000000,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "use_mtp": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
            **_SIZES,
        },
        "glm-4.5-air": {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "head_dim": 32,
            "max_position_embeddings": CONTEXT,
            "n_group": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": False,
            **_SIZES,
            **_EXPERTS,
        },
        "gpt-oss": {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "experts_per_token": 3,
            "head_dim": 32,
            "initial_context_length": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "max_position_embeddings": CONTEXT,
            "num_experts_per_tok": 3,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 20,
            "swiglu_limit": 7.0,
            "torch_dtype": "float32",
            **_SIZES,
        },
        "gemma-3": {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": 240,
            "eoi_token_index": 241,
            "image_token_index": 242,
            "mm_tokens_per_image": 4,
            "text_config": {
                "model_type": "gemma3_text",
                "head_dim": 32,
                "num_hidden_layers": 7,
                "query_pre_attn_scalar": 168,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 20,
                **{key: _SIZES[key] for key in _SIZES if key != "num_hidden_layers"},
                **_NO_EOS,
            },
            "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        },
        "gemma-3-text": {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": CONTEXT,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 500,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 20,
            "sliding_window_pattern": 2,
            **_SIZES,
        },
        "mistral-small-3.1": {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                "model_type": "mistral",
                "head_dim": 32,
                "hidden_act": "silu",
                "max_position_embeddings": CONTEXT,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
                "sliding_window": None,
                **_SIZES,
                **_NO_EOS,
            },
            "vision_config": {"model_type": "pixtral", "rope_theta": 10000.0, **_VISION},
            "vision_feature_layer": -1,
        },
        "ministral-3": {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                "model_type": "ministral3",
                "head_dim": 32,
                "max_position_embeddings": CONTEXT,
                "rms_norm_eps": 1e-05,
                "rope_parameters": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 8.0,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 32,
                    "rope_theta": 1000000.0,
                    "rope_type": "yarn",
                    "type": "yarn",
                },
                "sliding_window": None,
                "tie_word_embeddings": True,
                **_SIZES,
                **_NO_EOS,
            },
            "vision_config": {"model_type": "pixtral", **_VISION},
            "vision_feature_layer": -1,
        },
        "ministral-3-without-growth": {
            "architectures": ["Ministral3ForCausalLM"],
            "model_type": "ministral3",
            "head_dim": 32,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "llama_4_scaling_beta": 0.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
            },
            **_SIZES,
        },
        "gemma-4": {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "audio_config": None,
            "text_config": {
                "model_type": "gemma4_text",
                "attention_k_eq_v": False,
                "enable_moe_block": False,
                "expert_intermediate_size": None,
                "final_logit_softcapping": 30.0,
                "global_head_dim": 32,
                "head_dim": 16,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size_per_layer_input": 12,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "max_position_embeddings": CONTEXT,
                "moe_intermediate_size": None,
                "num_experts": None,
                "num_global_key_value_heads": None,
                "num_kv_shared_layers": 2,
                "rope_parameters": {
                    "full_attention": {
                        "partial_rotary_factor": 0.25,
                        "rope_theta": 1000000.0,
                        "rope_type": "proportional",
                    },
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                },
                "sliding_window": 20,
                "tie_word_embeddings": True,
                "top_k_experts": None,
                "use_bidirectional_attention": None,
                "use_double_wide_mlp": True,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                **_SIZES,
                **_NO_EOS,
                "pad_token_id": 0,
            },
            "tie_word_embeddings": True,
            "vision_config": {"num_key_value_heads": 2, **_VISION},
        },
        "phi-4-mini": {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "attention_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "max_position_embeddings": 4 * CONTEXT,
            "mlp_bias": False,
            "original_max_position_embeddings": CONTEXT,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [4.0 + index for index in range(6)],
                "short_factor": [1.0 + index for index in range(6)],
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            **_SIZES,
        },
        "olmo-3": {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "attention_bias": False,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 20,
            **_SIZES,
        },
        "granite-3": {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "attention_bias": False,
            "attention_multiplier": 0.0625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
            **_SIZES,
        },
        "smollm3": {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "layer_types": ["full_attention"] * 4,
            "max_position_embeddings": CONTEXT,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            **_SIZES,
        },
        "mixtral": {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "max_position_embeddings": CONTEXT,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            **_SIZES,
        },
    }
)

LEFT_OUT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "glm-4.5-air": ("model.layers.4.eh_proj.weight", "model.layers.4.shared_head.head.weight"),
        "minimax-m2": ("model.layers.4.mtp_proj.weight", "model.layers.6.final_layernorm.weight"),
        "qwen3-next": ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"),
        "qwen3.5": ("mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"),
    }
)
"""Weights that publishers ship but transformers does not use: layers that predict more tokens."""

TRANSPOSED: Final = ("qwen3-vl-moe",)
"""Checkpoints whose stacks of experts publishers ship in another order than transformers."""


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_equal(name: str, tmp_path: Path) -> None:
    config = dict(CONFIGS[name])
    if "text_config" not in config:
        config |= _NO_EOS
    spelled = json.dumps(config)
    path = tmp_path / "config.json"
    path.write_text(spelled)
    model_class = getattr(transformers, config["architectures"][0])
    theirs = model_class(model_class.config_class.from_pretrained(tmp_path))
    draw(theirs, seed=len(name))
    theirs.eval().save_pretrained(tmp_path)
    path.write_text(spelled)  # transformers has written its own
    weights = tmp_path / "model.safetensors"
    others = {other: torch.ones(2, 2) for other in LEFT_OUT.get(name, ())}
    tensors = load_file(weights) | others
    if name in TRANSPOSED:
        tensors |= {
            stack: tensors[stack].transpose(1, 2).contiguous()
            for stack in tensors
            if ".experts." in stack
        }
    save_file(tensors, weights)
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    model = load_model(tmp_path, context=CONTEXT)
    with TinyEngine(model, context=CONTEXT, page_size=16) as engine:
        outcome = engine.run(prompts, [GREEDY] * len(prompts))
    assert outcome.tokens == Answers([theirs] * len(prompts), prompts).tokens(outcome.tokens)
